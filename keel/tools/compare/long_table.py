"""A comparison as one long parquet table: a row for each number, step by step.

Written while the steps go by, so that it needs no more memory than one step, to a temporary name that becomes the file
when all is in it. It opens with pandas, polars or duckdb.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from keel.tools.compare.accumulators import ObjectiveCounts
from keel.tools.compare.evaluate import StepComparison
from keel.tools.compare.files import atomic_file

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("objective", pa.string()),
        ("measure", pa.string()),  # tokens, dropped, loss, ...; or dropped_by_position, cosine, ...
        ("key", pa.string()),  # a gate, a term, a label, a token text or the other objective; null: the whole step
        ("value", pa.float64()),
    ]
)
"""The columns of `--parquet FILE`."""

_SCALARS = (
    *("tokens", "kept", "dropped", "invalid_logprobs", "other_role", "clipped"),
    *("sequences", "sequences_dropped", "sequences_hit"),
    *("loss", "gradient_norm", "effective_sample_size", "effective_gradient_tokens", "dropped_advantage"),
)

LongRow = tuple[int, str, str, str | None, float]


@contextmanager
def open_long_table(path: Path) -> Iterator["LongTable"]:
    """An open table, which becomes the file when the block ends well."""
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as file:
        yield LongTable(file)


class LongTable:
    """Takes steps."""

    def __init__(self, file: pq.ParquetWriter) -> None:
        self._file = file

    def add(self, comparison: StepComparison) -> None:
        """All numbers of one step."""
        lines = list(_rows(comparison))
        columns = dict(zip(SCHEMA.names, map(list, zip(*lines, strict=True)), strict=True))
        self._file.write_table(pa.table(columns, schema=SCHEMA))


def _rows(comparison: StepComparison) -> Iterator[LongRow]:
    step, pairs = comparison.step.number, comparison.pairs
    cosine, overlap = pairs.cosine.tolist(), pairs.overlap.tolist()
    for place, (name, tally) in enumerate(zip(comparison.names, comparison.counts, strict=True)):
        for measure, key, value in _count_rows(tally):
            yield step, name, measure, key, value
        for other, angle, share in zip(comparison.names, cosine[place], overlap[place], strict=True):
            yield step, name, "cosine", other, angle
            yield step, name, "overlap", other, share


def _count_rows(objective_counts: ObjectiveCounts) -> Iterator[tuple[str, str | None, float]]:
    for measure in _SCALARS:
        yield measure, None, getattr(objective_counts, measure)
    for term, value in objective_counts.terms.items():
        yield "loss_of_term", term, value
    for reason, count in objective_counts.gates.items():
        yield "dropped_by_gate", reason, count
        yield "sequences_by_gate", reason, objective_counts.gate_sequences[reason]
    for kind, counts in objective_counts.dropped_by.items():
        for label, count in counts.items():
            yield f"dropped_by_{kind}", label, count
