"""The columns that a file of tokens has, and how the rows of a step become a token batch.

One row is one sequence; what is said of each token is a list as long as the sequence. A run's own files have these
columns and more. A column that is missing, of the wrong type or of the wrong length is refused by its name with what it
is for; columns with other names are left alone. Arithmetic is in float32, as in the trainer, so that a token on the
bound of a gate falls to the same side.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from keel.errors import KeelError
from keel.signal import TokenBatch
from keel.tools.compare.escape import escape_token

Array = NDArray[Any]
ColumnShape = Literal["sequence", "tokens", "either"]


class TokenColumn(NamedTuple):
    """One column: what it holds for each row, and what for."""

    name: str
    shape: ColumnShape
    """One value for the sequence, a list with one for each token, or either of them."""
    type: pa.DataType
    required: bool
    meaning: str


_FLOAT, _INT = pa.float64(), pa.int64()
COLUMNS = {
    column.name: column
    for column in (
        TokenColumn("logprobs", "tokens", _FLOAT, True, "log-prob of each token under the policy before the update"),
        TokenColumn("sampler_logprobs", "tokens", _FLOAT, True, "log-prob of each token as its sampler recorded it"),
        TokenColumn("advantage", "either", _FLOAT, True, "the advantage of the sequence, or of each token"),
        TokenColumn("trainable", "tokens", pa.bool_(), True, "whether the policy wrote the token and it may train"),
        TokenColumn("step", "sequence", _INT, False, "the step it is part of; not given: all rows are one step"),
        TokenColumn("version", "sequence", _INT, False, "version being trained; not given: the newest in the step"),
        TokenColumn(
            "versions", "either", _INT, False, "version that sampled each token, or all; staleness counts from it"
        ),
        TokenColumn("group", "sequence", pa.string(), False, "the group of sequences of the same task"),
        TokenColumn(
            "token_text", "tokens", pa.binary(), False, "the text of each token; not given: token_ids are shown"
        ),
        TokenColumn("token_ids", "tokens", _INT, False, "the tokens; with --model they are computed again"),
        TokenColumn("reference_logprobs", "tokens", _FLOAT, False, "under a frozen reference"),
        TokenColumn("teacher_logprobs", "tokens", _FLOAT, False, "under a teacher"),
        TokenColumn("proximal_logprobs", "tokens", _FLOAT, False, "under the policy at the start of the step"),
        TokenColumn("role", "either", _INT, False, "who wrote the token, for objectives that choose by role"),
        TokenColumn("temperature", "sequence", _FLOAT, False, "at which it was sampled, for --model; not given: 1"),
        TokenColumn("outcome", "sequence", pa.string(), False, 'rows with another word than "trained" are left out'),
    )
}


@dataclass(frozen=True, eq=False)
class TokenLabels:
    """A way to sort tokens: a number for each token, and what the numbers mean."""

    codes: Array
    labels: list[str]

    def count(self, selected: Array | None = None) -> Counter[str]:
        """How many tokens, or how many of the chosen ones, there are under each label."""
        codes = self.codes if selected is None else self.codes[selected]
        counts, found = np.bincount(codes, minlength=len(self.labels)), Counter[str]()
        for place in np.flatnonzero(counts).tolist():
            found[self.labels[place]] += int(counts[place])  # two long texts may be shown alike
        return found


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The trainable tokens of a step."""

    number: int
    batch: TokenBatch
    token_labels: dict[str, TokenLabels]
    """By "position", "advantage" and, where recorded, "staleness" and "text"."""
    rows: pa.Table
    """The sequences they come from, prompts included."""


def check_columns(names: list[str], where: str) -> None:
    """Refuse a file without a column that nothing can do without."""
    lines = [
        f"{where} has no column {column.name}: {column.meaning}"
        for column in COLUMNS.values()
        if column.required and column.name not in names
    ]
    if lines:
        raise KeelError("\n".join([*lines, f"it has {', '.join(names) or 'no columns'}"]))


def build_step(number: int, rows: pa.Table, where: str) -> RecordedStep | None:
    """The rows of a step as tokens; None when no row has any that trains."""
    reader = _ColumnReader(rows, f"{where}, step {number}")
    trainable = reader.token_values("trainable").astype(bool)
    if not trainable.any():
        return None
    row = np.repeat(np.arange(len(rows)), reader.lengths)[trainable]
    fields: dict[str, Array] = {}
    for name in ("logprobs", "sampler_logprobs", "advantage"):
        fields[name] = reader.token_values(name)[trainable]
    for name in ("reference_logprobs", "teacher_logprobs", "proximal_logprobs", "versions", "role", "token_ids"):
        if reader.has(name):
            fields[name] = reader.token_values(name)[trainable]
    for name in ("logprobs", "advantage"):
        reader.check_finite(name, fields[name], row)
    version = _trainer_version(rows, fields)
    tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    if reader.has("group"):
        codes = rows["group"].combine_chunks().fill_null("").dictionary_encode().indices.to_numpy()
        tensors["group"] = torch.from_numpy(codes[row].astype(np.int64))
    batch = TokenBatch(
        advantages=tensors.pop("advantage"),
        version=tensors.pop("versions", None),
        trainable=torch.ones(len(row), dtype=torch.bool),
        sequence=torch.from_numpy(row),
        trainer_version=version,
        **tensors,
    )
    return RecordedStep(number, batch, _token_labels(batch, row, reader, trainable), rows)


