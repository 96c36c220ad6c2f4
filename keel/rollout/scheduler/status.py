"""What the scheduler is doing, for whoever wonders why a batch takes so long."""

from dataclasses import dataclass
from typing import Self

from keel.rollout.scheduler.group_queue import GroupQueue
from keel.rollout.scheduler.in_flight import InFlightTasks


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Counts of what is under way."""

    waiting: bool
    """Whether somebody waits for a batch."""
    in_flight: int
    cancelling: int
    """Of those in flight: cancelled, and not ended yet."""
    abandoned: int
    """Given up by the watchdog, and not ended yet; not counted as in flight."""
    queued: int
    """Rollouts of groups in line that are to be dispatched, or wait to be tried again."""
    open_groups: int
    ready_groups: int
    """In line, and whole: they train, or were dropped and only take their place."""
    missing_groups: int
    """How many more a batch needs; the window rule may ask for particular ones."""
    first_pending_group: str | None
    """The first group in line that is not ready: what the line waits for."""
    oldest_rollout: str | None
    """group/member/attempt of what was dispatched first and is in flight."""
    oldest_seconds: float
    """Its seconds in flight."""
    last_error: str | None = None
    """Of the last rollout that failed since a batch was cut."""

    @classmethod
    def collect(
        cls,
        queue: GroupQueue,
        tasks: InFlightTasks,
        *,
        waiting: bool,
        groups_per_step: int,
        exhausted: bool,
        last_error: str | None = None,
    ) -> Self:
        unresolved = [group for group in queue if group.state == "open"]
        ready = len(queue) - len(unresolved)
        seat, age = tasks.oldest or (None, 0.0)
        return cls(
            waiting=waiting,
            in_flight=len(tasks),
            cancelling=tasks.cancelling,
            abandoned=tasks.abandoned,
            queued=sum(seat.state == "queued" for group in unresolved for seat in group.slots),
            open_groups=len(unresolved),
            ready_groups=ready,
            missing_groups=max((min(groups_per_step, len(queue)) if exhausted else groups_per_step) - ready, 0),
            first_pending_group=unresolved[0].id if unresolved else None,
            oldest_rollout=f"{seat.group.id}/{seat.member}/{seat.attempt}" if seat else None,
            oldest_seconds=age,
            last_error=last_error,
        )

    def __str__(self) -> str:
        oldest = f", the oldest {self.oldest_rollout} for {self.oldest_seconds:.0f} s" if self.oldest_rollout else ""
        error = f"; the last error: {self.last_error}" if self.last_error else ""
        return (
            f"{self.ready_groups} groups ready, {self.missing_groups} more needed, first of them {self.first_pending_group};"
            f" {self.in_flight} rollouts in flight ({self.cancelling} being cancelled){oldest}; {self.queued} queued"
            f"{error}"
        )
