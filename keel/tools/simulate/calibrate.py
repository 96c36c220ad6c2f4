"""What a real run tells about speeds, lengths and failures: the assumptions of a simulation, measured.

Reads a run's ledger and rollouts, and changes nothing in its folder. When each rollout began and ended says how many
were under way at any moment; how long each took, beside so many others, says what a decode step costs. Speeds are those
of the whole run: warming up, other work on the machine and all.
"""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keel.config import RunSettings, load
from keel.config.simulate import SimulateSettings
from keel.errors import KeelError
from keel.tools.simulate.fit import Rollouts, decode_speed, line_through
from keel.tools.simulate.simulated_pool import max_batch_of
from keel.tools.simulate.simulated_run import ranks_of

FAILURES = ("exception", "timeout", "empty", "engine", "over_length")
FATES = "SELECT coalesce(reason, fate), count(*) FROM rollouts GROUP BY 1"
COLUMNS = ["group", "member", "attempt", "fate", "reason", "turns", "seconds", "ended", "trainable"]
FEWEST = 3
"""Steps that a run must have for anything to be said of it; the first is not counted."""


@dataclass(frozen=True)
class Observed:
    """What a run did, to hold a prediction against."""

    steps: int
    step_seconds: float
    """From one step to the next, without evaluations and checkpoints."""
    staleness: float
    refused: float
    """Share of rollouts that did not train."""


def read(run: Path) -> tuple[RunSettings, dict[str, Any], Observed]:
    """The settings of a run, the assumptions that it gives, and what it was like."""
    if not (run / "run.db").is_file():
        raise KeelError(f"--from {run}: there is no run.db in it; give the folder of a run")
    settings = load(run / "config.toml").settings
    steps = _steps(run)
    if len(steps) < FEWEST:
        raise KeelError(f"--from {run}: it has {len(steps)} steps, and measuring takes {FEWEST} at least")
    tables = [_table(run, int(step["step"])) for step in steps]
    engines = _engines(settings)
    plain = SimulateSettings(engines=engines)
    rollouts, shape = _rollouts(tables, steps, max_batch_of(settings, plain) * engines)
    speed = decode_speed(rollouts, engines)
    batch = max_batch_of(settings, plain)
    found: dict[str, Any] = {
        "engines": engines,
        "max_batch": batch,
        "tokens_per_second_alone": 1 / (speed.base + speed.each),
        "tokens_per_second": batch / (speed.base + speed.each * batch),
        "environment_seconds": speed.outside,
        "contention": speed.contention,
        **shape,
        **_trainer(settings, plain, tables, steps),
        **_fates(run),
    }
    return settings, found, _observed(run, settings, steps)


def _query(run: Path, words: str) -> list[Any]:
    """Read-only: the run may be going on."""
    try:
        with closing(sqlite3.connect(f"{(run / 'run.db').resolve().as_uri()}?mode=ro", uri=True)) as db:
            return db.execute(words).fetchall()
    except sqlite3.Error as error:
        raise KeelError(f"--from {run}: run.db cannot be read: {error}") from None


def _steps(run: Path) -> list[dict[str, float]]:
    rows = _query(run, "SELECT step, time, stepped, numbers FROM steps ORDER BY step")
    return [{**json.loads(text), "step": step, "time": at, "stepped": done} for step, at, done, text in rows]


def _table(run: Path, step: int) -> list[dict[str, Any]]:
    path = run / "rollouts" / f"step_{step:06d}.parquet"
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=COLUMNS).to_pylist()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise KeelError(
            f"--from {run}: {path.name} cannot be measured: {error}; runs of before rollouts had a time have none"
        ) from None
    return rows


def _engines(settings: RunSettings) -> int:
    """How many sampled. A pool whose members come and go says nothing about that here."""
    return max(len(settings.pool.urls), 1) if settings.pool is not None else 1


