// Elements and text. Data reaches the page as text nodes only: nothing here, or elsewhere, parses a string as markup.

/** An element with properties and children; children that are not elements become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A labelled choice. */
export function choice(label, options, value, changed) {
  const select = make(
    "select",
    { onchange: () => changed(select.value) },
    options.map(([key, text]) => make("option", { value: key }, text)),
  );
  select.value = value;
  return make("label", { class: "field" }, make("span", {}, label), select);
}

const HIDDEN = /[\p{C}\p{Zl}\p{Zp}]/u;
const HIDDEN_ALL = /[\p{C}\p{Zl}\p{Zp}]/gu;

/** Text with all that is invisible, or turns the direction of what follows, as visible escapes. */
export function visible(text, oneLine = false) {
  if (!HIDDEN.test(text)) return [text];
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN_ALL)) {
    if (match.index > from) parts.push(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[0] === "\n") parts.push(make("span", { class: "mark" }, "↵"), oneLine ? "" : "\n");
    else if (match[0] === "\t") parts.push(make("span", { class: "mark" }, "⇥"), "\t");
    else parts.push(make("span", { class: "escape" }, `U+${hex(match[0])}`));
  }
  parts.push(text.slice(from));
  return parts;
}

function hex(letter) {
  return letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** The same as one string, for attributes and titles. */
export function plain(text) {
  return text.replace(HIDDEN_ALL, (letter) => (letter === "\n" ? "↵" : `U+${hex(letter)}`));
}

/** A short text of a token in a list: spaces seen, on one line. */
export function quoted(text) {
  const start = text.startsWith(" ") ? [make("span", { class: "mark" }, "␣")] : [];
  return make("bdi", { class: "token-text" }, start, visible(start.length ? text.slice(1) : text, true));
}

/** A number, short. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(digits - 2, 1)).replace(".0e", "e").replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(digits)));
}

export function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  if (part === 0) return "0 %";
  return `${percent < 0.01 ? "<0.01" : percent > 99 && percent < 100 ? Math.min(percent, 99.99).toPrecision(4) : percent >= 10 ? percent.toFixed(0) : percent.toPrecision(2)} %`;
}

export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** Say on the page what went wrong; with nothing, take it back. */
export function trouble(text = "") {
  const place = document.getElementById("trouble");
  place.replaceChildren(...visible(text));
  place.hidden = !text;
}
