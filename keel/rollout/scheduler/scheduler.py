"""The rollout scheduler: dispatches groups of rollouts, cuts batches, and accounts for every rollout.

It decides what to dispatch, retry and drop, and which groups form a batch. It runs no rollout itself: a rollout is one
call of `run` in one asyncio task, and the scheduler reads only the error, the oldest version and, for pass rates, the
reward of the result. It stores nothing: `snapshot` and `drain_task_changes` return plain data for the caller to save
together with the batch. Everything happens in one event loop without polling, in time that does not grow with the
number of rollouts.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Self

from keel.config import SchedulerSettings
from keel.errors import FatalEnvironmentError, KeelError, StorageError
from keel.rollout.scheduler.accounts import (
    RolloutBatch,
    RolloutFailures,
    SchedulerAccounts,
    SchedulerClosed,
    TasksExhausted,
)
from keel.rollout.scheduler.group_queue import GroupQueue
from keel.rollout.scheduler.group_scoring import GroupScorer, GroupScoring
from keel.rollout.scheduler.groups import (
    DroppedRollout,
    DropReason,
    Group,
    PendingGroup,
    RolloutLike,
    RolloutRequest,
    RolloutSlot,
)
from keel.rollout.scheduler.in_flight import InFlightTasks, read_group_results, read_result
from keel.rollout.scheduler.pass_rates import TaskRecord
from keel.rollout.scheduler.state import RolloutLookup, dump_state, load_state
from keel.rollout.scheduler.status import SchedulerStatus
from keel.rollout.scheduler.task_sources import TaskChanges, TaskSampler, TaskSource

RETRY_BACKOFF, MAX_RETRY_BACKOFF = 0.1, 30.0
"""Seconds before the second retry, doubled for each further one up to the maximum: a rollout that always fails
immediately would otherwise keep a core busy. The first retry is not delayed."""


class Scheduler:
    """Cuts batches of `settings.groups_per_step` groups with `settings.group_size` rollouts each.

    A source may have its own group size; a batch then has as many groups, of different sizes.

    Invariant: every dispatched rollout, named by (group, member, attempt), is emitted exactly once, whatever fails and
    in whatever order: as a member of a group in `RolloutBatch.groups`, or as a `DroppedRollout` with a reason in
    `RolloutBatch.dropped` (or from `drain_dropped` or `close`). A restart returns to a snapshot and undoes what
    happened after it: if every batch is saved together with the snapshot taken right after it, the invariant also holds
    across restarts.

    - Retries. A failed member is retried immediately, as the next attempt. Round r of a group consists of the r-th
      tries of all its members, so `max_error_reschedule_attempts` = 1 is one retry for each member that needs it. A
      member that fails without attempts left, or in a way that will repeat (`RolloutSlot.count_failure`), stays failed.
      Once fewer than `min_group_size` members (default: all) can still succeed, the group is dropped, its rollouts in
      flight are cancelled, and its position in the batch stays empty.
    - Group rewards. With `score_group`, a group whose last rollout has ended stays open until its rewards are known. A
      member whose scoring fails has failed, and is retried like any other; then the group is scored again.
    - Batches. Groups are cut by the window rule of `GroupQueue`. A batch is complete when `groups_per_step` of them are
      resolved, to be trained on or dropped; it has fewer only when tasks run out.
    - Staleness. If a group's oldest token is more than `max_off_policy_steps` behind the version passed to
      `next_batch`, the group is dropped and a new task is appended to the queue, or (`on_stale`) the group is sampled
      again and keeps its position. If it was started when the trainer already had this version, the engine lags and
      resampling does not help: the group is dropped, and its position in the batch stays empty.
    - Refill. With `settings.refills`, a group for which `is_zero_variance` returns true is dropped and a new task is
      appended to the queue. This happens to at most `max_refilled_groups` groups for each batch; later ones are cut
      like other groups. In a synchronous run it is decided when nothing is in flight, in order of dispatch, so that it
      depends on outcomes alone; otherwise as soon as the group is complete.
    - Pass rates. When a batch is cut, its groups and those replaced for it are counted in the pass rates of their
      tasks, which decide the tasks of groups started later (`pass_rates`).
    - Work ahead. With k = `max_off_policy_steps`, at most k batches of groups are queued or in flight between two
      calls, since more would only become stale, and one more batch during a call. For each version that the engines are
      known to be behind (`set_engine_version`) it is one batch less: a group started now is that much older when it is
      cut. k = 0 is synchronous: only what the next batch needs is dispatched, and a batch is cut when nothing is in
      flight; its rollouts depend on their outcomes alone, not on timing.
    - Memory: queued groups, rollouts in flight, and dropped rollouts until they are emitted. With unlimited retries,
      call `drain_dropped` regularly.
    """

    def __init__(
        self,
        run: Callable[[RolloutRequest], Awaitable[RolloutLike]],
        sources: Iterable[TaskSource],
        settings: SchedulerSettings | None = None,
        *,
        is_zero_variance: Callable[[Group], bool] | None = None,
        score_group: GroupScorer | None = None,
    ) -> None:
        """`is_zero_variance` returns whether a complete group does not train; None: no group is replaced.

        `score_group` computes the rewards that depend on a whole group; None: rollouts have their final rewards.
        """
        self.settings = settings = settings or SchedulerSettings()
        self._run_rollout = run
        self._task_sampler = TaskSampler(sources)
        self._group_queue = GroupQueue(settings.groups_per_step, settings.window_batches)
        self._in_flight = InFlightTasks(settings.rollout_timeout, self._on_done, self._on_timeout)
        self._scoring = GroupScoring(score_group, self._on_group_scored)
        self._slot_queue: list[tuple[int, int, RolloutSlot]] = []
        self._new_slots: list[RolloutSlot] = []
        """Slots of the newest group that were never dispatched, in reverse order."""
        self._is_zero_variance = is_zero_variance
        self._next_group_number = 0
        self._trainer_version = 0
        self._engine_version: int | None = None
        """The version the engines sample with; None: not reported, engines are assumed current."""
        self._batch_requested = self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._accounts = SchedulerAccounts()
        self.completed = 0
        """The number of successful rollouts; grows as long as there is progress."""
        self.failed = 0
        """The number of failed attempts, retried or not."""

    # -- public interface ---------------------------------------------------------------------------------------------

    async def next_batch(self, version: int) -> RolloutBatch:
        """Return the next batch, for a trainer with weights of version `version`.

        Cancelling the call is safe: rollouts in flight continue and nothing is lost. Raises `NothingToTrain` after
        `max_empty_steps` consecutive empty batches, `TasksExhausted` when tasks have run out and `SchedulerClosed`
        after `close`.
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
        """Record the version the engines now sample with. If never called, engines are assumed current."""
        before, self._engine_version = self._engine_version, version
        if before is not None:
            self._fill_in_flight()

    def find_group(self, group_id: str) -> PendingGroup | None:
        """Return the queued group with this id, or None."""
        return self._group_queue.get(group_id)

    def drain_dropped(self) -> list[DroppedRollout]:
        """Return the rollouts dropped so far, instead of emitting them with the next batch."""
        return self._accounts.drain()

    def drain_task_changes(self) -> TaskChanges:
        """Return what batches changed about the tasks since the last call, to be saved with the snapshot."""
        return self._task_sampler.drain_changes()

    @property
    def failures(self) -> RolloutFailures:
        """Failed rollouts since the scheduler was created."""
        return self._accounts.failures

    def status(self) -> SchedulerStatus:
        """Return what is in progress; takes time proportional to the queue and the rollouts in flight."""
        settings = self.settings
        return SchedulerStatus.collect(
            self._group_queue,
            self._in_flight,
            scoring=len(self._scoring),
            waiting=self._batch_requested,
            groups_per_step=settings.groups_per_step,
            exhausted=self._task_sampler.exhausted,
            last_error=self._accounts.last_error,
        )

    async def close(self, grace: float = 10.0) -> list[DroppedRollout]:
        """Cancel everything and return all rollouts not emitted yet; those in flight or queued have reason "run_ended".

        So do those of groups that were replaced for a batch that was not cut. Waits at most `grace` seconds for
        cancelled tasks to end. Closing twice is safe, and returns the remaining rollouts if the first call was itself
        cancelled.
        """
        self._closed = True
        for group in list(self._group_queue):
            self._drop_group(group, "run_ended")
            group.clear("removed")
            self._group_queue.remove(group)
        self._slot_queue, self._new_slots = [], []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._task_sampler.discard_replaced()
        await asyncio.gather(self._in_flight.drain(grace), self._scoring.cancel(grace))
        return self._accounts.drain_at_end()

    def snapshot(self) -> dict[str, Any]:
        """Return the state needed to resume later, as JSON-serializable data; rollouts are included by name only."""
        return {
            "number": self._next_group_number,
            "empty_batches": self._accounts.empty_batches,
            "reasons": dict(self._accounts.reasons),
            "counts": dict(self._accounts.counts),
            "tasks": self._task_sampler.state(),
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
        task_records: Iterable[TaskRecord] = (),
        is_zero_variance: Callable[[Group], bool] | None = None,
        score_group: GroupScorer | None = None,
    ) -> Self:
        """Resume from a snapshot, with the same groups in the same positions and the same tasks after them.

        A rollout that ended before or after the snapshot is used if `lookup` returns it. Any other dispatched rollout
        is dropped as "interrupted" and dispatched again as the next attempt, without using up a retry. Sources must
        return the same tasks again. `task_records` are the last ones of each task that `drain_task_changes` returned up
        to the snapshot.
        """
        scheduler = cls(run, sources, settings, is_zero_variance=is_zero_variance, score_group=score_group)
        accounts = scheduler._accounts
        groups, accounts.dropped = load_state(snapshot, scheduler._task_sampler, lookup, task_records)
        scheduler._next_group_number, accounts.empty_batches = snapshot["number"], snapshot["empty_batches"]
        accounts.reasons, accounts.counts = Counter(snapshot["reasons"]), Counter(snapshot["counts"])
        for group in groups:
            scheduler._group_queue.append(group)
            if group.state == "ready":  # perhaps not scored before the snapshot
                scheduler._scoring.postpone(group)
            for slot in group.slots:
                if slot.state == "in_flight":
                    accounts.record_drop(slot.to_dropped("interrupted"))
                    slot.requeue(reset_failures=False)
                if slot.state == "queued":
                    scheduler._enqueue(slot)
        return scheduler

    # -- cutting batches ----------------------------------------------------------------------------------------------

    def _begin_call(self, version: int) -> None:
        if self._batch_requested:
            raise KeelError("another call of next_batch is waiting; only one caller at a time is allowed")
        if self._closed:
            raise SchedulerClosed("the scheduler is closed and returns no more batches")
        self._batch_requested, self._trainer_version = True, version
        self._scoring.start_postponed()

    def _try_cut_batch(self) -> RolloutBatch | None:
        """Return a batch if the queue holds one. Nothing is awaited in between, so a cancelled call loses no batch."""
        while True:
            self._fill_in_flight()
            if self._closed:
                raise SchedulerClosed("the scheduler was closed while next_batch was waiting")
            if self._failure is not None:
                raise self._failure
            if self.settings.max_off_policy_steps == 0 and (self._in_flight or self._scoring):
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
            num_replaced = sum(self._handle_stale(group) for group in chosen if self._is_stale(group))
            num_replaced += sum(self._replace_zero_variance(group) for group in chosen)
            if not num_replaced:
                break
        if not chosen and not self._accounts.dropped:
            raise TasksExhausted(
                "all tasks are used up and every rollout has been emitted; add tasks to the environments"
            )
        self._group_queue.pop(chosen)
        self._task_sampler.record_batch(chosen)
        groups = [group.to_group() for group in chosen if group.state == "ready"]
        for group in chosen:
            group.clear("removed")
        return self._accounts.close_batch(self._trainer_version, groups, capacity=len(chosen))

    def _is_stale(self, group: PendingGroup) -> bool:
        if group.state != "ready" or group.oldest_version is None:
            return False
        return self._trainer_version - group.oldest_version > self.settings.max_off_policy_steps

    def _handle_stale(self, group: PendingGroup) -> bool:
        """Drop a stale group's rollouts; return whether a new group or the resampled group replaces it."""
        self._accounts.counts["groups_stale"] += 1
        engine_lags = group.version >= self._trainer_version
        self._drop_group(group, "stale")
        if engine_lags:
            group.clear("dropped")
            return False
        if self.settings.on_stale == "drop":
            group.clear("removed")
            self._group_queue.remove(group)
            return True
        self._accounts.counts["groups_resampled"] += 1
        group.restart(self._trainer_version)
        for slot in group.slots:
            slot.requeue(reset_failures=True)
            self._enqueue(slot)
        return True

    def _replace_zero_variance(self, group: PendingGroup) -> bool:
        """Drop a complete group that does not train, if the batch may still be refilled; return whether it did.

        The count of replaced groups is part of the snapshot, so that a restart does not extend the limit.
        """
        counts = self._accounts.counts
        if (
            group.state != "ready"
            or self._is_zero_variance is None
            or counts["groups_refilled"] >= self.settings.max_refilled_groups
            or not self._is_zero_variance(group.to_group())
        ):
            return False
        counts["groups_refilled"] += 1
        self._task_sampler.record_replaced(group)
        self._drop_group(group, "zero_variance")
        group.clear("removed")
        self._group_queue.remove(group)
        return True

    # -- dispatching --------------------------------------------------------------------------------------------------

    def _fill_in_flight(self) -> None:
        """Dispatch up to the limit of rollouts in flight: queued slots first, those of the oldest group first."""
        in_flight, queue, limit = self._in_flight, self._slot_queue, self.settings.max_in_flight
        while len(in_flight) < limit:
            if queue:
                slot = heapq.heappop(queue)[2]
            elif self._new_slots:
                slot = self._new_slots.pop()
            elif self._open_group():
                continue
            else:
                break
            if slot.group.state == "open":
                self._launch(slot)

    def _open_group(self) -> bool:
        """Start a new group if the queue has capacity and there are tasks; return whether it did."""
        engine_lag = 0 if self._engine_version is None else max(self._trainer_version - self._engine_version, 0)
        batches_ahead = max(self.settings.max_off_policy_steps - engine_lag, 0) + self._batch_requested
        if (
            self._closed
            or self._failure
            or self._task_sampler.exhausted
            or len(self._group_queue) >= batches_ahead * self.settings.groups_per_step
        ):
            return False
        try:
            drawn = self._task_sampler.next_task()
            if drawn is None:
                self._group_queue.invalidate()
                return False
            size = drawn.group_size or self.settings.group_size
            group = PendingGroup(
                self._next_group_number, drawn.environment, drawn.task_index, drawn.task, size, self._trainer_version
            )
        except Exception as error:  # noqa: BLE001 - next_batch raises it: a failing task source is not a rollout's error
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
        except Exception as error:  # noqa: BLE001 - a runner that fails to start counts as a failed rollout
            self._on_failure(slot, None, "exception", f"{type(error).__name__}: {error}")

    def _enqueue(self, slot: RolloutSlot) -> None:
        heapq.heappush(self._slot_queue, (slot.group.number, slot.member, slot))

    # -- handling results ---------------------------------------------------------------------------------------------

    def _on_done(self, slot: RolloutSlot, task: asyncio.Future[Any]) -> None:
        """Handle the end of a task. A removed group emitted it on cancellation; then only its slot is freed."""
        rollout, kind, error, version = read_result(task)
        self._note_fatal(task)
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

    def _note_fatal(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and isinstance(raised := task.exception(), StorageError | FatalEnvironmentError):
            self._failure = raised  # not a rollout's error: retries would sample indefinitely and store nothing

    def _on_timeout(self, slot: RolloutSlot) -> None:
        """Handle a task that the watchdog abandoned; it may still run, but its result is ignored."""
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
        self._accounts.failures = RolloutFailures(self._accounts.failures.total + 1, error or kind)
        self.failed += 1
        deterministic = slot.count_failure(rollout, kind, error)
        if not deterministic and (limit is None or slot.failures <= limit):
            self._accounts.record_drop(slot.to_dropped(kind, error, rollout))
            slot.requeue(reset_failures=False)
            if slot.failures > group.retry_rounds:
                group.retry_rounds = slot.failures
                self._accounts.counts["retry_rounds"] += 1
            self._schedule_retry(slot)
            return
        slot.finish(rollout, kind, error)
        size = len(group.slots)
        if size - group.failed < min(self.settings.min_group_size or size, size):
            self._accounts.counts["groups_dropped"] += 1
            self._drop_group(group, "group_dropped")
            group.clear("dropped")
            self._group_queue.on_resolved(group)
        else:
            self._mark_ready_if_done(group)

    def _mark_ready_if_done(self, group: PendingGroup) -> None:
        if group.pending or self._scoring.start(group):
            return
        group.state = "ready"
        if self.settings.max_off_policy_steps == 0 or not self._replace_zero_variance(group):
            self._group_queue.on_resolved(group)

    def _on_group_scored(self, group: PendingGroup, task: asyncio.Future[Any]) -> None:
        """Take the rewards of a complete group; members whose scoring failed are handled as failed rollouts."""
        valid = [slot for slot in group.slots if slot.reason is None]
        results = read_group_results(task, [slot.rollout for slot in valid])
        self._note_fatal(task)
        failed = []
        for slot, (rollout, kind, error, _) in zip(valid, results, strict=True):
            slot.rollout = rollout
            if kind is not None:
                slot.reopen(rollout, kind, error)
                failed.append((slot, rollout, kind, error))
        for slot, rollout, kind, error in failed:
            if group.state == "open":  # an earlier failure may have dropped the group, and this rollout with it
                self._on_failure(slot, rollout, kind, error)
        if not failed:
            self._mark_ready_if_done(group)
        self._fill_in_flight()
        self._wake()

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
        """Drop all rollouts of a group that are not emitted yet, with `reason` unless a rollout has its own."""
        for slot in group.slots:
            if slot.task is not None:
                self._accounts.record_drop(slot.to_dropped(reason))
                self._accounts.counts["cancelled"] += 1
                slot.task.cancel()
                slot.task = None
            elif slot.timer is not None:
                slot.timer.cancel()
                slot.timer = None
            elif slot.state == "done":
                self._accounts.record_drop(slot.to_dropped(slot.reason or reason, slot.error, slot.rollout))

    def _wake(self) -> None:
        """Wake `next_batch` if there may be a batch or a failure to raise."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        may_cut = self.settings.max_off_policy_steps > 0 or not (self._in_flight or self._scoring)
        if self._failure is not None or (self._group_queue.may_have_batch and may_cut):
            waiter.set_result(None)
