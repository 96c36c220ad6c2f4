"""What is in flight: one asyncio task for each rollout, and a watchdog for those that never come back.

All tasks have the same time limit, so the oldest one is always the first to be due and one timer is enough.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from keel.rollout.scheduler.groups import Reason, Seat


def read(task: asyncio.Future[Any]) -> tuple[Any, Reason | None, str | None, int | None]:
    """The rollout of a task that has ended, its error kind, its error, and its oldest version.

    Whatever escapes from a runner is its rollout's error.
    """
    if task.cancelled():
        return None, "exception", "CancelledError: whatever ran it was cancelled from outside", None
    error = task.exception()
    if error is not None:
        return None, "exception", f"{type(error).__name__}: {error}", None
    rollout = task.result()
    try:
        kind: Reason | None = rollout.error_kind
        return rollout, kind, *((None, rollout.oldest_version) if kind is None else (rollout.error, None))
    except Exception as missing:  # noqa: BLE001 - whatever it is, it is no rollout
        return None, "exception", f"the runner returned no rollout: {missing}", None


class Flights:
    """Tasks that run, each with the seat it runs for, in the order they were launched.

    A task that is cancelled stays in flight until it has really ended, so that the bound on them is honest; only the
    watchdog gives it up before. `landed` is called once for each task that ends, `lost` for each given up.
    """

    def __init__(
        self,
        limit: float | None,
        landed: Callable[[Seat, asyncio.Future[Any]], None],
        lost: Callable[[Seat], None],
    ) -> None:
        self._limit = limit
        self._on_landed, self._on_lost = landed, lost
        self._seats: dict[asyncio.Future[Any], Seat] = {}
        self._given_up: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def given_up(self) -> int:
        """Tasks that the watchdog gave up and that still have not ended."""
        return len(self._given_up)

    @property
    def oldest(self) -> tuple[Seat, float] | None:
        """The seat that was launched first, and how many seconds ago."""
        for task, seat in self._seats.items():
            return seat, task.get_loop().time() - seat.started
        return None

    @property
    def cancelling(self) -> int:
        """Tasks that were cancelled and have not ended yet."""
        return sum(seat.group.state != "open" for seat in self._seats.values())

    def launch(self, seat: Seat, rollout: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(rollout)
        loop = task.get_loop()
        seat.task, seat.started = task, loop.time()
        self._seats[task] = seat
        task.add_done_callback(self._landed)
        if self._limit is not None and self._timer is None:
            self._timer = loop.call_later(self._limit, self._look)

    async def end(self, grace: float) -> None:
        """Wait for all tasks, which were cancelled, to end."""
        tasks = {*self._seats, *self._given_up}
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _landed(self, task: asyncio.Future[Any]) -> None:
        seat = self._seats.pop(task, None)
        if seat is not None:
            self._on_landed(seat, task)
        else:
            self._given_up.discard(task)
            read(task)

    def _look(self) -> None:
        """Give up all that is due, then sleep until the next one is."""
        self._timer = None
        assert self._limit is not None
        while self._seats:
            task, seat = next(iter(self._seats.items()))
            loop = task.get_loop()
            if seat.started + self._limit > loop.time():
                self._timer = loop.call_at(seat.started + self._limit, self._look)
                return
            del self._seats[task]
            if task.done():  # in this very turn of the loop
                self._on_landed(seat, task)
            else:
                self._given_up.add(task)
                task.cancel()
                self._on_lost(seat)
