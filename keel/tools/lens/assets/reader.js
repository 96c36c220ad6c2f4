// One rollout, read: its text in blocks of who wrote it, every token coloured, the numbers of the one under the pointer
// or the keyboard above it.

import { choice, make, number, visible } from "./dom.js";
import { ask } from "./source.js";

const COLOURS = [["reason", "why dropped"], ["ratio", "ratio"], ["advantage", "advantage"], ["difference", "p - q"], ["gradient", "gradient"], ["entropy", "entropy"], ["staleness", "staleness"]];
const SHOWN = [["any", "all"], ["dropped", "dropped"], ["positive", "dropped, A > 0"], ["negative", "dropped, A < 0"], ["low", "dropped low"], ["high", "dropped high"], ["trained", "trained"]];
const PAGE = 2000;

/** How far out a token is by each colour, from -1 to 1; null where it has no such number. */
const MEASURES = {
  reason: (token) => (token.status === null ? null : token.dropped ? (token.high ? 1 : -1) : 0),
  ratio: (token) => (token.d === null ? null : token.d / Math.log(5)),
  advantage: (token, sample) => (token.status === null ? null : sample.advantage),
  difference: (token) => (token.d === null ? null : (token.p - token.q) / 0.5),
  gradient: (token, sample) => (token.gradient === null ? null : token.gradient / sample.steepest),
  entropy: (token) => (token.entropy === null ? null : token.entropy / 2),
  staleness: (token) => (token.staleness === null ? null : token.staleness / 4),
};
const HUES = { advantage: ["--drop", "--good"], gradient: ["--good", "--drop"], entropy: ["--other", "--other"], staleness: ["--other", "--other"] };

