// Tokens: a step, a group and a rollout, with every token coloured; next to it the most extreme tokens of the step or
// run, and the texts that are dropped most often.

import { escapeInvisible, escapeToString, formatNumber, formatShare, make, selectField, showMessage, tokenText } from "./dom.js";
import { focusedRun } from "./overview.js";
import { createReader } from "./reader.js";
import { runSelect } from "./region.js";
import { embeddedReport, query } from "./source.js";

const TOKEN_ORDERS = [["distance", "most off-policy"], ["high", "highest ratio"], ["low", "lowest ratio"], ["difference", "largest |p - q|"], ["gradient", "largest gradient"], ["entropy", "highest entropy"]];
const OUTCOMES = [["any", "any"], ["dropped", "dropped"], ["low", "dropped low"], ["high", "dropped high"], ["trained", "trained"]];
const ADVANTAGES = [["any", "any"], ["positive", "positive"], ["negative", "negative"]];
const GROUP_ORDERS = [["name", "by id"], ["dropped", "most dropped"], ["log_ratio", "most off-policy"], ["reward", "reward"], ["reward_range", "range of rewards"], ["tokens", "tokens"]];
const SAMPLE_KEYS = ["member", "attempt", "sample"];
/** Address parameters that name a rollout, removed. */
const NO_ROLLOUT = { group: null, member: null, attempt: null, sample: null, at: null };

