// Trust region: how far the policy has gone from the sampler, by the age of the tokens, and where the objective's band
// lies on it.

import { AGES, histogram } from "./charts.js";
import { choice, make, number, plain, share, visible } from "./dom.js";
import { focused } from "./overview.js";
import { ask, report } from "./source.js";

/** The choice of a run, for views that look at one. */
export function runChoice(page) {
  return choice("Run", page.runs.map((run) => [run.run, plain(run.run)]), focused(page),
    (run) => page.go({ run, step: null, group: null, member: null, attempt: null, sample: null, at: null, first: null, last: null }));
}

export function region(page, main) {
  const bar = make("form", { class: "bar", onsubmit: (event) => event.preventDefault() });
  const said = make("p", { class: "said" });
  const plots = make("div", { class: "plots" });
  const ages = make("div", { class: "ages" });
  main.append(bar, said, plots, ages);
  const view = { update, unfinished: false };
  let toolbar = "";
  let drawn = "";

  async function update(fresh) {
    const run = focused(page);
    const { side = "any", scale = "log", first = "", last = "" } = page.state;
    controls(run, side, scale, first, last);
    const [facts, told] = await Promise.all([ask("run", { run }), ask("region", { run, first, last })]);
    if (!fresh()) return;
    view.unfinished = told.read + told.unreadable.length < told.steps;
    const stamp = JSON.stringify([run, side, scale, first, last, told.read]);
    if (stamp === drawn) return;
    drawn = stamp;
    const counted = total(told.series.filter((line) => line.statistic === "ratio" && matches(line, side)));
    const range = told.first === told.last ? `step ${told.last}` : `steps ${number(told.first)} to ${number(told.last)}`;
    const part = view.unfinished
      ? `${number(told.read)} of ${number(told.steps)} steps read so far, evenly spread; more with each look.`
      : `all ${number(told.steps)} recorded steps.`;
    said.replaceChildren(
      make("b", {}, `${number(counted)} tokens`), ` of ${told.steps ? range : "no steps"}; ${report && view.unfinished ? `${number(told.read)} of ${number(told.steps)} steps, evenly spread.` : part} `,
      make("span", {}, "Dropped: "), make("code", {}, facts.dropped.join("; ") || "nobody"), ".",
      ...facts.notes.map((note) => make("span", { class: "quiet" }, " ", visible(note, true), ".")),
      ...told.unreadable.map((note) => make("span", { class: "bad" }, " Unreadable: ", visible(note, true), ".")));
    draw(told, side, scale);
    table(told, side);
  }

  function controls(run, side, scale, first, last) {
    const stamp = JSON.stringify([page.runs.map((one) => one.run), run, side, scale, first, last]);
    if (stamp === toolbar) return;
    toolbar = stamp;
    const range = (name, value, hint) => make("label", { class: "field" }, make("span", {}, name === "first" ? "Steps" : "to"),
      make("input", { type: "number", min: 1, step: 1, value, placeholder: hint, disabled: Boolean(report), "aria-label": `${name} step`,
        onchange: (event) => page.go({ [name]: event.target.value }) }));
    bar.replaceChildren(
      runChoice(page), range("first", first, "first"), range("last", last, "last"),
      choice("Advantage", [["any", "any"], ["positive", "positive"], ["negative", "negative"]], side, (value) => page.go({ side: value })),
      choice("Density", [["log", "logarithmic"], ["linear", "linear"]], scale, (value) => page.go({ scale: value })));
  }

  function draw(told, side, scale) {
    while (plots.children.length > told.statistics.length) plots.lastChild.remove();
    told.statistics.forEach((statistic, n) => {
      if (!plots.children[n])
        plots.append(make("figure", {}, make("figcaption", {}), make("div", { class: "legend" }), make("div", { class: "plot" })));
      const [caption, legend, place] = plots.children[n].children;
      const lines = byAge(told, statistic.name, side);
      caption.textContent = statistic.title;
      legend.replaceChildren("staleness ", ...lines.map((line) => {
        const swatch = make("i", { class: "swatch" });
        swatch.style.color = line.color;
        return make("span", { class: "entry" }, swatch, line.label);
      }));
      histogram(place, statistic, lines, { bins: told.bins, side, log: scale === "log" });
    });
  }

  function table(told, side) {
    const head = ["staleness", "tokens", "share", "mean |ln ratio|", "dropped low", "dropped high", "dropped, A > 0", "dropped, A < 0"];
    const of = (test) => total(told.series.filter((line) => line.statistic === "ratio" && matches(line, side) && test(line)));
    const everything = of(() => true);
    const row = (label, test, near, color) => {
      const all = of(test);
      const swatch = make("i", { class: "swatch" });
      swatch.style.color = color;
      const dropped = (more) => of((line) => test(line) && line.outcome !== "trained" && more(line));
      const cells = [
        number(all), share(all, everything), number(all ? near / all : null),
        share(dropped((line) => line.outcome === "low"), all), share(dropped((line) => line.outcome === "high"), all),
        number(dropped((line) => line.side === "positive")), number(dropped((line) => line.side === "negative")),
      ];
      return make("tr", {}, make("th", { scope: "row" }, color ? swatch : "", label), cells.map((cell) => make("td", { class: "n" }, cell)));
    };
    const distance = (test) => told.distance.filter(([age, which]) => test(age) && (side === "any" || which === side)).reduce((sum, one) => sum + one[2], 0);
    const found = [...new Set(told.series.map((line) => line.staleness))].sort((a, b) => a - b);
    ages.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, head.map((text, n) => make("th", { class: n ? "n" : "", scope: "col" }, text)))),
      make("tbody", {}, found.map((age) => row(label(age, told.oldest), (line) => line.staleness === age, distance((one) => one === age), AGES[age])),
        row("all", () => true, distance(() => true), ""))));
  }

  return view;
}

function matches(line, side) {
  return side === "any" || line.side === side;
}

function total(lines) {
  return lines.reduce((sum, line) => sum + line.counts.reduce((a, b) => a + b, 0), 0);
}

function label(age, oldest) {
  return age >= oldest ? `${oldest}+` : `${age}`;
}

/** The histograms of a statistic, one for each staleness, sides and outcomes added up. */
function byAge(told, name, side) {
  const found = new Map();
  for (const line of told.series) {
    if (line.statistic !== name || !matches(line, side)) continue;
    const counts = found.get(line.staleness) ?? new Map();
    line.counts.forEach((count, n) => count && counts.set(line.start + n, (counts.get(line.start + n) ?? 0) + count));
    found.set(line.staleness, counts);
  }
  return [...found.entries()].sort(([a], [b]) => a - b).map(([age, counts]) => ({
    label: label(age, told.oldest), color: AGES[age], counts, total: [...counts.values()].reduce((a, b) => a + b, 0),
  }));
}
