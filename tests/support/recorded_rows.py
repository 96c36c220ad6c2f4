"""Recorded tokens for tests of `keel compare`: sequences as dictionaries, written as a run, parquet or JSON lines.

Rows have the columns of docs/compare.md; run folders are written by `keel.run.records`.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keel.common.sample import Sample
from keel.run import records
from keel.tools.compare import Comparison, Recording, parse_candidates
from keel.tools.compare.report import ComparisonReport, build_report

Row = dict[str, Any]


def row(ratios: Sequence[float], advantage: float, *, prompt: int = 0, step: int = 1, **more: Any) -> Row:
    """Return a sequence of a prompt and trainable tokens with these ratios and a sampler probability of 2^-10."""
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
        "token_text": [f"p{index}" for index in range(size)],
        "token_ids": list(range(size)),
    }
    return values | more


def random_rows(steps: int, seed: int = 0) -> list[Row]:
    """Return sequences of different lengths over several steps, with tokens of different staleness."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        for member in range(int(rng.integers(4, 9))):
            size = int(rng.integers(1, 12))
            ratios = np.exp(rng.normal(0, 1.2, size)).tolist()
            staleness = rng.integers(0, 3, size)
            prompt = int(rng.integers(1, 4))
            record = row(ratios, float(rng.normal()), prompt=prompt, step=step, version=step, group=f"{step}-{member}")
            record["versions"] = [-1] * prompt + (step - staleness).tolist()
            record["token_text"] = [f"w{number}" for number in rng.integers(0, 5, prompt + size)]
            record["token_ids"] = [int(text[1:]) for text in record["token_text"]]
            rows.append(record)
    return rows


def write_json(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Row], **types: pa.DataType) -> Path:
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    table = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    pq.write_table(pa.table(table), path, row_group_size=3)
    return path


def write_run(folder: Path, rows: Iterable[Row]) -> Path:
    """Write a run folder with a dropped rollout in every step."""
    by_step: dict[int, list[Row]] = {}
    for sequence in rows:
        by_step.setdefault(sequence["step"], []).append(sequence)
    for step, members in by_step.items():
        written = [_record(number, sequence) for number, sequence in enumerate(members)]
        written.append(records.SampleRecord("lost", "env", "t", 0, 0, outcome="dropped", reason="stale"))
        token_texts = {
            token: text
            for sequence in members
            for token, text in zip(sequence["token_ids"], sequence["token_text"], strict=True)
        }
        records.write_step(folder / "rollouts", step, members[0]["version"], written, token_texts)
    return folder


def _record(number: int, recorded: Row) -> records.SampleRecord:
    sequence = Sample(
        token_ids=recorded["token_ids"],
        trainable=recorded["trainable"],
        advantage=recorded["advantage"],
        sampler_logprobs=recorded["sampler_logprobs"],
        version=recorded["versions"],
        temperature=1.0,
        split_reason="start",
    )
    report = {"logprobs": recorded["logprobs"]}
    return records.SampleRecord(recorded["group"], "env", "t", number, 0, 0, sequence, "trained", token_columns=report)


def compare(
    path: Path, objectives: str, *, steps: Any = None, texts: int = 10, proximal: bool = False
) -> ComparisonReport:
    """Compare objectives on a file and return the report."""
    recording = Recording(path, steps)
    comparison = Comparison(parse_candidates(objectives), proximal_is_policy=proximal)
    for step in recording.steps():
        comparison.add(step)
    return build_report(comparison, recording, texts=texts)
