"""The rollouts of a run on disk: one parquet file per step, one row per training sample, with every token in it.

Rows hold what trained and what was dropped, with the reason; a rollout without a sample is a row without tokens.
Files are written under a temporary name and renamed. pandas, polars and duckdb can open them, and they are sufficient
to train the step again: advantages and the sampler's log-probs are stored in full precision. No pickle.
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
from keel.common.sample import Sample
from keel.errors import StorageError
from keel.training import StepReport

_FLOAT_LIST = pa.list_(pa.float64())
_FLOAT_MAP = pa.map_(pa.string(), pa.float64())

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # step of the batch, from 1
        ("version", pa.int32()),  # policy version before the step
        ("group", pa.string()),
        ("environment", pa.string()),
        ("task_id", pa.string()),
        ("member", pa.int32()),
        ("attempt", pa.int32()),
        ("sample", pa.int32()),  # index among the samples of the rollout; -1: the rollout has none
        ("outcome", pa.string()),  # trained or dropped
        ("reason", pa.string()),  # why it was dropped
        ("error", pa.string()),
        ("reward", pa.float64()),
        ("reward_components", _FLOAT_MAP),  # of the rollout, as its environment returned them
        ("environment_metrics", _FLOAT_MAP),  # EpisodeResult.metrics
        ("advantage", pa.float64()),
        ("turns", pa.int32()),
        ("seconds", pa.float64()),  # duration of the rollout
        ("ended_at", pa.float64()),  # Unix time; with `seconds` it shows what was in flight at any moment
        ("split_reason", pa.string()),  # why the sample starts: "start", or why it could not extend another
        ("temperature", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_text", pa.list_(pa.string())),  # the text of each token
        ("trainable", pa.list_(pa.bool_())),
        ("versions", pa.list_(pa.int32())),  # policy version that sampled the token; -1 where not trainable
        ("sampler_logprobs", _FLOAT_LIST),
        ("logprobs", _FLOAT_LIST),  # under the policy before the update; null where not trainable or not trained on
        ("reference_logprobs", _FLOAT_LIST),
        ("entropy", _FLOAT_LIST),
        ("dloss_dlogprob", _FLOAT_LIST),  # d loss / d logprob
        ("drop_reason", pa.list_(pa.string())),  # the gate that dropped the token; null for every other token
    ]
)
"""The columns of `rollouts/step_NNNNNN.parquet`."""


ROLLOUT_COLUMNS = (
    *("group", "environment", "task_id", "member", "attempt", "sample"),
    *("outcome", "reason", "error", "reward", "reward_components", "environment_metrics", "turns", "seconds"),
    "ended_at",
)
"""Columns that are fields of a `SampleRecord`."""
COLUMNS_NOT_READ = (
    *("reward_components", "environment_metrics", "seconds", "ended_at", "token_text"),
    *("logprobs", "dloss_dlogprob", "entropy", "drop_reason"),
)
"""Columns that training a step again does not need."""


@dataclass(slots=True)
class SampleRecord:
    """One training sample of a batch and its outcome, or a rollout without a sample."""

    group: str
    environment: str
    task_id: str
    member: int
    attempt: int
    sample: int = -1
    sequence: Sample | None = None
    """The sample itself; with an advantage once it is scored."""
    outcome: str = "dropped"
    reason: str | None = None
    error: str | None = None
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    environment_metrics: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0
    seconds: float | None = None
    ended_at: float | None = None
    token_columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the trainer's token report, over all tokens of the sample."""

    @property
    def advantage(self) -> float | None:
        """Advantage of the sample; None if it has not been scored."""
        if self.sequence is None or self.sequence.advantage is None:
            return None
        return float(np.asarray(self.sequence.advantage)[0])


class TokenTexts:
    """The texts of token ids, each decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def lookup(self, rows: Iterable[SampleRecord]) -> Mapping[int, str]:
        """Return the texts of all token ids seen so far, those in the rows included."""
        for row in rows:
            for token in np.unique(np.asarray(row.sequence.token_ids)).tolist() if row.sequence is not None else ():
                if token not in self._texts:
                    self._texts[token] = self._tokenizer.decode([token])
        return self._texts


def step_path(folder: Path, step: int) -> Path:
    """Return the file with the rollouts of a step."""
    return folder / f"step_{step:06d}.parquet"


def sample_name(group: str, member: int, attempt: int, sample: int) -> str:
    """Return the name of a sample in errors and reports."""
    return f"{group}/{member}/{attempt}/{sample}"


def trained_rows(rows: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Return the rows that a step trains on, in the order of its samples."""
    return [row for row in rows if row.outcome == "trained"]


