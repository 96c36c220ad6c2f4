"""Small files that others may have written: read whole, within a bound, and never anything but a regular file.

Guarantees that whatever is wrong with a file is an `OSError` or a `ValueError`, nesting that is too deep included, and
that neither a pipe nor a device is waited for. What the content means is the caller's to check.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from keel.errors import KeelError

MAX_FILE_BYTES = 64 * 2**20
"""Bytes. Settings, manifests and indexes have a few thousand; the index of a very large model has some megabytes."""
MAX_COLUMN_VALUES = 2**27
"""Of one column of a parquet file: tokens of a step."""


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a file in UTF-8."""
    # without O_NONBLOCK opening a pipe that nobody writes to would wait for ever
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return data.decode("utf-8-sig")


def check_parquet_size(path: Path, metadata: Any) -> None:
    """Refuse a parquet file, by its metadata, that unfolds to more values than a step of a run can have.

    A few kilobytes of it can stand for any number of equal values.
    """
    for place in range(metadata.num_columns):
        count = sum(metadata.row_group(group).column(place).num_values for group in range(metadata.num_row_groups))
        if count > MAX_COLUMN_VALUES:
            raise KeelError(f"{path}: column {place} has {count:,} values; at most {MAX_COLUMN_VALUES:,} are read")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES) -> Any:
    """What a JSON file says."""
    return parse_json(read_text(path, max_bytes))
