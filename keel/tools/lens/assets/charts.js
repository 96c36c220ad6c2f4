// Charts drawn with uPlot: curves over steps, grouped bars, and histograms with the objective's bands on them.

import { formatNumber, make } from "./dom.js";

/** Colours of runs: readable in light and dark mode and with red-green colour blindness. */
export const RUN_COLOURS = ["#2f7ed8", "#e07b00", "#1a9e77", "#c2459b", "#7a68d8", "#b58900", "#d64545", "#6b7f8f"];
/** Colours of token staleness, from 0 upwards. */
export const STALENESS_COLOURS = ["#2f7ed8", "#16a0a0", "#5a9e2f", "#b58900", "#e07b00", "#d64545", "#c2459b", "#7a68d8", "#6b7f8f"];

/** The value of a colour variable of the style sheet in the current colour scheme. */
export function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(extra = {}) {
  const font = "11px system-ui, sans-serif";
  const line = { stroke: cssColour("line"), width: 1 };
  return { stroke: cssColour("quiet"), font, grid: line, ticks: { ...line, size: 4 }, gap: 3, ...extra };
}

const formatTicks = (_chart, ticks) => ticks.map((tick) => formatNumber(tick));

const chartsByContainer = new Map();
const resizeObserver = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = chartsByContainer.get(target);
    if (chart && target.clientWidth > 0) chart.setSize({ width: target.clientWidth, height: chart.height });
  }
});

function createChart(container, options, data) {
  removeChart(container);
  const chart = new uPlot({ width: container.clientWidth || 360, padding: [8, 10, 0, 0], legend: { show: false }, ...options }, data, container);
  chartsByContainer.set(container, chart);
  resizeObserver.observe(container);
  return chart;
}

/** Destroy the chart of a container. */
export function removeChart(container) {
  chartsByContainer.get(container)?.destroy();
  chartsByContainer.delete(container);
  resizeObserver.unobserve(container);
  container.replaceChildren();
}

/** Destroy every chart, when their view is replaced. */
export function removeAllCharts() {
  for (const container of [...chartsByContainer.keys()]) removeChart(container);
}

function showEmpty(container, text) {
  removeChart(container);
  container.append(make("p", { class: "quiet empty" }, text));
}

/**
 * Fill a legend with one entry per line and return a function that shows the values at a position of the x axis. The
 * position ("step 12") is the first entry and always takes the same space, so that the chart does not move.
 */
function fillLegend(legend, lines) {
  const position = make("span", { class: "position" }, "");
  const values = lines.map(() => make("b", {}));
  const entries = lines.map((line, index) => {
    const swatch = make("i", { class: line.points ? "swatch dot" : line.dash ? "swatch dashed" : "swatch" });
    swatch.style.color = line.color;
    return make("span", { class: "entry" }, swatch, `${line.label} `, values[index]);
  });
  legend.replaceChildren(position, ...entries);
  return (positionText, numbers) => {
    position.textContent = positionText;
    numbers.forEach((value, index) => {
      values[index].textContent = formatNumber(value ?? null);
    });
  };
}

function lastKnown(column) {
  for (let index = column.length - 1; index >= 0; index -= 1) if (column[index] !== null && column[index] !== undefined) return column[index];
  return null;
}

/**
 * Draw curves over steps. `lines`: {label, color, dash, points, step, values}, and optionally `low` and `high`, the edges of
 * a shaded band. The legend shows the values under the cursor, or the last ones. With `gaps` a null interrupts a curve.
 */
