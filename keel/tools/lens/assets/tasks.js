// Pass rates of tasks: for each environment a histogram and the tasks that are solved least often.

import { escapeInvisible, escapeToString, formatNumber, formatShare, make } from "./dom.js";

/** Characters of a task's id that are shown. */
const MAX_TASK_ID = 60;

/** The elements that show the result of the query "tasks"; none for a run without pass rates. */
export function taskPanel({ environments }) {
  return environments.flatMap((environment) => [
    make("h2", {}, "Tasks of ", escapeInvisible(environment.environment, true), ` (${formatNumber(environment.tasks)} sampled)`),
    make("p", { class: "quiet" }, passRateFacts(environment)),
    passRateHistogram(environment.histogram),
    lowestTasks(environment.lowest),
  ]);
}

function passRateFacts({ pass_rate: rate, retired, failed }) {
  const parts = [`mean pass rate ${formatNumber(rate)}`, retired ? `${formatNumber(retired)} retired` : "",
    failed ? `${formatNumber(failed)} without a result` : ""];
  return parts.filter(Boolean).join(", ");
}

function passRateHistogram(counts) {
  const largest = Math.max(...counts, 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const rows = counts.map((count, n) => {
    const bar = make("i", { class: n === 0 ? "bar" : n === counts.length - 1 ? "bar good" : "bar neutral" });
    bar.style.width = `${(100 * count) / largest}%`;
    const range = `${formatNumber(n / counts.length, 2)} – ${formatNumber((n + 1) / counts.length, 2)}`;
    return make("tr", {}, make("td", { class: "n" }, range), make("td", { class: "wide" }, bar),
      make("td", { class: "n" }, formatNumber(count)), make("td", { class: "n quiet" }, formatShare(count, total)));
  });
  return make("table", { class: "pass-rates", "aria-label": "tasks by pass rate" }, make("tbody", {}, rows));
}

function lowestTasks(tasks) {
  const rows = tasks.map(({ task, pass_rate: rate, groups, state, step }) => make("tr", { title: `${state}, last sampled in step ${step}` },
    make("td", { class: "n" }, formatNumber(rate, 2)), make("td", { class: "n" }, formatNumber(groups)),
    make("td", { title: escapeToString(task) }, make("bdi", {}, escapeInvisible(shortenTaskId(task), true)))));
  const head = make("tr", {}, ["pass rate", "groups", "lowest"].map((text, n) => make("th", { class: n === 2 ? "" : "n" }, text)));
  return make("table", { class: "lowest-tasks" }, make("thead", {}, head), make("tbody", {}, rows));
}

/** The end of a long id, where ids of one environment differ. */
function shortenTaskId(task) {
  return task.length > MAX_TASK_ID ? `…${task.slice(-MAX_TASK_ID)}` : task;
}
