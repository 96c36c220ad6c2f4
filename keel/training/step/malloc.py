"""Tell the C allocator to keep the memory that tensors free, so that the next tensor need not ask the kernel again.

A training step on CPU frees and takes back gigabytes; by default glibc returns each large block to the kernel at once,
and taking it back costs a page fault and a cleared page per 4 KiB. It changes no result, only time and the
memory that the process holds on to between steps. On other systems than Linux with glibc it does nothing.
"""

import ctypes
import platform
import sys

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = -1
# one arena: those of other threads than the first hold blocks of up to 64 MiB and hand back all that is larger, so that
# a step in a thread of its own, beside an engine, took a fifth longer
_RETAIN_OPTIONS = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: 256 * 2**20, _M_ARENA_MAX: 1}
_GLIBC_DEFAULTS = {
    _M_MMAP_MAX: 65536,
    _M_MMAP_THRESHOLD: 128 * 2**10,
    _M_TRIM_THRESHOLD: 128 * 2**10,
    _M_TOP_PAD: 128 * 2**10,
    _M_ARENA_MAX: 0,
}


def retain_freed_memory(enabled: bool = True) -> bool:
    """Keep freed memory, or stop keeping it; True when the allocator took the settings.

    Call it before the threads that train begin: a thread stays with the arena that it began with. Off restores glibc's
    default values and returns what is free to the kernel, but not glibc's habit of adapting its thresholds to the
    program, which any setting turns off for good.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # every one is set even when one is refused, so no `all` over a generator
    taken = [
        libc.mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1
        for name, value in (_RETAIN_OPTIONS if enabled else _GLIBC_DEFAULTS).items()
    ]
    if not enabled:
        libc.malloc_trim(ctypes.c_size_t(0))
    return all(taken)
