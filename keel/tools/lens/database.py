"""duckdb over the parquet files of runs: bounded in memory, kept to one folder, and never on the network.

Guarantees that a query can open files below its folder only, that no extension is fetched, and that text which is not
UTF-8 is shown with replacement characters instead of failing the step. It never writes.
"""

import logging
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from keel.common.safe_read import check_values
from keel.errors import KeelError

log = logging.getLogger("keel.tools.lens")

MEMORY = "1GB"
"""What duckdb may take. Queries stream; none needs as much."""
THREADS = 4
AT_ONCE = 2
"""Queries under way at a time; others wait, so that a page cannot take the whole machine from the run it watches."""
CLOSING = 10.0
"""Seconds that queries under way have to break off."""
FILES = "{files}"
"""Stands for the files in a query."""


class Database:
    """Answers queries over files below one folder, given as it really is: absolute, without links."""

    def __init__(self, folder: Path) -> None:
        settings = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
        self._root = duckdb.connect(config={**settings, "memory_limit": MEMORY, "threads": str(THREADS)})
        self._root.execute("SET allowed_directories = ?", [[f"{folder}/"]])
        self._root.execute("SET enable_external_access = false")
        self._root.execute("SET lock_configuration = true")
        self._turn = threading.BoundedSemaphore(AT_ONCE)
        self._busy: set[duckdb.DuckDBPyConnection] = set()
        self._closed = False

    def close(self) -> None:
        """Break off what is being asked, and end."""
        self._closed = True
        ended, end = 0, time.monotonic() + CLOSING
        while ended < AT_ONCE and time.monotonic() < end:
            # again and again: one that was about to start has not heard it
            for cursor in list(self._busy):
                cursor.interrupt()
            ended += self._turn.acquire(timeout=0.05)
        if ended == AT_ONCE:
            self._root.close()

    def rows(self, query: str, files: Sequence[Path], parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows that a query has over some files. `{files}` in it is what it reads from; its first parameter.

        When the text of a file is broken, the query is asked of each file by itself and the rows are put together: a
        query over several files must be one whose answers add up.
        """
        try:
            source = [_literal(path) for path in files]
            return self._run(query.replace(FILES, "read_parquet(?, filename = true)"), [source, *parameters])
        except duckdb.InvalidInputException as error:
            if "UTF8" not in str(error):
                raise KeelError(f"{_names(files)} cannot be read: {error}") from error
        except duckdb.Error as error:
            raise KeelError(f"{_names(files)} cannot be read: {error}") from error
        if len(files) > 1:
            return [row for path in files for row in self.rows(query, [path], parameters)]
        return self._run(query.replace(FILES, "mended"), parameters, mended=_mend(files[0]))

    def _run(self, query: str, parameters: Sequence[Any], mended: pa.Table | None = None) -> list[dict[str, Any]]:
        if self._closed:
            raise KeelError("the lens is being closed")
        with self._turn, self._root.cursor() as cursor:
            self._busy.add(cursor)
            try:
                if mended is not None:
                    cursor.register("mended", mended)
                found = cursor.execute(query, list(parameters))
                names = [column[0] for column in found.description or []]
                return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
            finally:
                self._busy.discard(cursor)


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _literal(path: Path) -> str:
    """A path in which nothing is taken for a pattern."""
    return re.sub(r"([\[\]*?])", r"[\1]", str(path))


def _mend(path: Path) -> pa.Table:
    """A step's table with replacement characters where its text is not UTF-8. In memory: one step fits there."""
    log.warning("%s holds text that is not UTF-8; it is shown with replacement characters", path)
    try:
        with pq.ParquetFile(path) as file:
            check_values(path, file.metadata)
            table = file.read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise KeelError(f"{path} cannot be read: {error}") from error
    for place, column in enumerate(table.schema):
        if column.type == pa.string():
            values = table.column(place).cast(pa.binary()).to_pylist()
            table = table.set_column(place, column.name, pa.array([_text(value) for value in values], pa.string()))
        elif column.type == pa.list_(pa.string()):
            lists = table.column(place).cast(pa.list_(pa.binary())).to_pylist()
            texts = [None if values is None else [_text(value) for value in values] for values in lists]
            table = table.set_column(place, column.name, pa.array(texts, pa.list_(pa.string())))
    return table.append_column("filename", pa.array([str(path)] * len(table), pa.string()))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
