// Overview: how runs are doing. Curves of the chosen runs over each other, and of one of them what it is and what
// became of its rollouts.

import { curves, RUNS } from "./charts.js";
import { ago, choice, make, number, plain, share, visible } from "./dom.js";
import { ask, report } from "./source.js";

const CHARTS = [
  { title: "Reward", names: [["reward", ""]], evaluations: true },
  { title: "Loss", names: [["loss", ""]] },
  { title: "Mismatch, KL of sampler and policy", names: [["mismatch_kl", ""]], zero: true },
  { title: "Share of tokens dropped", names: [["is_masked_low", "low"], ["is_masked_high", "high"]], zero: true },
  { title: "Staleness, versions", names: [["staleness", "mean"], ["staleness_max", "max"]], zero: true },
  { title: "Entropy", names: [["entropy", ""]] },
  { title: "Tokens per second", names: [["tokens_per_second", ""]], zero: true },
  { title: "Gradient norm", names: [["grad_norm", ""]], zero: true },
];
const NAMES = CHARTS.flatMap((chart) => chart.names.map(([name]) => name));
const MOST = 8;

/** The runs that are drawn: those that the address names, or the first few. */
export function chosen(page) {
  const named = (page.state.runs ?? "").split("|").filter((name) => page.runs.some((run) => run.run === name));
  return named.length ? named : page.runs.slice(0, 4).map((run) => run.run);
}

/** The run that one looks at closely. */
export function focused(page) {
  const known = (name) => page.runs.some((run) => run.run === name);
  return known(page.state.run) ? page.state.run : chosen(page)[0];
}