export function lineChart(figure, lines, { height = 170, zero = false, gaps = false } = {}) {
  const [legend, container] = figure.querySelectorAll(".legend, .plot");
  const shown = lines.filter((line) => line.values.some((value) => value !== null));
  if (!shown.length) {
    legend.replaceChildren();
    showEmpty(container, "no data yet");
    return;
  }
  const banded = shown.filter((line) => line.low && line.low.some((value) => value !== null));
  const data = uPlot.join([
    ...shown.map((line) => [line.step, line.values]),
    ...banded.flatMap((line) => [[line.step, line.high], [line.step, line.low]]),
  ]);
  const showValues = fillLegend(legend, shown);
  const showAt = (index) => {
    const columns = shown.map((_, n) => data[n + 1]);
    if (index === null) showValues("last", columns.map(lastKnown));
    else showValues(`step ${formatNumber(data[0][index])}`, columns.map((column) => column[index]));
  };
  const edge = { width: 0, spanGaps: false, points: { show: false } };
  createChart(
    container,
    {
      height,
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_chart, low, high) => padRange(low, high, zero) } },
      axes: [axis({ size: 24, space: 50 }), axis({ size: 58, space: 28, values: formatTicks })],
      bands: banded.map((line, n) => {
        const first = shown.length + 1 + 2 * n;
        return { series: [first, first + 1], fill: `${line.color}26` };
      }),
      series: [
        {},
        ...shown.map((line) => ({
          stroke: line.color,
          width: line.points ? 0 : 1.5,
          dash: line.dash,
          spanGaps: !gaps,
          paths: line.points ? () => null : undefined,
          points: line.points
            ? { show: true, size: 8, fill: line.color, stroke: cssColour("paper"), width: 1 }
            : { show: line.values.length < 2 || undefined, size: 5, fill: line.color },
        })),
        ...banded.flatMap(() => [edge, edge]),
      ],
      hooks: { setCursor: [(chart) => showAt(chart.cursor.idx ?? null)] },
    },
    data,
  );
  showAt(null);
}

function padRange(low, high, zero) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  if (zero) low = Math.min(low, 0);
  const padding = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero && low === 0 ? 0 : low - padding, high + padding];
}

/** Draw one bar per series next to each other for every category. `lines`: {label, color, values}, one value per category. */
export function barChart(figure, categories, lines, { height = 170 } = {}) {
  const [legend, container] = figure.querySelectorAll(".legend, .plot");
  if (!lines.some((line) => line.values.some((value) => value !== null))) {
    legend.replaceChildren();
    showEmpty(container, "no data yet");
    return;
  }
  // every bar has its own slot on the x axis, and each category ends with an empty slot
  const slots = lines.length + 1;
  const x = Array.from({ length: categories.length * slots }, (_, slot) => slot);
  const columns = lines.map((line, n) => x.map((slot) => (slot % slots === n ? line.values[Math.floor(slot / slots)] : null)));
  const centre = (category) => category * slots + (lines.length - 1) / 2;
  const showValues = fillLegend(legend, lines);
  const showAt = (index) => {
    const category = index === null ? null : Math.floor(index / slots);
    showValues(category === null ? "" : categories[category], lines.map((line) => (category === null ? null : line.values[category])));
  };
  createChart(
    container,
    {
      height,
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-1, x.length - 0.5] }, y: { range: (_chart, low, high) => padRange(Math.min(low ?? 0, 0), Math.max(high ?? 0, 0), true) } },
      axes: [
        axis({
          size: 24,
          splits: (chart) => {
            const every = Math.max(1, Math.ceil((categories.length * 60 * devicePixelRatio) / chart.bbox.width));
            return categories.map((_, category) => centre(category)).filter((_, category) => category % every === 0);
          },
          values: (_chart, splits) => splits.map((split) => categories[Math.floor(split / slots)]),
        }),
        axis({ size: 58, space: 28, values: formatTicks }),
      ],
      series: [{}, ...lines.map((line) => ({ stroke: line.color, fill: `${line.color}b3`, width: 1, paths: uPlot.paths.bars({ size: [0.86, 100] }), points: { show: false } }))],
      hooks: { setCursor: [(chart) => showAt(chart.cursor.idx ?? null)] },
    },
    [x, ...columns],
  );
  showAt(null);
}

const RATIO_TICKS = [
  1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1,
  1.001, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 100, 1e3, 1e4, 1e6,
];

/** Candidate ticks of a statistic as pairs of value and label. */
function tickCandidates(statistic) {
  if (statistic.axis === "ratio") return RATIO_TICKS.map((ratio) => [Math.log(ratio), formatNumber(ratio)]);
  const candidates = [[0, "0"]];
  for (let power = -8; power <= 1; power += 1)
    for (const digit of [1, 2, 5])
      for (const sign of [-1, 1]) candidates.push([sign * digit * 10 ** power, formatNumber(sign * digit * 10 ** power)]);
  return candidates;
}

/**
 * Draw a histogram of a statistic: one line for each staleness, as a density, because bins are wider further from zero.
 * `lines`: {label, color, counts: Map from bin to count, total}. The bands that apply to tokens with `advantage` are drawn.
 */
