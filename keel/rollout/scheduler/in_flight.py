"""Rollouts in flight: one asyncio task per rollout, and a watchdog for tasks that never return.

All tasks have the same time limit, so the oldest task always expires first and one timer is enough.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from keel.rollout.scheduler.groups import DropReason, RolloutSlot

TaskResult = tuple[Any, DropReason | None, str | None, int | None]
"""The rollout of a task, its error kind, its error message and its oldest version."""


def read_result(task: asyncio.Future[Any]) -> TaskResult:
    """Return the rollout of a finished task, its error kind, its error message and its oldest version.

    An exception that escapes from the runner is the rollout's error.
    """
    if task.cancelled():
        return None, "exception", "CancelledError: the rollout's task was cancelled from outside the scheduler", None
    raised = task.exception()
    if raised is not None:
        return None, "exception", f"{type(raised).__name__}: {raised}", None
    return _read_rollout(task.result())


def read_group_results(task: asyncio.Future[Any], unscored: Sequence[Any]) -> list[TaskResult]:
    """Return one result per rollout of a task that scored a group; `unscored` are its rollouts before it.

    An exception that escapes from the scorer, or a wrong number of rollouts, is the error of every rollout.
    """
    if not task.cancelled() and task.exception() is None:
        rollouts = list(task.result())
        if len(rollouts) == len(unscored):
            return [_read_rollout(rollout) for rollout in rollouts]
        kind, error = "exception", f"{len(rollouts)} rollouts were returned for a group of {len(unscored)}"
    else:
        _, failed, message, _ = read_result(task)
        kind, error = failed or "exception", message or ""
    return [(rollout, kind, error, None) for rollout in unscored]


def _read_rollout(rollout: Any) -> TaskResult:
    try:
        kind: DropReason | None = rollout.error_kind
        return rollout, kind, *((None, rollout.oldest_version) if kind is None else (rollout.error, None))
    except Exception as error:  # noqa: BLE001 - the object is not a rollout
        return None, "exception", f"the runner did not return a rollout: {error}", None


class InFlightTasks:
    """Running tasks and their slots, in the order they were launched.

    A cancelled task stays in flight until it has ended, so that `max_in_flight` also bounds tasks being cancelled; only
    the watchdog abandons one earlier. `on_done` is called once for each task that ends, `on_timeout` for each abandoned
    one.
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
        """The number of tasks that the watchdog abandoned and that have not ended."""
        return len(self._abandoned)

    @property
    def oldest(self) -> tuple[RolloutSlot, float] | None:
        """The slot that was launched first, and its seconds in flight."""
        for task, slot in self._slots.items():
            return slot, task.get_loop().time() - slot.started
        return None

    @property
    def cancelling(self) -> int:
        """The number of tasks that were cancelled and have not ended."""
        return sum(slot.group.state != "open" for slot in self._slots.values())

    def launch(self, slot: RolloutSlot, rollout: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(rollout)
        loop = task.get_loop()
        slot.task, slot.started = task, loop.time()
        self._slots[task] = slot
        task.add_done_callback(self._on_task_done)
        if self._timeout is not None and self._timer is None:
            self._timer = loop.call_later(self._timeout, self._check_timeouts)

    async def drain(self, grace: float) -> None:
        """Wait up to `grace` seconds for all tasks to end; the caller has cancelled them."""
        tasks = {*self._slots, *self._abandoned}
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_task_done(self, task: asyncio.Future[Any]) -> None:
        slot = self._slots.pop(task, None)
        if slot is not None:
            self._on_done(slot, task)
        else:
            self._abandoned.discard(task)
            read_result(task)  # retrieves the exception, which asyncio would otherwise log

    def _check_timeouts(self) -> None:
        """Abandon all expired tasks, and set the timer for the next one."""
        self._timer = None
        assert self._timeout is not None
        while self._slots:
            task, slot = next(iter(self._slots.items()))
            loop = task.get_loop()
            if slot.started + self._timeout > loop.time():
                self._timer = loop.call_at(slot.started + self._timeout, self._check_timeouts)
                return
            del self._slots[task]
            if task.done():  # it ended in this iteration of the event loop
                self._on_done(slot, task)
            else:
                self._abandoned.add(task)
                task.cancel()
                self._on_timeout(slot)
