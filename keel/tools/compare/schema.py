"""The columns of a file of tokens, and the conversion of the rows of a step to a token batch.

One row is one sequence; per-token values are lists as long as the sequence. The files of a run have these columns and
more. A column that is missing, or has the wrong type or length, raises an error that names it and its meaning; other
columns are ignored. Arithmetic is in float32, as in the trainer, so that a token on the bound of a gate is decided the
same way.
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
    """One column of a file of tokens."""

    name: str
    shape: ColumnShape
    """One value for the sequence, a list with one value per token, or either of them."""
    type: pa.DataType
    required: bool
    meaning: str


_FLOAT, _INT = pa.float64(), pa.int64()
COLUMNS = {
    column.name: column
    for column in (
        TokenColumn("logprobs", "tokens", _FLOAT, True, "log-prob of each token under the policy before the update"),
        TokenColumn("sampler_logprobs", "tokens", _FLOAT, True, "log-prob of each token as its sampler recorded it"),
        TokenColumn("advantage", "either", _FLOAT, True, "advantage of the sequence, or of each token"),
        TokenColumn("trainable", "tokens", pa.bool_(), True, "whether the policy sampled the token and it may train"),
        TokenColumn("step", "sequence", _INT, False, "training step of the sequence; default: all rows are one step"),
        TokenColumn("version", "sequence", _INT, False, "version being trained; default: the newest in the step"),
        TokenColumn(
            "versions", "either", _INT, False, "version that sampled each token, or the sequence; gives its staleness"
        ),
        TokenColumn("group", "sequence", pa.string(), False, "name of the group of sequences of the same task"),
        TokenColumn("token_text", "tokens", pa.binary(), False, "text of each token; default: token_ids are shown"),
        TokenColumn("token_ids", "tokens", _INT, False, "token ids; --model needs them to compute gradients"),
        TokenColumn("reference_logprobs", "tokens", _FLOAT, False, "log-prob of each token under a frozen reference"),
        TokenColumn("teacher_logprobs", "tokens", _FLOAT, False, "log-prob of each token under a teacher"),
        TokenColumn("proximal_logprobs", "tokens", _FLOAT, False, "log-prob under the policy at the start of the step"),
        TokenColumn("role", "either", _INT, False, "role of the token's author, for objectives that select by role"),
        TokenColumn("temperature", "sequence", _FLOAT, False, "sampling temperature, for --model; default: 1"),
        TokenColumn("outcome", "sequence", pa.string(), False, 'rows with a value other than "trained" are skipped'),
    )
}


@dataclass(frozen=True, eq=False)
class TokenLabels:
    """A classification of tokens: a code for each token, and the label of each code."""

    codes: Array
    labels: list[str]

    def count(self, selected: Array | None = None) -> Counter[str]:
        """Return the number of tokens, or of selected tokens, by label."""
        codes = self.codes if selected is None else self.codes[selected]
        counts, by_label = np.bincount(codes, minlength=len(self.labels)), Counter[str]()
        for code in np.flatnonzero(counts).tolist():
            by_label[self.labels[code]] += int(counts[code])  # two long texts may have the same label
        return by_label


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The trainable tokens of a step."""

    number: int
    batch: TokenBatch
    token_labels: dict[str, TokenLabels]
    """By "position", "advantage" and, if recorded, "staleness" and "text"."""
    rows: pa.Table
    """The sequences of the tokens, including prompts."""


def check_columns(names: list[str], where: str) -> None:
    """Raise an error that names each required column that is missing."""
    lines = [
        f"{where} has no column {column.name}: {column.meaning}"
        for column in COLUMNS.values()
        if column.required and column.name not in names
    ]
    if lines:
        raise KeelError("\n".join([*lines, f"it has {', '.join(names) or 'no columns'}"]))


def build_step(number: int, rows: pa.Table, where: str) -> RecordedStep | None:
    """Return the tokens of a step, or None if no token is trainable."""
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
    """Return the rows that were trained on and have log-probs, and the number of other rows by reason."""
    skipped: Counter[str] = Counter()
    size = len(table)
    if "outcome" in table.column_names:
        table = table.filter(pc.equal(table["outcome"], "trained"))
        skipped["not trained on"] = size - len(table)
    scored = table.filter(pc.is_valid(table["logprobs"]))
    skipped["without logprobs"] = len(table) - len(scored)
    return scored, +skipped


