"""The scheduler: groups of rollouts go out, batches come back, and every rollout is accounted for.

It decides what to run next, what to try again, what to give up and what a batch is made of. It runs nothing itself: a
rollout is one call of `run`, in one asyncio task, and all that is read of its result is the error kind and the oldest
version. It stores nothing either: `snapshot` gives plain data for the caller to write down together with the batch.
Everything happens in one event loop, in time that does not grow with the number of rollouts; nothing is polled.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Self

from keel.config import SchedulerSettings
from keel.errors import KeelError, StorageError
from keel.rollout.scheduler.accounts import RolloutBatch, SchedulerAccounts, SchedulerClosed, TasksExhausted
from keel.rollout.scheduler.group_queue import GroupQueue
from keel.rollout.scheduler.groups import (
    DroppedRollout,
    DropReason,
    PendingGroup,
    RolloutLike,
    RolloutRequest,
    RolloutSlot,
)
from keel.rollout.scheduler.in_flight import InFlightTasks, read_result
from keel.rollout.scheduler.state import RolloutLookup, dump_state, load_state
from keel.rollout.scheduler.status import SchedulerStatus
from keel.rollout.scheduler.task_sources import TaskSampler, TaskSource

RETRY_BACKOFF, MAX_RETRY_BACKOFF = 0.1, 30.0
"""Seconds before a second retry, doubled for each one after, up to the longest: a failure that comes back at once, for
ever, would otherwise keep a core busy. The first retry is not delayed."""


class Scheduler:
    """Cuts batches of `settings.groups` groups of `settings.group_size` rollouts each.

    Invariant: every rollout dispatched, named by (group, member, attempt), is emitted exactly once: as a member of a
    group in `Batch.groups`, or as a `Refusal` with a reason in `Batch.refused` (or from `take_refused` or `close`),
    whatever fails and in whatever order. A restart goes back to a snapshot, and what happened after it is undone: if
    batches are written down together with the snapshot taken right after them, the invariant holds across restarts too.

    - Retries. A member that fails is tried again at once, as the next attempt. Round r of a group are the r-th tries of
      all its members, so `max_error_reschedule_attempts` = 1 is one retry for each member that needs it. A member that
      fails when no attempt is left stays failed. Once fewer than `min_group_size` (without that setting: all) can still
      succeed, the group is dropped, what it has in flight is cancelled, and its place in the batch stays empty.
    - Batches. Groups leave by the window rule of `Line`. A batch is complete when `groups` of them are resolved, to be
      trained on or dropped; it has fewer only when tasks run out.
    - Staleness. A group of which the oldest token is more than `max_off_policy_steps` behind the version that
      `next_batch` was asked with is refused, and a new task takes its place at the end of the line; or all of it is
      sampled again and it keeps its place. If it was begun when the trainer already had this version, the engine lags
      and waiting does not help: it is refused, and its place in the batch stays empty.
    - Work ahead. With k = `max_off_policy_steps`, at most k batches of groups wait or are under way between two calls,
      since more could only become stale, and one batch more during a call. For each version that the engines are known
      to be behind (`live`) it is one batch less: what is begun now is that much older when it is cut. k = 0 is
      synchronous: only what the next batch needs is dispatched, and a batch is cut when nothing is in flight; which
      rollouts it holds depends on their outcomes alone, not on time.
    - Memory: what is in line, what is in flight, and refusals until they are emitted. Where retries may go on for ever,
      empty those with `take_refused` from time to time.
    """

    def __init__(
        self,
        run: Callable[[RolloutRequest], Awaitable[RolloutLike]],
        sources: Iterable[TaskSource],
        settings: SchedulerSettings | None = None,
    ) -> None:
        self.settings = settings = settings or SchedulerSettings()
        self._run_rollout = run
        self._task_sampler = TaskSampler(sources)
        self._group_queue = GroupQueue(settings.groups_per_step, settings.window_batches)
        self._in_flight = InFlightTasks(settings.rollout_timeout, self._on_done, self._on_timeout)
        self._slot_queue: list[tuple[int, int, RolloutSlot]] = []
        self._new_slots: list[RolloutSlot] = []
        """Seats of the newest group that were never dispatched, the next one last."""
        self._min_valid = settings.min_group_size or settings.group_size
        self._next_group_number = 0
        self._trainer_version = 0
        self._engine_version: int | None = None
        """Of the engines, where somebody tells."""
        self._batch_requested = self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._accounts = SchedulerAccounts()
        self.completed = 0
        """Rollouts that ended well: grows as long as there is progress."""

    # -- what callers use ---------------------------------------------------------------------------------------------

    async def next_batch(self, version: int) -> RolloutBatch:
        """The next batch, for a trainer that holds weights `version`.

        May be cancelled at any time, and loses nothing by it: what is under way goes on. Raises `NothingToTrain` after
        `halt_after` empty batches in a row, `Exhausted` when tasks have run out and `Closed` after `close`.
        """
        self._begin_call(version)
        try:
            while (batch := self._try_cut_batch()) is None:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            self._batch_requested, self._waiter = False, None
        self._accounts.check_empty_batches(batch, self.settings.max_empty_steps)
        return batch

    def set_engine_version(self, version: int) -> None:
        """The engines sample with this version from now on. Who never says so is taken to keep up."""
        before, self._engine_version = self._engine_version, version
        if before is not None:
            self._fill_in_flight()

    def find_group(self, group_id: str) -> PendingGroup | None:
        """A group that is not yet cut, by its id."""
        return self._group_queue.get(group_id)

    def drain_dropped(self) -> list[DroppedRollout]:
        """Emit what was refused so far now, instead of with the next batch."""
        return self._accounts.drain()

    def status(self) -> SchedulerStatus:
        """What is under way and what is waited for; takes time proportional to both."""
        settings = self.settings
        return SchedulerStatus.collect(
            self._group_queue,
            self._in_flight,
            waiting=self._batch_requested,
            groups_per_step=settings.groups_per_step,
            exhausted=self._task_sampler.exhausted,
            last_error=self._accounts.last_error,
        )

    async def close(self, grace: float = 10.0) -> list[DroppedRollout]:
        """Cancel everything, and emit all that was not: each rollout that is in flight or in line as "run_ended".

        Waits until what was cancelled has ended, at most `grace` seconds. Closing twice is harmless, and gives what is
        left if the first call was itself cancelled.
        """
        self._closed = True
        for group in list(self._group_queue):
            self._drop_group(group, "run_ended")
            group.clear("gone")
            self._group_queue.remove(group)
        self._slot_queue, self._new_slots = [], []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        await self._in_flight.drain(grace)
        return self._accounts.drain()

    def snapshot(self) -> dict[str, Any]:
        """All there is to go on from here later, as JSON-able data; rollouts are in it by name only."""
        return {
            "number": self._next_group_number,
            "empty_batches": self._accounts.empty_batches,
            "reasons": dict(self._accounts.reasons),
            "counts": dict(self._accounts.counts),
            "positions": dict(self._task_sampler.positions),
            **dump_state(self._group_queue, self._accounts.dropped),
        }

    @classmethod
    def restore(
        cls,
        snapshot: Mapping[str, Any],
        run: Callable[[RolloutRequest], Awaitable[RolloutLike]],
        sources: Iterable[TaskSource],
        settings: SchedulerSettings | None = None,
        *,
        lookup: RolloutLookup | None = None,
    ) -> Self:
        """Go on from a snapshot: the same groups in the same places, the same tasks after them.

        A rollout that had ended, before the snapshot or after it, is used if `recall` gives it back. Any other that was
        dispatched is refused as "interrupted" and dispatched anew as the next attempt, without using up a retry. Sources
        must give the same tasks again.
        """
        scheduler = cls(run, sources, settings)
        ledger = scheduler._accounts
        groups, ledger.dropped = load_state(snapshot, scheduler._task_sampler, lookup)
        scheduler._next_group_number, ledger.empty_batches = snapshot["number"], snapshot["empty_batches"]
        ledger.reasons, ledger.counts = Counter(snapshot["reasons"]), Counter(snapshot["counts"])
        for group in groups:
            scheduler._group_queue.append(group)
            for seat in group.slots:
                if seat.state == "in_flight":
                    ledger.record_drop(seat.to_dropped("interrupted"))
                    seat.requeue(reset_failures=False)
                if seat.state == "queued":
                    scheduler._enqueue(seat)
        return scheduler

    # -- what a batch is made of --------------------------------------------------------------------------------------

    def _begin_call(self, version: int) -> None:
        if self._batch_requested:
            raise KeelError("next_batch is already waiting; one caller at a time")
        if self._closed:
            raise SchedulerClosed("the scheduler is closed; it gives no more batches")
        self._batch_requested, self._trainer_version = True, version

    def _try_cut_batch(self) -> RolloutBatch | None:
        """A batch if the line holds one. There is no await between taking and returning it, so none is ever lost."""
        while True:
            self._fill_in_flight()
            if self._closed:
                raise SchedulerClosed("the scheduler was closed while a batch was waited for")
            if self._failure is not None:
                raise self._failure
            if self.settings.max_off_policy_steps == 0 and self._in_flight:
                self._group_queue.invalidate()
                return None
            count = (
                min(self.settings.groups_per_step, len(self._group_queue))
                if self._task_sampler.exhausted
                else self.settings.groups_per_step
            )
            chosen = self._group_queue.select(count)
            if chosen is None:
                return None
            renewed = sum(self._handle_stale(group) for group in chosen if self._is_stale(group))
            if not renewed:
                break
        if not chosen and not self._accounts.dropped:
            raise TasksExhausted(
                "all tasks are used up and every rollout has been emitted; give the sources more tasks"
            )
        self._group_queue.pop(chosen)
        groups = [group.to_group() for group in chosen if group.state == "ready"]
        for group in chosen:
            group.clear("gone")
        return self._accounts.close_batch(self._trainer_version, groups, capacity=len(chosen))

    def _is_stale(self, group: PendingGroup) -> bool:
        if group.state != "ready" or group.oldest_version is None:
            return False
        return self._trainer_version - group.oldest_version > self.settings.max_off_policy_steps

    def _handle_stale(self, group: PendingGroup) -> bool:
        """Refuse a stale group, and say whether another, or itself again, is to take its place."""
        self._accounts.counts["groups_stale"] += 1
        lagging = group.version >= self._trainer_version
        self._drop_group(group, "stale")
        if lagging:
            group.clear("dropped")
            return False
        if self.settings.on_stale == "drop":
            group.clear("gone")
            self._group_queue.remove(group)
            return True
        self._accounts.counts["groups_resampled"] += 1
        group.restart(self._trainer_version)
        for seat in group.slots:
            seat.requeue(reset_failures=True)
            self._enqueue(seat)
        return True

    # -- what is dispatched -------------------------------------------------------------------------------------------

    def _fill_in_flight(self) -> None:
        """Dispatch until nothing more may be in flight: what is queued first, the oldest group first."""
        flights, queue, limit = self._in_flight, self._slot_queue, self.settings.max_in_flight
        while len(flights) < limit:
            if queue:
                seat = heapq.heappop(queue)[2]
            elif self._new_slots:
                seat = self._new_slots.pop()
            elif self._open_group():
                continue
            else:
                break
            if seat.group.state == "open":
                self._launch(seat)

    def _open_group(self) -> bool:
        """Begin a new group, if the line has room and there are tasks."""
        behind = 0 if self._engine_version is None else max(self._trainer_version - self._engine_version, 0)
        ahead = max(self.settings.max_off_policy_steps - behind, 0) + self._batch_requested
        if (
            self._closed
            or self._failure
            or self._task_sampler.exhausted
            or len(self._group_queue) >= ahead * self.settings.groups_per_step
        ):
            return False
        try:
            drawn = self._task_sampler.next_task()
            if drawn is None:
                self._group_queue.invalidate()
                return False
            size = self.settings.group_size
            group = PendingGroup(
                self._next_group_number, drawn.environment, drawn.task_index, drawn.task, size, self._trainer_version
            )
        except Exception as error:  # noqa: BLE001 - next_batch raises it: an environment without tasks is no rollout's error
            self._failure = error
            return False
        self._next_group_number += 1
        self._group_queue.append(group)
        self._new_slots = group.slots[::-1]
        return True

    def _launch(self, slot: RolloutSlot) -> None:
        slot.state = "in_flight"
        self._accounts.counts["dispatched"] += 1
        try:
            self._in_flight.launch(slot, self._run_rollout(slot.to_request()))
        except Exception as error:  # noqa: BLE001 - a runner that cannot even begin has failed like any other
            self._on_failure(slot, None, "exception", f"{type(error).__name__}: {error}")

    def _enqueue(self, slot: RolloutSlot) -> None:
        heapq.heappush(self._slot_queue, (slot.group.number, slot.member, slot))

    # -- what comes back ----------------------------------------------------------------------------------------------

    def _on_done(self, slot: RolloutSlot, task: asyncio.Future[Any]) -> None:
        """A task has ended. If its group is gone, it was emitted when it was cancelled, and only its place is freed."""
        rollout, kind, error, version = read_result(task)
        if not task.cancelled() and isinstance(broken := task.exception(), StorageError):
            self._failure = broken  # no rollout's error: trying again would sample for ever and keep nothing
        if slot.group.state == "open":
            slot.task = None
            if kind is None:
                self._accounts.counts["succeeded"] += 1
                self.completed += 1
                slot.group.note_version(version)
                slot.finish(rollout)
                self._mark_ready_if_done(slot.group)
            else:
                self._on_failure(slot, rollout, kind, error)
        self._fill_in_flight()
        self._wake()

    def _on_timeout(self, slot: RolloutSlot) -> None:
        """The watchdog gave a task up; it may still run, but nobody waits for it."""
        if slot.group.state == "open":
            slot.task = None
            self._on_failure(
                slot,
                None,
                "timeout",
                f"no result after scheduler.rollout_timeout = {self.settings.rollout_timeout:g} s",
            )
        self._fill_in_flight()
        self._wake()

    def _on_failure(self, slot: RolloutSlot, rollout: Any, kind: DropReason, error: str | None) -> None:
        group, limit = slot.group, self.settings.max_error_reschedule_attempts
        self._accounts.counts["failed"] += 1
        slot.failures += 1
        if limit is None or slot.failures <= limit:
            self._accounts.record_drop(slot.to_dropped(kind, error, rollout))
            slot.requeue(reset_failures=False)
            if slot.failures > group.retry_rounds:
                group.retry_rounds = slot.failures
                self._accounts.counts["retry_rounds"] += 1
            self._schedule_retry(slot)
            return
        slot.finish(rollout, kind, error)
        if len(group.slots) - group.failed < min(self._min_valid, len(group.slots)):
            self._accounts.counts["groups_dropped"] += 1
            self._drop_group(group, "group_dropped")
            group.clear("dropped")
            self._group_queue.on_resolved(group)
        else:
            self._mark_ready_if_done(group)

    def _mark_ready_if_done(self, group: PendingGroup) -> None:
        if not group.pending:
            group.state = "ready"
            self._group_queue.on_resolved(group)

    def _schedule_retry(self, slot: RolloutSlot) -> None:
        if slot.failures == 1:
            self._enqueue(slot)
            return
        pause = min(RETRY_BACKOFF * 2 ** min(slot.failures - 2, 20), MAX_RETRY_BACKOFF)
        slot.timer = asyncio.get_running_loop().call_later(pause, self._retry_now, slot)

    def _retry_now(self, slot: RolloutSlot) -> None:
        slot.timer = None
        self._enqueue(slot)
        self._fill_in_flight()
        self._wake()

    def _drop_group(self, group: PendingGroup, reason: DropReason) -> None:
        """Emit all that a group has dispatched and not emitted; for this reason, unless it has one of its own."""
        for seat in group.slots:
            if seat.task is not None:
                self._accounts.record_drop(seat.to_dropped(reason))
                self._accounts.counts["cancelled"] += 1
                seat.task.cancel()
                seat.task = None
            elif seat.timer is not None:
                seat.timer.cancel()
                seat.timer = None
            elif seat.state == "done":
                self._accounts.record_drop(seat.to_dropped(seat.reason or reason, seat.error, seat.rollout))

    def _wake(self) -> None:
        """Let `next_batch` look again, if there may be something to see."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        at_rest = self.settings.max_off_policy_steps > 0 or not self._in_flight
        if self._failure is not None or (self._group_queue.may_have_batch and at_rest):
            waiter.set_result(None)
