// Evaluations: a grid of tasks by evaluations with the tasks that flipped between right and wrong; next to it the completion
// of the selected cell with its rewards, and its difference from another evaluation of the same task.

import { escapeInvisible, escapeToString, formatNumber, make, selectField } from "./dom.js";
import { focusedRun } from "./overview.js";
import { listValues } from "./reader.js";
import { runSelect } from "./region.js";
import { query } from "./source.js";
import { diffNodes } from "./text_diff.js";

const GRID_ORDERS = [["flips", "most flips"], ["id", "by id"], ["reward", "lowest reward"]];
/** Address parameters that name a cell, removed. */
const NO_CELL = { task: null, evaluation: null, against: null, episode: null };

export function evaluations(page, main) {
  const bar = make("form", { class: "bar", onsubmit: (event) => event.preventDefault() });
  const grid = make("section", { class: "tasks", "aria-label": "tasks by evaluations" });
  const episode = make("section", { class: "episode", "aria-label": "completion" });
  main.append(bar, grid, episode);
  let shownState = "";

  async function update(isCurrent) {
    const run = focusedRun(page);
    const { environment = "", gridorder = "flips", task = "", evaluation = "", against = "", episode: index = "" } = page.state;
    const data = await query("evaluations", { run, environment, order: gridorder === "flips" ? "" : gridorder });
    if (!isCurrent()) return;
    const cell = task && data.steps.includes(Number(evaluation)) ? { task, step: Number(evaluation) } : null;
    const state = JSON.stringify([run, data, cell, against, index, page.runs.map((other) => other.run)]);
    if (state === shownState) return;
    const other = cell ? otherStep(data.steps, cell.step, against) : null;
    const load = (step) => (step === null ? null : query("evaluated", { run, step, environment: data.environment, task }));
    const [now, before] = cell ? await Promise.all([load(cell.step), load(other)]) : [null, null];
    if (!isCurrent()) return;
    shownState = state;
    showControls(data, gridorder);
    showGrid(data, cell);
    if (cell) showEpisode(data, cell, other, now.episodes, before?.episodes ?? [], Number(index) || 0);
    else episode.replaceChildren(make("p", { class: "quiet" }, data.total ? "Choose a cell to read its completion." : ""));
  }

  function showControls(data, order) {
    const environments = data.environments.map((name) => [name, escapeToString(name)]);
    bar.replaceChildren(runSelect(page),
      selectField("Environment", environments, data.environment, (value) => page.navigate({ environment: value, ...NO_CELL })),
      selectField("Order", GRID_ORDERS, order, (value) => page.navigate({ gridorder: value })),
      make("span", { class: "quiet" }, gridNote(data)));
  }

  function showGrid(data, selected) {
    if (!data.total) {
      grid.replaceChildren(make("p", { class: "quiet" }, "This run has no stored evaluations."));
      return;
    }
    const heads = data.steps.map((step) => make("th", { scope: "col", title: `evaluated after step ${step}` }, formatNumber(step)));
    const rows = data.tasks.map((task) => make("tr", {},
      make("th", { scope: "row", title: escapeToString(task.task_id) }, escapeInvisible(task.task_id, true)),
      task.cells.map((cell, n) => make("td", {}, cell ? cellButton(data, task, n, selected) : "–"))));
    const table = make("table", { class: "grid" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "task"), heads)), make("tbody", {}, rows));
    const scroll = grid.scrollTop;
    grid.replaceChildren(table);
    grid.scrollTop = scroll;
  }

  function cellButton(data, task, n, selected) {
    const cell = task.cells[n];
    const previous = task.cells[n - 1];
    const flipped = previous && passedMostly(previous) !== passedMostly(cell);
    const outcome = cell.passed === cell.episodes ? "passed" : cell.passed ? "partly" : "failed";
    const text = cell.episodes > 1 ? `${cell.passed}/${cell.episodes}` : cell.errors ? "!" : cell.passed ? "✓" : "✗";
    const label = `step ${data.steps[n]}: ${cell.passed} of ${cell.episodes} passed, reward ${formatNumber(cell.reward)}${cell.errors ? `, ${cell.errors} failed` : ""}${flipped ? ", flipped" : ""}`;
    return make("button", {
      class: `cell ${outcome}${flipped ? " flip" : ""}`, title: label, "aria-label": label,
      "aria-pressed": String(selected?.task === task.task_id && selected.step === data.steps[n]),
      onclick: () => page.navigate({ ...NO_CELL, task: task.task_id, evaluation: data.steps[n], environment: data.environment }),
    }, text);
  }

  function showEpisode(data, cell, other, now, before, index) {
    const shown = now[index] ?? now[0];
    if (!shown) {
      episode.replaceChildren(make("p", { class: "quiet" }, "This evaluation does not have the task."));
      return;
    }
    const facts = [
      ["task", cell.task], ["step", cell.step], ["reward", formatNumber(shown.reward)], ["components", listValues(shown.reward_components)],
      ["metrics", listValues(shown.environment_metrics)], ["reference answer", shown.answer], ["tokens", formatNumber(shown.completion_tokens)],
      ["finish reason", shown.finish_reason], ["turns", shown.turns > 1 ? shown.turns : null], ["error", shown.error],
    ];
    const about = make("div", { class: "about" }, facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
      make("span", {}, make("span", { class: "quiet" }, `${name} `), make("b", {}, escapeInvisible(String(value), true)))));
    const fields = [];
    if (now.length > 1) fields.push(selectField("Episode", now.map((each, n) => [n, `${each.sample}: ${formatNumber(each.reward)}`]), now.indexOf(shown), (value) => page.navigate({ episode: value })));
    if (other !== null) fields.push(selectField("Compare with step", data.steps.filter((step) => step !== cell.step).map((step) => [step, formatNumber(step)]), other, (value) => page.navigate({ against: value })));
    const messages = readMessages(shown.prompt).map(([role, text]) => textBlock(role, escapeInvisible(text)));
    const truncated = shown.characters > [...(shown.completion ?? "")].length
      ? make("span", { class: "note" }, `… truncated; the completion has ${formatNumber(shown.characters)} characters`) : null;
    const parts = [about, make("div", { class: "bar" }, fields),
      make("div", { class: "text" }, messages, textBlock("completion", [...escapeInvisible(shown.completion ?? ""), truncated], "own"))];
    const earlier = before.find((each) => each.sample === shown.sample) ?? before[0];
    if (earlier) {
      parts.push(make("h2", {}, `Difference from step ${formatNumber(other)} (reward ${formatNumber(earlier.reward)}) to step ${formatNumber(cell.step)}`),
        make("div", { class: "text difference" }, textBlock("completion", diffNodes(earlier.completion ?? "", shown.completion ?? ""), "own")));
    }
    episode.replaceChildren(...parts);
  }

  return { update };
}

function gridNote(data) {
  const tasks = data.total > data.tasks.length ? `${formatNumber(data.tasks.length)} of ${formatNumber(data.total)} tasks` : `${formatNumber(data.total)} tasks`;
  return data.omitted ? `${tasks}; ${formatNumber(data.omitted)} earlier evaluations are not shown` : tasks;
}

function passedMostly(cell) {
  return 2 * cell.passed > cell.episodes;
}

/** The step to compare with: the one in the address, else the evaluation before, else the one after; null if there is none. */
function otherStep(steps, step, against) {
  if (against !== "" && steps.includes(Number(against)) && Number(against) !== step) return Number(against);
  const at = steps.indexOf(step);
  return steps[at - 1] ?? steps[at + 1] ?? null;
}

/** The messages of a prompt as pairs of role and text. A prompt that was truncated is shown as recorded. */
function readMessages(prompt) {
  if (!prompt) return [];
  try {
    return JSON.parse(prompt).map((message) => [String(message.role), typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "")]);
  } catch {
    return [["prompt", prompt]];
  }
}

function textBlock(label, nodes, kind = "") {
  return make("div", { class: `block ${kind}` }, make("span", {}, escapeInvisible(label, true)), make("div", {}, nodes));
}