export function histogram(container, statistic, lines, { bins, advantage, log, height = 330 }) {
  const toAxis = (value) => Math.asinh(value / statistic.scale) * bins;
  const bands = statistic.bands.filter((band) => advantage === "any" || band.when === "always" || band.when.startsWith(advantage));
  const bounds = bands.flatMap((band) => [band.low, band.high]).filter((bound) => bound !== null);
  const occupied = lines.flatMap((line) => [...line.counts.keys()]).concat(bounds.map((bound) => Math.round(toAxis(bound))));
  if (!lines.length) {
    showEmpty(container, "no tokens yet");
    return;
  }
  const first = Math.min(...occupied) - 2;
  const last = Math.max(...occupied) + 3;
  const edges = Array.from({ length: last - first + 1 }, (_, n) => first + n);
  const width = (edge) => statistic.scale * (Math.sinh((edge + 1) / bins) - Math.sinh(edge / bins));
  const densities = lines.map((line) => edges.map((edge) => (line.counts.get(edge) ?? 0) / line.total / width(edge)));
  const floor = Math.min(...densities.flat().filter((value) => value > 0)) / 2;
  const top = Math.max(...densities.flat());
  const data = [edges, ...densities.map((column) => column.map((value) => value || (log ? floor : 0)))];
  const ticks = tickCandidates(statistic).map(([value, text]) => ({ position: toAxis(value), text }));
  const splits = (chart) => {
    // the middle first, then outwards where there is space
    const gap = (46 / chart.bbox.width) * devicePixelRatio * (last - first);
    const inside = ticks.filter((tick) => tick.position >= first && tick.position <= last);
    const selected = [];
    for (const tick of inside.sort((a, b) => Math.abs(a.position) - Math.abs(b.position)))
      if (selected.every((other) => Math.abs(other.position - tick.position) > gap)) selected.push(tick);
    return selected.sort((a, b) => a.position - b.position).map((tick) => tick.position);
  };
  const labels = new Map(ticks.map((tick) => [tick.position, tick.text]));
  const powersOnly = (_chart, values) => values.map(powerOfTen);
  const densityAxis = axis({ size: 64, space: 26, values: (_chart, values) => values.map((value) => (value === null ? "" : formatNumber(value))) });
  if (log) Object.assign(densityAxis, { filter: powersOnly, grid: { ...densityAxis.grid, filter: powersOnly } });
  createChart(
    container,
    {
      height,
      cursor: { points: { size: 5 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: [first, last] }, y: log ? { distr: 3, range: [floor, top * 3] } : { range: [0, top * 1.12] } },
      axes: [axis({ size: 26, splits, values: (_chart, positions) => positions.map((position) => labels.get(position)) }), densityAxis],
      series: [{}, ...lines.map((line) => ({ stroke: line.color, width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }))],
      hooks: { drawAxes: [(chart) => drawBands(chart, bands, toAxis, statistic)] },
    },
    data,
  );
}

/** A tick of a logarithmic axis if it is a power of ten; the others get no line and no label. */
function powerOfTen(value) {
  return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6 ? value : null;
}

/** Shade where a gate drops tokens, and mark with dashed lines where a clip or a weight stops the gradient. */
function drawBands(chart, bands, toAxis, statistic) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  bands.forEach((band, row) => {
    const gate = band.kind === "gate";
    ctx.strokeStyle = ctx.fillStyle = cssColour(gate ? "drop" : "quiet");
    ctx.setLineDash(gate ? [] : [4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    for (const [bound, isLow] of [[band.low, true], [band.high, false]]) {
      if (bound === null) continue;
      const x = chart.valToPos(toAxis(bound), "x", true);
      if (gate) {
        ctx.globalAlpha = 0.09;
        if (isLow) ctx.fillRect(bbox.left, bbox.top, x - bbox.left, bbox.height);
        else ctx.fillRect(x, bbox.top, bbox.left + bbox.width - x, bbox.height);
      }
      ctx.globalAlpha = 0.9;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const value = formatNumber(statistic.axis === "ratio" ? Math.exp(bound) : bound);
      const when = { positive_advantage: ", A > 0", negative_advantage: ", A < 0" }[band.when] ?? "";
      const text = `${band.label}: ${gate ? "dropped" : "flat"} ${isLow ? "below" : "above"} ${value}${when}`;
      const width = ctx.measureText(text).width;
      const pad = 5 * devicePixelRatio;
      const leftOfLine = isLow ? x - bbox.left > width + 2 * pad : bbox.left + bbox.width - x < width + 2 * pad;
      ctx.fillText(text, leftOfLine ? x - width - pad : x + pad, bbox.top + (12 + 14 * row) * devicePixelRatio);
    }
  });
  ctx.restore();
}
