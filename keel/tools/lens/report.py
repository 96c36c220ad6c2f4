"""Write a run as one HTML file: the lens page with the query results it needs embedded.

Guarantees that the file works without a network (see `offline_page`), that it is no larger than the given limit, and
that it states what was left out. It contains every curve and count, histograms and lists over as many steps as can be
read in time, and a sample of the rollouts.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.tools.lens import rollouts
from keel.tools.lens.aggregates import ADVANTAGE_FILTERS, OUTCOME_FILTERS, TOKEN_ORDERS
from keel.tools.lens.offline_page import ASSETS, inline_assets, script_json
from keel.tools.lens.queries import Lens

JS_MODULES = (
    *("source", "dom", "charts", "tasks", "overview", "region", "reader", "tokens", "text_diff", "evaluations"),
    "main",
)
"""Modules of the page, each after the modules it imports."""
MIN_BYTES = 500_000
"""Smallest allowed report size; below it there is no space for the page and its curves."""
AGGREGATE_SECONDS = 20.0
"""Reading time for each of the two aggregates over the whole run."""
LIST_SECONDS = 1.0
"""Reading time for each list of extreme tokens."""
SAMPLED_STEPS = 12
"""Number of evenly spaced steps whose rollouts are sampled."""
MAX_STEP_FRACTION = 0.25
"""Largest fraction of the remaining bytes that one step may use, so that several steps fit."""

JsonObject = dict[str, Any]


class EmbeddedResults:
    """Query results to embed, up to a number of bytes."""

    def __init__(self, lens: Lens, bytes_left: int) -> None:
        self.lens, self.bytes_left = lens, bytes_left
        self.results: dict[str, Any] = {}

    def query(self, name: str, max_bytes: float | None = None, **params: Any) -> Any:
        """Run a query and store its result if it fits; return None if it does not."""
        result = self.lens.query(name, {key: str(value) for key, value in params.items()})
        if name == "series":
            del params["names"]
        return self.store(result, name, max_bytes, **params)

    def store(self, result: Any, name: str, max_bytes: float | None = None, **params: Any) -> Any:
        """Store the known result of a query if it fits; return None if it does not."""
        key = "|".join([name, *sorted(f"{param}={value}" for param, value in params.items())])
        if key in self.results:
            return self.results[key]
        size = len(script_json(result).encode()) + len(key.encode()) + 8
        if size > (self.bytes_left if max_bytes is None else min(self.bytes_left, max_bytes)):
            return None
        self.bytes_left -= size
        self.results[key] = result
        return result


def write_report(folder: Path, out: Path, limit: int) -> int:
    """Write the report of a run, at most `limit` bytes, and return its size in bytes."""
    if not (folder / "run.db").is_file():
        raise KeelError(f"{folder} is not a run folder: it has no run.db")
    lens = Lens(folder, read_seconds=AGGREGATE_SECONDS)
    try:
        page = _render_page(lens, limit)
    finally:
        lens.close()
    temporary = out.with_name(f".{out.name}.new")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise KeelError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from error
    return len(page.encode())


def _render_page(lens: Lens, limit: int) -> str:
    embedded = EmbeddedResults(lens, limit - len(build_html({}).encode()) - 2000)
    (run,) = (row["run"] for row in lens.query("runs", {})["runs"])
    facts = lens.query("run", {"run": run})
    for name, params in (("runs", {}), ("run", {"run": run}), ("outcomes", {"run": run}), ("tasks", {"run": run})):
        _require_fits(embedded.query(name, **params), limit)
    _require_fits(embedded.query("series", run=run, names=_series_names(facts["names"])), limit)
    _require_fits(embedded.query("region", run=run), limit)
    texts = embedded.query("texts", run=run)
    embedded.query("evaluations", run=run)
    lens.read_seconds = LIST_SECONDS
    extreme_tokens = list(_extreme_tokens(embedded, run))
    steps, samples, total = _sample_rollouts(embedded, run, extreme_tokens)
    payload = {
        "results": embedded.results,
        "steps": steps,
        "date": time.strftime("%Y-%m-%d"),
        "omissions": _omissions_note(facts["recorded"], steps, samples, total, texts),
    }
    return build_html(payload)


def _require_fits(result: Any, limit: int) -> None:
    if result is None:
        raise KeelError(f"--megabytes {limit / 1e6:g} is too small for the curves of this run; increase it")


def _series_names(names: list[str]) -> str:
    """Return the metrics of one series query: those that the page draws by default first, at most 100."""
    source = (ASSETS / "overview.js").read_text()
    drawn = [name for name in names if f'"{name}"' in source]
    return ",".join([*drawn, *(name for name in names if name not in drawn)][:100])


def _extreme_tokens(embedded: EmbeddedResults, run: str) -> Iterator[dict[str, Any]]:
    """Yield extreme tokens of the run: every filter ordered by distance, and every order without a filter."""
    queries = [("distance", outcome, advantage) for outcome in OUTCOME_FILTERS for advantage in ADVANTAGE_FILTERS]
    queries += [(order, "any", "any") for order in TOKEN_ORDERS if order != "distance"]
    for order, outcome, advantage in queries:
        result = embedded.query("extremes", run=run, order=order, outcome=outcome, advantage=advantage)
        yield from (result or {"tokens": []})["tokens"][:5]


def _sample_rollouts(
    embedded: EmbeddedResults, run: str, extreme_tokens: list[dict[str, Any]]
) -> tuple[list[int], int, int]:
    """Embed rollouts of evenly spaced steps, groups with extreme tokens first.

    Return the steps, the number of embedded samples, and the number of rollouts of those steps.
    """
    recorded = embedded.lens.runs.get(run).recorded_steps()
    spaced = (
        {recorded[round(n * (len(recorded) - 1) / max(SAMPLED_STEPS - 1, 1))] for n in range(SAMPLED_STEPS)}
        if recorded
        else set()
    )
    steps: list[int] = []
    samples = total = 0
    preferred = [(token["step"], token["group"]) for token in extreme_tokens]
    ordered = sorted(spaced | {step for step, _ in preferred[:10]}, reverse=True)
    for step in ordered:
        step_bytes = embedded.bytes_left * max(MAX_STEP_FRACTION, 1 / len(ordered))
        try:
            groups = embedded.query("groups", step_bytes, run=run, step=step)
        except KeelError:
            continue  # the aggregates list files that cannot be read
        if groups is None:
            continue
        steps.append(step)
        total += sum(group["rollouts"] for group in groups["groups"])
        names = [group["group"] for group in groups["groups"]]
        for group in sorted(names, key=lambda name: (step, name) not in preferred):
            before = embedded.bytes_left
            stored, complete = _embed_group(embedded, run, step, group, step_bytes)
            samples += stored
            step_bytes -= before - embedded.bytes_left
            if not complete:
                break
    return sorted(steps), samples, total


def _embed_group(embedded: EmbeddedResults, run: str, step: int, group: str, max_bytes: float) -> tuple[int, bool]:
    """Embed a group and as many of its samples as fit; return how many did, and whether all did."""
    lens, before = embedded.lens, embedded.bytes_left
    members = embedded.query("members", max_bytes, run=run, step=step, group=group)
    if members is None:
        return 0, False
    samples = rollouts.read_group_samples(lens.database, lens.runs.get(run).rollout_file(step), group)
    stored = 0
    for sample in samples:
        key = {name: sample[name] for name in ("group", "member", "attempt", "sample")}
        bytes_left = max_bytes - (before - embedded.bytes_left)
        stored += embedded.store(sample, "sample", bytes_left, run=run, step=step, **key) is not None
    return stored, stored == len(samples)


def _omissions_note(recorded: int, steps: list[int], samples: int, total: int, texts: Any) -> str:
    parts = [
        f"This report includes rollouts of {len(steps)} of {recorded} steps: {samples} of the {total} rollouts of"
        " those steps."
    ]
    if texts is None or texts["read"] < texts["steps"]:
        read = 0 if texts is None else texts["read"]
        parts.append(f"Histograms and lists cover {read} or more of {recorded} steps, evenly spaced.")
    parts.append("Run keel lens on the run folder to see everything.")
    return " ".join(parts)


def build_html(payload: JsonObject) -> str:
    """Return the page with its assets inlined and `payload` embedded."""
    shell = (ASSETS / "index.html").read_text()
    shell = re.sub(r"^<(?:link rel=\"(?:stylesheet|modulepreload)\"|script).*\n", "", shell, flags=re.MULTILINE)
    return inline_assets(shell, JS_MODULES, (), "keel-results", payload)
