// Sends queries to the server of this page or, in a report, looks up the results embedded in the file.

const embedded = document.getElementById("keel-results");
/** The data of a report; null on a page with a server. */
export const embeddedReport = embedded ? JSON.parse(embedded.textContent) : null;

/** Run a query of the lens. Throws an Error with the reason if it fails. */
export async function query(name, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  if (embeddedReport) return lookUp(name, given);
  const response = await fetch(`query/${name}?${new URLSearchParams(given)}`, { headers: { accept: "application/json" } });
  const result = await response.json().catch(() => ({ error: `the lens returned status ${response.status} without a message` }));
  if (!response.ok) throw new Error(result.error);
  return result;
}

function lookUp(name, given) {
  const params = given.map(([key, value]) => `${key}=${value}`).sort();
  const names = name === "series" ? given.find(([key]) => key === "names")[1].split(",") : null;
  const key = [name, ...(names ? params.filter((param) => !param.startsWith("names=")) : params)].join("|");
  const result = embeddedReport.results[key];
  if (!result) throw new Error("Not included in this report. Run keel lens on the run folder to see it.");
  if (!names) return result;
  const missing = result.step.map(() => null);
  return { ...result, values: Object.fromEntries(names.map((metric) => [metric, result.values[metric] ?? missing])) };
}
