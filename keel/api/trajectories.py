"""Trajectories with a reward, in groups of the same task, as `train` takes them.

A trajectory contains the messages of a conversation and, for what the model said, the choices exactly as the endpoint
of a registered model returned them: they carry token ids, log-probs and versions. A group gathers its trajectories
concurrently; failures are kept as data, up to a number that the caller sets. Nothing here samples or trains.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.common.tasks import gather_or_cancel
from keel.errors import KeelError
from keel.inference.protocol import Message

MAX_SHOWN_FAILURES = 3
"""Number of failures an error message quotes."""


class TooManyExceptions(KeelError):
    """More trajectories failed than the caller allowed."""

    def __init__(self, exceptions: Sequence[Exception], allowed: int) -> None:
        self.exceptions = list(exceptions)
        """Failures so far, when the rest was cancelled."""
        first = "; ".join(f"{type(error).__name__}: {error}" for error in self.exceptions[:MAX_SHOWN_FAILURES])
        super().__init__(f"{len(self.exceptions)} trajectories failed, but max_exceptions = {allowed}: {first}")


@dataclass(kw_only=True, eq=False)
class Trajectory:
    """One attempt at a task."""

    messages_and_choices: list[Any] = field(default_factory=list)
    """In order: messages in the OpenAI form, and choices (or whole responses with one choice) from the endpoint. The
    choices train; assistant messages that are not choices are context, such as few-shot examples."""
    reward: float | None = None
    """Reward; must be set before training."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The caller's metrics, averaged into those of the step."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The caller's notes; never read."""
    name: str = ""
    """Name shown in errors, in addition to its position."""

    @property
    def choices(self) -> list[Any]:
        """The policy's choices, in order."""
        return [item for item in map(_as_choice, self.messages_and_choices) if item is not None]

    def messages(self) -> list[Message]:
        """Return the conversation as the messages of the next request."""
        messages = []
        for item in self.messages_and_choices:
            choice = _as_choice(item)
            messages.append(dict(item) if choice is None else _choice_message(choice))
        return messages


class TrajectoryGroup:
    """Attempts at one task, whose rewards are compared with each other.

    Consists of trajectories, awaitables of trajectories, or both; `await group` (or `keel.gather_groups`) runs the
    awaitables concurrently. An exception becomes an entry of `exceptions`; cancellation is not a failure and cancels
    everything in flight.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory | Awaitable[Trajectory]],
        *,
        exceptions: Iterable[Exception] = (),
        metadata: Mapping[str, Any] | None = None,
        environment: str = "agent",
        task_id: str = "",
    ) -> None:
        """`environment` and `task_id` name the task in the records of the run, as the lens shows it."""
        self._items = list(trajectories)
        self._exceptions = list(exceptions)
        self.metadata = dict(metadata or {})
        """The caller's notes; never read."""
        self.environment, self.task_id = environment, task_id
        for name, value in (("environment", environment), ("task_id", task_id)):
            if not isinstance(value, str) or (name == "environment" and not value):
                raise KeelError(f"{name} = {value!r} must be text" + (", not empty" if name == "environment" else ""))
        for item in self._items:
            if not isinstance(item, Trajectory | Awaitable):
                raise KeelError(f"a group holds trajectories or awaitables of them, not {type(item).__name__}")

    @property
    def pending(self) -> bool:
        """Whether some trajectories have not been awaited."""
        return any(not isinstance(item, Trajectory) for item in self._items)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories that did not fail."""
        pending = sum(not isinstance(item, Trajectory) for item in self._items)
        if pending:
            raise KeelError(f"{pending} trajectories of the group are still pending: await the group first")
        return [item for item in self._items if isinstance(item, Trajectory)]

    @property
    def exceptions(self) -> list[Exception]:
        """Exceptions of the trajectories that failed."""
        return list(self._exceptions)

    def __len__(self) -> int:
        return len(self._items)

    def __await__(self) -> Generator[Any, None, "TrajectoryGroup"]:
        return self._gather(_FailureLimit(None)).__await__()

    async def _gather(self, failures: "_FailureLimit") -> "TrajectoryGroup":
        async def resolve(item: Trajectory | Awaitable[Trajectory]) -> Trajectory | Exception:
            try:
                trajectory = item if isinstance(item, Trajectory) else await item
                if not isinstance(trajectory, Trajectory):
                    raise TypeError(f"expected a Trajectory, got {type(trajectory).__name__}")
            except Exception as error:  # noqa: BLE001 - any error of an agent is data of its group
                failures.add(error)
                return error
            return trajectory

        try:
            done = await gather_or_cancel([resolve(item) for item in self._items])
        finally:
            self._cancel_pending()
        self._items = [item for item in done if isinstance(item, Trajectory)]
        self._exceptions += [item for item in done if isinstance(item, Exception)]
        return self

    def _cancel_pending(self) -> None:
        """Cancel items that did not finish: nothing of a group keeps running in the background."""
        for item in self._items:
            _cancel(item)


async def gather_groups(
    groups: Iterable[TrajectoryGroup | Awaitable[TrajectoryGroup]], *, max_exceptions: int | None = 0
) -> list[TrajectoryGroup]:
    """Run the trajectories of all groups concurrently and return the groups in the given order.

    If more than `max_exceptions` trajectories fail over all groups, raise `TooManyExceptions` and cancel the rest;
    None: any number of failures is kept as data.
    """
    failures, groups = _FailureLimit(max_exceptions), list(groups)

    async def resolve(item: TrajectoryGroup | Awaitable[TrajectoryGroup]) -> TrajectoryGroup:
        group = item if isinstance(item, TrajectoryGroup) else await item
        if not isinstance(group, TrajectoryGroup):
            raise KeelError(f"gather_groups takes TrajectoryGroups or awaitables of them, not {type(group).__name__}")
        for error in group.exceptions:
            failures.add(error)
        return await group._gather(failures)

    try:
        return await gather_or_cancel([resolve(group) for group in groups])
    finally:
        for group in groups:
            if isinstance(group, TrajectoryGroup):
                group._cancel_pending()
            else:
                _cancel(group)


class _FailureLimit:
    """Collects failures over all groups and raises when there are too many."""

    def __init__(self, max_exceptions: int | None) -> None:
        if max_exceptions is not None and (isinstance(max_exceptions, bool) or max_exceptions < 0):
            raise KeelError(f"max_exceptions = {max_exceptions} must be 0 or more, or None for any number")
        self.max_exceptions = max_exceptions
        self.errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        self.errors.append(error)
        if self.max_exceptions is not None and len(self.errors) > self.max_exceptions:
            raise TooManyExceptions(self.errors, self.max_exceptions)


def _cancel(item: Any) -> None:
    """Close a coroutine that never started, or cancel a task; a no-op for a finished one."""
    if inspect.iscoroutine(item):
        item.close()
    elif isinstance(item, asyncio.Future):
        item.cancel()


def get_field(item: Any, name: str) -> Any:
    """Return a field of an object or a mapping; None if it is missing."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _as_choice(item: Any) -> Any:
    """Return the choice that an item is or contains; None for a message."""
    choices = get_field(item, "choices")
    if choices is not None:
        if len(choices) != 1:
            raise KeelError(
                f"a response has {len(choices)} choices: append the one that the conversation continues from"
            )
        return choices[0]
    if get_field(item, "message") is not None:
        return item
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise KeelError(f"{str(item)[:80]} is neither a message with a role nor a choice of a chat completion")
    return None


def _choice_message(choice: Any) -> Message:
    message = get_field(choice, "message")
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    return {key: value for key, value in dict(message).items() if value is not None}