def _trainer_version(rows: pa.Table, fields: dict[str, Array]) -> int | None:
    if "versions" not in fields or "version" not in rows.column_names:
        return None
    newest = pc.max(rows["version"]).as_py()
    return None if newest is None else int(newest)


class _ColumnReader:
    """Reads columns as flat arrays over all tokens of the rows."""

    def __init__(self, rows: pa.Table, where: str) -> None:
        self.rows, self.where = rows, where
        self.lengths: Array = self._lengths("trainable")

    def _lengths(self, name: str) -> Array:
        lengths = pc.list_value_length(self._column(name))
        if lengths.null_count:
            row = int(pc.index(lengths.is_null(), True).as_py())
            self._raise_error(name, row, "is missing, although other rows have it")
        result: Array = lengths.to_numpy().astype(np.int64)
        return result

    def _column(self, name: str) -> pa.Array:
        return self.rows[name].combine_chunks()

    def has(self, name: str) -> bool:
        return name in self.rows.column_names and self.rows[name].null_count < max(len(self.rows), 1)

    def token_values(self, name: str) -> Array:
        """Return one value for each token; a null becomes NaN, -1 or false."""
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
        result: Array = np.array(values.to_numpy(zero_copy_only=False))
        return result

    def text_labels(self, trainable: Array) -> TokenLabels | None:
        """Return labels by the texts of the trainable tokens, or by their ids if texts are not recorded."""
        if self.has("token_text"):
            self._check_lengths("token_text")
            texts = self._column("token_text").flatten().fill_null(b"").filter(pa.array(trainable)).dictionary_encode()
            labels = [escape_token(raw) for raw in texts.dictionary.to_pylist()]
            return TokenLabels(texts.indices.to_numpy().astype(np.int64), labels)
        if self.has("token_ids"):
            ids, codes = np.unique(self.token_values("token_ids")[trainable], return_inverse=True)
            return TokenLabels(codes, [f"id {token}" for token in ids.tolist()])
        return None

    def _check_lengths(self, name: str) -> None:
        lengths = self._lengths(name)
        if (lengths != self.lengths).any():
            row = int(np.flatnonzero(lengths != self.lengths)[0])
            self._raise_error(name, row, f"has {lengths[row]} values, but trainable has {self.lengths[row]}")

    def check_finite(self, name: str, values: Array, row: Array) -> None:
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            self._raise_error(name, int(row[bad[0]]), f"is {values[bad[0]]} at a trainable token; it must be finite")

    def _raise_error(self, name: str, row: int, problem: str) -> None:
        raise KeelError(f"{self.where}, sequence {row}: {name} {problem} ({name}: {COLUMNS[name].meaning})")


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _token_labels(batch: TokenBatch, row: Array, reader: _ColumnReader, trainable: Array) -> dict[str, TokenLabels]:
    first = np.searchsorted(row, row)  # rows are sorted: the index of the first token of each token's row
    position = np.arange(1, len(row) + 1) - first
    power = np.frexp(position)[1] - 1  # exact, whereas a logarithm may round
    ranges = [(1 << exponent, (2 << exponent) - 1) for exponent in range(int(power.max()) + 1)]
    sign = np.sign(batch.advantages.numpy()).astype(np.int64)
    labels = {
        "position": TokenLabels(power, [str(low) if low == high else f"{low}-{high}" for low, high in ranges]),
        "advantage": TokenLabels(1 - sign, ["positive", "zero", "negative"]),
    }
    if batch.version is not None:
        version = batch.version.numpy()
        newest = int(version.max()) if batch.trainer_version is None else batch.trainer_version
        staleness, codes = np.unique(newest - version, return_inverse=True)
        labels["staleness"] = TokenLabels(codes, [str(value) for value in staleness.tolist()])
    texts = reader.text_labels(trainable)
    return labels if texts is None else labels | {"text": texts}
