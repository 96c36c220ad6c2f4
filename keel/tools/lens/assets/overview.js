// Overview: curves of the selected runs over each other, and the facts and rollout outcomes of one of them.

import { lineChart, RUN_COLOURS } from "./charts.js";
import { escapeInvisible, escapeToString, formatAge, formatNumber, formatShare, make, selectField } from "./dom.js";
import { embeddedReport, query } from "./source.js";
import { taskPanel } from "./tasks.js";

const CHARTS = [
  { title: "Reward", names: [["reward", ""]], evaluations: "reward" },
  { title: "Loss", names: [["loss", ""]], evaluations: "loss" },
  { title: "Mismatch: KL between sampler and policy", names: [["mismatch_kl", ""]], zero: true },
  { title: "Share of tokens dropped", names: [["is_masked_low", "low"], ["is_masked_high", "high"]], zero: true },
  { title: "Staleness in versions", names: [["staleness", "mean"], ["staleness_max", "max"]], zero: true },
  { title: "Entropy", names: [["entropy", ""]] },
  { title: "Tokens per second", names: [["tokens_per_second", ""]], zero: true },
  { title: "Gradient norm", names: [["grad_norm", ""]], zero: true },
];
const METRICS = CHARTS.flatMap((chart) => chart.names.map(([name]) => name));
const DEFAULT_METRIC = "dropped";
const MAX_RUNS = 8;
const DEFAULT_RUNS = 4;
/** Outcomes of rollouts that are no error, with what they mean. */
const NEUTRAL_OUTCOMES = {
  zero_variance: "all rewards of the group are equal, so its advantages are zero",
  run_ended: "in flight or queued when the run ended",
  stale: "sampled by a version older than scheduler.max_off_policy_steps allows",
};

/** The runs that are drawn: those named in the address, or the most recent ones. */
export function selectedRuns(page) {
  const named = (page.state.runs ?? "").split("|").filter((name) => page.runs.some((run) => run.run === name));
  return named.length ? named : page.runs.slice(0, DEFAULT_RUNS).map((run) => run.run);
}

/** The run whose details are shown: the one named in the address, or the most recent one with a step. */
export function focusedRun(page) {
  if (page.runs.some((run) => run.run === page.state.run)) return page.state.run;
  const selected = selectedRuns(page);
  return selected.find((name) => page.runs.some((run) => run.run === name && run.step > 0)) ?? selected[0];
}

