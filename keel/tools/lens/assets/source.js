// Where answers come from: the server that served this page, or, in a report, the answers written into the file.

const written = document.getElementById("keel-answers");
export const report = written ? JSON.parse(written.textContent) : null;

/** One question to the lens. Throws an Error that says why there is no answer. */
export async function ask(name, words = {}) {
  const given = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  if (report) return fromReport(name, given);
  const answer = await fetch(`query/${name}?${new URLSearchParams(given)}`, { headers: { accept: "application/json" } });
  const told = await answer.json().catch(() => ({ error: `the lens answered ${answer.status} without words` }));
  if (!answer.ok) throw new Error(told.error);
  return told;
}

function fromReport(name, given) {
  const words = given.map(([key, value]) => `${key}=${value}`).sort();
  const names = name === "series" ? given.find(([key]) => key === "names")[1].split(",") : null;
  const key = [name, ...(names ? words.filter((word) => !word.startsWith("names=")) : words)].join("|");
  const found = report.answers[key];
  if (!found) throw new Error("This was left out of the report; keel lens on the run folder shows it.");
  if (!names) return found;
  const nothing = found.step.map(() => null);
  return { ...found, values: Object.fromEntries(names.map((one) => [one, found.values[one] ?? nothing])) };
}
