"""Read small files from untrusted sources: regular files only, completely, and up to a maximum size.

Guarantees that any problem with a file is an `OSError` or a `ValueError`, including JSON that is nested too deeply, and
that reading never blocks on a pipe or a device. Callers validate the content.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from keel.errors import KeelError

MAX_FILE_BYTES = 64 * 2**20
"""Settings, manifests and indexes have a few kilobytes; the index of a very large model has some megabytes."""
MAX_COLUMN_VALUES = 2**27
"""Maximum number of values in one column of a parquet file, above the number of tokens of any step."""


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a UTF-8 file."""
    # without O_NONBLOCK, opening a pipe without a writer would block indefinitely
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return data.decode("utf-8-sig")


def check_parquet_size(path: Path, metadata: Any) -> None:
    """Raise a `KeelError` if a parquet file would decompress to more values than a step can have.

    Only the metadata is read. A few kilobytes of parquet can encode any number of equal values.
    """
    for column in range(metadata.num_columns):
        count = sum(metadata.row_group(group).column(column).num_values for group in range(metadata.num_row_groups))
        if count > MAX_COLUMN_VALUES:
            raise KeelError(f"{path}: column {column} has {count:,} values; the maximum is {MAX_COLUMN_VALUES:,}")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """Read and parse a JSON file."""
    return parse_json(read_text(path, max_bytes))
