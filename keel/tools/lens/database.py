"""Run duckdb queries over the parquet files of runs, with bounded memory, in one folder, and without network access.

Guarantees that a query opens only files below its folder, that no extension is downloaded, and that text which is not
UTF-8 is shown with replacement characters instead of making the step unreadable. Nothing is written.
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
"""Memory limit of duckdb. Queries stream and need less."""
THREADS = 4
MAX_CONCURRENT_QUERIES = 2
"""Queries that run concurrently; others wait, so that the page does not slow down a run on the same machine."""
CLOSE_TIMEOUT = 10.0
"""Seconds to wait for running queries to stop."""
FILES_PLACEHOLDER = "{files}"
"""Placeholder for the files in a query."""


class Database:
    """Runs queries over files below one folder, which must be absolute and without symbolic links."""

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
        """Interrupt running queries and close the connection."""
        self._closed = True
        ended, deadline = 0, time.monotonic() + CLOSE_TIMEOUT
        while ended < MAX_CONCURRENT_QUERIES and time.monotonic() < deadline:
            # repeated, because an interrupt has no effect on a query that has not started yet
            for cursor in list(self._active_cursors):
                cursor.interrupt()
            ended += self._query_slots.acquire(timeout=0.05)
        if ended == MAX_CONCURRENT_QUERIES:
            self._connection.close()

    def query_rows(self, query: str, files: Sequence[Path], parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query over files. `{files}` in the query is replaced by the files.

        If the text of a file is not UTF-8, the query runs on each file separately and the rows are concatenated, so
        callers must be able to merge rows of a query over several files.
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
        return self._execute(query.replace(FILES_PLACEHOLDER, "repaired"), parameters, repaired=_repair_utf8(files[0]))

    def _execute(self, query: str, parameters: Sequence[Any], repaired: pa.Table | None = None) -> list[dict[str, Any]]:
        if self._closed:
            raise KeelError("the lens is shutting down")
        with self._query_slots, self._connection.cursor() as cursor:
            self._active_cursors.add(cursor)
            try:
                if repaired is not None:
                    cursor.register("repaired", repaired)
                result = cursor.execute(query, list(parameters))
                names = [column[0] for column in result.description or []]
                return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
            finally:
                self._active_cursors.discard(cursor)


def _describe_files(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _escape_glob(path: Path) -> str:
    """Return a path without characters that duckdb reads as a glob pattern."""
    return re.sub(r"([\[\]*?])", r"[\1]", str(path))


def _repair_utf8(path: Path) -> pa.Table:
    """Read a step's table into memory with replacement characters where its text is not UTF-8."""
    log.warning("%s contains text that is not UTF-8; it is shown with replacement characters", path)
    try:
        with pq.ParquetFile(path) as file:
            check_parquet_size(path, file.metadata)
            table = file.read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise KeelError(f"{path} cannot be read: {error}") from error
    for index, column in enumerate(table.schema):
        if column.type == pa.string():
            values = table.column(index).cast(pa.binary()).to_pylist()
            texts = pa.array([_decode_utf8(value) for value in values], pa.string())
            table = table.set_column(index, column.name, texts)
        elif column.type == pa.list_(pa.string()):
            lists = table.column(index).cast(pa.list_(pa.binary())).to_pylist()
            decoded = [None if values is None else [_decode_utf8(value) for value in values] for values in lists]
            table = table.set_column(index, column.name, pa.array(decoded, pa.list_(pa.string())))
    return table.append_column("filename", pa.array([str(path)] * len(table), pa.string()))


def _decode_utf8(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
