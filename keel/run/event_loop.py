"""Running a coroutine to its end, by time that counts, without being held up by what it leaves behind.

Time in which the process was stopped (a signal, a frozen machine) does not count: a timeout is for what takes long, and
nothing takes long while nothing runs. Tasks that go on after they were cancelled, as episodes of a careless environment
may, have a moment to end and are then left; `asyncio.run` would wait for them for ever.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

CANCEL_GRACE = 5.0
"""Seconds for tasks that were cancelled."""
MAX_WAIT, SUSPEND_THRESHOLD = 1.0, 4.0
"""Seconds that one wait lasts at most, and by how much it must be late to say that the process was stopped."""


class SuspendAwareSelector(selectors.DefaultSelector):
    """Waits in slices, and finds out how long the process was stopped meanwhile."""

    suspended_seconds = 0.0
    """Seconds, in all."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            wait = MAX_WAIT if end is None else min(max(end - began, 0.0), MAX_WAIT)
            ready = super().select(wait)
            late = time.monotonic() - began - wait
            if late > SUSPEND_THRESHOLD:
                self.suspended_seconds += late
                return ready  # the loop looks at its clock again
            if ready or (end is not None and time.monotonic() >= end):
                return ready


class SuspendAwareLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while the process is stopped."""

    def __init__(self) -> None:
        self._suspend_selector = SuspendAwareSelector()
        super().__init__(self._suspend_selector)

    def time(self) -> float:
        return super().time() - self._suspend_selector.suspended_seconds


def run_to_completion(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What the coroutine returns or raises, in an event loop of its own."""
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
        loop.set_exception_handler(lambda *_: None)  # that they are pending when they are thrown away is known
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
