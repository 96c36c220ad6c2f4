// One rollout: its text in blocks of prompt and completion, every token coloured, and above it the numbers of the token
// under the pointer or the keyboard cursor.

import { escapeInvisible, formatNumber, make, selectField } from "./dom.js";
import { query } from "./source.js";

const COLOUR_MODES = [["reason", "drop reason"], ["ratio", "ratio"], ["advantage", "advantage"], ["difference", "p - q"], ["gradient", "gradient"], ["entropy", "entropy"], ["staleness", "staleness"]];
const TOKEN_FILTERS = [["any", "all"], ["dropped", "dropped"], ["positive", "dropped, A > 0"], ["negative", "dropped, A < 0"], ["low", "dropped low"], ["high", "dropped high"], ["trained", "trained"]];
const PAGE_TOKENS = 2000;

/** The values by name as one text, null without any: `correct 1, called 0.1`. */
export function listValues(values) {
  const parts = Object.entries(values ?? {}).map(([name, value]) => `${name} ${formatNumber(value)}`);
  return parts.length ? parts.join(", ") : null;
}

/** The strength of each colour for a token, from -1 to 1; null where the token has no such number. */
const COLOUR_VALUES = {
  reason: (token) => (token.status === null ? null : token.dropped ? (token.high ? 1 : -1) : 0),
  ratio: (token) => (token.logRatio === null ? null : token.logRatio / Math.log(5)),
  advantage: (token, sample) => (token.status === null ? null : sample.advantage),
  difference: (token) => (token.logRatio === null ? null : (token.p - token.q) / 0.5),
  gradient: (token, sample) => (token.gradient === null ? null : token.gradient / sample.maxGradient),
  entropy: (token) => (token.entropy === null ? null : token.entropy / 2),
  staleness: (token) => (token.staleness === null ? null : token.staleness / 4),
};
const HUES = { advantage: ["--drop", "--good"], gradient: ["--good", "--drop"], entropy: ["--other", "--other"], staleness: ["--other", "--other"] };
/** The meaning of the negative and the positive hue of each colour mode. */
const HUE_LABELS = {
  reason: ["dropped, p ≪ q", "dropped, p ≫ q"],
  ratio: ["ratio 1/5 or less", "ratio 5 or more"],
  advantage: ["negative", "positive"],
  difference: ["p - q of -0.5 or less", "0.5 or more"],
  gradient: ["increases the probability", "decreases the probability"],
  entropy: [null, "2 nats or more"],
  staleness: [null, "4 versions or more"],
};