export function reader(page) {
  const about = make("div", { class: "about" });
  const strip = make("div", { class: "token-facts", role: "status", "aria-live": "off" });
  const key = make("div", { class: "key" });
  const text = make("div", { class: "text", tabindex: 0, role: "region", "aria-label": "conversation; left and right move by token, n and p by how extreme, d to the next dropped" });
  const element = make("section", { class: "reader", "aria-label": "rollout" }, about, strip, key, text);
  const controls = make("span", { class: "field" });
  let now = "";
  let sample = null;
  let listed = []; // tokens that are on the page
  let current = -1;
  let rank = -1; // of the current token among the extreme ones, when it was reached as one of them

  /** What is on the page: a look that finds the same leaves it alone. */
  function stamp(wanted) {
    return JSON.stringify([wanted, page.state.colour, page.state.show, page.state.at]);
  }

  async function show(run, step, chosen, fresh) {
    const { colour = "reason", show: filter = "any", at = "" } = page.state;
    const name = chosen && { run, step, group: chosen.group, member: chosen.member, attempt: chosen.attempt, sample: chosen.sample };
    const offset = Math.floor(Number(at || 0) / PAGE) * PAGE;
    const wanted = JSON.stringify([name, offset]);
    if (stamp(wanted) === now) return;
    if (!name) {
      about.replaceChildren("No rollout.");
      return;
    }
    const again = sample?.wanted !== wanted;
    if (again) {
      const told = await ask("sample", { ...name, offset: offset || "" });
      if (!fresh()) return;
      sample = { ...told, wanted };
      rank = -1;
      prepare();
    }
    now = stamp(wanted);
    controls.replaceChildren(
      choice("Colour", COLOURS, colour, (value) => page.go({ colour: value })),
      choice("Show", SHOWN, filter, (value) => page.go({ show: value })));
    if (again) {
      head();
      write();
    }
    paint(colour, filter);
    point(at === "" ? -1 : Number(at) - sample.offset, true);
  }

  function prepare() {
    const at = (name, n) => sample[name]?.[n] ?? null;
    listed = (sample.token_ids ?? []).map((id, n) => {
      const [l, b] = [at("logprobs", n), at("sampler_logprobs", n)];
      const own = sample.trainable[n];
      const status = l === null ? null : at("drop_reason", n) ?? "trained";
      const usable = own && l !== null && b !== null;
      return {
        id, own, status, l, b: own ? b : null,
        text: sample.token_text[n] ?? "", letters: sample.letters[n] ?? 0,
        d: usable ? l - b : null, p: l === null ? null : Math.exp(l), q: own && b !== null ? Math.exp(b) : null,
        dropped: status !== null && status !== "trained", high: status?.endsWith(" high") ?? false, low: status?.endsWith(" low") ?? false,
        staleness: own ? sample.version - sample.versions[n] : null,
        entropy: at("entropy", n), gradient: at("dloss_dlogprob", n), reference: at("reference_logprobs", n),
      };
    });
    sample.steepest = Math.max(1e-12, ...listed.map((token) => Math.abs(token.gradient ?? 0)));
  }

  function head() {
    const own = listed.filter((token) => token.own).length;
    const dropped = listed.filter((token) => token.dropped).length;
    const facts = [
      ["rollout", `${sample.group}/${sample.member}${sample.attempt ? `, attempt ${sample.attempt}` : ""}${sample.sample > 0 ? `, sample ${sample.sample}` : ""}`],
      ["task", sample.task_id], ["outcome", sample.outcome + (sample.reason ? `: ${sample.reason}` : "")],
      ["reward", number(sample.reward)], ["advantage", number(sample.advantage)],
      ["tokens", `${number(own)} of ${number(sample.length)} by the policy, ${number(dropped)} dropped`],
      ["begins", sample.split_reason === "start" ? null : sample.split_reason], ["error", sample.error],
    ];
    about.replaceChildren(...facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
      make("span", {}, make("span", { class: "quiet" }, `${name} `), make("b", {}, visible(String(value), true)))));
  }

  function write() {
    const blocks = [];
    listed.forEach((token, n) => {
      if (!n || token.own !== listed[n - 1].own)
        blocks.push(make("div", { class: token.own ? "block own" : "block" }, make("span", {}, token.own ? "policy" : "context"), make("div", {})));
      const cut = token.letters > [...token.text].length
        ? make("span", { class: "note" }, `… cut; the token has ${number(token.letters)} characters`) : null;
      token.span = make("span", { class: "t", "data-n": n }, visible(token.text), cut);
      blocks.at(-1).lastChild.append(token.span);
    });
    const end = sample.offset + listed.length;
    const button = (label, at) => make("div", { class: "more" }, make("button", { onclick: () => page.go({ at }) }, label));
    if (sample.offset) blocks.unshift(button(`the ${number(PAGE)} tokens before`, sample.offset - PAGE));
    if (end < sample.length) blocks.push(button(`${number(sample.length - end)} more tokens`, end));
    if (!listed.length) blocks.push(make("p", { class: "quiet" }, "This rollout has no tokens."));
    text.replaceChildren(...blocks);
    text.scrollTop = 0;
  }

  function paint(colour, filter) {
    const [minus, plus] = HUES[colour] ?? ["--low", "--high"];
    for (const token of listed) {
      const far = MEASURES[colour](token, sample);
      const size = far === null ? 0 : Math.min(1, Math.abs(far));
      token.far = far === null ? -1 : Math.abs(far);
      token.matches = matching(token, filter);
      token.span.style.setProperty("--hue", `var(${far < 0 ? minus : plus})`);
      token.span.style.setProperty("--much", String(Math.round(55 * size)));
      token.span.classList.toggle("dropped", token.dropped);
      token.span.classList.toggle("faint", !token.matches);
    }
    const swatch = (hue, word) => {
      const square = make("i", {});
      square.style.background = `color-mix(in srgb, var(${hue}) 55%, transparent)`;
      return make("span", {}, square, word);
    };
    const words = {
      reason: [[minus, "dropped, policy too low"], [plus, "dropped, policy too high"]], ratio: [[minus, "ratio 1/5 or less"], [plus, "ratio 5 or more"]],
      advantage: [[minus, "negative"], [plus, "positive"]], difference: [[minus, "p - q of -0.5 or less"], [plus, "0.5 or more"]],
      gradient: [[minus, "pushes the token up"], [plus, "pushes it down"]], entropy: [[plus, "2 nats or more"]], staleness: [[plus, "4 versions or more"]],
    }[colour];
    key.replaceChildren(...words.map(([hue, word]) => swatch(hue, word)), make("span", { class: "t dropped" }, "dropped"), make("span", {}, "keys: ← → token, n p most extreme, d next dropped"));
  }

  function matching(token, filter) {
    if (filter === "any") return true;
    if (filter === "trained") return token.status === "trained";
    if (filter === "low" || filter === "high") return token.dropped && token[filter];
    if (!token.dropped) return false;
    return filter === "dropped" || (filter === "positive" ? sample.advantage > 0 : sample.advantage < 0);
  }

  /** Make a token the current one. */
  function point(n, scroll = false) {
    listed[current]?.span.classList.remove("at");
    current = n;
    const token = listed[n];
    token?.span.classList.add("at");
    if (scroll && token) token.span.scrollIntoView({ block: "center" });
    tell(token);
  }

  function tell(token) {
    const cells = token ? [
      ["token", [make("bdi", { class: "token-text" }, visible(token.text.slice(0, 60), true))]],
      ["outcome", [token.status ?? (token.own ? "not trained" : "context")]],
      ["ratio", [number(token.d === null ? null : Math.exp(token.d))]],
      ["p policy", [number(token.p)]], ["q sampler", [number(token.q)]], ["p - q", [number(token.d === null ? null : token.p - token.q)]],
      ["advantage", [number(token.own ? sample.advantage : null)]], ["gradient", [number(token.gradient)]],
      ["entropy", [number(token.entropy)]], ["staleness", [number(token.staleness)]],
    ] : [["token", ["point at one"]]];
    strip.replaceChildren(...cells.map(([name, value]) => make("div", { title: name === "outcome" ? value[0] : undefined }, make("span", {}, name), value)));
    if (token) strip.title = `token ${sample.offset + listed.indexOf(token)}, id ${token.id}, log-probs: policy ${number(token.l, 6)}, sampler ${number(token.b, 6)}, reference ${number(token.reference, 6)}`;
  }

  text.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-n]");
    if (span) tell(listed[Number(span.dataset.n)]);
  });
  text.addEventListener("pointerleave", () => tell(listed[current]));
  text.addEventListener("click", (event) => {
    const span = event.target.closest("[data-n]");
    if (span) jump(Number(span.dataset.n));
  });

  function jump(n, place = -1) {
    if (!listed[n]) return;
    rank = place;
    page.go({ at: n + sample.offset }, { quietly: true });
    point(n);
    listed[n].span.scrollIntoView({ block: "nearest" });
    now = stamp(sample.wanted);
  }

  /** The most extreme first; those that are filtered out, or have no number, not at all. */
  function extreme(by) {
    const order = listed.map((_, n) => n).filter((n) => listed[n].matches && listed[n].far > 0).sort((a, b) => listed[b].far - listed[a].far || a - b);
    const place = Math.min(Math.max(rank + by, 0), order.length - 1);
    jump(order[place], place);
  }

  function keyed(event) {
    const moves = {
      n: () => extreme(1), p: () => extreme(-1),
      d: () => jump(listed.findIndex((token, n) => n > current && token.dropped)),
      D: () => jump(listed.findLastIndex((token, n) => n < current && token.dropped)),
    };
    if (document.activeElement === text || document.activeElement === document.body) {
      moves.ArrowRight = () => jump(current + 1);
      moves.ArrowLeft = () => jump(current - 1);
    }
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  tell(null);
  return { element, controls, show, key: keyed };
}
