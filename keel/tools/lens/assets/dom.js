// Elements and text. Data is inserted as text nodes only: no module of the page parses a string as markup.

/** Create an element with properties and children; children that are not elements become text. */
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

/** Create a labelled select element. `options`: pairs of value and text. */
export function selectField(label, options, value, onChange) {
  const select = make(
    "select",
    { onchange: () => onChange(select.value) },
    options.map(([key, text]) => make("option", { value: key }, text)),
  );
  select.value = value;
  return make("label", { class: "field" }, make("span", {}, label), select);
}

const INVISIBLE = /[\p{C}\p{Zl}\p{Zp}]/u;
const ALL_INVISIBLE = /[\p{C}\p{Zl}\p{Zp}]/gu;

/** Return text as nodes, with invisible characters and direction marks as visible escapes. */
export function escapeInvisible(text, oneLine = false) {
  if (!INVISIBLE.test(text)) return [text];
  const parts = [];
  let start = 0;
  for (const match of text.matchAll(ALL_INVISIBLE)) {
    if (match.index > start) parts.push(text.slice(start, match.index));
    start = match.index + match[0].length;
    if (match[0] === "\n") parts.push(make("span", { class: "mark" }, "↵"), oneLine ? "" : "\n");
    else if (match[0] === "\t") parts.push(make("span", { class: "mark" }, "⇥"), "\t");
    else parts.push(make("span", { class: "escape" }, `U+${codePoint(match[0])}`));
  }
  parts.push(text.slice(start));
  return parts;
}

function codePoint(character) {
  return character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** Like `escapeInvisible`, as one string for attributes and titles. */
export function escapeToString(text) {
  return text.replace(ALL_INVISIBLE, (character) => (character === "\n" ? "↵" : `U+${codePoint(character)}`));
}

/** Return the text of a token for a list: on one line, with a visible leading space. */
export function tokenText(text) {
  const space = text.startsWith(" ") ? [make("span", { class: "mark" }, "␣")] : [];
  return make("bdi", { class: "token-text" }, space, escapeInvisible(space.length ? text.slice(1) : text, true));
}

export function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(digits - 2, 1)).replace(".0e", "e").replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(digits)));
}

/** Format a part of a total as a percentage; shares next to 0 % and 100 % are not rounded to them. */
export function formatShare(part, total) {
  if (!total) return "–";
  if (part === 0) return "0 %";
  const percent = (100 * part) / total;
  if (percent < 0.01) return "<0.01 %";
  if (percent > 99 && percent < 100) return `${Math.min(percent, 99.99).toPrecision(4)} %`;
  return `${percent >= 10 ? percent.toFixed(0) : percent.toPrecision(2)} %`;
}

export function formatAge(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** Show a message at the top of the page; an empty text hides it. */
export function showMessage(text = "") {
  const bar = document.getElementById("message");
  bar.replaceChildren(...escapeInvisible(text));
  bar.hidden = !text;
}