export function createReader(page) {
  const about = make("div", { class: "about" });
  const tokenFacts = make("div", { class: "token-facts", role: "status", "aria-live": "off" });
  const colourKey = make("div", { class: "key" });
  const text = make("div", { class: "text", tabindex: 0, role: "region", "aria-label": "conversation; left and right move by token, n and p to the most extreme tokens, d to the next dropped token" });
  const element = make("section", { class: "reader", "aria-label": "rollout" }, about, tokenFacts, colourKey, text);
  const controls = make("span", { class: "field" });
  let shownState = "";
  let sample = null;
  let listed = []; // the tokens on the page
  let current = -1; // index of the current token
  let rank = -1; // rank of the current token among the extreme ones, if it was reached with n or p

  /** The state that the page shows; a refresh with the same state changes nothing. */
  function stateOf(sampleKey) {
    return JSON.stringify([sampleKey, page.state.colour, page.state.show, page.state.at]);
  }

  async function show(run, step, selected, isCurrent) {
    const { colour = "reason", show: filter = "any", at = "" } = page.state;
    const id = selected && { run, step, group: selected.group, member: selected.member, attempt: selected.attempt, sample: selected.sample };
    const offset = Math.floor(Number(at || 0) / PAGE_TOKENS) * PAGE_TOKENS;
    const sampleKey = JSON.stringify([id, offset]);
    if (stateOf(sampleKey) === shownState) return;
    if (!id) {
      about.replaceChildren("No rollout.");
      return;
    }
    const isNew = sample?.key !== sampleKey;
    if (isNew) {
      const data = await query("sample", { ...id, offset: offset || "" });
      if (!isCurrent()) return;
      sample = { ...data, key: sampleKey };
      rank = -1;
      prepareTokens();
    }
    shownState = stateOf(sampleKey);
    controls.replaceChildren(
      selectField("Colour", COLOUR_MODES, colour, (value) => page.navigate({ colour: value })),
      selectField("Show", TOKEN_FILTERS, filter, (value) => page.navigate({ show: value })));
    if (isNew) {
      showAbout();
      writeText();
    }
    paint(colour, filter);
    setCurrent(at === "" ? -1 : Number(at) - sample.offset, true);
  }

  function prepareTokens() {
    const valueAt = (name, n) => sample[name]?.[n] ?? null;
    listed = (sample.token_ids ?? []).map((id, n) => {
      const trainable = sample.trainable[n];
      const logprob = valueAt("logprobs", n);
      const samplerLogprob = trainable ? valueAt("sampler_logprobs", n) : null;
      // tokens without a policy log-prob were not part of the step; the others have trained unless they have a reason
      const status = logprob === null ? null : valueAt("drop_reason", n) ?? "trained";
      return {
        id, trainable, status, logprob, samplerLogprob,
        text: sample.token_text[n] ?? "", characters: sample.num_characters[n] ?? 0,
        logRatio: logprob !== null && samplerLogprob !== null ? logprob - samplerLogprob : null,
        p: logprob === null ? null : Math.exp(logprob), q: samplerLogprob === null ? null : Math.exp(samplerLogprob),
        dropped: status !== null && status !== "trained", high: status?.endsWith(" high") ?? false, low: status?.endsWith(" low") ?? false,
        staleness: trainable && sample.versions ? sample.version - sample.versions[n] : null,
        entropy: valueAt("entropy", n), gradient: valueAt("dloss_dlogprob", n), referenceLogprob: valueAt("reference_logprobs", n),
      };
    });
    sample.maxGradient = Math.max(1e-12, ...listed.map((token) => Math.abs(token.gradient ?? 0)));
  }

  function showAbout() {
    const trainable = listed.filter((token) => token.trainable).length;
    const dropped = listed.filter((token) => token.dropped).length;
    const facts = [
      ["rollout", `${sample.group}/${sample.member}${sample.attempt ? `, attempt ${sample.attempt}` : ""}${sample.sample > 0 ? `, sample ${sample.sample}` : ""}`],
      ["task", sample.task_id], ["outcome", sample.outcome + (sample.reason ? `: ${sample.reason}` : "")],
      ["reward", formatNumber(sample.reward)], ["components", listValues(sample.reward_components)],
      ["metrics", listValues(sample.environment_metrics)], ["advantage", formatNumber(sample.advantage)], ["turns", sample.turns || null],
      ["tokens", `${formatNumber(trainable)} of ${formatNumber(sample.length)} from the policy, ${formatNumber(dropped)} dropped`],
      ["split reason", sample.split_reason === "start" ? null : sample.split_reason], ["error", sample.error],
    ];
    about.replaceChildren(...facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
      make("span", {}, make("span", { class: "quiet" }, `${name} `), make("b", {}, escapeInvisible(String(value), true)))));
  }

  function writeText() {
    const blocks = [];
    listed.forEach((token, n) => {
      if (!n || token.trainable !== listed[n - 1].trainable)
        blocks.push(make("div", { class: token.trainable ? "block own" : "block" }, make("span", {}, token.trainable ? "completion" : "prompt"), make("div", {})));
      const truncated = token.characters > [...token.text].length
        ? make("span", { class: "note" }, `… truncated; the token has ${formatNumber(token.characters)} characters`) : null;
      token.span = make("span", { class: "t", "data-n": n }, escapeInvisible(token.text), truncated);
      blocks.at(-1).lastChild.append(token.span);
    });
    const end = sample.offset + listed.length;
    const button = (label, at) => make("div", { class: "more" }, make("button", { onclick: () => page.navigate({ at }) }, label));
    if (sample.offset) blocks.unshift(button(`previous ${formatNumber(PAGE_TOKENS)} tokens`, sample.offset - PAGE_TOKENS));
    if (end < sample.length) blocks.push(button(`${formatNumber(sample.length - end)} more tokens`, end));
    if (!listed.length) blocks.push(make("p", { class: "quiet" }, "This rollout has no tokens."));
    text.replaceChildren(...blocks);
    text.scrollTop = 0;
  }

  function paint(colour, filter) {
    const hues = HUES[colour] ?? ["--low", "--high"];
    for (const token of listed) {
      const value = COLOUR_VALUES[colour](token, sample);
      token.extremeness = value === null ? -1 : Math.abs(value);
      token.matches = matchesFilter(token, filter);
      token.span.style.setProperty("--hue", `var(${value < 0 ? hues[0] : hues[1]})`);
      token.span.style.setProperty("--much", String(Math.round(55 * Math.min(1, Math.max(0, token.extremeness)))));
      token.span.classList.toggle("dropped", token.dropped);
      token.span.classList.toggle("faint", !token.matches);
    }
    const swatches = HUE_LABELS[colour].map((label, n) => {
      if (label === null) return null;
      const square = make("i", {});
      square.style.background = `color-mix(in srgb, var(${hues[n]}) 55%, transparent)`;
      return make("span", {}, square, label);
    });
    colourKey.replaceChildren(...swatches.filter(Boolean), make("span", { class: "t dropped" }, "dropped"), make("span", {}, "keys: ← → token, n p most extreme, d next dropped"));
  }

  function matchesFilter(token, filter) {
    if (filter === "any") return true;
    if (filter === "trained") return token.status === "trained";
    if (filter === "low" || filter === "high") return token.dropped && token[filter];
    if (!token.dropped) return false;
    return filter === "dropped" || (filter === "positive" ? sample.advantage > 0 : sample.advantage < 0);
  }

  function setCurrent(n, scroll = false) {
    listed[current]?.span.classList.remove("at");
    current = n;
    const token = listed[n];
    token?.span.classList.add("at");
    if (scroll && token) token.span.scrollIntoView({ block: "center" });
    showTokenFacts(token);
  }

  function showTokenFacts(token) {
    const cells = token ? [
      ["token", [make("bdi", { class: "token-text" }, escapeInvisible(token.text.slice(0, 60), true))]],
      ["outcome", [token.status ?? (token.trainable ? "not trained" : "prompt")]],
      ["ratio p/q", [formatNumber(token.logRatio === null ? null : Math.exp(token.logRatio))]],
      ["p policy", [formatNumber(token.p)]], ["q sampler", [formatNumber(token.q)]], ["p - q", [formatNumber(token.logRatio === null ? null : token.p - token.q)]],
      ["logprob", [formatNumber(token.logprob, 4)]], ["sampler logprob", [formatNumber(token.samplerLogprob, 4)]],
      ["advantage", [formatNumber(token.trainable ? sample.advantage : null)]], ["gradient", [formatNumber(token.gradient)]],
      ["entropy", [formatNumber(token.entropy)]], ["staleness", [formatNumber(token.staleness)]],
    ] : [["token", ["point at a token to see its numbers"]]];
    tokenFacts.replaceChildren(...cells.map(([name, value]) => make("div", { title: name === "outcome" ? value[0] : undefined }, make("span", {}, name), value)));
    if (token) tokenFacts.title = `token ${sample.offset + listed.indexOf(token)}, id ${token.id}, log-probs: policy ${formatNumber(token.logprob, 6)}, sampler ${formatNumber(token.samplerLogprob, 6)}, reference ${formatNumber(token.referenceLogprob, 6)}`;
  }

  text.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-n]");
    if (span) showTokenFacts(listed[Number(span.dataset.n)]);
  });
  text.addEventListener("pointerleave", () => showTokenFacts(listed[current]));
  text.addEventListener("click", (event) => {
    const span = event.target.closest("[data-n]");
    if (span) jump(Number(span.dataset.n));
  });

  function jump(n, newRank = -1) {
    if (!listed[n]) return;
    rank = newRank;
    page.navigate({ at: n + sample.offset }, { silent: true });
    setCurrent(n);
    listed[n].span.scrollIntoView({ block: "nearest" });
    shownState = stateOf(sample.key);
  }

  /** Jump to the next or previous token in order of extremeness, among those that match the filter and have a number. */
  function jumpToExtreme(by) {
    const order = listed.map((_, n) => n).filter((n) => listed[n].matches && listed[n].extremeness > 0)
      .sort((a, b) => listed[b].extremeness - listed[a].extremeness || a - b);
    const newRank = Math.min(Math.max(rank + by, 0), order.length - 1);
    jump(order[newRank], newRank);
  }

  function onKey(event) {
    const actions = {
      n: () => jumpToExtreme(1), p: () => jumpToExtreme(-1),
      d: () => jump(listed.findIndex((token, n) => n > current && token.dropped)),
      D: () => jump(listed.findLastIndex((token, n) => n < current && token.dropped)),
    };
    if (document.activeElement === text || document.activeElement === document.body) {
      actions.ArrowRight = () => jump(current + 1);
      actions.ArrowLeft = () => jump(current - 1);
    }
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  showTokenFacts(null);
  return { element, controls, show, onKey };
}
