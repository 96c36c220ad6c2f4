"""Run a coroutine to completion on an event loop that ignores suspended time and does not wait for leftover tasks.

Time in which the process was suspended does not count towards timeouts (see `keel.common.suspend_clock`). Tasks that
keep running after they were cancelled, as episodes of a careless environment may, get a grace period and are then
abandoned; `asyncio.run` would wait for them indefinitely.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from keel.common.suspend_clock import SuspendClock

ResultT = TypeVar("ResultT")

CANCEL_GRACE = 5.0
"""Seconds for cancelled tasks to finish."""
MAX_WAIT, SUSPEND_THRESHOLD = 1.0, 4.0
"""Longest single wait in seconds, and by how much it must be late to count as suspended."""


class SuspendAwareSelector(selectors.DefaultSelector):
    """Waits in slices and measures how long the process was suspended meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.suspend_clock = SuspendClock(SUSPEND_THRESHOLD)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            start = self.suspend_clock.start()
            wait = MAX_WAIT if end is None else min(max(end - start, 0.0), MAX_WAIT)
            ready = super().select(wait)
            if self.suspend_clock.poll(expected=wait):
                return ready  # the event loop then reads its clock again
            if ready or (end is not None and time.monotonic() >= end):
                return ready


class SuspendAwareLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while the process is suspended."""

    def __init__(self) -> None:
        self._suspend_selector = SuspendAwareSelector()
        super().__init__(self._suspend_selector)

    def time(self) -> float:
        return super().time() - self._suspend_selector.suspend_clock.suspended_seconds


def run_to_completion(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return or raise what the coroutine does, on a new event loop."""
    loop = SuspendAwareLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        try:
            _shut_down(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _shut_down(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_GRACE))
    if any(not task.done() for task in tasks):
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending" is expected here
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
