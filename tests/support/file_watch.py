"""Detect any file access in a folder with inotify, for tests with hostile input."""

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
    """Fail if anything in these folders is opened, read, changed, added or removed during the block.

    inotify also sees native readers (C, Rust), not only Python's.
    """
    handle = _LIBC.inotify_init1(os.O_NONBLOCK)
    assert handle >= 0, os.strerror(ctypes.get_errno())
    try:
        for folder in folders:
            for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
                mask = _ACCESS | _MODIFY | _MOVED | _CREATE | _DELETE | _OPEN
                assert _LIBC.inotify_add_watch(handle, os.fsencode(path), mask) >= 0
        yield
        assert _accessed_names(handle) == []
    finally:
        os.close(handle)


def _accessed_names(handle: int) -> list[str]:
    try:
        data = os.read(handle, 1 << 20)
    except BlockingIOError:
        return []
    names, offset = [], 0
    while offset < len(data):
        _, mask, _, size = struct.unpack_from("iIII", data, offset)
        names.append(f"{data[offset + 16 : offset + 16 + size].rstrip(bytes(1)).decode()} ({mask:#x})")
        offset += 16 + size
    return names
