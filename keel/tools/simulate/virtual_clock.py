"""An event loop with a virtual clock: hours of timers pass in the time that their callbacks take to run.

Time moves only when no callback is ready, and then jumps to the next timer, so a program gives the same order of events
each time. When no callback is ready and no timer is set, an ordinary loop would wait indefinitely; this one raises
`Deadlock`. Files, sockets, signals and threads are not supported.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Deadlock(RuntimeError):
    """Raised when every task waits and no timer is set."""


class _VirtualSelector:
    """Replaces a selector: instead of waiting it advances the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"all tasks wait and no timer is set at virtual time {self.now}")
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
        """Timers this close count as due. It must exceed the float resolution, or a late timer would never be due."""
        return max(1e-9, 4 * math.ulp(self._selector.now))

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """Ignore the resolution of the machine's clock, which the base class sets."""

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_virtually(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `main` in a new virtual loop and return its result. An exception in any callback is raised here."""
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