export function overview(page, main) {
  const figures = [...CHARTS.map((chart) => chart.title), ""].map((title) =>
    make("figure", {}, make("figcaption", {}, title), make("div", { class: "legend" }), make("div", { class: "plot" })));
  const sidebar = make("aside", { "aria-label": "runs" });
  main.append(sidebar, make("section", { class: "charts", "aria-label": "curves" }, figures));
  const cache = new Map(); // run name -> its data, with the step and status it was read at
  let drawnState = "";

  async function readRun(run, metric) {
    const version = `${run.step} ${run.status} ${metric}`;
    if (cache.get(run.run)?.version === version) return cache.get(run.run);
    const names = [...METRICS, ...(metric ? [metric] : [])].join(",");
    const [series, facts] = await Promise.all([query("series", { run: run.run, names }), query("run", { run: run.run })]);
    cache.set(run.run, { version, series, facts });
    return cache.get(run.run);
  }

  async function update(isCurrent) {
    const runs = page.runs.filter((run) => run.status !== "unreadable" && selectedRuns(page).includes(run.run));
    const metric = page.state.metric ?? DEFAULT_METRIC;
    const focus = page.runs.find((run) => run.run === focusedRun(page));
    const data = await Promise.all(runs.map((run) => readRun(run, metric)));
    if (!isCurrent()) return;
    const state = JSON.stringify([runs.map((run) => [run.run, run.step, run.status]), metric, focus.run]);
    if (state !== drawnState) {
      drawnState = state;
      drawCharts(runs, data, metric);
    }
    showSidebar(focus, data[runs.indexOf(focus)]);
    if (focus.status === "unreadable") return;
    const [outcomes, tasks] = await Promise.all([query("outcomes", { run: focus.run }), query("tasks", { run: focus.run })]);
    if (!isCurrent()) return;
    showOutcomes(outcomes);
    sidebar.querySelector(".tasks").replaceChildren(...taskPanel(tasks));
  }

  /** Runs are listed newest first; counting from the end keeps the colours of older runs when a run is added. */
  function runColour(run) {
    return RUN_COLOURS[(page.runs.length - 1 - page.runs.indexOf(run)) % RUN_COLOURS.length];
  }

  function drawCharts(runs, data, metric) {
    const charts = [...CHARTS, { title: metric, names: metric ? [[metric, ""]] : [] }];
    charts.forEach((chart, n) => {
      const lines = [];
      runs.forEach((run, index) => {
        const { series, facts } = data[index];
        chart.names.forEach(([name, label], position) => lines.push({
          label: [runs.length > 1 ? escapeToString(run.run) : "", label].filter(Boolean).join(" ") || escapeToString(name),
          color: runColour(run),
          dash: position ? [5, 4] : undefined,
          step: series.step,
          values: series.values[name],
        }));
        const evaluated = chart.evaluations ? meanOverEnvironments(facts.evaluations, chart.evaluations) : { step: [] };
        if (evaluated.step.length) lines.push({
          label: runs.length > 1 ? "eval" : "evaluation",
          color: runColour(run),
          points: true,
          ...evaluated,
        });
      });
      if (n < CHARTS.length || metric) lineChart(figures[n], lines, { zero: chart.zero });
    });
    const names = [...new Set(data.flatMap(({ facts }) => facts.names))];
    figures.at(-1).querySelector("figcaption").replaceChildren(
      selectField("Metric", names.map((name) => [name, escapeToString(name)]), metric, (value) => page.navigate({ metric: value })));
    const stepsPerPoint = Math.max(...data.map(({ series }) => series.steps_per_point));
    performance.mark("curves"); // for the benchmark
    sidebar.dataset.note = stepsPerPoint > 1 ? `each point is the mean of ${stepsPerPoint} steps` : "";
  }

  function showSidebar(focus, data) {
    const selected = selectedRuns(page);
    if (!sidebar.querySelector("ul")) sidebar.append(
      make("h2", {}), make("ul", { class: "runs" }), make("div", { class: "facts" }), make("div", { class: "outcomes" }),
      make("div", { class: "tasks" }));
    const drawn = selected.length < page.runs.length ? `, ${selected.length} drawn` : "";
    sidebar.querySelector("h2").textContent = page.runs.length > 1 ? `Runs (${page.runs.length}${drawn})` : "Run";
    const list = sidebar.querySelector("ul");
    const state = JSON.stringify([page.runs.map((run) => [run.run, run.status, run.step]), selected, focus.run]);
    if (list.dataset.state !== state) {
      const controls = () => [...list.querySelectorAll("button, input")];
      const focusedControl = controls().indexOf(document.activeElement);
      list.replaceChildren(...page.runs.map((run) => runRow(run, focus, selected)));
      list.dataset.state = state;
      if (focusedControl >= 0) controls()[focusedControl]?.focus();
    }
    sidebar.querySelector(".facts").replaceChildren(...factList(focus, data));
  }

  function runRow(run, focus, selected) {
    const box = make("input", {
      type: "checkbox", checked: selected.includes(run.run), "aria-label": `draw ${escapeToString(run.run)}`,
      disabled: run.status === "unreadable",
      onchange: (event) => toggleRun(run.run, event.target.checked),
    });
    const swatch = make("i", { class: "swatch" });
    swatch.style.color = runColour(run);
    const name = make("button", {
      class: "name", title: escapeToString(run.run), "aria-pressed": String(run === focus), onclick: () => page.navigate({ run: run.run }),
    }, escapeInvisible(run.run));
    const progress = make("span", { class: "steps" }, run.steps ? `${run.step} / ${run.steps}` : `${run.step}`);
    return make("li", {}, box, swatch, name, make("span", { class: `state ${run.status}` }, run.status), progress);
  }

  function toggleRun(name, on) {
    const others = selectedRuns(page).filter((other) => other !== name);
    page.navigate({ runs: (on ? [...others, name].slice(-MAX_RUNS) : others).join("|") });
  }

  function factList(run, data) {
    const activity = run.live?.doing;
    const rows = [
      ["status", [run.status, run.why ? `: ${run.why}` : ""].join("")],
      ["now", activity && run.status === "running" ? activity : null],
      ["engines", run.live?.engines ?? null],
      ["step", `${formatNumber(run.step)}${run.steps ? ` of ${formatNumber(run.steps)}` : ""}, policy version ${run.version ?? "–"}`],
      ["last step", run.time && !embeddedReport ? formatAge(Date.now() / 1000 - run.time) : null],
      ["queued", run.waiting ? `${formatNumber(run.waiting)} finished rollouts wait for their batch` : null],
      ["objective", run.objective],
      ["loss", data?.facts.formula || null],
      ["dropped", data?.facts.dropped.join("; ") || null],
      ["model", run.model],
      ["environments", run.environments?.join(", ") || null],
      ["commit", run.commit?.slice(0, 10)],
      ["note", [run.problem, sidebar.dataset.note].filter(Boolean).join("; ") || null],
    ];
    const list = rows.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, escapeInvisible(String(value), true))]);
    const evaluations = (data?.facts.evaluations ?? []).slice(-6).reverse();
    return [make("h2", {}, escapeInvisible(run.run)), make("dl", {}, list), evaluations.length ? evaluationTable(evaluations) : ""];
  }

  function evaluationTable(evaluations) {
    const rows = evaluations.map(({ step, environment, numbers }) => make("tr", {},
      make("td", { class: "n" }, formatNumber(step)), make("td", { class: "cut", title: escapeToString(environment) }, escapeInvisible(environment)),
      make("td", { class: "n" }, formatNumber(numbers.reward ?? numbers.loss)),
      make("td", { class: "n quiet" }, `${formatNumber(numbers.low ?? null, 2)} – ${formatNumber(numbers.high ?? null, 2)}`)));
    const measure = evaluations.every(({ numbers }) => "loss" in numbers) ? "loss" : "reward";
    const head = make("tr", {}, ["step", "evaluation", measure, "95 %"].map((text, n) => make("th", { class: n === 1 ? "" : "n" }, text)));
    return make("table", {}, make("thead", {}, head), make("tbody", {}, rows));
  }

  function showOutcomes({ rollouts: total, outcomes }) {
    const largest = Math.max(...Object.values(outcomes));
    const rows = Object.entries(outcomes).map(([reason, count]) => {
      const kind = reason === "trained" ? "bar good" : reason in NEUTRAL_OUTCOMES ? "bar neutral" : "bar";
      const bar = make("i", { class: kind });
      bar.style.width = `${(100 * count) / largest}%`;
      return make("tr", { title: NEUTRAL_OUTCOMES[reason] }, make("td", {}, escapeInvisible(reason)), make("td", { class: "wide" }, bar),
        make("td", { class: "n" }, formatNumber(count)), make("td", { class: "n quiet" }, formatShare(count, total)));
    });
    sidebar.querySelector(".outcomes").replaceChildren(
      make("h2", {}, `Rollouts (${formatNumber(total)})`), make("table", {}, make("tbody", {}, rows)));
  }

  return { update };
}

/** The mean reward, or loss of supervised fine-tuning, over environments at each evaluated step. */
function meanOverEnvironments(evaluations, name) {
  const found = new Map();
  for (const { step, numbers } of evaluations)
    if (typeof numbers[name] === "number") found.set(step, [...(found.get(step) ?? []), numbers[name]]);
  const step = [...found.keys()];
  return { step, values: step.map((at) => found.get(at).reduce((a, b) => a + b, 0) / found.get(at).length) };
}
