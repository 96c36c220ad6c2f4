"""What the scheduler is doing, for whoever wonders why a batch takes so long."""

from dataclasses import dataclass
from typing import Self

from keel.rollout.scheduler.group_queue import Line
from keel.rollout.scheduler.in_flight import Flights


@dataclass(frozen=True, slots=True)
class Status:
    """Counts of what is under way."""

    waiting: bool
    """Whether somebody waits for a batch."""
    in_flight: int
    cancelling: int
    """Of those in flight: cancelled, and not ended yet."""
    given_up: int
    """Given up by the watchdog, and not ended yet; not counted as in flight."""
    queued: int
    """Rollouts of groups in line that are to be dispatched, or wait to be tried again."""
    open_groups: int
    ready_groups: int
    """In line, and whole: they train, or were dropped and only take their place."""
    missing_groups: int
    """How many more a batch needs; the window rule may ask for particular ones."""
    first: str | None
    """The first group in line that is not ready: what the line waits for."""
    oldest: str | None
    """group/member/attempt of what was dispatched first and is in flight."""
    oldest_age: float
    """Its seconds in flight."""
    last_error: str | None = None
    """Of the last rollout that failed since a batch was cut."""

    @classmethod
    def of(
        cls, line: Line, flights: Flights, *, called: bool, groups: int, dry: bool, last_error: str | None = None
    ) -> Self:
        unresolved = [group for group in line if group.state == "open"]
        ready = len(line) - len(unresolved)
        seat, age = flights.oldest or (None, 0.0)
        return cls(
            waiting=called,
            in_flight=len(flights),
            cancelling=flights.cancelling,
            given_up=flights.given_up,
            queued=sum(seat.state == "queued" for group in unresolved for seat in group.seats),
            open_groups=len(unresolved),
            ready_groups=ready,
            missing_groups=max((min(groups, len(line)) if dry else groups) - ready, 0),
            first=unresolved[0].id if unresolved else None,
            oldest=f"{seat.group.id}/{seat.member}/{seat.attempt}" if seat else None,
            oldest_age=age,
            last_error=last_error,
        )

    def __str__(self) -> str:
        oldest = f", the oldest {self.oldest} for {self.oldest_age:.0f} s" if self.oldest else ""
        error = f"; the last error: {self.last_error}" if self.last_error else ""
        return (
            f"{self.ready_groups} groups ready, {self.missing_groups} more needed, first of them {self.first};"
            f" {self.in_flight} rollouts in flight ({self.cancelling} being cancelled){oldest}; {self.queued} queued"
            f"{error}"
        )
