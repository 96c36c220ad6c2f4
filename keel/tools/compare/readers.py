"""Read recorded tokens from a run folder, a parquet file or a JSON-lines file, one step at a time.

All three become tables with the columns of `schema`, so that the same tokens give the same results from any of them.
The rows of a step must be consecutive; memory use is that of the largest step. Nothing is written.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from keel.common.safe_read import check_parquet_size
from keel.errors import KeelError
from keel.tools.compare.schema import COLUMNS, RecordedStep, build_step, check_columns, is_list, select_trained_rows

_STEP_FILE = re.compile(r"step_(\d+)\.parquet")
_BATCH_ROWS = 256
"""Number of rows that are read at a time."""

StepRanges = list[tuple[int, int | None]]
"""Selected steps: pairs of first and last, both inclusive; a last of None means no upper bound."""


def parse_steps(text: str) -> StepRanges:
    """Parse a list of steps such as `1-20,30,40-`."""
    ranges: StepRanges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(-\s*(\d*))?\s*", part)
        if match is None:
            raise KeelError(f"--steps {text}: {part.strip()!r} is not a step or a range; write 1-20,30 or 40-")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else None
        if last is not None and last < first:
            raise KeelError(f"--steps {text}: {part.strip()} ends before it starts")
        ranges.append((first, last))
    return ranges


def _in_ranges(number: int, ranges: StepRanges | None) -> bool:
    return ranges is None or any(first <= number and (last is None or number <= last) for first, last in ranges)


class Recording:
    """Recorded tokens on disk."""

    def __init__(self, path: Path, step_ranges: StepRanges | None = None) -> None:
        self.path, self.step_ranges = path, step_ranges
        self.skipped: Counter[str] = Counter()
        """Number of sequences of the steps read so far that cannot be evaluated, by reason."""
        if path.is_dir():
            self._files = _step_files(path)
        elif not path.is_file():
            raise KeelError(f"{path} does not exist; give a run folder, a parquet file or a JSON-lines file")

    def step_numbers(self) -> list[int]:
        """Return the selected steps that exist, in order, without reading their tokens if the format allows it."""
        if self.path.is_dir():
            return [number for number, _ in self._selected_files()]
        return [number for number, _ in self._tables(["step"])]

    def steps(self) -> Iterator[RecordedStep]:
        """Yield each selected step that has a trainable token with log-probs."""
        is_empty = True
        for number, table in self._tables(None):
            rows, skipped = select_trained_rows(table)
            self.skipped.update(skipped)
            step = build_step(number, rows, str(self.path))
            is_empty = False
            if step is not None:
                yield step
        if is_empty:
            problem = "no rows" if self.step_ranges is None else "none of the selected steps"
            raise KeelError(f"{self.path} has {problem}")

    def _tables(self, column_names: list[str] | None) -> Iterator[tuple[int, pa.Table]]:
        if self.path.is_dir():
            for number, path in self._selected_files():
                yield number, pa.concat_tables([table for _, table in _read_parquet(path, column_names)])
        else:
            parts = _read_parquet(self.path, column_names) if _is_parquet(self.path) else _read_json_lines(self.path)
            yield from _merge_steps(parts, self.step_ranges, self.path)

    def _selected_files(self) -> list[tuple[int, Path]]:
        selected = [(number, path) for number, path in self._files if _in_ranges(number, self.step_ranges)]
        if not selected:
            first, last = self._files[0][0], self._files[-1][0]
            raise KeelError(f"{self.path} has none of the selected steps; it has {first} to {last}")
        return selected


def _step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the step files of a run folder, or of its rollouts folder, sorted by step."""
    inner = folder / "rollouts"
    folder = inner if inner.is_dir() else folder
    matches = ((_STEP_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    files = sorted((int(match[1]), path) for match, path in matches if match)
    if not files:
        raise KeelError(f"{folder} contains no recorded steps: it has no files such as step_000001.parquet")
    return files


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _merge_steps(
    parts: Iterator[tuple[int | None, pa.Table]], step_ranges: StepRanges | None, path: Path
) -> Iterator[tuple[int, pa.Table]]:
    """Join consecutive parts of the same step."""
    current, tables, seen = None, list[pa.Table](), set[int]()
    for number, table in parts:
        step = 1 if number is None else number
        if step != current:
            if tables:
                yield current or 0, pa.concat_tables(tables)
            if step in seen:
                raise KeelError(f"{path}: the rows of step {step} are not consecutive; sort the file by step")
            current, tables = step, []
            seen.add(step)
        if _in_ranges(step, step_ranges):
            tables.append(table)
    if tables:
        yield current or 0, pa.concat_tables(tables)


def _read_parquet(path: Path, column_names: list[str] | None) -> Iterator[tuple[int | None, pa.Table]]:
    """Yield consecutive rows of one step, with that step."""
    try:
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            present = file.schema_arrow.names
            check_columns(present, str(path))
            names = [name for name in column_names or COLUMNS if name in present] or ["advantage"]
            empty = cast_columns(file.schema_arrow.empty_table().select(names), path)
            yielded = False
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                for part in _split_by_step(cast_columns(pa.Table.from_batches([batch]), path)):
                    yielded = True
                    yield part
            if not yielded:
                yield None, empty
    except (OSError, pa.ArrowException) as error:
        raise KeelError(f"{path} cannot be read: {error}") from error


def _split_by_step(table: pa.Table) -> Iterator[tuple[int | None, pa.Table]]:
    if "step" not in table.column_names:
        yield None, table
        return
    steps, start = table["step"].to_pylist(), 0
    for end in range(1, len(steps) + 1):
        if end == len(steps) or steps[end] != steps[start]:
            yield steps[start], table.slice(start, end - start)
            start = end


def cast_columns(table: pa.Table, path: Path) -> pa.Table:
    """Return the known columns, cast to their types."""
    columns = {}
    for name in table.column_names:
        if name not in COLUMNS:
            continue
        column, actual_type = COLUMNS[name], table.schema.field(name).type
        listed = is_list(actual_type)
        if listed == (column.shape == "sequence") and column.shape != "either" and not pa.types.is_null(actual_type):
            expected = "one value for each sequence" if column.shape == "sequence" else "a list for each sequence"
            raise KeelError(f"{path}: column {name} has type {actual_type}; it must hold {expected} ({column.meaning})")
        target_type = column.type
        if listed or column.shape == "tokens":
            target_type = pa.list_(column.type)
        try:
            columns[name] = table[name].cast(target_type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise KeelError(f"{path}: column {name} has type {actual_type}; {column.meaning}: {error}") from error
    return pa.table(columns)


def _read_json_lines(path: Path) -> Iterator[tuple[int | None, pa.Table]]:
    """Yield some rows of one step at a time, with that step."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _parse_json_line(line, f"{path}, line {number}")
            if rows and (len(rows) == _BATCH_ROWS or row.get("step") != rows[0].get("step")):
                yield rows[0].get("step"), _json_rows_to_table(rows, path)
                rows = []
            rows.append(row)
    if rows:
        yield rows[0].get("step"), _json_rows_to_table(rows, path)


def _parse_json_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise KeelError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise KeelError(f"{where} is not a JSON object; each line must be an object with the columns of one sequence")
    check_columns(list(row), where)
    step = row.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise KeelError(f"{where}: step = {step!r} must be an integer")
    return {name: row[name] for name in COLUMNS if name in row}


def _json_rows_to_table(rows: list[dict[str, Any]], path: Path) -> pa.Table:
    columns = {}
    for name, column in COLUMNS.items():
        values = [row.get(name) for row in rows]
        if all(value is None for value in values) and not column.required:
            continue
        listed = any(isinstance(value, list) for value in values)
        kind = pa.list_(column.type) if listed or column.shape == "tokens" else column.type
        if name == "token_text":
            values = [_encode_texts(value) for value in values]
        elif name == "group":
            values = [None if value is None else str(value) for value in values]
        try:
            # masks of 0 and 1 are cast later, because pyarrow does not accept them as booleans here
            columns[name] = pa.array(values) if name == "trainable" else pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise KeelError(f"{path}: {name} cannot be read as {kind}: {error} ({column.meaning})") from error
    return cast_columns(pa.table(columns), path)


def _encode_texts(texts: Any) -> Any:
    """Return texts as bytes: JSON may contain half of a surrogate pair, which cannot be stored as text."""
    if not isinstance(texts, list):
        return texts
    return [
        text.encode("utf-8", "surrogateescape" if _is_surrogateescaped(text) else "surrogatepass")
        if isinstance(text, str)
        else text
        for text in texts
    ]


def _is_surrogateescaped(text: str) -> bool:
    """Return whether all surrogates in a text stand for bytes that were not UTF-8."""
    return all(not 0xD800 <= ord(character) <= 0xDFFF or 0xDC80 <= ord(character) <= 0xDCFF for character in text)
