"""Threads that OpenMP keeps for a thread that has computed, given back.

Every thread that runs parallel work gets helpers of its own, which it keeps. When there are more helpers in a process
than it has cores, the library lets none of them wait actively any more, and each small product then wakes sleeping
threads: an engine decoded at 1.3 of two cores beside a trainer that was not even working. So whoever has computed and
now waits gives its helpers back. Costs the start of threads at the next product; does nothing without such a library.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

_OMP_PAUSE_SOFT = 1

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def release_openmp_threads() -> None:
    """Give back the helpers of the thread that calls; they must not be at work."""
    with suppress(AttributeError, OSError):  # no OpenMP, or one from before 5.0
        ctypes.CDLL(None).omp_pause_resource_all(ctypes.c_int(_OMP_PAUSE_SOFT))


class OpenMPReleasingExecutor(ThreadPoolExecutor):
    """Threads that give their helpers back after each piece of work: the next may be done by another one."""

    def submit(self, fn: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> Future[ResultT]:
        def released() -> ResultT:
            try:
                return fn(*args, **kwargs)
            finally:
                release_openmp_threads()

        return super().submit(released)