def _rollouts(
    tables: Sequence[list[dict[str, Any]]], steps: Sequence[dict[str, float]], places: int
) -> tuple[Rollouts, dict[str, Any]]:
    """When each began and ended and what it sampled; and what they are like."""
    whole: dict[tuple[str, int, int], list[float]] = {}
    prompts, turns = [], 1
    for row in (row for table in tables for row in table):
        name = (row["group"], row["member"], row["attempt"])
        sampled = sum(row["trainable"]) if row["trainable"] else 0
        if row["seconds"] is None or row["ended"] is None:
            continue
        if name in whole:
            whole[name][2] += sampled
        else:
            whole[name] = [row["ended"] - row["seconds"], row["ended"], sampled]
        if row["trainable"]:
            prompts.append(len(row["trainable"]) - sampled)
        turns = max(turns, row["turns"] or 1)
    began, ended, tokens = np.array(list(whole.values())).T
    computing = [(one["time"] - one["seconds"] + one["sampling_seconds"], one["training_seconds"]) for one in steps]
    spans = np.array([(start, start + length) for start, length in computing])
    lengths = tuple(int(count) for count in sorted(tokens[tokens > 0]))
    shape = {
        "length": {"kind": "empirical", "values": lengths},
        "prompt": max(round(float(np.mean(prompts))), 1),
        "turns": turns,
    }
    return Rollouts(began, ended, tokens, spans, places), shape


def _trainer(
    settings: RunSettings,
    plain: SimulateSettings,
    tables: Sequence[list[dict[str, Any]]],
    steps: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Seconds of a step by the tokens in it. The first step warms up, and is left out."""
    tokens, seconds, rest = [], [], []
    for table, step in list(zip(tables, steps, strict=True))[1:]:
        trained = [row for row in table if row["fate"] == "trained"]
        if not trained:
            continue
        prompts = {row["group"]: len(row["trainable"]) - sum(row["trainable"]) for row in trained}
        tokens.append(sum(sum(row["trainable"]) for row in trained) + sum(prompts.values()))
        seconds.append(step["training_seconds"])
        rest.append(step["seconds"] - step["sampling_seconds"] - step["training_seconds"])
    if not tokens:
        raise KeelError("the run trained nothing after its first step, so that its trainer's speed is not known")
    fixed, each = line_through(tokens, seconds)
    ranks = ranks_of(settings, plain)
    alone = each * (1 + (ranks - 1) * plain.rank_efficiency)
    return {
        "step_seconds": fixed + fmean(rest),
        "trainer_tokens_per_second": 1 / max(alone, 1e-9),
        "publish_seconds": fmean(step.get("publishing_seconds", 0.0) for step in steps[1:]),
    }


def _fates(run: Path) -> dict[str, Any]:
    """How often rollouts fail, and groups have no signal."""
    counts = dict(_query(run, FATES))
    groups = dict(
        _query(
            run,
            "SELECT coalesce(reason, fate), count(DISTINCT \"group\") FROM rollouts WHERE reason = 'no_signal' OR"
            " fate = 'trained' GROUP BY 1",
        )
    )
    ended = sum(count for reason, count in counts.items() if reason not in ("closed", "restart", "group_dropped"))
    failed = sum(counts.get(kind, 0) for kind in FAILURES)
    return {
        "rollout_failures": min(failed / max(ended, 1), 0.999),
        "no_signal": groups.get("no_signal", 0) / max(sum(groups.values()), 1),
    }


def _observed(run: Path, settings: RunSettings, steps: Sequence[dict[str, float]]) -> Observed:
    apart = [
        later["time"] - before["time"]
        for before, later in pairwise(steps[1:])
        if not _interrupted(settings, int(before["step"]))
    ]
    counts = {reason: count for reason, count in _query(run, FATES) if reason not in ("closed", "restart")}
    tokens = sum(one.get("tokens", 0.0) for one in steps[1:])
    return Observed(
        steps=len(steps),
        step_seconds=float(np.mean(apart)) if apart else float("nan"),
        staleness=sum(one.get("tokens", 0.0) * one.get("staleness", 0.0) for one in steps[1:]) / max(tokens, 1.0),
        refused=1 - counts.get("trained", 0) / max(sum(counts.values()), 1),
    )


def _interrupted(settings: RunSettings, step: int) -> bool:
    """Whether something was done after a step that has nothing to do with training."""
    evaluation = settings.evaluation
    evaluated = evaluation.when == "always" and step % evaluation.every == 0
    return evaluated or step % settings.checkpoints.every == 0
