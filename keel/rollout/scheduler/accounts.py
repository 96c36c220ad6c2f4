"""Batches, and the scheduler's accounts: dropped rollouts not emitted yet, counters, and consecutive empty batches."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from keel.errors import KeelError
from keel.rollout.scheduler.groups import DroppedRollout, DropReason, Group


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups of one training step, and the rollouts dropped since the previous batch."""

    version: int
    """The trainer's version, as passed to `next_batch`."""
    groups: list[Group]
    """The groups to train on, in order of dispatch."""
    dropped: list[DroppedRollout]
    """All rollouts dropped since the last batch; their group may be in this batch or still in the queue."""
    counters: dict[str, int]
    """Counts of events since the last batch."""


class TasksExhausted(KeelError):
    """Raised when no task is left and every dispatched rollout has been emitted."""


class SchedulerClosed(KeelError):
    """Raised by `next_batch` after the scheduler was closed."""


class NothingToTrain(KeelError):
    """Raised after `max_empty_steps` consecutive batches without a group to train on."""

    def __init__(self, message: str, batch: RolloutBatch, reasons: Mapping[DropReason, int]) -> None:
        super().__init__(message)
        self.batch = batch
        """The last empty batch; its dropped rollouts are emitted only here."""
        self.reasons = dict(reasons)
        """Counts of rollouts dropped since the last batch that trained, by reason."""


class RolloutFailures(NamedTuple):
    """How many rollouts failed, retried or not, and the last error."""

    total: int = 0
    last_error: str = ""


class SchedulerAccounts:
    """Keeps dropped rollouts until they are drained, counters per batch, and reasons since the last non-empty batch."""

    def __init__(self) -> None:
        self.dropped: list[DroppedRollout] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[DropReason] = Counter()
        self.empty_batches = 0
        """Consecutive batches with nothing to train on."""
        self.last_error: str | None = None
        """The error of the last rollout that failed since a batch was cut."""
        self.failures = RolloutFailures()
        """Failed rollouts since the scheduler was created."""

    def record_drop(self, dropped: DroppedRollout) -> None:
        self.dropped.append(dropped)
        self.last_error = dropped.error or self.last_error
        self.counts[f"dropped_{dropped.reason}"] += 1
        self.reasons[dropped.reason] += 1

    def drain(self) -> list[DroppedRollout]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def drain_at_end(self) -> list[DroppedRollout]:
        """Drain after the last batch: a group that was replaced for a batch that was never cut belongs to no step."""
        return [
            replace(rollout, reason="run_ended") if rollout.reason == "zero_variance" else rollout
            for rollout in self.drain()
        ]

    def close_batch(self, version: int, groups: list[Group], *, capacity: int) -> RolloutBatch:
        """Return the batch with these groups and start new counters; `capacity` groups were cut, some maybe dropped."""
        counts, self.counts, self.last_error = self.counts, Counter(), None
        counts["groups_trained"] = len(groups)
        if groups:
            self.empty_batches, self.reasons = 0, Counter()
        elif capacity:
            self.empty_batches += 1
        return RolloutBatch(version, groups, self.drain(), dict(counts))

    def check_empty_batches(self, batch: RolloutBatch, limit: int | None) -> None:
        """Raise `NothingToTrain` after `limit` consecutive batches with nothing to train on."""
        if batch.groups or limit is None or self.empty_batches < limit:
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        error = next((rollout.error for rollout in reversed(batch.dropped) if rollout.error), None)
        raise NothingToTrain(
            f"{self.empty_batches} consecutive batches had nothing to train on (scheduler.max_empty_steps = {limit});"
            f" dropped: {reasons or 'nothing'}{f'; the last error: {error}' if error else ''}; fix the cause, or raise"
            " scheduler.max_error_reschedule_attempts or scheduler.max_off_policy_steps",
            batch,
            self.reasons,
        )
