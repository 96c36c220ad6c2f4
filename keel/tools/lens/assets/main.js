// The page: which view is shown, for which runs, and when data is refreshed. The address holds all of this state, so that
// a reload, a bookmark and the back button lead to the same view.

import { removeAllCharts } from "./charts.js";
import { formatAge, make, showMessage } from "./dom.js";
import { evaluations } from "./evaluations.js";
import { overview } from "./overview.js";
import { region } from "./region.js";
import { embeddedReport, query } from "./source.js";
import { tokens } from "./tokens.js";

const VIEWS = { overview: ["Overview", overview], region: ["Trust region", region], tokens: ["Tokens", tokens], evaluations: ["Evaluations", evaluations] };
/** Milliseconds between refreshes while a run is running, and otherwise. */
const REFRESH_RUNNING = 2000;
const REFRESH_IDLE = 10000;

const page = { runs: [], root: "", state: {}, navigate, view: null };
let shownView = null;
let renderCount = 0;

function readAddress() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Change parameters of the address and render the page for it. A value of null removes a parameter. */
function navigate(changes, { silent = false } = {}) {
  const params = Object.entries({ ...readAddress(), ...changes }).filter(([, value]) => value !== null && value !== "");
  const hash = `#${new URLSearchParams(params)}`;
  if (hash === location.hash) return;
  if (silent) {
    history.replaceState(null, "", hash);
    page.state = readAddress();
  } else {
    location.hash = hash;
  }
}

/** Refresh the list of runs and the status line; return whether any run is running. */
async function refreshRuns() {
  try {
    const data = await query("runs");
    page.runs = data.runs;
    page.root = data.root;
    showMessage(embeddedReport ? embeddedReport.omissions : "");
  } catch (error) {
    showMessage(`The lens server does not respond: ${error.message}`);
  }
  const running = page.runs.filter((run) => run.status === "running");
  const lastStepTime = Math.max(...page.runs.map((run) => run.time ?? 0));
  const status = embeddedReport ? `report of ${embeddedReport.date}` : running.length ? `${running.length} running` : "no active runs";
  const live = running.length > 0 && !embeddedReport;
  const bar = document.getElementById("status");
  bar.replaceChildren(make("span", {}, page.root), make("span", { class: live ? "live" : "" }, status));
  if (live && lastStepTime > 0) bar.append(make("span", {}, `last step ${formatAge(Date.now() / 1000 - lastStepTime)}`));
  return running.length > 0;
}

async function render() {
  page.state = readAddress();
  const name = VIEWS[page.state.view] ? page.state.view : "overview";
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  renderCount += 1;
  const thisRender = renderCount;
  /** Whether no later render has started: results of an older one are discarded. */
  const isCurrent = () => thisRender === renderCount;
  const main = document.getElementById("main");
  try {
    if (!page.runs.length) return;
    if (shownView !== name) {
      removeAllCharts();
      main.replaceChildren();
      main.className = name;
      shownView = name;
      page.view = VIEWS[name][1](page, main);
    }
    await page.view.update(isCurrent);
    document.body.dataset.ready = name;
  } catch (error) {
    if (isCurrent()) showMessage(error.message);
  }
}

async function refresh() {
  const running = document.hidden ? true : await refreshRuns();
  if (!document.hidden) await render();
  if (!embeddedReport) setTimeout(refresh, running || page.view?.incomplete ? REFRESH_RUNNING : REFRESH_IDLE);
}

function start() {
  const links = Object.entries(VIEWS).map(([name, [title]], n) =>
    make("a", { href: `#view=${name}`, "data-view": name, title: `key ${n + 1}`, onclick: (event) => {
      event.preventDefault();
      navigate({ view: name });
    } }, title));
  document.getElementById("views").append(...links);
  addEventListener("hashchange", render);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    shownView = null;
    render();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const name = Object.keys(VIEWS)[Number(event.key) - 1];
    if (name) navigate({ view: name });
    else page.view?.onKey?.(event);
  });
  addEventListener("error", (event) => showMessage(`Error on this page: ${event.message}`));
  refresh();
}

start();
