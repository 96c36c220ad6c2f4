"""Write a comparison as a parquet table in long format, one row per number and step.

Steps are written one by one, so that memory use is that of one step, to a temporary file that is renamed when it is
complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from keel.common.atomic_files import atomic_file
from keel.tools.compare.accumulators import ObjectiveCounts
from keel.tools.compare.evaluate import StepComparison

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("objective", pa.string()),
        ("measure", pa.string()),  # tokens, dropped, loss, ...; or dropped_by_position, cosine, ...
        ("key", pa.string()),  # a gate, a term, a label, a token text or the other objective; null for the step's total
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
    """Open a table that becomes the file when the block ends without an error."""
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as file:
        yield LongTable(file)


class LongTable:
    """Writes the numbers of steps."""

    def __init__(self, file: pq.ParquetWriter) -> None:
        self._file = file

    def add(self, comparison: StepComparison) -> None:
        """Write all numbers of one step."""
        rows = list(_rows(comparison))
        columns = dict(zip(SCHEMA.names, map(list, zip(*rows, strict=True)), strict=True))
        self._file.write_table(pa.table(columns, schema=SCHEMA))


def _rows(comparison: StepComparison) -> Iterator[LongRow]:
    step, pairs = comparison.step.number, comparison.pairs
    cosine, overlap = pairs.cosine.tolist(), pairs.overlap.tolist()
    for index, (name, counts) in enumerate(zip(comparison.names, comparison.counts, strict=True)):
        for measure, key, value in _count_rows(counts):
            yield step, name, measure, key, value
        for other, other_cosine, other_overlap in zip(comparison.names, cosine[index], overlap[index], strict=True):
            yield step, name, "cosine", other, other_cosine
            yield step, name, "overlap", other, other_overlap


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