export function overview(page, main) {
  const figures = [...CHARTS.map((chart) => chart.title), ""].map((title) =>
    make("figure", {}, make("figcaption", {}, title), make("div", { class: "legend" }), make("div", { class: "plot" })));
  const side = make("aside", { "aria-label": "runs" });
  main.append(side, make("section", { class: "charts", "aria-label": "curves" }, figures));
  const kept = new Map(); // run -> what was read of it, and at which step
  let drawn = "";

  async function read(run, extra) {
    const stamp = `${run.step} ${run.status} ${extra}`;
    if (kept.get(run.run)?.stamp === stamp) return kept.get(run.run);
    const names = [...NAMES, ...(extra ? [extra] : [])].join(",");
    const [series, facts] = await Promise.all([ask("series", { run: run.run, names }), ask("run", { run: run.run })]);
    const found = { stamp, series, facts, outcomes: null };
    kept.set(run.run, found);
    return found;
  }

  async function update(fresh) {
    const runs = page.runs.filter((run) => run.status !== "unreadable" && chosen(page).includes(run.run));
    const extra = page.state.number ?? "dropped";
    const focus = page.runs.find((run) => run.run === focused(page));
    const found = await Promise.all(runs.map((run) => read(run, extra)));
    if (!fresh()) return;
    const stamp = JSON.stringify([runs.map((run) => [run.run, run.step, run.status]), extra, focus.run]);
    if (stamp !== drawn) {
      drawn = stamp;
      draw(runs, found, extra);
    }
    sidebar(focus, found[runs.indexOf(focus)]);
    if (focus.status === "unreadable") return;
    const outcomes = await ask("outcomes", { run: focus.run });
    if (fresh()) rollouts(outcomes);
  }

  function draw(runs, found, extra) {
    const color = (run) => RUNS[page.runs.indexOf(run) % RUNS.length];
    const all = [...CHARTS, { title: extra, names: extra ? [[extra, ""]] : [] }];
    all.forEach((chart, n) => {
      const lines = [];
      runs.forEach((run, place) => {
        const { series, facts } = found[place];
        chart.names.forEach(([name, label], second) => lines.push({
          label: [runs.length > 1 ? plain(run.run) : "", label].filter(Boolean).join(" ") || plain(name),
          color: color(run),
          dash: second ? [5, 4] : undefined,
          step: series.step,
          values: series.values[name],
        }));
        if (chart.evaluations && facts.evaluations.length) lines.push({
          label: runs.length > 1 ? "eval" : "evaluation",
          color: color(run),
          points: true,
          ...averaged(facts.evaluations),
        });
      });
      if (n < CHARTS.length || extra) curves(figures[n], lines, { zero: chart.zero });
    });
    const names = [...new Set(found.flatMap(({ facts }) => facts.names))];
    const options = names.map((name) => [name, plain(name)]);
    figures.at(-1).querySelector("figcaption").replaceChildren(
      choice("Any other", options, extra, (value) => page.go({ number: value })));
    const each = Math.max(...found.map(({ series }) => series.each));
    performance.mark("curves"); // for the benchmark
    side.dataset.each = each > 1 ? `each point is the mean of ${each} steps` : "";
  }

  function sidebar(focus, found) {
    const rows = page.runs.map((run, n) => {
      const box = make("input", {
        type: "checkbox", checked: chosen(page).includes(run.run), "aria-label": `draw ${plain(run.run)}`,
        disabled: run.status === "unreadable",
        onchange: (event) => toggle(run.run, event.target.checked),
      });
      const swatch = make("i", { class: "swatch" });
      swatch.style.color = RUNS[n % RUNS.length];
      const state = make("span", { class: `state ${run.status}` }, run.status);
      const name = make("button", { class: "name", "aria-pressed": String(run === focus), onclick: () => page.go({ run: run.run }) }, visible(run.run));
      const progress = make("span", { class: "steps" }, run.steps ? `${run.step} / ${run.steps}` : `${run.step}`);
      return make("li", {}, box, swatch, name, state, progress);
    });
    const parts = side.querySelector("ul") ? null : [
      make("h2", {}, page.runs.length > 1 ? `Runs (${page.runs.length})` : "Run"),
      make("ul", { class: "runs" }),
      make("div", { class: "facts" }),
      make("div", { class: "outcomes" }),
    ];
    if (parts) side.append(...parts);
    const list = side.querySelector("ul");
    const again = JSON.stringify([page.runs.map((run) => [run.run, run.status, run.step]), chosen(page), focus.run]);
    if (list.dataset.now !== again) {
      const held = list.contains(document.activeElement) ? [...list.querySelectorAll("button, input")].indexOf(document.activeElement) : -1;
      list.replaceChildren(...rows);
      list.dataset.now = again;
      if (held >= 0) list.querySelectorAll("button, input")[held]?.focus();
    }
    side.querySelector(".facts").replaceChildren(...facts(focus, found));
  }

  function toggle(name, on) {
    const now = chosen(page).filter((one) => one !== name);
    const next = on ? [...now, name].slice(-MOST) : now;
    page.go({ runs: next.join("|") });
  }

  function facts(run, found) {
    const doing = run.live?.doing;
    const rows = [
      ["status", [run.status, run.why ? `: ${run.why}` : ""].join("")],
      ["now", doing && run.status === "running" ? doing : null],
      ["engines", run.live?.engines ?? null],
      ["step", `${number(run.step)}${run.steps ? ` of ${number(run.steps)}` : ""}, policy version ${run.version ?? "–"}`],
      ["last step", run.time && !report ? ago(Date.now() / 1000 - run.time) : null],
      ["waiting", run.waiting ? `${number(run.waiting)} finished rollouts wait for their batch` : null],
      ["objective", run.objective],
      ["loss", found?.facts.formula || null],
      ["dropped", found?.facts.dropped.join("; ") || null],
      ["model", run.model],
      ["environments", run.environments?.join(", ") || null],
      ["commit", run.commit?.slice(0, 10)],
      ["note", [run.problem, side.dataset.each].filter(Boolean).join("; ") || null],
    ];
    const list = rows.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, visible(String(value), true))]);
    const evaluations = (found?.facts.evaluations ?? []).slice(-6).reverse();
    return [make("h2", {}, visible(run.run)), make("dl", {}, list), evaluations.length ? table(evaluations) : ""];
  }

  function table(evaluations) {
    const rows = evaluations.map(({ step, environment, numbers }) => make("tr", {},
      make("td", { class: "n" }, number(step)), make("td", { class: "cut", title: plain(environment) }, visible(environment)),
      make("td", { class: "n" }, number(numbers.reward)),
      make("td", { class: "n quiet" }, `${number(numbers.low ?? null, 2)} – ${number(numbers.high ?? null, 2)}`)));
    const head = make("tr", {}, ["step", "evaluation", "reward", "95 %"].map((text, n) => make("th", { class: n === 1 ? "" : "n" }, text)));
    return make("table", {}, make("thead", {}, head), make("tbody", {}, rows));
  }

  function rollouts({ rollouts: total, outcomes }) {
    const rows = Object.entries(outcomes).map(([reason, count]) => {
      const bar = make("i", { class: reason === "trained" ? "bar good" : "bar" });
      bar.style.width = `${(100 * count) / Math.max(...Object.values(outcomes))}%`;
      return make("tr", {}, make("td", {}, visible(reason)), make("td", { class: "wide" }, bar),
        make("td", { class: "n" }, number(count)), make("td", { class: "n quiet" }, share(count, total)));
    });
    side.querySelector(".outcomes").replaceChildren(
      make("h2", {}, `Rollouts (${number(total)})`), make("table", {}, make("tbody", {}, rows)));
  }

  return { update };
}

/** One point a step: the mean over environments. */
function averaged(evaluations) {
  const steps = new Map();
  for (const { step, numbers } of evaluations)
    if (typeof numbers.reward === "number") steps.set(step, [...(steps.get(step) ?? []), numbers.reward]);
  const step = [...steps.keys()];
  return { step, values: step.map((one) => steps.get(one).reduce((a, b) => a + b, 0) / steps.get(one).length) };
}