def trained_samples(rows: Sequence[SampleRecord]) -> list[Sample]:
    """Return the samples that a step trains on."""
    return [row.sequence for row in trained_rows(rows) if row.sequence is not None]


def attach_token_report(rows: Sequence[SampleRecord], report: StepReport) -> None:
    """Add the trainer's per-token results to the rows that trained."""
    tokens, reason_names = report.tokens, report.reasons
    bounds = np.searchsorted(tokens.sample.numpy(), np.arange(report.samples + 1))
    for index, row in enumerate(trained_rows(rows)):
        assert row.sequence is not None
        part, size = slice(int(bounds[index]), int(bounds[index + 1])), len(row.sequence)
        positions = tokens.position[part].tolist()
        columns = {}
        for name in ("logprobs", "reference_logprobs", "entropy", "dloss_dlogprob"):
            column = getattr(tokens, name)
            if column is not None:
                columns[name] = _scatter(column[part].tolist(), positions, size)
        reasons = [reason_names[code] if code else None for code in tokens.reasons[part].tolist()]
        columns["drop_reason"] = _scatter(reasons, positions, size)
        row.token_columns = {**row.token_columns, **columns}


def _scatter(values: list[Any], positions: list[int], size: int) -> list[Any]:
    """Return a list of `size` with the values at their positions and None elsewhere."""
    column: list[Any] = [None] * size
    for position, value in zip(positions, values, strict=True):
        column[position] = value
    return column


def write_step(
    folder: Path, step: int, version: int, rows: Iterable[SampleRecord], token_texts: Mapping[int, str]
) -> Path:
    """Write the rows of a step. `token_texts` has the text of every token id that occurs."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows:
        values: dict[str, Any] = {"step": step, "version": version, "advantage": row.advantage}
        values |= {name: getattr(row, name) for name in ROLLOUT_COLUMNS}
        values |= {name: list(values[name].items()) for name in ("reward_components", "environment_metrics")}
        if row.sequence is not None:
            lists = row.sequence.as_lists()
            values |= {name: lists[name] for name in ("split_reason", "temperature", "token_ids", "trainable")}
            values |= {
                "token_text": [token_texts[token] for token in lists["token_ids"]],
                "versions": lists.get("version"),
                "sampler_logprobs": lists.get("sampler_logprobs"),
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
    """Read the rows of a step, without the token report. `expected_hash` is the file's hash in the ledger."""
    columns = [name for name in SCHEMA.names if name not in COLUMNS_NOT_READ]
    try:
        if expected_hash is not None and hash_file(path) != expected_hash:
            raise ValueError("its hash differs from the one in the ledger: it was changed or truncated")
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            table = file.read(columns=columns).cast(pa.schema([SCHEMA.field(name) for name in columns]))
            rows = _to_records(table)
    except (TypeError, OverflowError, OSError, pa.ArrowException, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}; its step cannot be trained again: restore the file from a copy,"
            f" or start a new run with model.name = {path.parent.parent / 'checkpoints'}/step_N, the last checkpoint"
        ) from error
    return rows


def _to_records(table: pa.Table) -> list[SampleRecord]:
    """Return the rows with their samples; groups are numbered in order of appearance, as scoring numbers them."""
    rows: list[SampleRecord] = []
    group_indices: dict[str, int] = {}
    names = [name for name in ROLLOUT_COLUMNS if name not in COLUMNS_NOT_READ]
    for values in table.to_pylist():
        group_index = group_indices.setdefault(values["group"], len(group_indices))
        sequence = None
        if values["token_ids"] is not None:
            # samples of supervised fine-tuning have neither log-probs of a sampler nor versions
            optional = [values[name] for name in ("sampler_logprobs", "versions") if values[name] is not None]
            lengths = {len(column) for column in (values["token_ids"], values["trainable"], *optional)}
            if len(lengths) > 1:
                raise ValueError(f"rollout {values['group']}/{values['member']} has lists of different lengths")
            sequence = Sample(
                token_ids=values["token_ids"],
                trainable=values["trainable"],
                advantage=values["advantage"],
                sampler_logprobs=values["sampler_logprobs"],
                version=values["versions"],
                group=group_index,
                temperature=values["temperature"],
                split_reason=values["split_reason"],
                name=sample_name(values["group"], values["member"], values["attempt"], values["sample"]),
            )
        rows.append(SampleRecord(**{name: values[name] for name in names}, sequence=sequence))
    return rows


def write_metrics(path: Path, steps: Sequence[Mapping[str, float]]) -> None:
    """Write the metrics of all steps as one table; a metric that a step does not have is null."""
    names = dict.fromkeys(name for row in steps for name in row)
    if names:
        with atomic_file(path) as temporary:
            pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in steps]), temporary)
