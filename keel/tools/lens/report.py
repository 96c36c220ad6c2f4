"""A run as one HTML file: the page of the lens with the answers it would ask for written into it.

Guarantees that the file needs no network and can reach none (its policy names the hashes of the one script and the one
style that it holds, and no source), that it is no larger than asked for, and that it says what was left out: all curves
and counts are in it, histograms and lists of as many steps as could be read in time, and a sample of rollouts.
"""

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.tools.lens import rollouts
from keel.tools.lens.aggregates import ADVANTAGE_FILTERS, OUTCOME_FILTERS, TOKEN_ORDERS
from keel.tools.lens.queries import Lens
from keel.tools.lens.server import ASSETS

JS_MODULES = ("source", "dom", "charts", "overview", "region", "reader", "tokens", "main")
"""In an order in which each comes after those that it imports."""
MIN_BYTES = 500_000
"""Bytes below which a report has no room for its own page and curves."""
AGGREGATE_SECONDS = 20.0
"""Of reading, for each of the two aggregates over the whole run."""
LIST_SECONDS = 1.0
"""Of reading, for each list of extreme tokens."""
SAMPLED_STEPS = 12
"""Steps of which rollouts are sampled, evenly spread."""
MAX_STEP_FRACTION = 0.25
"""The share of the room that one step may take, so that several steps have some."""

JsonObject = dict[str, Any]


class EmbeddedResults:
    """Questions and their answers, as long as there is room."""

    def __init__(self, lens: Lens, bytes_left: int) -> None:
        self.lens, self.bytes_left = lens, bytes_left
        self.results: dict[str, Any] = {}

    def query(self, name: str, max_bytes: float | None = None, **params: Any) -> Any:
        """Ask, and keep the answer if it fits; None when it does not."""
        told = self.lens.query(name, {key: str(value) for key, value in params.items()})
        if name == "series":
            del params["names"]
        return self.store(told, name, max_bytes, **params)

    def store(self, result: Any, name: str, max_bytes: float | None = None, **params: Any) -> Any:
        """Keep what is known to be the answer, if it fits."""
        key = "|".join([name, *sorted(f"{word}={value}" for word, value in params.items())])
        if key in self.results:
            return self.results[key]
        size = len(_script_json(result).encode()) + len(key.encode()) + 8
        if size > (self.bytes_left if max_bytes is None else min(self.bytes_left, max_bytes)):
            return None
        self.bytes_left -= size
        self.results[key] = result
        return result


def write_report(folder: Path, out: Path, limit: int) -> int:
    """Write the report of a run to a file, and return its size. `limit`: in bytes."""
    if not (folder / "run.db").is_file():
        raise KeelError(f"{folder} holds no run: there is no run.db in it")
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
        raise KeelError(f"{out} cannot be written: {error.strerror}; choose another with --out") from error
    return len(page.encode())


def _render_page(lens: Lens, limit: int) -> str:
    shell = build_html({})
    answers = EmbeddedResults(lens, limit - len(shell.encode()) - 2000)
    (run,) = (one["run"] for one in answers.lens.query("runs", {})["runs"])
    facts = lens.query("run", {"run": run})
    for name, words in (("runs", {}), ("run", {"run": run}), ("outcomes", {"run": run})):
        _require_fits(answers.query(name, **words), limit)
    _require_fits(answers.query("series", run=run, names=_series_names(facts["names"])), limit)
    _require_fits(answers.query("region", run=run), limit)
    texts = answers.query("texts", run=run)
    lens.read_seconds = LIST_SECONDS
    hits = list(_extreme_tokens(answers, run))
    steps, samples, total = _sample_rollouts(answers, run, hits)
    said = {
        "answers": answers.results,
        "steps": steps,
        "made": time.strftime("%Y-%m-%d"),
        "left_out": _omissions_note(facts["recorded"], steps, samples, total, texts),
    }
    return build_html(said)


def _require_fits(result: Any, limit: int) -> None:
    if result is None:
        raise KeelError(f"--megabytes {limit / 1e6:g} leaves no room for the curves of this run; give more")


def _series_names(names: list[str]) -> str:
    """Those that fit one question: what the page draws by itself, and others in their order."""
    source = (ASSETS / "overview.js").read_text()
    drawn = [name for name in names if f'"{name}"' in source]
    return ",".join([*drawn, *(name for name in names if name not in drawn)][:100])


def _extreme_tokens(embedded: EmbeddedResults, run: str) -> Iterator[dict[str, Any]]:
    """The most extreme tokens of the run: every filter by distance, and every order without a filter."""
    asked = [("distance", outcome, side) for outcome in OUTCOME_FILTERS for side in ADVANTAGE_FILTERS]
    asked += [(order, "any", "any") for order in TOKEN_ORDERS if order != "distance"]
    for order, outcome, side in asked:
        found = embedded.query("extremes", run=run, order=order, outcome=outcome, side=side)
        yield from (found or {"tokens": []})["tokens"][:5]


