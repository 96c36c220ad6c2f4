"""A report of what the scheduler is doing, to explain why a batch takes long."""

from dataclasses import dataclass
from typing import Self

from keel.rollout.scheduler.group_queue import GroupQueue
from keel.rollout.scheduler.in_flight import InFlightTasks


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Counts of rollouts and groups in progress."""

    waiting: bool
    """Whether a caller waits in `next_batch`."""
    in_flight: int
    cancelling: int
    """Rollouts in flight that were cancelled and have not ended."""
    abandoned: int
    """Rollouts that the watchdog abandoned and that have not ended; not counted in `in_flight`."""
    queued: int
    """Rollouts of queued groups that wait for their dispatch or a retry."""
    open_groups: int
    ready_groups: int
    """Resolved groups in the queue: they will train, or were dropped and only occupy their position."""
    missing_groups: int
    """How many more resolved groups a batch needs; the window rule may require particular ones."""
    first_pending_group: str | None
    """The first unresolved group in the queue."""
    oldest_rollout: str | None
    """group/member/attempt of the rollout that has been in flight longest."""
    oldest_seconds: float
    """Seconds in flight of `oldest_rollout`."""
    last_error: str | None = None
    """The error of the last rollout that failed since a batch was cut."""
    scoring: int = 0
    """Groups whose rollouts have ended and whose rewards are being computed; counted in `open_groups`."""

    @classmethod
    def collect(
        cls,
        queue: GroupQueue,
        tasks: InFlightTasks,
        *,
        scoring: int,
        waiting: bool,
        groups_per_step: int,
        exhausted: bool,
        last_error: str | None = None,
    ) -> Self:
        unresolved = [group for group in queue if group.state == "open"]
        ready = len(queue) - len(unresolved)
        slot, age = tasks.oldest or (None, 0.0)
        return cls(
            waiting=waiting,
            in_flight=len(tasks),
            cancelling=tasks.cancelling,
            abandoned=tasks.abandoned,
            queued=sum(each.state == "queued" for group in unresolved for each in group.slots),
            open_groups=len(unresolved),
            ready_groups=ready,
            missing_groups=max((min(groups_per_step, len(queue)) if exhausted else groups_per_step) - ready, 0),
            first_pending_group=unresolved[0].id if unresolved else None,
            oldest_rollout=f"{slot.group.id}/{slot.member}/{slot.attempt}" if slot else None,
            oldest_seconds=age,
            last_error=last_error,
            scoring=scoring,
        )

    def __str__(self) -> str:
        oldest = f", the oldest {self.oldest_rollout} for {self.oldest_seconds:.0f} s" if self.oldest_rollout else ""
        scoring = f"; {self.scoring} groups being scored" if self.scoring else ""
        error = f"; the last error: {self.last_error}" if self.last_error else ""
        return (
            f"{self.ready_groups} groups ready, {self.missing_groups} more needed, first pending"
            f" {self.first_pending_group}; {self.in_flight} rollouts in flight ({self.cancelling} being"
            f" cancelled){oldest}; {self.queued} queued{scoring}{error}"
        )
