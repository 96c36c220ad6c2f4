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

Done = TypeVar("Done")

MOMENT = 5.0
"""Seconds for tasks that were cancelled."""
SLICE, STOPPED = 1.0, 4.0
"""Seconds that one wait lasts at most, and by how much it must be late to say that the process was stopped."""


class Selector(selectors.DefaultSelector):
    """Waits in slices, and finds out how long the process was stopped meanwhile."""

    stopped = 0.0
    """Seconds, in all."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            wait = SLICE if end is None else min(max(end - began, 0.0), SLICE)
            ready = super().select(wait)
            late = time.monotonic() - began - wait
            if late > STOPPED:
                self.stopped += late
                return ready  # the loop looks at its clock again
            if ready or (end is not None and time.monotonic() >= end):
                return ready


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while the process is stopped."""

    def __init__(self) -> None:
        self._clock = Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return super().time() - self._clock.stopped


def complete(work: Coroutine[Any, Any, Done]) -> Done:
    """What the coroutine returns or raises, in an event loop of its own."""
    loop = Loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        try:
            _end(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=MOMENT))
    if any(not task.done() for task in tasks):
        loop.set_exception_handler(lambda *_: None)  # that they are pending when they are thrown away is known
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
