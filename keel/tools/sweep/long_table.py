"""Write a sweep as a parquet table in long format, one row per number of every step and evaluation of every run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keel.common.atomic_files import atomic_file
from keel.tools.sweep.results import SweepResults

SCHEMA = pa.schema(
    [
        ("variant", pa.string()),
        ("seed", pa.int64()),
        ("run", pa.string()),
        ("step", pa.int64()),
        ("environment", pa.string()),  # of an evaluation; null for metrics of training steps
        ("measure", pa.string()),  # the names in run.db: reward, mismatch_kl, is_masked_low, ...
        ("value", pa.float64()),
    ]
)
"""The columns of `--parquet FILE`."""


def write_table(path: Path, results: SweepResults) -> None:
    """Write the table atomically."""
    rows = list(_rows(results))
    columns = {name: [row[index] for row in rows] for index, name in enumerate(SCHEMA.names)}
    with atomic_file(path) as temporary:
        pq.write_table(pa.table(columns, schema=SCHEMA), temporary, compression="zstd")


def _rows(results: SweepResults) -> Iterator[tuple[Any, ...]]:
    for trial in results.trials:
        key = (trial.variant, trial.seed, trial.name)
        for row in trial.step_rows:
            for measure, value in row.metrics.items():
                yield *key, row.step, None, measure, value
        for step, environment, metrics in trial.evaluation_rows:
            for measure, value in metrics.items():
                yield *key, step, environment, measure, value
