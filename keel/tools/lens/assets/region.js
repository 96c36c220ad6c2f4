// Trust region: the distance between policy and sampler by the staleness of tokens, with the objective's bands on it.

import { histogram, STALENESS_COLOURS } from "./charts.js";
import { escapeInvisible, escapeToString, formatNumber, formatShare, make, selectField } from "./dom.js";
import { focusedRun } from "./overview.js";
import { embeddedReport, query } from "./source.js";

/** A select element for the run, for views that show one run. */
export function runSelect(page) {
  return selectField("Run", page.runs.map((run) => [run.run, escapeToString(run.run)]), focusedRun(page),
    (run) => page.navigate({ run, step: null, group: null, member: null, attempt: null, sample: null, at: null, first: null, last: null }));
}

export function region(page, main) {
  const bar = make("form", { class: "bar", onsubmit: (event) => event.preventDefault() });
  const summary = make("p", { class: "summary" });
  const plots = make("div", { class: "plots" });
  const stalenessTable = make("div", { class: "staleness" });
  main.append(bar, summary, plots, stalenessTable);
  const view = { update, incomplete: false };
  let controlState = "";
  let drawnState = "";

  async function update(isCurrent) {
    const run = focusedRun(page);
    const { advantage = "any", scale = "log", first = "", last = "" } = page.state;
    showControls(run, advantage, scale, first, last);
    const [facts, data] = await Promise.all([query("run", { run }), query("region", { run, first, last })]);
    if (!isCurrent()) return;
    view.incomplete = data.read + data.unreadable.length < data.steps;
    const state = JSON.stringify([run, advantage, scale, first, last, data.read]);
    if (state === drawnState) return;
    drawnState = state;
    showSummary(facts, data, advantage);
    drawHistograms(data, advantage, scale);
    showStalenessTable(data, advantage);
  }

  function showSummary(facts, data, advantage) {
    const tokens = totalCount(data.series.filter((line) => line.statistic === "ratio" && matchesSign(line, advantage)));
    const range = data.first === data.last ? `step ${data.last}` : `steps ${formatNumber(data.first)} to ${formatNumber(data.last)}`;
    const read = `${formatNumber(data.read)} of ${formatNumber(data.steps)} steps`;
    const progress = !view.incomplete ? `all ${formatNumber(data.steps)} recorded steps.`
      : embeddedReport ? `${read}, evenly spaced.` : `${read} read so far, evenly spaced; each refresh reads more.`;
    summary.replaceChildren(
      make("b", {}, `${formatNumber(tokens)} tokens`), ` of ${data.steps ? range : "no steps"}; ${progress} `,
      make("span", {}, "Dropped: "), make("code", {}, facts.dropped.join("; ") || "none"), ".",
      ...facts.notes.map((note) => make("span", { class: "quiet" }, " ", escapeInvisible(note, true), ".")),
      ...data.unreadable.map((note) => make("span", { class: "bad" }, " Unreadable: ", escapeInvisible(note, true), ".")));
  }

  function showControls(run, advantage, scale, first, last) {
    const state = JSON.stringify([page.runs.map((other) => other.run), run, advantage, scale, first, last]);
    if (state === controlState) return;
    controlState = state;
    const stepInput = (name, value, hint) => make("label", { class: "field" }, make("span", {}, name === "first" ? "Steps" : "to"),
      make("input", { type: "number", min: 1, step: 1, value, placeholder: hint, disabled: Boolean(embeddedReport), "aria-label": `${name} step`,
        onchange: (event) => page.navigate({ [name]: event.target.value }) }));
    bar.replaceChildren(
      runSelect(page), stepInput("first", first, "first"), stepInput("last", last, "last"),
      selectField("Advantage", [["any", "any"], ["positive", "positive"], ["negative", "negative"]], advantage, (value) => page.navigate({ advantage: value })),
      selectField("Density", [["log", "logarithmic"], ["linear", "linear"]], scale, (value) => page.navigate({ scale: value })));
  }

  function drawHistograms(data, advantage, scale) {
    while (plots.children.length > data.statistics.length) plots.lastChild.remove();
    data.statistics.forEach((statistic, n) => {
      if (!plots.children[n])
        plots.append(make("figure", {}, make("figcaption", {}), make("div", { class: "legend" }), make("div", { class: "plot" })));
      const [caption, legend, container] = plots.children[n].children;
      const lines = linesByStaleness(data, statistic.name, advantage);
      caption.textContent = statistic.title;
      legend.replaceChildren("staleness ", ...lines.map((line) => {
        const swatch = make("i", { class: "swatch" });
        swatch.style.color = line.color;
        return make("span", { class: "entry" }, swatch, line.label);
      }));
      histogram(container, statistic, lines, { bins: data.bins, advantage, log: scale === "log" });
    });
  }

  function showStalenessTable(data, advantage) {
    const headers = ["staleness", "tokens", "share", "mean |ln ratio|", "dropped low", "dropped high", "dropped, A > 0", "dropped, A < 0"];
    const count = (test) => totalCount(data.series.filter((line) => line.statistic === "ratio" && matchesSign(line, advantage) && test(line)));
    const allTokens = count(() => true);
    const row = (label, test, logRatioSum, color) => {
      const tokens = count(test);
      const swatch = make("i", { class: "swatch" });
      swatch.style.color = color;
      const dropped = (condition) => count((line) => test(line) && line.outcome !== "trained" && condition(line));
      const cells = [
        formatNumber(tokens), formatShare(tokens, allTokens), formatNumber(tokens ? logRatioSum / tokens : null),
        formatShare(dropped((line) => line.outcome === "low"), tokens), formatShare(dropped((line) => line.outcome === "high"), tokens),
        formatNumber(dropped((line) => line.advantage_sign === "positive")), formatNumber(dropped((line) => line.advantage_sign === "negative")),
      ];
      return make("tr", {}, make("th", { scope: "row" }, color ? swatch : "", label), cells.map((cell) => make("td", { class: "n" }, cell)));
    };
    const logRatioSum = (test) => data.abs_log_ratio
      .filter(([staleness, sign]) => test(staleness) && (advantage === "any" || sign === advantage)).reduce((sum, entry) => sum + entry[2], 0);
    const values = [...new Set(data.series.map((line) => line.staleness))].sort((a, b) => a - b);
    const rows = values.map((staleness) => row(
      stalenessLabel(staleness, data.max_staleness), (line) => line.staleness === staleness,
      logRatioSum((other) => other === staleness), STALENESS_COLOURS[staleness]));
    stalenessTable.replaceChildren(make("table", {},
      make("thead", {}, make("tr", {}, headers.map((text, n) => make("th", { class: n ? "n" : "", scope: "col" }, text)))),
      make("tbody", {}, rows, row("all", () => true, logRatioSum(() => true), ""))));
  }

  return view;
}

function matchesSign(line, advantage) {
  return advantage === "any" || line.advantage_sign === advantage;
}

function totalCount(lines) {
  return lines.reduce((sum, line) => sum + line.counts.reduce((a, b) => a + b, 0), 0);
}

function stalenessLabel(staleness, maximum) {
  return staleness >= maximum ? `${maximum}+` : `${staleness}`;
}

/** The histograms of a statistic, one for each staleness, summed over outcomes and the selected signs. */
function linesByStaleness(data, name, advantage) {
  const histograms = new Map();
  for (const line of data.series) {
    if (line.statistic !== name || !matchesSign(line, advantage)) continue;
    const counts = histograms.get(line.staleness) ?? new Map();
    line.counts.forEach((count, n) => count && counts.set(line.start + n, (counts.get(line.start + n) ?? 0) + count));
    histograms.set(line.staleness, counts);
  }
  return [...histograms.entries()].sort(([a], [b]) => a - b).map(([staleness, counts]) => ({
    label: stalenessLabel(staleness, data.max_staleness), color: STALENESS_COLOURS[staleness], counts,
    total: [...counts.values()].reduce((a, b) => a + b, 0),
  }));
}
