"""Release the OpenMP worker threads that a thread keeps after it finishes computing.

Every thread that runs parallel work gets its own worker threads and keeps them. When a process has more worker threads
than cores, OpenMP stops spinning and puts them to sleep, and each small matrix product has to wake them: an engine used
only 1.3 of two cores next to an idle trainer. So a thread that finished computing and now waits releases its workers.
The next product then has to start threads again. Without an OpenMP library this is a no-op.
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
    """Release the OpenMP worker threads of the calling thread. They must be idle."""
    with suppress(AttributeError, OSError):  # no OpenMP, or a version before 5.0
        ctypes.CDLL(None).omp_pause_resource_all(ctypes.c_int(_OMP_PAUSE_SOFT))


class OpenMPReleasingExecutor(ThreadPoolExecutor):
    """A thread pool whose threads release their OpenMP workers after each call: another thread may run the next one."""

    def submit(self, fn: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> Future[ResultT]:
        def call_and_release() -> ResultT:
            try:
                return fn(*args, **kwargs)
            finally:
                release_openmp_threads()

        return super().submit(call_and_release)
