"""Measure the assumptions of a simulation (speeds, lengths, failure rates) from a real run.

Reads a run's ledger and rollouts and writes nothing. The start and end time of each rollout give the number of rollouts
in flight at any moment; the duration of each at that concurrency gives the cost of a decode step. Speeds are averages
over the whole run, including warm-up and other load on the machine.
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

from keel.config import RunSettings, load_settings
from keel.config.simulate import SimulateSettings
from keel.errors import KeelError
from keel.tools.simulate.fit import RolloutTimings, fit_decode_costs, fit_line
from keel.tools.simulate.simulated_pool import resolve_max_batch
from keel.tools.simulate.simulated_run import resolve_ranks

FAILURE_REASONS = ("exception", "timeout", "empty", "engine", "over_length", "prompt_too_long")
OUTCOMES_QUERY = "SELECT coalesce(reason, outcome), count(*) FROM rollouts GROUP BY 1"
ROLLOUT_COLUMNS = ["group", "member", "attempt", "outcome", "reason", "turns", "seconds", "ended_at", "trainable"]
MIN_STEPS = 3
"""Least number of steps that a run must have to be measured; the first step is left out as warm-up."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measured results of a run, to compare with a prediction."""

    steps: int
    step_seconds: float
    """Seconds from one step to the next, without evaluations and checkpoints."""
    staleness: float
    dropped_share: float
    """Share of rollouts that did not train."""


def measure_run(run_folder: Path) -> tuple[RunSettings, dict[str, Any], MeasuredRun]:
    """Return a run's settings, the assumptions measured from it (as a table), and its measured results."""
    if not (run_folder / "run.db").is_file():
        raise KeelError(f"--from {run_folder}: run.db not found; pass the folder of a run")
    settings = load_settings(run_folder / "config.toml").settings
    steps = _read_steps(run_folder)
    if len(steps) < MIN_STEPS:
        raise KeelError(
            f"--from {run_folder}: the run has {len(steps)} steps; at least {MIN_STEPS} are needed to measure"
        )
    tables = [_read_rollouts(run_folder, int(step["step"])) for step in steps]
    engines = _count_engines(settings)
    defaults = SimulateSettings(engines=engines)
    rollouts, lengths = _rollout_timings(tables, steps, resolve_max_batch(settings, defaults) * engines)
    speed = fit_decode_costs(rollouts, engines)
    batch = resolve_max_batch(settings, defaults)
    assumptions: dict[str, Any] = {
        "engines": engines,
        "max_batch": batch,
        "tokens_per_second_alone": 1 / (speed.base_seconds + speed.seconds_per_request),
        "tokens_per_second": batch / (speed.base_seconds + speed.seconds_per_request * batch),
        "environment_seconds": speed.environment_seconds,
        "trainer_slowdown": speed.trainer_slowdown,
        **lengths,
        **_trainer_speed(settings, defaults, tables, steps),
        **_failure_rates(run_folder),
    }
    return settings, assumptions, _measured_run(run_folder, settings, steps)


def _query(run_folder: Path, sql: str) -> list[Any]:
    """Query the ledger read-only, since the run may still be writing it."""
    try:
        with closing(sqlite3.connect(f"{(run_folder / 'run.db').resolve().as_uri()}?mode=ro", uri=True)) as db:
            return db.execute(sql).fetchall()
    except sqlite3.Error as error:
        raise KeelError(f"--from {run_folder}: run.db cannot be read: {error}") from None


def _read_steps(run_folder: Path) -> list[dict[str, float]]:
    rows = _query(run_folder, "SELECT step, time, stepped, metrics FROM steps ORDER BY step")
    return [{**json.loads(text), "step": step, "time": at, "stepped": done} for step, at, done, text in rows]


def _read_rollouts(run_folder: Path, step: int) -> list[dict[str, Any]]:
    path = run_folder / "rollouts" / f"step_{step:06d}.parquet"
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, columns=ROLLOUT_COLUMNS).to_pylist()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise KeelError(
            f"--from {run_folder}: {path.name} cannot be measured: {error}; runs written before rollouts had"
            " time stamps cannot be used"
        ) from None
    return rows


def _count_engines(settings: RunSettings) -> int:
    """Return the number of engines that sampled; a pool with dynamic discovery counts as one."""
    return max(len(settings.pool.urls), 1) if settings.pool is not None else 1


