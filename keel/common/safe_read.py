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

LARGEST = 64 * 2**20
"""Bytes. Settings, manifests and indexes have a few thousand; the index of a very large model has some megabytes."""
VALUES = 2**27
"""Of one column of a parquet file: tokens of a step."""


def read_text(path: Path, limit: int = LARGEST) -> str:
    """The text of a file in UTF-8."""
    # without O_NONBLOCK opening a pipe that nobody writes to would wait for ever
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return data.decode("utf-8-sig")


def check_values(path: Path, metadata: Any) -> None:
    """Refuse a parquet file, by its metadata, that unfolds to more values than a step of a run can have.

    A few kilobytes of it can stand for any number of equal values.
    """
    for place in range(metadata.num_columns):
        count = sum(metadata.row_group(group).column(place).num_values for group in range(metadata.num_row_groups))
        if count > VALUES:
            raise KeelError(f"{path}: column {place} has {count:,} values; at most {VALUES:,} are read")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, limit: int = LARGEST) -> Any:
    """What a JSON file says."""
    return parse_json(read_text(path, limit))
