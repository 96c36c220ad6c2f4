"""The trials as one long parquet table: a row for every number of every step and every evaluation of every run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keel.tools.compare.files import atomic_file
from keel.tools.sweep.results import SweepResults

SCHEMA = pa.schema(
    [
        ("variant", pa.string()),
        ("seed", pa.int64()),
        ("run", pa.string()),
        ("step", pa.int64()),
        ("environment", pa.string()),  # of an evaluation; null: a number of the training step
        ("measure", pa.string()),  # the names in run.db: reward, mismatch_kl, is_masked_low, ...
        ("value", pa.float64()),
    ]
)
"""The columns of `--parquet FILE`."""


def write_table(path: Path, results: SweepResults) -> None:
    """All of it, or nothing."""
    lines = list(_rows(results))
    columns = {name: [line[place] for line in lines] for place, name in enumerate(SCHEMA.names)}
    with atomic_file(path) as temporary:
        pq.write_table(pa.table(columns, schema=SCHEMA), temporary, compression="zstd")


def _rows(results: SweepResults) -> Iterator[tuple[Any, ...]]:
    for trial in results.trials:
        key = (trial.variant, trial.seed, trial.name)
        for row in trial.step_rows:
            for measure, value in row.metrics.items():
                yield *key, row.step, None, measure, value
        for step, environment, numbers in trial.evaluation_rows:
            for measure, value in numbers.items():
                yield *key, step, environment, measure, value
