"""Recorded tokens for the tests of `keel compare`: sequences as plain rows, written as a run, as parquet or as JSON.

A row is what docs/compare.md says a line of a file is; the run folder is written by the run's own code.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keel.rollout.trajectory import TrainingSample
from keel.run import records
from keel.tools.compare import Comparison, Recording, parse_candidates
from keel.tools.compare.report import ComparisonReport, build_report

Row = dict[str, Any]


def row(ratios: Sequence[float], advantage: float, *, prompt: int = 0, step: int = 1, **more: Any) -> Row:
    """A sequence whose trainable tokens have these ratios and the sampler's probability 1/2^10, after a prompt."""
    size = prompt + len(ratios)
    sampler = -10 * math.log(2)
    values = {
        "step": step,
        "trainable": [False] * prompt + [True] * len(ratios),
        "sampler_logprobs": [0.0] * prompt + [sampler] * len(ratios),
        "logprobs": [None] * prompt + [sampler + math.log(ratio) for ratio in ratios],
        "advantage": advantage,
        "version": 3,
        "versions": [-1] * prompt + [3] * len(ratios),
        "group": "g",
        "token_text": [f"p{place}" for place in range(size)],
        "token_ids": list(range(size)),
    }
    return values | more


def random_rows(steps: int, seed: int = 0) -> list[Row]:
    """Sequences of uneven length over several steps, sampled by versions of several ages."""
    chance = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        for member in range(int(chance.integers(4, 9))):
            size = int(chance.integers(1, 12))
            ratios = np.exp(chance.normal(0, 1.2, size)).tolist()
            ages = chance.integers(0, 3, size)
            prompt = int(chance.integers(1, 4))
            found = row(
                ratios, float(chance.normal()), prompt=prompt, step=step, version=step, group=f"{step}-{member}"
            )
            found["versions"] = [-1] * prompt + (step - ages).tolist()
            found["token_text"] = [f"w{number}" for number in chance.integers(0, 5, prompt + size)]
            found["token_ids"] = [int(piece[1:]) for piece in found["token_text"]]
            rows.append(found)
    return rows


def write_json(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Row], **types: pa.DataType) -> Path:
    columns = {name: [one.get(name) for one in rows] for name in rows[0]}
    table = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(table), path, row_group_size=3)
    return path


def write_run(folder: Path, rows: Iterable[Row]) -> Path:
    """A run folder, by the code that writes them, with a refused rollout in every step."""
    by_step: dict[int, list[Row]] = {}
    for one in rows:
        by_step.setdefault(one["step"], []).append(one)
    for step, members in by_step.items():
        written = [_record(number, one) for number, one in enumerate(members)]
        written.append(records.SampleRecord("lost", "env", "t", 0, 0, outcome="dropped", reason="stale"))
        pieces = {
            token: text for one in members for token, text in zip(one["token_ids"], one["token_text"], strict=True)
        }
        records.write_step(folder / "rollouts", step, members[0]["version"], written, pieces)
    return folder


def _record(number: int, one: Row) -> records.SampleRecord:
    data = TrainingSample(
        token_ids=tuple(one["token_ids"]),
        trainable=tuple(one["trainable"]),
        logprobs=tuple(one["sampler_logprobs"]),
        versions=tuple(one["versions"]),
        temperature=1.0,
        split_reason="start",
    )
    account = {"logprobs": one["logprobs"]}
    return records.SampleRecord(
        one["group"], "env", "t", number, 0, 0, data, "trained", advantage=one["advantage"], token_columns=account
    )


def compare(
    path: Path, objectives: str, *, steps: Any = None, texts: int = 10, proximal: bool = False
) -> ComparisonReport:
    """The whole way from a file to the numbers."""
    recording = Recording(path, steps)
    comparison = Comparison(parse_candidates(objectives), proximal_is_policy=proximal)
    for step in recording.steps():
        comparison.add(step)
    return build_report(comparison, recording, texts=texts)
