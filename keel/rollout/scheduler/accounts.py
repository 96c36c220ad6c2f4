"""What the scheduler owes its caller: refusals that were not emitted yet, counters, and how long nothing trained."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from keel.errors import KeelError
from keel.rollout.scheduler.groups import DroppedRollout, DropReason, Group


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step trains on, and what it does not."""

    version: int
    """That it was asked with: the trainer's."""
    groups: list[Group]
    """In order of dispatch."""
    dropped: list[DroppedRollout]
    """All rollouts refused since the last batch, whether their group is in this one or still in line."""
    counters: dict[str, int]
    """What happened since the last batch."""


class TasksExhausted(KeelError):
    """All tasks are used up, and everything that was dispatched has been emitted."""


class SchedulerClosed(KeelError):
    """The scheduler was closed."""


class NothingToTrain(KeelError):
    """Batch after batch had nothing to train on."""

    def __init__(self, message: str, batch: RolloutBatch, reasons: Mapping[DropReason, int]) -> None:
        super().__init__(message)
        self.batch = batch
        """The last of them: what it refused is emitted here and nowhere else."""
        self.reasons = dict(reasons)
        """Rollouts refused since the last batch that trained, by reason."""


class SchedulerAccounts:
    """Refusals since they were last taken, counters since the last batch, reasons since the last batch that trained."""

    def __init__(self) -> None:
        self.dropped: list[DroppedRollout] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[DropReason] = Counter()
        self.empty_batches = 0
        """Batches in a row with nothing to train on."""
        self.last_error: str | None = None
        """Of the last rollout that failed since a batch was cut."""

    def record_drop(self, dropped: DroppedRollout) -> None:
        self.dropped.append(dropped)
        self.last_error = dropped.error or self.last_error
        self.counts[f"dropped_{dropped.reason}"] += 1
        self.reasons[dropped.reason] += 1

    def drain(self) -> list[DroppedRollout]:
        refused, self.dropped = self.dropped, []
        return refused

    def close_batch(self, version: int, groups: list[Group], *, capacity: int) -> RolloutBatch:
        """Close the account of a batch that had so many places, of which these were filled."""
        counts, self.counts, self.last_error = self.counts, Counter(), None
        counts["groups_trained"] = len(groups)
        if groups:
            self.empty_batches, self.reasons = 0, Counter()
        elif capacity:
            self.empty_batches += 1
        return RolloutBatch(version, groups, self.drain(), dict(counts))

    def check_empty_batches(self, batch: RolloutBatch, limit: int | None) -> None:
        """Raise once `limit` batches in a row had nothing to train on."""
        if batch.groups or limit is None or self.empty_batches < limit:
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        error = next((refusal.error for refusal in reversed(batch.dropped) if refusal.error), None)
        raise NothingToTrain(
            f"{self.empty_batches} batches in a row had nothing to train on (scheduler.max_empty_steps = {limit}); refused:"
            f" {reasons or 'nothing'}{f'; the last error: {error}' if error else ''}; mend what fails, or raise"
            " scheduler.max_error_reschedule_attempts or max_off_policy_steps",
            batch,
            self.reasons,
        )
