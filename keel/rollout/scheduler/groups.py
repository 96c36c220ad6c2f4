"""Data types of the scheduler: rollout requests, groups in progress, finished groups and dropped rollouts.

A group is n rollouts of one task, each with its own `RolloutSlot`. A slot is retried until it holds a rollout without
an error or its attempts are used up. The scheduler emits plain frozen data: a `Group` in a batch, or a
`DroppedRollout`.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

DropReason = str
"""Why a rollout was dropped: its own error kind ("exception", "timeout", "empty", "engine", "over_length",
"prompt_too_long"), or "group_dropped": too few members of its group succeeded; "stale": the group was too old when its
batch was cut; "zero_variance": the rewards of its group are all equal, and another group takes its place;
"interrupted": it was in flight, or finished and not stored, when the snapshot was taken; "run_ended": the scheduler was
closed first."""

SlotState = Literal["queued", "in_flight", "done"]
GroupState = Literal["open", "ready", "dropped", "removed"]


class RolloutLike(Protocol):
    """The attributes of a rollout that the scheduler reads."""

    @property
    def error(self) -> str | None: ...
    @property
    def error_kind(self) -> str | None: ...
    @property
    def oldest_version(self) -> int | None: ...


class RolloutRequest(NamedTuple):
    """One rollout to run. (group, member, attempt) is its name, unique within a run."""

    environment: str
    task_id: str
    task: Any
    group: str
    member: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DroppedRollout:
    """A dispatched rollout that will not be trained on."""

    environment: str
    task_id: str
    group: str
    member: int
    attempt: int
    reason: DropReason
    error: str | None = None
    rollout: Any = None
    """The rollout, if the runner returned one."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rollout of a group that trains; a member that failed is included, but excluded from baseline and training."""

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
    """All members by index, also failed ones: see `GroupMember.valid`."""
    oldest_version: int | None
    """The oldest version among the tokens of the valid members."""

    @property
    def rollouts(self) -> list[Any]:
        """The rollouts of the valid members, which train and count in the group's baseline."""
        return [member.rollout for member in self.members if member.reason is None]


class RolloutSlot:
    """The state of one member of a `PendingGroup`."""

    __slots__ = (
        "attempt",
        "error",
        "failures",
        "group",
        "last_exception",
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
        """The attempt of the last dispatch, or of the next one while the slot is queued."""
        self.failures = 0
        """Failures since the group was last sampled from the start."""
        self.last_exception: str | None = None
        """The error of the last attempt if the environment raised it; None if it failed otherwise."""
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

    def reopen(self, rollout: Any, reason: DropReason, error: str | None) -> None:
        """Undo `finish`: the rollout failed when its group was scored. The caller retries or finishes the slot.

        Until then the slot holds its error, with which it is dropped if the group is.
        """
        self.rollout, self.reason, self.error = rollout, reason, error
        self.group.pending += 1

    def requeue(self, *, reset_failures: bool) -> None:
        """Prepare the next attempt; with `reset_failures` all retries are available again."""
        self.attempt += 1
        self.state = "queued"
        self.rollout = self.reason = self.error = None
        if reset_failures:
            self.failures, self.last_exception = 0, None

    def count_failure(self, rollout: Any, kind: DropReason, error: str | None) -> bool:
        """Count a failed attempt; return whether its kind says that another attempt would fail in the same way.

        Only errors that a rollout reports are compared: they name the exception, its message and its line. The result
        depends on this member's attempts alone, never on the order in which members end.
        """
        self.failures += 1
        before, self.last_exception = (
            self.last_exception,
            error if kind == "exception" and rollout is not None else None,
        )
        return kind == "prompt_too_long" or (before is not None and before == self.last_exception)

    def to_dropped(self, reason: DropReason, error: str | None = None, rollout: Any = None) -> DroppedRollout:
        group = self.group
        return DroppedRollout(
            group.environment, group.task_id, group.id, self.member, self.attempt, reason, error, rollout
        )

    def to_request(self) -> RolloutRequest:
        group = self.group
        return RolloutRequest(group.environment, group.task_id, group.task, group.id, self.member, self.attempt)


class PendingGroup:
    """A group from its first dispatch until it is cut into a batch or dropped."""

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
        """The position in the order of dispatch."""
        self.environment = environment
        self.task_index = task_index
        """The index of the task among those of its environment."""
        self.task = task
        self.task_id: str = task.id
        self.version = version
        """The trainer's last known version when sampling started."""
        self.slots: list[RolloutSlot] = [RolloutSlot(self, member) for member in range(size)]
        self.state: GroupState = "open"
        self.pending = size
        """The number of slots that are not done."""
        self.failed = 0
        """The number of slots that are done and hold an error."""
        self.retry_rounds = 0
        """Retry rounds since the group was last sampled from the start; members that fail in one round count once."""
        self.oldest_version: int | None = None
        self.overtaken = 0
        """The number of groups dispatched later and cut earlier."""

    def note_version(self, version: int | None) -> None:
        """Update the oldest version with that of another rollout."""
        if version is not None and (self.oldest_version is None or version < self.oldest_version):
            self.oldest_version = version

    def restart(self, version: int) -> None:
        """Reset the group to be sampled again; the caller queues the slots."""
        self.state, self.version, self.oldest_version = "open", version, None
        self.pending, self.failed, self.retry_rounds = len(self.slots), 0, 0

    def clear(self, state: GroupState) -> None:
        """Release the slots; this breaks the reference cycle with them, so that the group is freed immediately."""
        self.state = state
        self.slots = []

    def to_group(self) -> Group:
        members = tuple(GroupMember(s.member, s.attempt, s.rollout, s.reason, s.error) for s in self.slots)
        return Group(self.id, self.environment, self.task_id, self.task, members, self.oldest_version)
