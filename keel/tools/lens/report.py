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
from keel.tools.lens.aggregates import ADVANTAGES, ORDERS, OUTCOMES
from keel.tools.lens.queries import Lens
from keel.tools.lens.server import ASSETS

MODULES = ("source", "dom", "charts", "overview", "region", "reader", "tokens", "main")
"""In an order in which each comes after those that it imports."""
SMALLEST = 500_000
"""Bytes below which a report has no room for its own page and curves."""
SECONDS = 20.0
"""Of reading, for each of the two aggregates over the whole run."""
LIST_SECONDS = 1.0
"""Of reading, for each list of extreme tokens."""
STEPS = 12
"""Steps of which rollouts are sampled, evenly spread."""
FULL = 0.25
"""The share of the room that one step may take, so that several steps have some."""

Words = dict[str, Any]


class Answers:
    """Questions and their answers, as long as there is room."""

    def __init__(self, lens: Lens, room: int) -> None:
        self.lens, self.room = lens, room
        self.kept: dict[str, Any] = {}

    def add(self, name: str, most: float | None = None, **words: Any) -> Any:
        """Ask, and keep the answer if it fits; None when it does not."""
        told = self.lens.answer(name, {key: str(value) for key, value in words.items()})
        if name == "series":
            del words["names"]
        return self.keep(told, name, most, **words)

    def keep(self, told: Any, name: str, most: float | None = None, **words: Any) -> Any:
        """Keep what is known to be the answer, if it fits."""
        key = "|".join([name, *sorted(f"{word}={value}" for word, value in words.items())])
        if key in self.kept:
            return self.kept[key]
        size = len(_json(told).encode()) + len(key.encode()) + 8
        if size > (self.room if most is None else min(self.room, most)):
            return None
        self.room -= size
        self.kept[key] = told
        return told


def write_report(folder: Path, out: Path, limit: int) -> int:
    """Write the report of a run to a file, and return its size. `limit`: in bytes."""
    if not (folder / "run.db").is_file():
        raise KeelError(f"{folder} holds no run: there is no run.db in it")
    lens = Lens(folder, patience=SECONDS)
    try:
        page = _page(lens, limit)
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


def _page(lens: Lens, limit: int) -> str:
    shell = assemble({})
    answers = Answers(lens, limit - len(shell.encode()) - 2000)
    (run,) = (one["run"] for one in answers.lens.answer("runs", {})["runs"])
    facts = lens.answer("run", {"run": run})
    for name, words in (("runs", {}), ("run", {"run": run}), ("fates", {"run": run})):
        _must(answers.add(name, **words), limit)
    _must(answers.add("series", run=run, names=_numbers(facts["names"])), limit)
    _must(answers.add("region", run=run), limit)
    texts = answers.add("texts", run=run)
    lens.patience = LIST_SECONDS
    hits = list(_lists(answers, run))
    steps, samples, total = _rollouts(answers, run, hits)
    said = {
        "answers": answers.kept,
        "steps": steps,
        "made": time.strftime("%Y-%m-%d"),
        "left_out": _left_out(facts["recorded"], steps, samples, total, texts),
    }
    return assemble(said)


def _must(told: Any, limit: int) -> None:
    if told is None:
        raise KeelError(f"--megabytes {limit / 1e6:g} leaves no room for the curves of this run; give more")


def _numbers(names: list[str]) -> str:
    """Those that fit one question: what the page draws by itself, and others in their order."""
    source = (ASSETS / "overview.js").read_text()
    drawn = [name for name in names if f'"{name}"' in source]
    return ",".join([*drawn, *(name for name in names if name not in drawn)][:100])


def _lists(answers: Answers, run: str) -> Iterator[dict[str, Any]]:
    """The most extreme tokens of the run: every filter by distance, and every order without a filter."""
    asked = [("distance", outcome, side) for outcome in OUTCOMES for side in ADVANTAGES]
    asked += [(order, "any", "any") for order in ORDERS if order != "distance"]
    for order, outcome, side in asked:
        found = answers.add("extremes", run=run, order=order, outcome=outcome, side=side)
        yield from (found or {"tokens": []})["tokens"][:5]


