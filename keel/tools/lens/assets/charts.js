// Charts by uPlot: curves of runs over steps, and histograms with the objective's band on them.

import { make, number } from "./dom.js";

/** The colours of runs. Read in both schemes, and told apart by those who do not see red and green apart. */
export const RUNS = ["#2f7ed8", "#e07b00", "#1a9e77", "#c2459b", "#7a68d8", "#b58900", "#d64545", "#6b7f8f"];
/** From fresh to old. */
export const AGES = ["#2f7ed8", "#16a0a0", "#5a9e2f", "#b58900", "#e07b00", "#d64545", "#c2459b", "#7a68d8", "#6b7f8f"];

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(extra = {}) {
  const font = "11px system-ui, sans-serif";
  const line = { stroke: colour("line"), width: 1 };
  return { stroke: colour("quiet"), font, grid: line, ticks: { ...line, size: 4 }, gap: 3, ...extra };
}

const watched = new Map();
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = watched.get(target);
    if (chart && target.clientWidth > 0) chart.setSize({ width: target.clientWidth, height: chart.height });
  }
});

function draw(place, options, data) {
  drop(place);
  const chart = new uPlot({ width: place.clientWidth || 360, padding: [8, 10, 0, 0], ...options }, data, place);
  watched.set(place, chart);
  resized.observe(place);
  return chart;
}

/** Take a chart away. */
export function drop(place) {
  watched.get(place)?.destroy();
  watched.delete(place);
  resized.unobserve(place);
  place.replaceChildren();
}

/** Take all charts away: their view is gone. */
export function dropAll() {
  for (const place of [...watched.keys()]) drop(place);
}

/**
 * Curves over steps. `lines`: {label, color, dash, points, step, values}; the legend tells the values under the cursor,
 * or the last ones.
 */