def select_trained_rows(table: pa.Table) -> tuple[pa.Table, Counter[str]]:
    """The rows that were trained on and have log-probs, and how many others there are."""
    left_out: Counter[str] = Counter()
    size = len(table)
    if "outcome" in table.column_names:
        table = table.filter(pc.equal(table["outcome"], "trained"))
        left_out["not trained on"] = size - len(table)
    scored = table.filter(pc.is_valid(table["logprobs"]))
    left_out["without logprobs"] = len(table) - len(scored)
    return scored, +left_out


def _trainer_version(rows: pa.Table, fields: dict[str, Array]) -> int | None:
    if "versions" not in fields or "version" not in rows.column_names:
        return None
    newest = pc.max(rows["version"]).as_py()
    return None if newest is None else int(newest)


class _ColumnReader:
    """Columns of the used rows as flat arrays over all their tokens."""

    def __init__(self, rows: pa.Table, where: str) -> None:
        self.rows, self.where = rows, where
        self.lengths: Array = self._lengths("trainable")

    def _lengths(self, name: str) -> Array:
        lengths = pc.list_value_length(self._column(name))
        if lengths.null_count:
            self._raise_error(
                name, int(pc.index(lengths.is_null(), True).as_py()), "is missing, and other rows have it"
            )
        found: Array = lengths.to_numpy().astype(np.int64)
        return found

    def _column(self, name: str) -> pa.Array:
        return self.rows[name].combine_chunks()

    def has(self, name: str) -> bool:
        return name in self.rows.column_names and self.rows[name].null_count < max(len(self.rows), 1)

    def token_values(self, name: str) -> Array:
        """One value for each token of the rows; a hole is NaN, -1 or false."""
        column = self._column(name)
        if not is_list(column.type):
            values = self._to_numpy(name, column)
            return np.repeat(values, self.lengths)
        self._check_lengths(name)
        return self._to_numpy(name, column.flatten())

    def _to_numpy(self, name: str, values: pa.Array) -> Array:
        kind = COLUMNS[name].type
        if pa.types.is_floating(kind):
            values = values.fill_null(float("nan"))
        else:
            values = values.fill_null(False if pa.types.is_boolean(kind) else -1)
        found: Array = np.array(values.to_numpy(zero_copy_only=False))
        return found

    def text_labels(self, trainable: Array) -> TokenLabels | None:
        """The texts of the trainable tokens, or their ids where there are no texts."""
        if self.has("token_text"):
            self._check_lengths("token_text")
            words = self._column("token_text").flatten().fill_null(b"").filter(pa.array(trainable)).dictionary_encode()
            labels = [escape_token(raw) for raw in words.dictionary.to_pylist()]
            return TokenLabels(words.indices.to_numpy().astype(np.int64), labels)
        if self.has("token_ids"):
            ids, codes = np.unique(self.token_values("token_ids")[trainable], return_inverse=True)
            return TokenLabels(codes, [f"id {token}" for token in ids.tolist()])
        return None

    def _check_lengths(self, name: str) -> None:
        lengths = self._lengths(name)
        if (lengths != self.lengths).any():
            row = int(np.flatnonzero(lengths != self.lengths)[0])
            self._raise_error(name, row, f"has {lengths[row]} values, and trainable has {self.lengths[row]}")

    def check_finite(self, name: str, values: Array, row: Array) -> None:
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            self._raise_error(name, int(row[bad[0]]), f"is {values[bad[0]]} at a trainable token; it must be finite")

    def _raise_error(self, name: str, row: int, problem: str) -> None:
        raise KeelError(f"{self.where}, sequence {row}: {name} {problem} ({name}: {COLUMNS[name].meaning})")


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _token_labels(batch: TokenBatch, row: Array, reader: _ColumnReader, trainable: Array) -> dict[str, TokenLabels]:
    first = np.searchsorted(row, row)  # rows are in order: where each token's own begins
    place = np.arange(1, len(row) + 1) - first
    power = np.frexp(place)[1] - 1  # exact, where a logarithm may round
    ends = [(1 << step, (2 << step) - 1) for step in range(int(power.max()) + 1)]
    sign = np.sign(batch.advantages.numpy()).astype(np.int64)
    keys = {
        "position": TokenLabels(power, [str(low) if low == high else f"{low}-{high}" for low, high in ends]),
        "advantage": TokenLabels(1 - sign, ["positive", "zero", "negative"]),
    }
    if batch.version is not None:
        version = batch.version.numpy()
        newest = int(version.max()) if batch.trainer_version is None else batch.trainer_version
        ages, codes = np.unique(newest - version, return_inverse=True)
        keys["staleness"] = TokenLabels(codes, [str(age) for age in ages.tolist()])
    texts = reader.text_labels(trainable)
    return keys if texts is None else keys | {"text": texts}
