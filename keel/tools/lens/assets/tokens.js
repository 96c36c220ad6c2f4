// Tokens: a step, a group, a rollout; its conversation with every token coloured by what became of it. Beside it the
// tokens of the step or run that lie furthest out, and the texts that are dropped most.

import { choice, make, number, plain, quoted, share, trouble, visible } from "./dom.js";
import { focused } from "./overview.js";
import { reader } from "./reader.js";
import { runChoice } from "./region.js";
import { ask, report } from "./source.js";

const ORDERS = [["distance", "furthest ratio"], ["high", "highest ratio"], ["low", "lowest ratio"], ["difference", "largest p - q"], ["gradient", "largest gradient"], ["entropy", "highest entropy"]];
const OUTCOMES = [["any", "any"], ["dropped", "dropped"], ["low", "dropped low"], ["high", "dropped high"], ["trained", "trained"]];
const SIDES = [["any", "any"], ["positive", "positive"], ["negative", "negative"]];
const GROUPS = [["order", "as named"], ["dropped", "most dropped"], ["furthest", "furthest ratio"], ["reward", "reward"], ["spread", "spread of reward"], ["tokens", "tokens"]];
const NAME = ["group", "member", "attempt", "sample"];

export function tokens(page, main) {
  const bar = make("form", { class: "bar", onsubmit: (event) => event.preventDefault() });
  const left = make("aside", { class: "left", "aria-label": "groups and rollouts" });
  const read = reader(page);
  const right = make("aside", { class: "right", "aria-label": "find tokens" });
  const fields = make("div", { class: "fields" });
  const hits = make("div", {});
  const texts = make("div", { class: "list" });
  right.append(make("h2", {}, "Find tokens"), fields, hits, make("h2", {}, "Most dropped texts of the run"), texts);
  main.append(bar, left, read.element, right);
  const view = { update, key: read.key, unfinished: false };
  const said = new Map(); // what each part of the page was last made from
  let facts = null;

  /** Whether a part has to be made again. */
  function changed(part, ...from) {
    const stamp = JSON.stringify(from);
    const again = said.get(part) !== stamp;
    said.set(part, stamp);
    return again;
  }

  async function update(fresh) {
    const run = focused(page);
    facts = await ask("run", { run });
    if (!fresh()) return;
    if (facts.last === null) {
      left.replaceChildren(make("p", { class: "quiet" }, "No rollouts are recorded yet."));
      return;
    }
    const steps = report ? report.steps : null;
    const step = Number(page.state.step) || (steps ? steps.at(-1) : facts.last);
    controls(run, step, steps);
    await Promise.all([pick(run, step, fresh), find(run, step, fresh), dropped(run, fresh)].map((part) => part.catch(tell)));
  }

  function tell(error) {
    trouble(error.message);
  }

  function controls(run, step, steps) {
    if (!changed("bar", page.runs.map((one) => one.run), run, step, facts.last)) return;
    const move = (by) => {
      const to = steps ? steps[steps.indexOf(step) + by] : step + by;
      return make("button", {
        type: "button", disabled: steps ? to === undefined : to < facts.first || to > facts.last,
        "aria-label": by < 0 ? "step before" : "next step", onclick: () => page.go({ step: to, ...nothing() }),
      }, by < 0 ? "‹" : "›");
    };
    const input = steps
      ? choice("Step", steps.map((one) => [one, number(one)]), step, (value) => page.go({ step: value, ...nothing() }))
      : make("label", { class: "field" }, make("span", {}, "Step"), make("input", {
        type: "number", min: facts.first, max: facts.last, value: step,
        onchange: (event) => page.go({ step: event.target.value, ...nothing() }),
      }));
    bar.replaceChildren(runChoice(page), input, move(-1), move(1),
      make("span", { class: "quiet" }, `${number(facts.first)} to ${number(facts.last)} are recorded`), read.controls);
  }

  /** Groups of the step, the rollouts of the chosen one below it, and the chosen rollout in the middle. */
  async function pick(run, step, fresh) {
    const { order = "order", group } = page.state;
    const found = await ask("groups", { run, step, order: order === "order" ? "" : order });
    const chosen = group ?? (found.groups.find((one) => one.dropped > 0) ?? found.groups.find((one) => one.trained > 0) ?? found.groups[0])?.group;
    const members = chosen === undefined ? { samples: [] } : await ask("members", { run, step, group: chosen });
    if (!fresh()) return;
    const named = members.samples.find((one) => NAME.slice(1).every((name) => String(one[name]) === page.state[name]));
    const sample = named ?? members.samples.find((one) => one.dropped > 0) ?? members.samples[0];
    if (changed("left", run, step, order, chosen, sample?.member, sample?.attempt, sample?.sample, found, members))
      list(run, step, order, found, chosen, members.samples, sample);
    await read.show(run, step, sample, fresh);
  }

  function list(run, step, order, found, chosen, samples, sample) {
    const rows = [];
    for (const group of found.groups) {
      const open = group.group === chosen;
      const status = group.trained ? "" : ` ${group.reason ?? "dropped"}`;
      rows.push(make("button", {
        class: "pick group", "aria-expanded": String(open), title: plain(group.task_id ?? ""),
        onclick: () => page.go({ step, ...nothing(), group: group.group }),
      }, make("span", {}, visible(group.group, true), make("span", { class: "quiet" }, visible(status, true))),
      make("span", { class: "n" }, number(group.reward)), drops(group.dropped)));
      if (!open) continue;
      for (const one of samples) {
        rows.push(make("button", {
          class: "pick member", "aria-pressed": String(one === sample),
          onclick: () => page.go({ step, group: chosen, member: one.member, attempt: one.attempt, sample: one.sample, at: null }),
        }, make("span", {}, `${one.member} `, make("span", { class: "quiet" }, fateOf(one))),
        make("span", { class: "n" }, number(one.reward)), drops(one.dropped)));
      }
    }
    const held = left.contains(document.activeElement);
    const more = found.total > found.groups.length ? make("p", { class: "quiet more" }, `${number(found.groups.length)} of ${number(found.total)} groups; order them to see others`) : "";
    const orders = report ? "" : make("div", { class: "fields" }, choice("Order", GROUPS, order, (value) => page.go({ order: value })));
    left.replaceChildren(make("h2", {}, `Groups of step ${number(step)}`), orders,
      make("div", { class: "heads group" }, make("span", {}, "group, rollouts"), make("span", { class: "n" }, "reward"), make("span", { class: "n" }, "dropped")), ...rows, more);
    const focus = left.querySelector('[aria-pressed="true"]') ?? left.querySelector('[aria-expanded="true"]');
    if (held) focus?.focus();
  }

  async function find(run, step, fresh) {
    const { scope = report ? "run" : "step", extreme = "distance", outcome = "any", side = "any", text = "" } = page.state;
    if (changed("fields", scope, extreme, outcome, side, text)) {
      const input = make("input", { type: "search", value: text, placeholder: "any", disabled: Boolean(report), onchange: (event) => page.go({ text: event.target.value }) });
      fields.replaceChildren(
        report ? "" : choice("In", [["step", "this step"], ["run", "the whole run"]], scope, (value) => page.go({ scope: value })),
        choice("Outcome", OUTCOMES, outcome, (value) => page.go({ outcome: value })),
        choice("Advantage", SIDES, side, (value) => page.go({ side: value })),
        choice("Order", ORDERS, extreme, (value) => page.go({ extreme: value })),
        make("label", { class: "field" }, make("span", {}, "Text has"), input));
    }
    const range = scope === "step" ? { first: step, last: step } : {};
    let told;
    try {
      told = await ask("extremes", { run, ...range, order: extreme, outcome, side, text });
    } catch (error) {
      hits.replaceChildren(make("p", { class: "quiet" }, error.message));
      return;
    }
    if (!fresh()) return;
    view.unfinished = told.read + told.unreadable.length < told.steps;
    if (!changed("hits", run, step, told)) return;
    const rows = told.tokens.map((one) => make("button", {
      class: "pick hit", title: `step ${one.step}, ${plain(one.group)}/${one.member}, token ${one.position}: ${plain(one.drop_reason ?? "trained")}`,
      onclick: () => page.go({ step: one.step, group: one.group, member: one.member, attempt: one.attempt, sample: one.sample, at: one.position }),
    }, quoted(one.text), make("span", { class: one.drop_reason === null ? "n" : "n drops" }, number(Math.exp(one.l - one.b))),
    make("span", { class: "n" }, number(one.advantage, 2)), make("span", { class: "n quiet" }, `${one.step}`)));
    hits.replaceChildren(make("p", { class: "quiet" }, `${number(told.matching)} tokens match${view.unfinished ? `, in ${number(told.read)} of ${number(told.steps)} steps read so far` : ""}`),
      make("div", { class: "heads hit" }, ["token", "ratio", "A", "step"].map((word, n) => make("span", { class: n ? "n" : "" }, word))), make("div", { class: "hits" }, rows));
  }

  async function dropped(run, fresh) {
    const told = await ask("texts", { run });
    if (!fresh()) return;
    view.unfinished ||= told.read + told.unreadable.length < told.steps;
    if (!changed("texts", run, told)) return;
    const rows = told.texts.map((one) => make("tr", {},
      make("td", {}, report ? quoted(one.text) : make("button", { class: "pick", title: "find it", onclick: () => page.go({ text: one.text, outcome: "dropped", scope: "run" }) }, quoted(one.text))),
      make("td", { class: "n drops" }, number(one.dropped)), make("td", { class: "n quiet" }, share(one.dropped, one.all)),
      make("td", { class: "n" }, number(one.positive)), make("td", { class: "n" }, number(one.negative))));
    const head = ["token", "dropped", "of its", "A > 0", "A < 0"];
    texts.replaceChildren(make("p", { class: "quiet" }, `${number(told.dropped)} tokens dropped, ${number(told.different)} different${told.read < told.steps ? `, in ${number(told.read)} of ${number(told.steps)} steps` : ""}`),
      make("table", {}, make("thead", {}, make("tr", {}, head.map((word, n) => make("th", { class: n ? "n" : "" }, word)))), make("tbody", {}, rows)));
  }

  return view;
}

function fateOf(sample) {
  const which = `${sample.attempt > 0 ? `, attempt ${sample.attempt}` : ""}${sample.sample > 0 ? `, sample ${sample.sample}` : ""}`;
  return sample.outcome === "trained" ? `A ${number(sample.advantage, 2)}${which}` : visible(`${sample.reason ?? "dropped"}${which}`, true);
}

function drops(count) {
  return make("span", { class: count ? "n drops" : "n quiet" }, number(count));
}

/** What names a rollout, taken out of the address. */
function nothing() {
  return { group: null, member: null, attempt: null, sample: null, at: null };
}