export function curves(figure, lines, { height = 170, zero = false } = {}) {
  const [legend, place] = figure.querySelectorAll(".legend, .plot");
  const shown = lines.filter((line) => line.values.some((value) => value !== null));
  if (!shown.length) {
    drop(place);
    legend.replaceChildren();
    place.append(make("p", { class: "quiet empty" }, "no numbers yet"));
    return;
  }
  const data = uPlot.join(shown.map((line) => [line.step, line.values]));
  const values = shown.map((line) => {
    const value = make("b", {});
    const swatch = make("i", { class: line.points ? "swatch dot" : line.dash ? "swatch dashed" : "swatch" });
    swatch.style.color = line.color;
    legend.append(make("span", { class: "entry" }, swatch, `${line.label} `, value));
    return value;
  });
  legend.replaceChildren(...values.map((value) => value.parentElement));
  const tell = (index) => {
    shown.forEach((line, n) => {
      const column = data[n + 1];
      let at = index ?? column.length - 1;
      while (index === null && at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
      values[n].textContent = number(column[at] ?? null);
    });
  };
  draw(
    place,
    {
      height,
      legend: { show: false },
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: {
        x: { time: false },
        y: { range: (_u, low, high) => spread(low, high, zero) },
      },
      axes: [axis({ size: 24, space: 50 }), axis({ size: 52, space: 28, values: (_u, ticks) => ticks.map((t) => number(t)) })],
      series: [
        {},
        ...shown.map((line) => ({
          stroke: line.color,
          width: line.points ? 0 : 1.5,
          dash: line.dash,
          spanGaps: true,
          paths: line.points ? () => null : undefined,
          points: line.points
            ? { show: true, size: 8, fill: line.color, stroke: colour("paper"), width: 1 }
            : { show: line.values.length < 2, size: 5, fill: line.color },
        })),
      ],
      hooks: { setCursor: [(chart) => tell(chart.cursor.idx ?? null)] },
    },
    data,
  );
  tell(null);
}

function spread(low, high, zero) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  if (zero) low = Math.min(low, 0);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

const RATIOS = [
  1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1,
  1.001, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 100, 1e3, 1e4, 1e6,
];

function marks(statistic) {
  if (statistic.axis === "ratio") return RATIOS.map((ratio) => [Math.log(ratio), number(ratio)]);
  const found = [[0, "0"]];
  for (let power = -8; power <= 1; power += 1)
    for (const lead of [1, 2, 5])
      for (const sign of [-1, 1]) found.push([sign * lead * 10 ** power, number(sign * lead * 10 ** power)]);
  return found;
}

/**
 * A histogram of a statistic: one line for each staleness, as density, since bins are wider further out. `lines`: {label,
 * color, counts: Map from bin to count, total}. Bands that speak of `side` are drawn: what lies beyond is shaded.
 */
export function histogram(place, statistic, lines, { bins, side, log, height = 330 }) {
  const at = (value) => Math.asinh(value / statistic.scale) * bins;
  const bands = statistic.bands.filter((band) => side === "any" || band.when === "always" || band.when.startsWith(side));
  const bounds = bands.flatMap((band) => [band.low, band.high]).filter((bound) => bound !== null);
  const places = lines.flatMap((line) => [...line.counts.keys()]).concat(bounds.map((bound) => Math.round(at(bound))));
  if (!lines.length) {
    drop(place);
    place.append(make("p", { class: "quiet empty" }, "no tokens yet"));
    return;
  }
  const first = Math.min(...places) - 2;
  const last = Math.max(...places) + 3;
  const edges = Array.from({ length: last - first + 1 }, (_, n) => first + n);
  const width = (edge) => statistic.scale * (Math.sinh((edge + 1) / bins) - Math.sinh(edge / bins));
  const dense = lines.map((line) => edges.map((edge) => (line.counts.get(edge) ?? 0) / line.total / width(edge)));
  const floor = Math.min(...dense.flat().filter((value) => value > 0)) / 2;
  const top = Math.max(...dense.flat());
  const data = [edges, ...dense.map((column) => column.map((value) => value || (log ? floor : 0)))];
  const ticks = marks(statistic).map(([value, text]) => ({ place: at(value), text, important: value === 0 }));
  const splits = (chart) => {
    // the middle first, and then outwards where there is room
    const gap = (46 / chart.bbox.width) * devicePixelRatio * (last - first);
    const inside = ticks.filter((tick) => tick.place >= first && tick.place <= last);
    const chosen = [];
    for (const tick of inside.sort((a, b) => Math.abs(a.place) - Math.abs(b.place)))
      if (chosen.every((other) => Math.abs(other.place - tick.place) > gap)) chosen.push(tick);
    return chosen.sort((a, b) => a.place - b.place).map((tick) => tick.place);
  };
  const words = new Map(ticks.map((tick) => [tick.place, tick.text]));
  draw(
    place,
    {
      height,
      legend: { show: false },
      cursor: { points: { size: 5 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: [first, last] }, y: log ? { distr: 3, range: [floor, top * 3] } : { range: [0, top * 1.12] } },
      axes: [
        axis({ size: 26, splits, values: (_u, found) => found.map((one) => words.get(one)) }),
        axis({ size: 52, space: 26, ...(log ? { grid: { stroke: colour("line"), width: 1, filter: (_u, found) => found.map(power) } } : {}), filter: log ? (_u, found) => found.map(power) : undefined, values: (_u, found) => found.map((t) => (t === null ? "" : number(t))) }),
      ],
      series: [{}, ...lines.map((line) => ({ stroke: line.color, width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }))],
      hooks: { drawAxes: [(chart) => shade(chart, bands, at, statistic)] },
    },
    data,
  );
}

/** A tick of a logarithmic axis that is a power of ten; others have no line and no label. */
function power(value) {
  return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6 ? value : null;
}

/** Where the objective drops, or stops to push. */
function shade(chart, bands, at, statistic) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  bands.forEach((band, row) => {
    const gate = band.kind === "gate";
    ctx.strokeStyle = ctx.fillStyle = colour(gate ? "drop" : "quiet");
    ctx.setLineDash(gate ? [] : [4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    for (const [bound, isLow] of [[band.low, true], [band.high, false]]) {
      if (bound === null) continue;
      const x = chart.valToPos(at(bound), "x", true);
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
      const value = number(statistic.axis === "ratio" ? Math.exp(bound) : bound);
      const when = { positive_advantage: ", A > 0", negative_advantage: ", A < 0" }[band.when] ?? "";
      const text = `${band.label} ${isLow ? "≥" : "≤"} ${value}${when}`;
      const width = ctx.measureText(text).width;
      const pad = 5 * devicePixelRatio;
      const inside = isLow ? x - bbox.left > width + 2 * pad : bbox.left + bbox.width - x < width + 2 * pad;
      ctx.fillText(text, inside ? x - width - pad : x + pad, bbox.top + (12 + 14 * row) * devicePixelRatio);
    }
  });
  ctx.restore();
}
