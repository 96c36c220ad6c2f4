"""What a run writes down of its rollouts: one parquet file a step, one row for each training sample, every token in it.

Rows are of what trained and of what was refused, with the reason; a rollout without a sample is a row without tokens.
The files are written to a temporary name and renamed, open with pandas, polars or duckdb, and are enough to train the
step again (`samples_of`): advantages and the sampler's log-probs are stored in full precision. No pickle.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keel.common.atomic_files import atomic_file, hash_file
from keel.common.safe_read import check_parquet_size
from keel.errors import StorageError
from keel.rollout.trajectory import TrainingSample
from keel.training import Sample, StepReport

_FLOAT_LIST = pa.list_(pa.float64())

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # the batch it was part of, from 1
        ("version", pa.int32()),  # of the policy that the step trained
        ("group", pa.string()),
        ("environment", pa.string()),
        ("task_id", pa.string()),
        ("member", pa.int32()),
        ("attempt", pa.int32()),
        ("sample", pa.int32()),  # its number among those of the rollout; -1: the rollout has none
        ("outcome", pa.string()),  # trained or dropped
        ("reason", pa.string()),  # why it was dropped
        ("error", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("turns", pa.int32()),
        ("seconds", pa.float64()),  # of the rollout, from its dispatch to its end
        ("ended_at", pa.float64()),  # Unix time; with `seconds` it gives what was in flight at any moment
        ("split_reason", pa.string()),  # why a new sample begins: start, or what prevented appending to an earlier one
        ("temperature", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_text", pa.list_(pa.string())),  # the text of each token
        ("trainable", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.int32())),  # that sampled the token; -1 where not trainable
        ("sampler_logprobs", _FLOAT_LIST),
        ("logprobs", _FLOAT_LIST),  # under the policy before the update; null where not trainable or not trained on
        ("reference_logprobs", _FLOAT_LIST),
        ("entropy", _FLOAT_LIST),
        ("dloss_dlogprob", _FLOAT_LIST),  # d loss / d logprob
        ("drop_reason", pa.list_(pa.string())),  # the gate that dropped the token; null for every other token
    ]
)
"""The columns of `rollouts/step_NNNNNN.parquet`."""


@dataclass(slots=True)
class SampleRecord:
    """One training sample of a batch, or a rollout without one."""

    group: str
    environment: str
    task_id: str
    member: int
    attempt: int
    sample: int = -1
    data: TrainingSample | None = None
    outcome: str = "dropped"
    reason: str | None = None
    error: str | None = None
    reward: float | None = None
    advantage: float | None = None
    turns: int = 0
    seconds: float | None = None
    ended_at: float | None = None
    token_columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the trainer's account, over all tokens of the sample."""


