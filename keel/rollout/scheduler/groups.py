"""The nouns of the scheduler: what is dispatched, what is emitted, and a group on its way between the two.

A group is n rollouts of one task, each in a seat of its own. A seat is tried until it holds a rollout without an error
or its attempts are used up. What leaves the scheduler is plain frozen data: a `Group` in a batch, or a `Refusal`.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

DropReason = str
"""Why a rollout was refused: its own error kind ("exception", "timeout", "empty", "engine", "over_length"), or
"group_dropped": another member used up the group's attempts; "stale": the group was too old when its batch was cut;
"interrupted": it was under way, or finished and not kept, when the snapshot was taken; "run_ended": the scheduler was."""

SlotState = Literal["queued", "in_flight", "done"]
GroupState = Literal["open", "ready", "dropped", "gone"]


class RolloutLike(Protocol):
    """All that the scheduler reads of a rollout."""

    @property
    def error(self) -> str | None: ...
    @property
    def error_kind(self) -> str | None: ...
    @property
    def oldest_version(self) -> int | None: ...


class RolloutRequest(NamedTuple):
    """One rollout to run. (group, member, attempt) names it, and no two dispatches of a run share a name."""

    environment: str
    task_id: str
    task: Any
    group: str
    member: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DroppedRollout:
    """A rollout that was dispatched and will not be trained on."""

    environment: str
    task_id: str
    group: str
    member: int
    attempt: int
    reason: DropReason
    error: str | None = None
    rollout: Any = None
    """What came back, if anything did."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rollout of a group that trains. One that failed for good is here too, so that it is seen, but has no vote."""

    member: int
    attempt: int
    rollout: Any
    reason: DropReason | None = None
    error: str | None = None

    @property
    def valid(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task that train together."""

    id: str
    environment: str
    task_id: str
    task: Any
    members: tuple[GroupMember, ...]
    """In order of their number, all of them: see `Member.valid`."""
    oldest_version: int | None
    """Of the tokens of the valid members."""

    @property
    def rollouts(self) -> list[Any]:
        """Those of the valid members: what trains, and what votes in the baseline."""
        return [member.rollout for member in self.members if member.reason is None]


class RolloutSlot:
    """The place of one member in a group that is not yet cut."""

    __slots__ = (
        "attempt",
        "error",
        "failures",
        "group",
        "member",
        "reason",
        "rollout",
        "started",
        "state",
        "task",
        "timer",
    )

    def __init__(self, group: "PendingGroup", member: int) -> None:
        self.group = group
        self.member = member
        self.attempt = 0
        """Of the last dispatch, or of the next one while it is queued."""
        self.failures = 0
        """Since the group was last sampled from the start."""
        self.state: SlotState = "queued"
        self.task: asyncio.Future[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started = 0.0
        self.rollout: Any = None
        self.reason: DropReason | None = None
        self.error: str | None = None

    def finish(self, rollout: Any, reason: DropReason | None = None, error: str | None = None) -> None:
        self.state = "done"
        self.rollout, self.reason, self.error = rollout, reason, error
        self.group.pending -= 1
        self.group.failed += reason is not None

    def requeue(self, *, reset_failures: bool) -> None:
        """Queue the next attempt; `afresh`: with all retries to come, because nothing was wrong with the last one."""
        self.attempt += 1
        self.state = "queued"
        self.rollout = self.reason = self.error = None
        if reset_failures:
            self.failures = 0

    def to_dropped(self, reason: DropReason, error: str | None = None, rollout: Any = None) -> DroppedRollout:
        group = self.group
        return DroppedRollout(
            group.environment, group.task_id, group.id, self.member, self.attempt, reason, error, rollout
        )

    def to_request(self) -> RolloutRequest:
        group = self.group
        return RolloutRequest(group.environment, group.task_id, group.task, group.id, self.member, self.attempt)


class PendingGroup:
    """A group from its first dispatch until it is cut into a batch or refused."""

    __slots__ = (
        "environment",
        "failed",
        "id",
        "number",
        "oldest_version",
        "overtaken",
        "pending",
        "retry_rounds",
        "slots",
        "state",
        "task",
        "task_id",
        "task_index",
        "version",
    )  # fmt: skip

    def __init__(self, number: int, environment: str, task_index: int, task: Any, size: int, version: int) -> None:
        self.id = f"{environment}#{number}"
        self.number = number
        """Its place in the order of dispatch."""
        self.environment = environment
        self.task_index = task_index
        """Of the task among those of its environment."""
        self.task = task
        self.task_id: str = task.id
        self.version = version
        """The trainer's, as far as it was known, when sampling began."""
        self.slots: list[RolloutSlot] = [RolloutSlot(self, member) for member in range(size)]
        self.state: GroupState = "open"
        self.pending = size
        """Seats that are not done."""
        self.failed = 0
        """Seats that are done and hold an error."""
        self.retry_rounds = 0
        """Retries since it was last sampled from the start, counted once for all that failed in the same round."""
        self.oldest_version: int | None = None
        self.overtaken = 0
        """Groups dispatched later and cut earlier."""

    def note_version(self, version: int | None) -> None:
        if version is not None and (self.oldest_version is None or version < self.oldest_version):
            self.oldest_version = version

    def restart(self, version: int) -> None:
        """Begin from the start; the seats are the caller's to queue."""
        self.state, self.version, self.oldest_version = "open", version, None
        self.pending, self.failed, self.retry_rounds = len(self.slots), 0, 0

    def clear(self, state: GroupState) -> None:
        """It holds nothing any more; without its seats it is in no reference cycle either, and is freed at once."""
        self.state = state
        self.slots = []

    def to_group(self) -> Group:
        members = tuple(GroupMember(s.member, s.attempt, s.rollout, s.reason, s.error) for s in self.slots)
        return Group(self.id, self.environment, self.task_id, self.task, members, self.oldest_version)