def _rollouts(answers: Answers, run: str, hits: list[dict[str, Any]]) -> tuple[list[int], int, int]:
    """A sample: of evenly spread steps, first the rollouts with extreme tokens, then group by group."""
    recorded = answers.lens.runs.get(run).steps()
    spread = {recorded[round(n * (len(recorded) - 1) / max(STEPS - 1, 1))] for n in range(STEPS)} if recorded else set()
    steps: list[int] = []
    samples = total = 0
    wanted = [(hit["step"], hit["group"]) for hit in hits]
    ordered = sorted(spread | {step for step, _ in wanted[:10]}, reverse=True)
    for step in ordered:
        most = answers.room * max(FULL, 1 / len(ordered))
        try:
            groups = answers.add("groups", most, run=run, step=step)
        except KeelError:
            continue  # a file that cannot be read is named among the aggregates
        if groups is None:
            continue
        steps.append(step)
        total += sum(group["rollouts"] for group in groups["groups"])
        named = [group["group"] for group in groups["groups"]]
        for group in sorted(named, key=lambda one: (step, one) not in wanted):
            before = answers.room
            kept, whole = _group(answers, run, step, group, most)
            samples += kept
            most -= before - answers.room
            if not whole:
                break
    return sorted(steps), samples, total


def _group(answers: Answers, run: str, step: int, group: str, most: float) -> tuple[int, bool]:
    """A group and those of its rollouts that fit: how many, and whether all did."""
    lens, before = answers.lens, answers.room
    members = answers.add("members", most, run=run, step=step, group=group)
    if members is None:
        return 0, False
    found = rollouts.samples(lens.database, lens.runs.get(run).file(step), group)
    kept = 0
    for one in found:
        name = {key: one[key] for key in ("group", "member", "attempt", "sample")}
        room = most - (before - answers.room)
        kept += answers.keep(one, "sample", room, run=run, step=step, **name) is not None
    return kept, kept == len(found)


def _left_out(recorded: int, steps: list[int], samples: int, total: int, texts: Any) -> str:
    parts = [
        f"A report: rollouts of {len(steps)} of {recorded} steps, {samples} of the {total} rollouts of those steps."
    ]
    if texts is None or texts["read"] < texts["steps"]:
        read = 0 if texts is None else texts["read"]
        parts.append(f"Histograms and lists are of {read} or more of {recorded} steps, evenly spread.")
    parts.append("The rest is in the run folder: keel lens shows it.")
    return " ".join(parts)


def assemble(said: Words) -> str:
    """One file of the page's parts and these answers."""
    script = (ASSETS / "vendor/uPlot.iife.min.js").read_text().strip() + "\n" + bundle()
    style = "\n".join((ASSETS / name).read_text() for name in ("vendor/uPlot.min.css", "style.css"))
    if re.search(r"</(script|style)|<!--", script + style, re.IGNORECASE):
        raise KeelError("an asset of the lens holds the end of its own element; it was changed, install keel again")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    text = (ASSETS / "index.html").read_text()
    text = re.sub(r"^<(?:link rel=\"(?:stylesheet|modulepreload)\"|script).*\n", "", text, flags=re.MULTILINE)
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n<style>{style}</style>\n'
    # "<" inside of a string is written as an escape: no text of a model can end the element
    data = f'<script type="application/json" id="keel-answers">{_json(said)}</script>\n'
    text = text.replace("<title>", head + "<title>", 1)
    return text.replace("</body>", f"{data}<script>{script}</script>\n</body>", 1)


def bundle() -> str:
    """The page's modules as one script: their names are different, so that imports and exports can be left out."""
    parts = []
    for name in MODULES:
        source = (ASSETS / f"{name}.js").read_text()
        source = re.sub(r"^import .*;\n", "", source, flags=re.MULTILINE)
        parts.append(re.sub(r"^export (?=async|function|const)", "", source, flags=re.MULTILINE))
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # lone surrogates cannot be written to a file
    text = text.encode("utf-8", "replace").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
