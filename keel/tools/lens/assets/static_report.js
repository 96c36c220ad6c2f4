// Draws the charts of a static report (`keel compare --html`, `keel sweep --html`) from the data written into the file.

import { barChart, lineChart, removeAllCharts, RUN_COLOURS } from "./charts.js";
import { escapeToString } from "./dom.js";

function styleOf(index) {
  const repeat = Math.floor(index / RUN_COLOURS.length);
  return { color: RUN_COLOURS[index % RUN_COLOURS.length], dash: repeat ? [2 + 3 * repeat, 3] : undefined };
}

function drawCharts() {
  removeAllCharts();
  const { charts } = JSON.parse(document.getElementById("keel-charts").textContent);
  charts.forEach((chart, index) => {
    const figure = document.getElementById(`chart-${index}`);
    const lines = chart.series.map((series, n) => ({ ...series, ...styleOf(n), label: escapeToString(series.label) }));
    if (chart.kind === "bars") barChart(figure, chart.categories.map(escapeToString), lines, { height: 220 });
    else lineChart(figure, lines, { height: 220, gaps: true });
  });
  document.body.dataset.ready = "report";
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
drawCharts();
