"""For tests with hostile input: a watch that sees every file opened in a folder, whoever opens it and however."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_ACCESS, _MODIFY, _MOVED, _CREATE, _DELETE, _OPEN = 0x1, 0x2, 0xC0, 0x100, 0x200, 0x20


@contextmanager
def untouched(*folders: Path) -> Iterator[None]:
    """Fails when anything in these folders was opened, read, changed, added or removed while the block ran.

    The kernel tells (inotify), so that readers in C and Rust are seen as well as Python's own.
    """
    handle = _LIBC.inotify_init1(os.O_NONBLOCK)
    assert handle >= 0, os.strerror(ctypes.get_errno())
    try:
        for folder in folders:
            for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
                mask = _ACCESS | _MODIFY | _MOVED | _CREATE | _DELETE | _OPEN
                assert _LIBC.inotify_add_watch(handle, os.fsencode(path), mask) >= 0
        yield
        assert _names(handle) == []
    finally:
        os.close(handle)


def _names(handle: int) -> list[str]:
    try:
        data = os.read(handle, 1 << 20)
    except BlockingIOError:
        return []
    names, place = [], 0
    while place < len(data):
        _, mask, _, size = struct.unpack_from("iIII", data, place)
        names.append(f"{data[place + 16 : place + 16 + size].rstrip(bytes(1)).decode()} ({mask:#x})")
        place += 16 + size
    return names
