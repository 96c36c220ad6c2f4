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

from keel.common.safe_read import check_parquet_size
from keel.errors import KeelError

log = logging.getLogger("keel.tools.lens")

MEMORY_LIMIT = "1GB"
"""What duckdb may take. Queries stream; none needs as much."""
THREADS = 4
MAX_CONCURRENT_QUERIES = 2
"""Queries under way at a time; others wait, so that a page cannot take the whole machine from the run it watches."""
CLOSE_TIMEOUT = 10.0
"""Seconds that queries under way have to break off."""
FILES_PLACEHOLDER = "{files}"
"""Stands for the files in a query."""


class Database:
    """Answers queries over files below one folder, given as it really is: absolute, without links."""

    def __init__(self, folder: Path) -> None:
        settings = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
        self._connection = duckdb.connect(config={**settings, "memory_limit": MEMORY_LIMIT, "threads": str(THREADS)})
        self._connection.execute("SET allowed_directories = ?", [[f"{folder}/"]])
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")
        self._query_slots = threading.BoundedSemaphore(MAX_CONCURRENT_QUERIES)
        self._active_cursors: set[duckdb.DuckDBPyConnection] = set()
        self._closed = False

    def close(self) -> None:
        """Break off what is being asked, and end."""
        self._closed = True
        ended, end = 0, time.monotonic() + CLOSE_TIMEOUT
        while ended < MAX_CONCURRENT_QUERIES and time.monotonic() < end:
            # again and again: one that was about to start has not heard it
            for cursor in list(self._active_cursors):
                cursor.interrupt()
            ended += self._query_slots.acquire(timeout=0.05)
        if ended == MAX_CONCURRENT_QUERIES:
            self._connection.close()

    def query_rows(self, query: str, files: Sequence[Path], parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows that a query has over some files. `{files}` in it is what it reads from; its first parameter.

        When the text of a file is broken, the query is asked of each file by itself and the rows are put together: a
        query over several files must be one whose answers add up.
        """
        try:
            source = [_escape_glob(path) for path in files]
            return self._execute(
                query.replace(FILES_PLACEHOLDER, "read_parquet(?, filename = true)"), [source, *parameters]
            )
        except duckdb.InvalidInputException as error:
            if "UTF8" not in str(error):
                raise KeelError(f"{_describe_files(files)} cannot be read: {error}") from error
        except duckdb.Error as error:
            raise KeelError(f"{_describe_files(files)} cannot be read: {error}") from error
        if len(files) > 1:
            return [row for path in files for row in self.query_rows(query, [path], parameters)]
        return self._execute(query.replace(FILES_PLACEHOLDER, "mended"), parameters, repaired=_repair_utf8(files[0]))

    def _execute(self, query: str, parameters: Sequence[Any], repaired: pa.Table | None = None) -> list[dict[str, Any]]:
        if self._closed:
            raise KeelError("the lens is being closed")
        with self._query_slots, self._connection.cursor() as cursor:
            self._active_cursors.add(cursor)
            try:
                if repaired is not None:
                    cursor.register("mended", repaired)
                found = cursor.execute(query, list(parameters))
                names = [column[0] for column in found.description or []]
                return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
            finally:
                self._active_cursors.discard(cursor)


def _describe_files(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _escape_glob(path: Path) -> str:
    """A path in which nothing is taken for a pattern."""
    return re.sub(r"([\[\]*?])", r"[\1]", str(path))


def _repair_utf8(path: Path) -> pa.Table:
    """A step's table with replacement characters where its text is not UTF-8. In memory: one step fits there."""
    log.warning("%s holds text that is not UTF-8; it is shown with replacement characters", path)
    try:
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            table = file.read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise KeelError(f"{path} cannot be read: {error}") from error
    for place, column in enumerate(table.schema):
        if column.type == pa.string():
            values = table.column(place).cast(pa.binary()).to_pylist()
            table = table.set_column(
                place, column.name, pa.array([_decode_utf8(value) for value in values], pa.string())
            )
        elif column.type == pa.list_(pa.string()):
            lists = table.column(place).cast(pa.list_(pa.binary())).to_pylist()
            texts = [None if values is None else [_decode_utf8(value) for value in values] for values in lists]
            table = table.set_column(place, column.name, pa.array(texts, pa.list_(pa.string())))
    return table.append_column("filename", pa.array([str(path)] * len(table), pa.string()))


def _decode_utf8(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
