// The difference of two texts, word by word. Texts are of a model: they only ever become text nodes.

import { escapeInvisible, make } from "./dom.js";

/** Words beyond which a text is compared as a whole: the table of the comparison has the product of both lengths. */
const MAX_DIFF_WORDS = 1500;

/** Return the parts of a difference in order, as pairs of kind ("same", "removed" or "added") and text. */
export function diffWords(before, after) {
  const words = [before, after].map((text) => text.match(/\s+|[^\s]+/gu) ?? []);
  if (words.some((list) => list.length > MAX_DIFF_WORDS)) return before === after ? [["same", after]] : [["removed", before], ["added", after]];
  const [a, b] = words;
  // longest[i][j]: length of the longest common subsequence of a from i and b from j
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1)
    for (let j = b.length - 1; j >= 0; j -= 1)
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  const parts = [];
  const add = (kind, word) => {
    if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += word;
    else parts.push([kind, word]);
  };
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add("same", a[i]);
      i += 1;
      j += 1;
    } else if (j === b.length || (i < a.length && longest[i + 1][j] >= longest[i][j + 1])) {
      add("removed", a[i]);
      i += 1;
    } else {
      add("added", b[j]);
      j += 1;
    }
  }
  return parts;
}

/** Return the nodes that show a difference. */
export function diffNodes(before, after) {
  const tags = { same: "span", removed: "del", added: "ins" };
  return diffWords(before, after).map(([kind, text]) => make(tags[kind], {}, escapeInvisible(text)));
}
