// The page: which view is shown, over which runs, and when to look again. The address holds all of it, so that a reload,
// a bookmark and the back button lead to the same place.

import { dropAll } from "./charts.js";
import { ago, make, trouble } from "./dom.js";
import { overview } from "./overview.js";
import { region } from "./region.js";
import { ask, report } from "./source.js";
import { tokens } from "./tokens.js";

const VIEWS = { overview: ["Overview", overview], region: ["Trust region", region], tokens: ["Tokens", tokens] };
const OFTEN = 2000;
const SELDOM = 10000;

const page = { runs: [], root: "", state: {}, go, view: null };
let shown = null;
let drawing = 0;

function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Change the address, and with it the page. A value of null takes a word out. */
function go(changes, { quietly = false } = {}) {
  const next = Object.entries({ ...read(), ...changes }).filter(([, value]) => value !== null && value !== "");
  const hash = `#${new URLSearchParams(next)}`;
  if (hash === location.hash) return;
  if (quietly) {
    history.replaceState(null, "", hash);
    page.state = read();
  } else {
    location.hash = hash;
  }
}

async function look() {
  try {
    const told = await ask("runs");
    page.runs = told.runs;
    page.root = told.root;
    trouble(report ? report.left_out : "");
  } catch (error) {
    trouble(`The lens does not answer: ${error.message}`);
  }
  const running = page.runs.filter((run) => run.status === "running");
  const now = document.getElementById("now");
  const when = Math.max(...page.runs.map((run) => run.time ?? 0));
  const words = report ? `report of ${report.made}` : running.length ? `${running.length} running` : "no run is running";
  now.replaceChildren(make("span", {}, page.root), make("span", { class: running.length && !report ? "live" : "" }, words));
  if (running.length && when > 0 && !report) now.append(make("span", {}, `last step ${ago(Date.now() / 1000 - when)}`));
  return running.length > 0;
}

async function render() {
  page.state = read();
  const name = VIEWS[page.state.view] ? page.state.view : "overview";
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const turn = (drawing += 1);
  const fresh = () => turn === drawing;
  const main = document.getElementById("main");
  try {
    if (!page.runs.length) return;
    if (shown !== name) {
      dropAll();
      main.replaceChildren();
      main.className = name;
      shown = name;
      page.view = VIEWS[name][1](page, main);
    }
    await page.view.update(fresh);
    document.body.dataset.ready = name;
  } catch (error) {
    if (fresh()) trouble(error.message);
  }
}

async function watch() {
  const running = document.hidden ? true : await look();
  if (!document.hidden) await render();
  if (!report) setTimeout(watch, running || page.view?.unfinished ? OFTEN : SELDOM);
}

function begin() {
  const links = Object.entries(VIEWS).map(([name, [title]], n) =>
    make("a", { href: `#view=${name}`, "data-view": name, title: `key ${n + 1}`, onclick: (event) => {
      event.preventDefault();
      go({ view: name });
    } }, title));
  document.getElementById("views").append(...links);
  addEventListener("hashchange", render);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    shown = null;
    render();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const name = Object.keys(VIEWS)[Number(event.key) - 1];
    if (name) go({ view: name });
    else page.view?.key?.(event);
  });
  addEventListener("error", (event) => trouble(`The page failed: ${event.message}`));
  watch();
}

begin();