export function tokens(page, main) {
  const bar = make("form", { class: "bar", onsubmit: (event) => event.preventDefault() });
  const left = make("aside", { class: "left", "aria-label": "groups and rollouts" });
  const reader = createReader(page);
  const right = make("aside", { class: "right", "aria-label": "find tokens" });
  const fields = make("div", { class: "fields" });
  const matches = make("div", {});
  const texts = make("div", { class: "list" });
  right.append(make("h2", {}, "Find tokens"), fields, matches, make("h2", {}, "Most dropped texts of the run"), texts);
  main.append(bar, left, reader.element, right);
  const view = { update, onKey: reader.onKey, incomplete: false };
  const shownStates = new Map(); // part of the page -> the data it was last drawn from
  let facts = null;

  /** Whether a part of the page must be redrawn because its data has changed. */
  function hasChanged(part, ...data) {
    const state = JSON.stringify(data);
    const changed = shownStates.get(part) !== state;
    shownStates.set(part, state);
    return changed;
  }

  async function update(isCurrent) {
    const run = focusedRun(page);
    facts = await query("run", { run });
    if (!isCurrent()) return;
    const steps = embeddedReport ? embeddedReport.steps : null;
    const step = Number(page.state.step) || (steps ? steps.at(-1) : facts.last);
    showControls(run, step, steps);
    if (facts.last === null) {
      shownStates.delete("left");
      left.replaceChildren(make("p", { class: "quiet" }, "This run has no recorded rollouts yet."));
      return;
    }
    const parts = [showRollouts(run, step, isCurrent), showMatches(run, step, isCurrent), showTexts(run, isCurrent)];
    await Promise.all(parts.map((part) => part.catch((error) => showMessage(error.message))));
  }

  function showControls(run, step, steps) {
    if (!hasChanged("bar", page.runs.map((other) => other.run), run, step, facts.last)) return;
    if (facts.last === null) {
      bar.replaceChildren(runSelect(page));
      return;
    }
    const moveButton = (by) => {
      const target = steps ? steps[steps.indexOf(step) + by] : step + by;
      return make("button", {
        type: "button", disabled: steps ? target === undefined : target < facts.first || target > facts.last,
        "aria-label": by < 0 ? "previous step" : "next step", onclick: () => page.navigate({ step: target, ...NO_ROLLOUT }),
      }, by < 0 ? "‹" : "›");
    };
    const input = steps
      ? selectField("Step", steps.map((other) => [other, formatNumber(other)]), step, (value) => page.navigate({ step: value, ...NO_ROLLOUT }))
      : make("label", { class: "field" }, make("span", {}, "Step"), make("input", {
        type: "number", min: facts.first, max: facts.last, value: step,
        onchange: (event) => page.navigate({ step: event.target.value, ...NO_ROLLOUT }),
      }));
    bar.replaceChildren(runSelect(page), input, moveButton(-1), moveButton(1),
      make("span", { class: "quiet" }, `recorded: ${formatNumber(facts.first)} to ${formatNumber(facts.last)}`), reader.controls);
  }

  /** Show the groups of the step, the samples of the selected group below it, and the selected sample in the reader. */
  async function showRollouts(run, step, isCurrent) {
    const { order = "name", group } = page.state;
    const data = await query("groups", { run, step, order: order === "name" ? "" : order });
    const defaultGroup = data.groups.find((other) => other.dropped > 0) ?? data.groups.find((other) => other.trained > 0) ?? data.groups[0];
    const selectedGroup = group ?? defaultGroup?.group;
    const { samples } = selectedGroup === undefined ? { samples: [] } : await query("members", { run, step, group: selectedGroup });
    if (!isCurrent()) return;
    const named = samples.find((sample) => SAMPLE_KEYS.every((key) => String(sample[key]) === page.state[key]));
    const selected = named ?? samples.find((sample) => sample.dropped > 0) ?? samples[0];
    if (hasChanged("left", run, step, order, selectedGroup, selected?.member, selected?.attempt, selected?.sample, data, samples))
      showGroups(step, order, data, selectedGroup, samples, selected);
    await reader.show(run, step, selected, isCurrent);
  }

  function showGroups(step, order, data, selectedGroup, samples, selected) {
    const rows = [];
    const environments = new Set(data.groups.map((group) => group.environment));
    for (const group of data.groups) {
      const open = group.group === selectedGroup;
      // with one environment its name would only hide the number, which differs
      const prefix = environments.size === 1 && group.group.startsWith(group.environment ?? " ") ? group.environment.length : 0;
      const name = group.group.slice(prefix).replace(/^[/#:]/, "") || group.group;
      const tag = group.trained ? null : make("span", { class: "tag" }, escapeInvisible(group.reason ?? "dropped", true));
      rows.push(make("button", {
        class: "pick group", "aria-expanded": String(open), title: escapeToString(`${group.group}, task ${group.task_id ?? ""}`),
        onclick: () => page.navigate({ step, ...NO_ROLLOUT, group: group.group }),
      }, make("span", {}, tag, escapeInvisible(name, true)), make("span", { class: "n" }, formatNumber(group.reward)), dropCount(group.dropped)));
      if (!open) continue;
      for (const sample of samples) {
        rows.push(make("button", {
          class: "pick member", "aria-pressed": String(sample === selected),
          onclick: () => page.navigate({ step, group: selectedGroup, member: sample.member, attempt: sample.attempt, sample: sample.sample, at: null }),
        }, make("span", {}, `${sample.member} `, make("span", { class: "quiet" }, sampleLabel(sample))),
        make("span", { class: "n" }, formatNumber(sample.reward)), dropCount(sample.dropped)));
      }
    }
    const hadFocus = left.contains(document.activeElement);
    const more = data.total > data.groups.length ? make("p", { class: "quiet more" }, `${formatNumber(data.groups.length)} of ${formatNumber(data.total)} groups; change the order to see others`) : "";
    const orderField = embeddedReport ? "" : make("div", { class: "fields" }, selectField("Order", GROUP_ORDERS, order, (value) => page.navigate({ order: value })));
    left.replaceChildren(make("h2", {}, `Groups of step ${formatNumber(step)}`), orderField,
      make("div", { class: "heads group" }, make("span", {}, "group / sample"), make("span", { class: "n" }, "reward"), make("span", { class: "n" }, "dropped")), ...rows, more);
    const target = left.querySelector('[aria-pressed="true"]') ?? left.querySelector('[aria-expanded="true"]');
    if (hadFocus) target?.focus();
  }

  async function showMatches(run, step, isCurrent) {
    const { scope = embeddedReport ? "run" : "step", extreme = "distance", outcome = "any", advantage = "any", text = "" } = page.state;
    if (hasChanged("fields", scope, extreme, outcome, advantage, text)) {
      const input = make("input", { type: "search", value: text, placeholder: "any", disabled: Boolean(embeddedReport), onchange: (event) => page.navigate({ text: event.target.value }) });
      fields.replaceChildren(
        embeddedReport ? "" : selectField("In", [["step", "this step"], ["run", "the whole run"]], scope, (value) => page.navigate({ scope: value })),
        selectField("Outcome", OUTCOMES, outcome, (value) => page.navigate({ outcome: value })),
        selectField("Advantage", ADVANTAGES, advantage, (value) => page.navigate({ advantage: value })),
        selectField("Order", TOKEN_ORDERS, extreme, (value) => page.navigate({ extreme: value })),
        make("label", { class: "field" }, make("span", {}, "Token contains"), input));
    }
    const range = scope === "step" ? { first: step, last: step } : {};
    let data;
    try {
      data = await query("extremes", { run, ...range, order: extreme, outcome, advantage, text });
    } catch (error) {
      matches.replaceChildren(make("p", { class: "quiet" }, error.message));
      return;
    }
    if (!isCurrent()) return;
    view.incomplete = data.read + data.unreadable.length < data.steps;
    if (!hasChanged("matches", run, step, data)) return;
    const rows = data.tokens.map((token) => make("button", {
      class: "pick hit", title: `step ${token.step}, ${escapeToString(token.group)}/${token.member}, token ${token.position}: ${escapeToString(token.drop_reason ?? "trained")}`,
      onclick: () => page.navigate({ step: token.step, group: token.group, member: token.member, attempt: token.attempt, sample: token.sample, at: token.position }),
    }, tokenText(token.text), make("span", { class: token.drop_reason === null ? "n" : "n drops" }, formatNumber(Math.exp(token.logprob - token.sampler_logprob))),
    make("span", { class: "n" }, formatNumber(token.advantage, 2)), make("span", { class: "n quiet" }, `${token.step}`)));
    const progress = view.incomplete ? `, in ${formatNumber(data.read)} of ${formatNumber(data.steps)} steps read so far` : "";
    matches.replaceChildren(make("p", { class: "quiet" }, `${formatNumber(data.matching)} tokens match${progress}`),
      make("div", { class: "heads hit" }, ["token", "ratio", "A", "step"].map((text, n) => make("span", { class: n ? "n" : "" }, text))), make("div", { class: "hits" }, rows));
  }

  async function showTexts(run, isCurrent) {
    const data = await query("texts", { run });
    if (!isCurrent()) return;
    view.incomplete ||= data.read + data.unreadable.length < data.steps;
    if (!hasChanged("texts", run, data)) return;
    const rows = data.texts.map((text) => make("tr", {},
      make("td", {}, embeddedReport ? tokenText(text.text) : make("button", {
        class: "pick", title: "find this token", onclick: () => page.navigate({ text: text.text, outcome: "dropped", scope: "run" }),
      }, tokenText(text.text))),
      make("td", { class: "n drops" }, formatNumber(text.dropped)), make("td", { class: "n quiet" }, formatShare(text.dropped, text.all)),
      make("td", { class: "n" }, formatNumber(text.positive)), make("td", { class: "n" }, formatNumber(text.negative))));
    const headers = ["token", "dropped", "share", "A > 0", "A < 0"];
    const progress = data.read < data.steps ? `, in ${formatNumber(data.read)} of ${formatNumber(data.steps)} steps` : "";
    texts.replaceChildren(make("p", { class: "quiet" }, `${formatNumber(data.dropped)} tokens dropped, ${formatNumber(data.distinct)} distinct${progress}; share: of all occurrences`),
      make("table", {}, make("thead", {}, make("tr", {}, headers.map((text, n) => make("th", { class: n ? "n" : "" }, text)))), make("tbody", {}, rows)));
  }

  return view;
}

function sampleLabel(sample) {
  const suffix = `${sample.attempt > 0 ? `, attempt ${sample.attempt}` : ""}${sample.sample > 0 ? `, sample ${sample.sample}` : ""}`;
  return sample.outcome === "trained" ? `A ${formatNumber(sample.advantage, 2)}${suffix}` : escapeInvisible(`${sample.reason ?? "dropped"}${suffix}`, true);
}

function dropCount(count) {
  return make("span", { class: count ? "n drops" : "n quiet" }, formatNumber(count));
}
