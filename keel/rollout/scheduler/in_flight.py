"""What is in flight: one asyncio task for each rollout, and a watchdog for those that never come back.

All tasks have the same time limit, so the oldest one is always the first to be due and one timer is enough.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from keel.rollout.scheduler.groups import DropReason, RolloutSlot


def read_result(task: asyncio.Future[Any]) -> tuple[Any, DropReason | None, str | None, int | None]:
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
        kind: DropReason | None = rollout.error_kind
        return rollout, kind, *((None, rollout.oldest_version) if kind is None else (rollout.error, None))
    except Exception as missing:  # noqa: BLE001 - whatever it is, it is no rollout
        return None, "exception", f"the runner returned no rollout: {missing}", None


class InFlightTasks:
    """Tasks that run, each with the seat it runs for, in the order they were launched.

    A task that is cancelled stays in flight until it has really ended, so that the bound on them is honest; only the
    watchdog gives it up before. `landed` is called once for each task that ends, `lost` for each given up.
    """

    def __init__(
        self,
        timeout: float | None,
        on_done: Callable[[RolloutSlot, asyncio.Future[Any]], None],
        on_timeout: Callable[[RolloutSlot], None],
    ) -> None:
        self._timeout = timeout
        self._on_done, self._on_timeout = on_done, on_timeout
        self._slots: dict[asyncio.Future[Any], RolloutSlot] = {}
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def abandoned(self) -> int:
        """Tasks that the watchdog gave up and that still have not ended."""
        return len(self._abandoned)

    @property
    def oldest(self) -> tuple[RolloutSlot, float] | None:
        """The seat that was launched first, and how many seconds ago."""
        for task, seat in self._slots.items():
            return seat, task.get_loop().time() - seat.started
        return None

    @property
    def cancelling(self) -> int:
        """Tasks that were cancelled and have not ended yet."""
        return sum(seat.group.state != "open" for seat in self._slots.values())

    def launch(self, slot: RolloutSlot, rollout: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(rollout)
        loop = task.get_loop()
        slot.task, slot.started = task, loop.time()
        self._slots[task] = slot
        task.add_done_callback(self._on_task_done)
        if self._timeout is not None and self._timer is None:
            self._timer = loop.call_later(self._timeout, self._check_timeouts)

    async def drain(self, grace: float) -> None:
        """Wait for all tasks, which were cancelled, to end."""
        tasks = {*self._slots, *self._abandoned}
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_task_done(self, task: asyncio.Future[Any]) -> None:
        seat = self._slots.pop(task, None)
        if seat is not None:
            self._on_done(seat, task)
        else:
            self._abandoned.discard(task)
            read_result(task)

    def _check_timeouts(self) -> None:
        """Give up all that is due, then sleep until the next one is."""
        self._timer = None
        assert self._timeout is not None
        while self._slots:
            task, seat = next(iter(self._slots.items()))
            loop = task.get_loop()
            if seat.started + self._timeout > loop.time():
                self._timer = loop.call_at(seat.started + self._timeout, self._check_timeouts)
                return
            del self._slots[task]
            if task.done():  # in this very turn of the loop
                self._on_done(seat, task)
            else:
                self._abandoned.add(task)
                task.cancel()
                self._on_timeout(seat)
