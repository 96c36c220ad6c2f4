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

from keel.common.safe_read import check_values
from keel.errors import KeelError
from keel.tools.compare.schema import COLUMNS, Step, check_columns, is_list, step_of, used

_STEP_FILE = re.compile(r"step_(\d+)\.parquet")
_ROWS = 256
"""Rows of a parquet file that are read at once."""

Ranges = list[tuple[int, int | None]]
"""Chosen steps: first and last, both included; without a last, all from the first on."""


def parse_steps(text: str) -> Ranges:
    """`1-20,30,40-` as ranges."""
    ranges: Ranges = []
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


def _among(number: int, ranges: Ranges | None) -> bool:
    return ranges is None or any(first <= number and (last is None or number <= last) for first, last in ranges)


class Recording:
    """Recorded tokens on disk."""

    def __init__(self, path: Path, chosen: Ranges | None = None) -> None:
        self.path, self.chosen = path, chosen
        self.left_out: Counter[str] = Counter()
        """Sequences of the steps read so far that cannot be evaluated, by why."""
        if path.is_dir():
            self._files = _step_files(path)
        elif not path.is_file():
            raise KeelError(f"{path} does not exist; give a run folder, a parquet file or a file of JSON lines")

    def numbers(self) -> list[int]:
        """The chosen steps that are there, in order, without reading their tokens where the format allows it."""
        if self.path.is_dir():
            return [number for number, _ in self._chosen_files()]
        return [number for number, _ in self._tables(["step"])]

    def steps(self) -> Iterator[Step]:
        """Each chosen step that has a trainable token with log-probs."""
        found: list[int] = []
        for number, table in self._tables(None):
            rows, left_out = used(table)
            self.left_out.update(left_out)
            step = step_of(number, rows, str(self.path))
            found.append(number)
            if step is not None:
                yield step
        if not found:
            what = "no rows" if self.chosen is None else "no step that was chosen"
            raise KeelError(f"{self.path} has {what}")

    def _tables(self, only: list[str] | None) -> Iterator[tuple[int, pa.Table]]:
        if self.path.is_dir():
            for number, path in self._chosen_files():
                yield number, pa.concat_tables([table for _, table in _parquet_parts(path, only)])
        else:
            parts = _parquet_parts(self.path, only) if _is_parquet(self.path) else _json_parts(self.path)
            yield from _joined(parts, self.chosen, self.path)

    def _chosen_files(self) -> list[tuple[int, Path]]:
        chosen = [(number, path) for number, path in self._files if _among(number, self.chosen)]
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


def _joined(
    parts: Iterator[tuple[int | None, pa.Table]], chosen: Ranges | None, path: Path
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
        if _among(here, chosen):
            held.append(table)
    if held:
        yield number or 0, pa.concat_tables(held)


def _parquet_parts(path: Path, only: list[str] | None) -> Iterator[tuple[int | None, pa.Table]]:
    """Stretches of rows of one step, with that step."""
    try:
        with pq.ParquetFile(path) as file:
            check_values(path, file.metadata)
            there = file.schema_arrow.names
            check_columns(there, str(path))
            names = [name for name in only or COLUMNS if name in there] or ["advantage"]
            empty = canonical(file.schema_arrow.empty_table().select(names), path)
            yielded = False
            for batch in file.iter_batches(batch_size=_ROWS, columns=names):
                for part in _by_step(canonical(pa.Table.from_batches([batch]), path)):
                    yielded = True
                    yield part
            if not yielded:
                yield None, empty
    except (OSError, pa.ArrowException) as error:
        raise KeelError(f"{path} cannot be read: {error}") from error


def _by_step(table: pa.Table) -> Iterator[tuple[int | None, pa.Table]]:
    if "step" not in table.column_names:
        yield None, table
        return
    steps, start = table["step"].to_pylist(), 0
    for place in range(1, len(steps) + 1):
        if place == len(steps) or steps[place] != steps[start]:
            yield steps[start], table.slice(start, place - start)
            start = place


def canonical(table: pa.Table, path: Path) -> pa.Table:
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


def _json_parts(path: Path) -> Iterator[tuple[int | None, pa.Table]]:
    """Some lines at a time, none of two steps."""
    held: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _json_row(line, f"{path}, line {number}")
            if held and (len(held) == _ROWS or row.get("step") != held[0].get("step")):
                yield held[0].get("step"), _json_table(held, path)
                held = []
            held.append(row)
    if held:
        yield held[0].get("step"), _json_table(held, path)


def _json_row(line: bytes, where: str) -> dict[str, Any]:
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


def _json_table(rows: list[dict[str, Any]], path: Path) -> pa.Table:
    columns = {}
    for name, column in COLUMNS.items():
        values = [row.get(name) for row in rows]
        if all(value is None for value in values) and not column.needed:
            continue
        listed = any(isinstance(value, list) for value in values)
        kind = pa.list_(column.type) if listed or column.shape == "tokens" else column.type
        if name == "pieces":
            values = [_encoded(value) for value in values]
        elif name == "group":
            values = [None if value is None else str(value) for value in values]
        try:
            # masks of 0 and 1 are cast later: as booleans they are not taken
            columns[name] = pa.array(values) if name == "trainable" else pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise KeelError(f"{path}: {name} cannot be read as {kind}: {error} ({column.meaning})") from error
    return canonical(pa.table(columns), path)


def _encoded(pieces: Any) -> Any:
    """Texts as bytes: JSON may hold half of a surrogate pair, which is no text that could be stored."""
    if not isinstance(pieces, list):
        return pieces
    return [
        piece.encode("utf-8", "surrogateescape" if _escaped(piece) else "surrogatepass")
        if isinstance(piece, str)
        else piece
        for piece in pieces
    ]


def _escaped(piece: str) -> bool:
    """Whether all of its surrogates stand for bytes that were no UTF-8."""
    return all(not 0xD800 <= ord(character) <= 0xDFFF or 0xDC80 <= ord(character) <= 0xDCFF for character in piece)
