"""An event loop whose clock jumps: hours of timers pass in as long as their callbacks take.

Time moves only when nothing is left to run, and then straight to the next timer, so that the same program gives the
same order of events each time. When nothing is left to run and no timer is set, an ordinary loop would wait for ever;
this one raises `Deadlock`. It has no files, sockets, signals or threads.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Deadlock(RuntimeError):
    """Everybody waits for somebody else."""


class _VirtualSelector:
    """In place of a selector: it waits by moving the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"nothing left to wait for at {self.now}")
        self.now += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times."""

    def __init__(self) -> None:
        self._selector = _VirtualSelector()
        super().__init__()

    def time(self) -> float:
        return self._selector.now

    @property
    def _clock_resolution(self) -> float:
        """Timers this close count as due: more than a float can tell apart, or late ones would never be."""
        return max(1e-9, 4 * math.ulp(self._selector.now))

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """That of the machine's own clock, which is not looked at."""

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_virtually(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `main`, in a loop of its own. What any callback raised is raised here."""
    loop = VirtualLoop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: problems.append(context))
    try:
        result = loop.run_until_complete(main)
        if problems:
            raise RuntimeError(problems)
        return result
    finally:
        leftover = asyncio.all_tasks(loop)
        for task in leftover:
            task.cancel()
        if leftover:
            loop.run_until_complete(asyncio.wait(leftover, timeout=1000))
        loop.close()