def _sample_rollouts(
    embedded: EmbeddedResults, run: str, extreme_tokens: list[dict[str, Any]]
) -> tuple[list[int], int, int]:
    """A sample: of evenly spread steps, first the rollouts with extreme tokens, then group by group."""
    recorded = embedded.lens.runs.get(run).recorded_steps()
    spread = (
        {recorded[round(n * (len(recorded) - 1) / max(SAMPLED_STEPS - 1, 1))] for n in range(SAMPLED_STEPS)}
        if recorded
        else set()
    )
    steps: list[int] = []
    samples = total = 0
    wanted = [(hit["step"], hit["group"]) for hit in extreme_tokens]
    ordered = sorted(spread | {step for step, _ in wanted[:10]}, reverse=True)
    for step in ordered:
        most = embedded.bytes_left * max(MAX_STEP_FRACTION, 1 / len(ordered))
        try:
            groups = embedded.query("groups", most, run=run, step=step)
        except KeelError:
            continue  # a file that cannot be read is named among the aggregates
        if groups is None:
            continue
        steps.append(step)
        total += sum(group["rollouts"] for group in groups["groups"])
        named = [group["group"] for group in groups["groups"]]
        for group in sorted(named, key=lambda one: (step, one) not in wanted):
            before = embedded.bytes_left
            kept, whole = _embed_group(embedded, run, step, group, most)
            samples += kept
            most -= before - embedded.bytes_left
            if not whole:
                break
    return sorted(steps), samples, total


def _embed_group(embedded: EmbeddedResults, run: str, step: int, group: str, max_bytes: float) -> tuple[int, bool]:
    """A group and those of its rollouts that fit: how many, and whether all did."""
    lens, before = embedded.lens, embedded.bytes_left
    members = embedded.query("members", max_bytes, run=run, step=step, group=group)
    if members is None:
        return 0, False
    found = rollouts.read_group_samples(lens.database, lens.runs.get(run).rollout_file(step), group)
    kept = 0
    for one in found:
        name = {key: one[key] for key in ("group", "member", "attempt", "sample")}
        room = max_bytes - (before - embedded.bytes_left)
        kept += embedded.store(one, "sample", room, run=run, step=step, **name) is not None
    return kept, kept == len(found)


def _omissions_note(recorded: int, steps: list[int], samples: int, total: int, texts: Any) -> str:
    parts = [
        f"A report: rollouts of {len(steps)} of {recorded} steps, {samples} of the {total} rollouts of those steps."
    ]
    if texts is None or texts["read"] < texts["steps"]:
        read = 0 if texts is None else texts["read"]
        parts.append(f"Histograms and lists are of {read} or more of {recorded} steps, evenly spread.")
    parts.append("The rest is in the run folder: keel lens shows it.")
    return " ".join(parts)


def build_html(payload: JsonObject) -> str:
    """One file of the page's parts and these answers."""
    script = (ASSETS / "vendor/uPlot.iife.min.js").read_text().strip() + "\n" + bundle_scripts()
    style = "\n".join((ASSETS / name).read_text() for name in ("vendor/uPlot.min.css", "style.css"))
    if re.search(r"</(script|style)|<!--", script + style, re.IGNORECASE):
        raise KeelError("an asset of the lens holds the end of its own element; it was changed, install keel again")
    policy = (
        f"default-src 'none'; script-src '{_csp_hash(script)}'; style-src '{_csp_hash(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    text = (ASSETS / "index.html").read_text()
    text = re.sub(r"^<(?:link rel=\"(?:stylesheet|modulepreload)\"|script).*\n", "", text, flags=re.MULTILINE)
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n<style>{style}</style>\n'
    # "<" inside of a string is written as an escape: no text of a model can end the element
    data = f'<script type="application/json" id="keel-answers">{_script_json(payload)}</script>\n'
    text = text.replace("<title>", head + "<title>", 1)
    return text.replace("</body>", f"{data}<script>{script}</script>\n</body>", 1)


def bundle_scripts() -> str:
    """The page's modules as one script: their names are different, so that imports and exports can be left out."""
    parts = []
    for name in JS_MODULES:
        source = (ASSETS / f"{name}.js").read_text()
        source = re.sub(r"^import .*;\n", "", source, flags=re.MULTILINE)
        parts.append(re.sub(r"^export (?=async|function|const)", "", source, flags=re.MULTILINE))
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def _script_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # lone surrogates cannot be written to a file
    text = text.encode("utf-8", "replace").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