class TokenTexts:
    """The texts of token ids, each decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def lookup(self, rows: Iterable[SampleRecord]) -> Mapping[int, str]:
        """Of every token id in the rows, and of those before."""
        for row in rows:
            for token in row.data.token_ids if row.data is not None else ():
                if token not in self._texts:
                    self._texts[token] = self._tokenizer.decode([token])
        return self._texts


def step_path(folder: Path, step: int) -> Path:
    """Where the rollouts of a step are."""
    return folder / f"step_{step:06d}.parquet"


def trained_rows(rows: Sequence[SampleRecord]) -> list[SampleRecord]:
    """The rows that a step trains on, in the order of its samples."""
    return [row for row in rows if row.outcome == "trained"]


def to_samples(rows: Sequence[SampleRecord]) -> list[Sample]:
    """What the trainer is given."""
    groups: dict[str, int] = {}
    samples = []
    for row in trained_rows(rows):
        assert row.data is not None and row.advantage is not None
        samples.append(
            Sample(
                token_ids=np.array(row.data.token_ids, np.int64),
                trainable=np.array(row.data.trainable, np.bool_),
                advantage=row.advantage,
                sampler_logprobs=np.array(row.data.logprobs, np.float64),
                version=np.array(row.data.versions, np.int64),
                group=groups.setdefault(row.group, len(groups)),
                temperature=row.data.temperature,
                name=f"{row.group}/{row.member}/{row.attempt}/{row.sample}",
            )
        )
    return samples


def attach_token_report(rows: Sequence[SampleRecord], report: StepReport) -> None:
    """Add to the rows that trained what became of each of their tokens."""
    tokens, names = report.tokens, report.reasons
    bounds = np.searchsorted(tokens.sample.numpy(), np.arange(report.samples + 1))
    for number, row in enumerate(trained_rows(rows)):
        assert row.data is not None
        here = slice(int(bounds[number]), int(bounds[number + 1]))
        places = tokens.position[here].tolist()
        for name in ("logprobs", "reference_logprobs", "entropy", "dloss_dlogprob"):
            column = getattr(tokens, name)
            if column is not None:
                row.token_columns = {**row.token_columns, name: _scatter(column[here].tolist(), places, len(row.data))}
        reasons = [names[code] if code else None for code in tokens.reasons[here].tolist()]
        row.token_columns = {**row.token_columns, "drop_reason": _scatter(reasons, places, len(row.data))}


def _scatter(values: list[Any], positions: list[int], size: int) -> list[Any]:
    found: list[Any] = [None] * size
    for place, value in zip(positions, values, strict=True):
        found[place] = value
    return found


def write_step(
    folder: Path, step: int, version: int, rows: Iterable[SampleRecord], token_texts: Mapping[int, str]
) -> Path:
    """Write the rows of a step. `token_texts` has the text of every token id that occurs."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows:
        data = row.data
        values: dict[str, Any] = {
            "step": step,
            "version": version,
            **{name: getattr(row, name) for name in ("group", "environment", "task_id", "member", "attempt", "sample")},
            **{name: getattr(row, name) for name in ("outcome", "reason", "error", "reward")},
            **{name: getattr(row, name) for name in ("advantage", "turns", "seconds", "ended_at")},
        }
        if data is not None:
            values |= {
                "split_reason": data.split_reason,
                "temperature": data.temperature,
                "token_ids": data.token_ids,
                "token_text": [token_texts[token] for token in data.token_ids],
                "trainable": data.trainable,
                "versions": data.versions,
                "sampler_logprobs": data.logprobs,
                **row.token_columns,
            }
        for name, column in columns.items():
            column.append(values.get(name))
    target = step_path(folder, step)
    table = pa.table(columns, schema=SCHEMA)
    with atomic_file(target) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return target


def read_step(path: Path, expected_hash: str | None = None) -> list[SampleRecord]:
    """The rows of a step, without the trainer's account. `expected`: the hash that the file was written down with."""
    left_out = ("seconds", "ended_at", "token_text", "logprobs", "dloss_dlogprob", "entropy", "drop_reason")
    wanted = [name for name in SCHEMA.names if name not in left_out]
    try:
        if expected_hash is not None and hash_file(path) != expected_hash:
            raise ValueError("it does not have the hash in the ledger: it was changed or cut off")
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            missing = [name for name in wanted if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            rows = _to_records(file.read(columns=wanted).cast(pa.schema([SCHEMA.field(name) for name in wanted])))
    except (TypeError, OverflowError, OSError, pa.ArrowException, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}; the step that it records cannot be trained again: restore it from a copy,"
            f" or begin a new run with model.name = {path.parent.parent / 'checkpoints'}/step_N, the last one there"
        ) from error
    return rows


def _to_records(table: pa.Table) -> list[SampleRecord]:
    rows = []
    for found in table.to_pylist():
        data = None
        if found["token_ids"] is not None:
            sizes = {len(found[name]) for name in ("token_ids", "trainable", "sampler_logprobs", "versions")}
            if len(sizes) > 1:
                raise ValueError(f"rollout {found['group']}/{found['member']} has lists of different lengths")
            data = TrainingSample(
                token_ids=tuple(found["token_ids"]),
                trainable=tuple(found["trainable"]),
                logprobs=tuple(found["sampler_logprobs"]),
                versions=tuple(found["versions"]),
                temperature=found["temperature"],
                split_reason=found["split_reason"],
            )
        names = (
            "group",
            "environment",
            "task_id",
            "member",
            "attempt",
            "sample",
            "outcome",
            "reason",
            "error",
            "reward",
        )
        rows.append(SampleRecord(**{name: found[name] for name in (*names, "advantage", "turns")}, data=data))
    return rows


def write_metrics(path: Path, steps: Sequence[Mapping[str, float]]) -> None:
    """The numbers of all steps as one table; a number that a step does not have is null."""
    names = dict.fromkeys(name for row in steps for name in row)
    if names:
        with atomic_file(path) as temporary:
            pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in steps]), temporary)