def _rollout_timings(
    tables: Sequence[list[dict[str, Any]]], steps: Sequence[dict[str, float]], capacity: int
) -> tuple[RolloutTimings, dict[str, Any]]:
    """Return start, end and sampled tokens of each rollout, and the assumptions about lengths."""
    timings: dict[tuple[str, int, int], list[float]] = {}
    prompts, turns = [], 1
    for row in (row for table in tables for row in table):
        key = (row["group"], row["member"], row["attempt"])
        sampled = sum(row["trainable"]) if row["trainable"] else 0
        if row["seconds"] is None or row["ended_at"] is None:
            continue
        if key in timings:
            timings[key][2] += sampled
        else:
            timings[key] = [row["ended_at"] - row["seconds"], row["ended_at"], sampled]
        if row["trainable"]:
            prompts.append(len(row["trainable"]) - sampled)
        turns = max(turns, row["turns"] or 1)
    started_at, ended_at, tokens = np.array(list(timings.values())).T
    computing = [
        (step["time"] - step["seconds"] + step["sampling_seconds"], step["training_seconds"]) for step in steps
    ]
    spans = np.array([(start, start + length) for start, length in computing])
    values = tuple(int(count) for count in sorted(tokens[tokens > 0]))
    lengths = {
        "length": {"kind": "empirical", "values": values},
        "prompt_tokens": max(round(float(np.mean(prompts))), 1),
        "turns": turns,
    }
    return RolloutTimings(started_at, ended_at, tokens, spans, capacity), lengths


def _trainer_speed(
    settings: RunSettings,
    defaults: SimulateSettings,
    tables: Sequence[list[dict[str, Any]]],
    steps: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Fit a step's seconds to its tokens. The first step is left out as warm-up."""
    tokens, seconds, rest = [], [], []
    for table, step in list(zip(tables, steps, strict=True))[1:]:
        trained = [row for row in table if row["outcome"] == "trained"]
        if not trained:
            continue
        prompts = {row["group"]: len(row["trainable"]) - sum(row["trainable"]) for row in trained}
        tokens.append(sum(sum(row["trainable"]) for row in trained) + sum(prompts.values()))
        seconds.append(step["training_seconds"])
        rest.append(step["seconds"] - step["sampling_seconds"] - step["training_seconds"])
    if not tokens:
        raise KeelError("the run trained nothing after its first step, so the trainer's speed cannot be measured")
    fixed, seconds_per_token = fit_line(tokens, seconds)
    ranks = resolve_ranks(settings, defaults)
    seconds_per_token_one_rank = seconds_per_token * (1 + (ranks - 1) * defaults.rank_efficiency)
    return {
        "step_seconds": fixed + fmean(rest),
        "trainer_tokens_per_second": 1 / max(seconds_per_token_one_rank, 1e-9),
        "publish_seconds": fmean(step.get("publishing_seconds", 0.0) for step in steps[1:]),
    }


def _failure_rates(run_folder: Path) -> dict[str, Any]:
    """Return the share of rollouts that fail and of groups with zero variance."""
    counts = dict(_query(run_folder, OUTCOMES_QUERY))
    groups = dict(
        _query(
            run_folder,
            'SELECT coalesce(reason, outcome), count(DISTINCT "group") FROM rollouts'
            " WHERE reason = 'zero_variance' OR outcome = 'trained' GROUP BY 1",
        )
    )
    completed = sum(
        count for reason, count in counts.items() if reason not in ("run_ended", "interrupted", "group_dropped")
    )
    failed = sum(counts.get(kind, 0) for kind in FAILURE_REASONS)
    return {
        "rollout_failures": min(failed / max(completed, 1), 0.999),
        "zero_variance_share": groups.get("zero_variance", 0) / max(sum(groups.values()), 1),
    }


def _measured_run(run_folder: Path, settings: RunSettings, steps: Sequence[dict[str, float]]) -> MeasuredRun:
    step_seconds = [
        later["time"] - before["time"]
        for before, later in pairwise(steps[1:])
        if not _had_eval_or_checkpoint(settings, int(before["step"]))
    ]
    counts = {
        reason: count
        for reason, count in _query(run_folder, OUTCOMES_QUERY)
        if reason not in ("run_ended", "interrupted")
    }
    tokens = sum(step.get("trainable_tokens", 0.0) for step in steps[1:])
    return MeasuredRun(
        steps=len(steps),
        step_seconds=float(np.mean(step_seconds)) if step_seconds else float("nan"),
        staleness=sum(step.get("trainable_tokens", 0.0) * step.get("staleness", 0.0) for step in steps[1:])
        / max(tokens, 1.0),
        dropped_share=1 - counts.get("trained", 0) / max(sum(counts.values()), 1),
    )


def _had_eval_or_checkpoint(settings: RunSettings, step: int) -> bool:
    """Return whether an evaluation or a checkpoint followed a step."""
    evaluation = settings.evaluation
    evaluated = evaluation.when == "always" and step % evaluation.every == 0
    return evaluated or step % settings.checkpoints.every == 0
