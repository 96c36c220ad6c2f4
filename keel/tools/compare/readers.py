"""Where recorded tokens come from: a run folder, a parquet file or a file of JSON lines, read one step at a time.

All three become the same tables with the columns of `columns`, so that the same tokens give the same numbers from any
of them. Rows of a step stand together; the memory needed is that of the largest step. Nothing is written.
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
"""Rows of a parquet file that are read at once."""

StepRanges = list[tuple[int, int | None]]
"""Chosen steps: first and last, both included; without a last, all from the first on."""


def parse_steps(text: str) -> StepRanges:
    """`1-20,30,40-` as ranges."""
    ranges: StepRanges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(-\s*(\d*))?\s*", part)
        if match is None:
            raise KeelError(f"--steps {text}: {part.strip()!r} is no step and no range; write 1-20,30 or 40-")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] else None
        if last is not None and last < first:
            raise KeelError(f"--steps {text}: {part.strip()} ends before it begins")
        ranges.append((first, last))
    return ranges


def _in_ranges(number: int, ranges: StepRanges | None) -> bool:
    return ranges is None or any(first <= number and (last is None or number <= last) for first, last in ranges)


class Recording:
    """Recorded tokens on disk."""

    def __init__(self, path: Path, step_ranges: StepRanges | None = None) -> None:
        self.path, self.step_ranges = path, step_ranges
        self.skipped: Counter[str] = Counter()
        """Sequences of the steps read so far that cannot be evaluated, by why."""
        if path.is_dir():
            self._files = _step_files(path)
        elif not path.is_file():
            raise KeelError(f"{path} does not exist; give a run folder, a parquet file or a file of JSON lines")

    def step_numbers(self) -> list[int]:
        """The chosen steps that are there, in order, without reading their tokens where the format allows it."""
        if self.path.is_dir():
            return [number for number, _ in self._selected_files()]
        return [number for number, _ in self._tables(["step"])]

    def steps(self) -> Iterator[RecordedStep]:
        """Each chosen step that has a trainable token with log-probs."""
        found: list[int] = []
        for number, table in self._tables(None):
            rows, left_out = select_trained_rows(table)
            self.skipped.update(left_out)
            step = build_step(number, rows, str(self.path))
            found.append(number)
            if step is not None:
                yield step
        if not found:
            what = "no rows" if self.step_ranges is None else "no step that was chosen"
            raise KeelError(f"{self.path} has {what}")

    def _tables(self, column_names: list[str] | None) -> Iterator[tuple[int, pa.Table]]:
        if self.path.is_dir():
            for number, path in self._selected_files():
                yield number, pa.concat_tables([table for _, table in _read_parquet(path, column_names)])
        else:
            parts = _read_parquet(self.path, column_names) if _is_parquet(self.path) else _read_json_lines(self.path)
            yield from _merge_steps(parts, self.step_ranges, self.path)

    def _selected_files(self) -> list[tuple[int, Path]]:
        chosen = [(number, path) for number, path in self._files if _in_ranges(number, self.step_ranges)]
        if not chosen:
            first, last = self._files[0][0], self._files[-1][0]
            raise KeelError(f"{self.path} has none of the chosen steps; it has {first} to {last}")
        return chosen


def _step_files(folder: Path) -> list[tuple[int, Path]]:
    """The files of a run folder, or of its folder of rollouts, by step."""
    inner = folder / "rollouts"
    folder = inner if inner.is_dir() else folder
    matches = ((_STEP_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    files = sorted((int(match[1]), path) for match, path in matches if match)
    if not files:
        raise KeelError(f"{folder} holds no run: there is no step_000001.parquet or the like in it")
    return files


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _merge_steps(
    parts: Iterator[tuple[int | None, pa.Table]], step_ranges: StepRanges | None, path: Path
) -> Iterator[tuple[int, pa.Table]]:
    """Parts of steps, in the order of the file, as whole steps."""
    number, held, done = None, list[pa.Table](), set[int]()
    for found, table in parts:
        here = 1 if found is None else found
        if here != number:
            if held:
                yield number or 0, pa.concat_tables(held)
            if here in done:
                raise KeelError(f"{path}: the rows of step {here} do not stand together; sort the file by step")
            number, held = here, []
            done.add(here)
        if _in_ranges(here, step_ranges):
            held.append(table)
    if held:
        yield number or 0, pa.concat_tables(held)


def _read_parquet(path: Path, column_names: list[str] | None) -> Iterator[tuple[int | None, pa.Table]]:
    """Stretches of rows of one step, with that step."""
    try:
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            there = file.schema_arrow.names
            check_columns(there, str(path))
            names = [name for name in column_names or COLUMNS if name in there] or ["advantage"]
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
    for place in range(1, len(steps) + 1):
        if place == len(steps) or steps[place] != steps[start]:
            yield steps[start], table.slice(start, place - start)
            start = place


def cast_columns(table: pa.Table, path: Path) -> pa.Table:
    """The known columns, each with the type that it has here."""
    columns = {}
    for name in table.column_names:
        if name not in COLUMNS:
            continue
        column, found = COLUMNS[name], table.schema.field(name).type
        listed = is_list(found)
        if listed == (column.shape == "sequence") and column.shape != "either" and not pa.types.is_null(found):
            wanted = "one value for each sequence" if column.shape == "sequence" else "a list for each sequence"
            raise KeelError(f"{path}: column {name} holds {found}; it must hold {wanted} ({column.meaning})")
        wanted_type = column.type
        if listed or column.shape == "tokens":
            wanted_type = pa.list_(column.type)
        try:
            columns[name] = table[name].cast(wanted_type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise KeelError(f"{path}: column {name} holds {found}; {column.meaning}: {error}") from error
    return pa.table(columns)


def _read_json_lines(path: Path) -> Iterator[tuple[int | None, pa.Table]]:
    """Some lines at a time, none of two steps."""
    held: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _parse_json_line(line, f"{path}, line {number}")
            if held and (len(held) == _BATCH_ROWS or row.get("step") != held[0].get("step")):
                yield held[0].get("step"), _json_rows_to_table(held, path)
                held = []
            held.append(row)
    if held:
        yield held[0].get("step"), _json_rows_to_table(held, path)


def _parse_json_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise KeelError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise KeelError(f"{where} is no JSON object; a line is one sequence with its columns by name")
    check_columns(list(row), where)
    step = row.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise KeelError(f"{where}: step = {step!r} must be a whole number")
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
            # masks of 0 and 1 are cast later: as booleans they are not taken
            columns[name] = pa.array(values) if name == "trainable" else pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise KeelError(f"{path}: {name} cannot be read as {kind}: {error} ({column.meaning})") from error
    return cast_columns(pa.table(columns), path)


def _encode_texts(texts: Any) -> Any:
    """Texts as bytes: JSON may hold half of a surrogate pair, which is no text that could be stored."""
    if not isinstance(texts, list):
        return texts
    return [
        piece.encode("utf-8", "surrogateescape" if _is_surrogateescaped(piece) else "surrogatepass")
        if isinstance(piece, str)
        else piece
        for piece in texts
    ]


def _is_surrogateescaped(text: str) -> bool:
    """Whether all of its surrogates stand for bytes that were no UTF-8."""
    return all(not 0xD800 <= ord(character) <= 0xDFFF or 0xDC80 <= ord(character) <= 0xDCFF for character in text)
