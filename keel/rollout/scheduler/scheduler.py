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
from keel.rollout.scheduler.accounts import Batch, Closed, Exhausted, Ledger
from keel.rollout.scheduler.group_queue import Line
from keel.rollout.scheduler.groups import Dispatch, OpenGroup, Reason, Refusal, Result, Seat
from keel.rollout.scheduler.in_flight import Flights, read
from keel.rollout.scheduler.state import Recall, freeze, thaw
from keel.rollout.scheduler.status import Status
from keel.rollout.scheduler.task_sources import Source, Sources

PAUSE, LONGEST_PAUSE = 0.1, 30.0
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
        run: Callable[[Dispatch], Awaitable[Result]],
        sources: Iterable[Source],
        settings: SchedulerSettings | None = None,
    ) -> None:
        self.settings = settings = settings or SchedulerSettings()
        self._run = run
        self._sources = Sources(sources)
        self._line = Line(settings.groups, settings.window)
        self._flights = Flights(settings.watchdog, self._landed, self._lost)
        self._queue: list[tuple[int, int, Seat]] = []
        self._fresh: list[Seat] = []
        """Seats of the newest group that were never dispatched, the next one last."""
        self._needed = settings.min_group_size or settings.group_size
        self._number = 0
        self._version = 0
        self._live: int | None = None
        """Of the engines, where somebody tells."""
        self._called = self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._ledger = Ledger()
        self.landed = 0
        """Rollouts that ended well: grows as long as there is progress."""

    # -- what callers use ---------------------------------------------------------------------------------------------

    async def next_batch(self, version: int) -> Batch:
        """The next batch, for a trainer that holds weights `version`.

        May be cancelled at any time, and loses nothing by it: what is under way goes on. Raises `NothingToTrain` after
        `halt_after` empty batches in a row, `Exhausted` when tasks have run out and `Closed` after `close`.
        """
        self._enter(version)
        try:
            while (batch := self._cut()) is None:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            self._called, self._waiter = False, None
        self._ledger.check(batch, self.settings.halt_after)
        return batch

    def live(self, version: int) -> None:
        """The engines sample with this version from now on. Who never says so is taken to keep up."""
        before, self._live = self._live, version
        if before is not None:
            self._fill()

    def find(self, group: str) -> OpenGroup | None:
        """A group that is not yet cut, by its id."""
        return self._line.find(group)

    def take_refused(self) -> list[Refusal]:
        """Emit what was refused so far now, instead of with the next batch."""
        return self._ledger.take()

    def status(self) -> Status:
        """What is under way and what is waited for; takes time proportional to both."""
        settings = self.settings
        return Status.of(
            self._line,
            self._flights,
            called=self._called,
            groups=settings.groups,
            dry=self._sources.dry,
            last_error=self._ledger.last_error,
        )

    async def close(self, grace: float = 10.0) -> list[Refusal]:
        """Cancel everything, and emit all that was not: each rollout that is in flight or in line as "closed".

        Waits until what was cancelled has ended, at most `grace` seconds. Closing twice is harmless, and gives what is
        left if the first call was itself cancelled.
        """
        self._closed = True
        for group in list(self._line):
            self._empty(group, "closed")
            group.retire("gone")
            self._line.leave(group)
        self._queue, self._fresh = [], []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        await self._flights.end(grace)
        return self._ledger.take()

    def snapshot(self) -> dict[str, Any]:
        """All there is to go on from here later, as JSON-able data; rollouts are in it by name only."""
        return {
            "number": self._number,
            "barren": self._ledger.barren,
            "reasons": dict(self._ledger.reasons),
            "counts": dict(self._ledger.counts),
            "positions": dict(self._sources.positions),
            **freeze(self._line, self._ledger.refused),
        }

    @classmethod
    def restore(
        cls,
        snapshot: Mapping[str, Any],
        run: Callable[[Dispatch], Awaitable[Result]],
        sources: Iterable[Source],
        settings: SchedulerSettings | None = None,
        *,
        recall: Recall | None = None,
    ) -> Self:
        """Go on from a snapshot: the same groups in the same places, the same tasks after them.

        A rollout that had ended, before the snapshot or after it, is used if `recall` gives it back. Any other that was
        dispatched is refused as "restart" and dispatched anew as the next attempt, without using up a retry. Sources
        must give the same tasks again.
        """
        scheduler = cls(run, sources, settings)
        ledger = scheduler._ledger
        groups, ledger.refused = thaw(snapshot, scheduler._sources, recall)
        scheduler._number, ledger.barren = snapshot["number"], snapshot["barren"]
        ledger.reasons, ledger.counts = Counter(snapshot["reasons"]), Counter(snapshot["counts"])
        for group in groups:
            scheduler._line.append(group)
            for seat in group.seats:
                if seat.state == "flying":
                    ledger.refuse(seat.refusal("restart"))
                    seat.again(afresh=False)
                if seat.state == "queued":
                    scheduler._enqueue(seat)
        return scheduler

    # -- what a batch is made of --------------------------------------------------------------------------------------

    def _enter(self, version: int) -> None:
        if self._called:
            raise KeelError("next_batch is already waiting; one caller at a time")
        if self._closed:
            raise Closed("the scheduler is closed; it gives no more batches")
        self._called, self._version = True, version

    def _cut(self) -> Batch | None:
        """A batch if the line holds one. There is no await between taking and returning it, so none is ever lost."""
        while True:
            self._fill()
            if self._closed:
                raise Closed("the scheduler was closed while a batch was waited for")
            if self._failure is not None:
                raise self._failure
            if self.settings.max_off_policy_steps == 0 and self._flights:
                self._line.look_again()
                return None
            count = min(self.settings.groups, len(self._line)) if self._sources.dry else self.settings.groups
            chosen = self._line.select(count)
            if chosen is None:
                return None
            renewed = sum(self._renew(group) for group in chosen if self._stale(group))
            if not renewed:
                break
        if not chosen and not self._ledger.refused:
            raise Exhausted("all tasks are used up and every rollout has been emitted; give the sources more tasks")
        self._line.take(chosen)
        groups = [group.emitted() for group in chosen if group.state == "ready"]
        for group in chosen:
            group.retire("gone")
        return self._ledger.batch(self._version, groups, places=len(chosen))

    def _stale(self, group: OpenGroup) -> bool:
        if group.state != "ready" or group.oldest is None:
            return False
        return self._version - group.oldest > self.settings.max_off_policy_steps

    def _renew(self, group: OpenGroup) -> bool:
        """Refuse a stale group, and say whether another, or itself again, is to take its place."""
        self._ledger.counts["groups_stale"] += 1
        lagging = group.version >= self._version
        self._empty(group, "stale")
        if lagging:
            group.retire("dropped")
            return False
        if self.settings.stale == "refuse":
            group.retire("gone")
            self._line.leave(group)
            return True
        self._ledger.counts["groups_resampled"] += 1
        group.renew(self._version)
        for seat in group.seats:
            seat.again(afresh=True)
            self._enqueue(seat)
        return True

    # -- what is dispatched -------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Dispatch until nothing more may be in flight: what is queued first, the oldest group first."""
        flights, queue, limit = self._flights, self._queue, self.settings.max_in_flight
        while len(flights) < limit:
            if queue:
                seat = heapq.heappop(queue)[2]
            elif self._fresh:
                seat = self._fresh.pop()
            elif self._open():
                continue
            else:
                break
            if seat.group.state == "open":
                self._launch(seat)

    def _open(self) -> bool:
        """Begin a new group, if the line has room and there are tasks."""
        behind = 0 if self._live is None else max(self._version - self._live, 0)
        ahead = max(self.settings.max_off_policy_steps - behind, 0) + self._called
        if self._closed or self._failure or self._sources.dry or len(self._line) >= ahead * self.settings.groups:
            return False
        try:
            drawn = self._sources.draw()
            if drawn is None:
                self._line.look_again()
                return False
            size = self.settings.group_size
            group = OpenGroup(self._number, drawn.environment, drawn.number, drawn.task, size, self._version)
        except Exception as error:  # noqa: BLE001 - next_batch raises it: an environment without tasks is no rollout's error
            self._failure = error
            return False
        self._number += 1
        self._line.append(group)
        self._fresh = group.seats[::-1]
        return True

    def _launch(self, seat: Seat) -> None:
        seat.state = "flying"
        self._ledger.counts["dispatched"] += 1
        try:
            self._flights.launch(seat, self._run(seat.dispatch()))
        except Exception as error:  # noqa: BLE001 - a runner that cannot even begin has failed like any other
            self._failed(seat, None, "exception", f"{type(error).__name__}: {error}")

    def _enqueue(self, seat: Seat) -> None:
        heapq.heappush(self._queue, (seat.group.number, seat.member, seat))

    # -- what comes back ----------------------------------------------------------------------------------------------

    def _landed(self, seat: Seat, task: asyncio.Future[Any]) -> None:
        """A task has ended. If its group is gone, it was emitted when it was cancelled, and only its place is freed."""
        rollout, kind, error, version = read(task)
        if not task.cancelled() and isinstance(broken := task.exception(), StorageError):
            self._failure = broken  # no rollout's error: trying again would sample for ever and keep nothing
        if seat.group.state == "open":
            seat.task = None
            if kind is None:
                self._ledger.counts["succeeded"] += 1
                self.landed += 1
                seat.group.saw(version)
                seat.finish(rollout)
                self._resolved_if_done(seat.group)
            else:
                self._failed(seat, rollout, kind, error)
        self._fill()
        self._nudge()

    def _lost(self, seat: Seat) -> None:
        """The watchdog gave a task up; it may still run, but nobody waits for it."""
        if seat.group.state == "open":
            seat.task = None
            self._failed(seat, None, "timeout", f"no result after scheduler.watchdog = {self.settings.watchdog:g} s")
        self._fill()
        self._nudge()

    def _failed(self, seat: Seat, rollout: Any, kind: Reason, error: str | None) -> None:
        group, limit = seat.group, self.settings.max_error_reschedule_attempts
        self._ledger.counts["failed"] += 1
        seat.failures += 1
        if limit is None or seat.failures <= limit:
            self._ledger.refuse(seat.refusal(kind, error, rollout))
            seat.again(afresh=False)
            if seat.failures > group.rounds:
                group.rounds = seat.failures
                self._ledger.counts["retry_rounds"] += 1
            self._retry(seat)
            return
        seat.finish(rollout, kind, error)
        if len(group.seats) - group.failed < min(self._needed, len(group.seats)):
            self._ledger.counts["groups_dropped"] += 1
            self._empty(group, "group_dropped")
            group.retire("dropped")
            self._line.resolved(group)
        else:
            self._resolved_if_done(group)

    def _resolved_if_done(self, group: OpenGroup) -> None:
        if not group.pending:
            group.state = "ready"
            self._line.resolved(group)

    def _retry(self, seat: Seat) -> None:
        if seat.failures == 1:
            self._enqueue(seat)
            return
        pause = min(PAUSE * 2 ** min(seat.failures - 2, 20), LONGEST_PAUSE)
        seat.timer = asyncio.get_running_loop().call_later(pause, self._paused, seat)

    def _paused(self, seat: Seat) -> None:
        seat.timer = None
        self._enqueue(seat)
        self._fill()
        self._nudge()

    def _empty(self, group: OpenGroup, reason: Reason) -> None:
        """Emit all that a group has dispatched and not emitted; for this reason, unless it has one of its own."""
        for seat in group.seats:
            if seat.task is not None:
                self._ledger.refuse(seat.refusal(reason))
                self._ledger.counts["cancelled"] += 1
                seat.task.cancel()
                seat.task = None
            elif seat.timer is not None:
                seat.timer.cancel()
                seat.timer = None
            elif seat.state == "done":
                self._ledger.refuse(seat.refusal(seat.reason or reason, seat.error, seat.rollout))

    def _nudge(self) -> None:
        """Let `next_batch` look again, if there may be something to see."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        at_rest = self.settings.max_off_policy_steps > 0 or not self._flights
        if self._failure is not None or (self._line.hopeful and at_rest):
            waiter.set_result(None)
