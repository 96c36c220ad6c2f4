"""Make the C allocator retain freed memory, so that new tensors do not have to request it from the kernel again.

A training step on CPU frees and allocates gigabytes; by default glibc returns each large block to the kernel
immediately, and allocating it again costs a page fault and a cleared page per 4 KiB. Results are unchanged; only the
step time and the memory held between steps differ. Outside Linux with glibc this is a no-op.
"""

import ctypes
import platform
import sys

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_NEVER = -1
# one arena: arenas of threads other than the first retain blocks of up to 64 MiB only, which made a step in a separate
# thread next to an engine a fifth slower
_RETAIN_OPTIONS = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: 256 * 2**20, _M_ARENA_MAX: 1}
_GLIBC_DEFAULTS = {
    _M_MMAP_MAX: 65536,
    _M_MMAP_THRESHOLD: 128 * 2**10,
    _M_TRIM_THRESHOLD: 128 * 2**10,
    _M_TOP_PAD: 128 * 2**10,
    _M_ARENA_MAX: 0,
}


def retain_freed_memory(enabled: bool = True) -> bool:
    """Start or stop retaining freed memory; return True if the allocator accepted all options.

    Call it before the training threads start, because a thread stays with its first arena. Disabling restores glibc's
    default values and returns free memory to the kernel, but not glibc's dynamic thresholds, which any mallopt call
    disables permanently.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # a list, so that every option is set even if an earlier one is rejected
    accepted = [
        libc.mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1
        for name, value in (_RETAIN_OPTIONS if enabled else _GLIBC_DEFAULTS).items()
    ]
    if not enabled:
        libc.malloc_trim(ctypes.c_size_t(0))
    return all(accepted)
