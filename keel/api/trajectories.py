"""What an agent did, as training takes it: trajectories with a reward, in groups of the same task.

A trajectory is the messages of a conversation and, in place of what the model said, the choices as the endpoint of a
registered model gave them: these carry token ids, log-probs and versions. Groups gather their trajectories at once;
what fails is kept as data beside them, up to a number that the caller sets. Nothing here samples or trains.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.errors import KeelError
from keel.inference.protocol import Message

MAX_SHOWN_FAILURES = 3
"""Failures that an error message quotes."""


class TooManyExceptions(KeelError):
    """More trajectories failed than the caller allowed."""

    def __init__(self, exceptions: Sequence[Exception], allowed: int) -> None:
        self.exceptions = list(exceptions)
        """Those that had failed when the rest was given up."""
        first = "; ".join(f"{type(error).__name__}: {error}" for error in self.exceptions[:MAX_SHOWN_FAILURES])
        super().__init__(f"{len(self.exceptions)} trajectories failed, and max_exceptions = {allowed}: {first}")


@dataclass(kw_only=True, eq=False)
class Trajectory:
    """One attempt at a task."""

    messages_and_choices: list[Any] = field(default_factory=list)
    """In order: messages in the OpenAI form, and choices (or whole responses with one choice) from the endpoint. The
    choices train; messages of the assistant that are no choices are context, as few-shot examples are."""
    reward: float | None = None
    """How good it was; must be set before it is trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The caller's own numbers, averaged into those of the step."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The caller's own notes; never read."""
    name: str = ""
    """What errors call it, beside its place."""

    @property
    def choices(self) -> list[Any]:
        """What the policy said, in order."""
        return [item for item in map(_as_choice, self.messages_and_choices) if item is not None]

    def messages(self) -> list[Message]:
        """The conversation as the next request takes it."""
        found = []
        for item in self.messages_and_choices:
            choice = _as_choice(item)
            found.append(dict(item) if choice is None else _choice_message(choice))
        return found


class TrajectoryGroup:
    """Attempts at one task, whose rewards are compared with each other.

    Made of trajectories, of awaitables that give one, or of both; `await group` (or `keel.gather_groups`) runs what is
    to be awaited, all at once. An exception becomes an entry of `exceptions`; being cancelled is no failure and passes
    through, to all that is under way.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory | Awaitable[Trajectory]],
        *,
        exceptions: Iterable[Exception] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._items = list(trajectories)
        self._exceptions = list(exceptions)
        self.metadata = dict(metadata or {})
        """The caller's own notes; never read."""
        for item in self._items:
            if not isinstance(item, Trajectory | Awaitable):
                raise KeelError(f"a group holds trajectories or awaitables of them, not {type(item).__name__}")

    @property
    def pending(self) -> bool:
        """Whether some of its trajectories have not been awaited."""
        return any(not isinstance(item, Trajectory) for item in self._items)

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those that did not fail."""
        waiting = sum(not isinstance(item, Trajectory) for item in self._items)
        if waiting:
            raise KeelError(f"{waiting} trajectories of the group are not there yet: await the group first")
        return [item for item in self._items if isinstance(item, Trajectory)]

    @property
    def exceptions(self) -> list[Exception]:
        """What the others ended with."""
        return list(self._exceptions)

    def __len__(self) -> int:
        return len(self._items)

    def __await__(self) -> Generator[Any, None, "TrajectoryGroup"]:
        return self._gather(_FailureLimit(None)).__await__()

    async def _gather(self, failures: "_FailureLimit") -> "TrajectoryGroup":
        async def one(item: Trajectory | Awaitable[Trajectory]) -> Trajectory | Exception:
            try:
                made = item if isinstance(item, Trajectory) else await item
                if not isinstance(made, Trajectory):
                    raise TypeError(f"a trajectory was expected, and {type(made).__name__} came")
            except Exception as error:  # noqa: BLE001 - whatever an agent raises is data of its group
                failures.add(error)
                return error
            return made

        try:
            done = await _gather_or_cancel([one(item) for item in self._items])
        finally:
            self._cancel_pending()
        self._items = [item for item in done if isinstance(item, Trajectory)]
        self._exceptions += [item for item in done if isinstance(item, Exception)]
        return self

    def _cancel_pending(self) -> None:
        """End what was not awaited to its end: nothing of a group goes on behind the caller's back."""
        for item in self._items:
            _cancel(item)


async def gather_groups(
    groups: Iterable[TrajectoryGroup | Awaitable[TrajectoryGroup]], *, max_exceptions: int | None = 0
) -> list[TrajectoryGroup]:
    """All groups, their trajectories run at once, in the order given.

    More than `max_exceptions` failed trajectories, over all groups, are `TooManyExceptions`, and the rest is cancelled;
    None: any number is kept as data.
    """
    failures, groups = _FailureLimit(max_exceptions), list(groups)

    async def one(group: TrajectoryGroup | Awaitable[TrajectoryGroup]) -> TrajectoryGroup:
        made = group if isinstance(group, TrajectoryGroup) else await group
        if not isinstance(made, TrajectoryGroup):
            raise KeelError(f"gather_groups takes TrajectoryGroups or awaitables of them, not {type(made).__name__}")
        for error in made.exceptions:
            failures.add(error)
        return await made._gather(failures)

    try:
        return await _gather_or_cancel([one(group) for group in groups])
    finally:
        for group in groups:
            if isinstance(group, TrajectoryGroup):
                group._cancel_pending()
            else:
                _cancel(group)


class _FailureLimit:
    """What has failed so far, over all groups."""

    def __init__(self, max_exceptions: int | None) -> None:
        if max_exceptions is not None and (isinstance(max_exceptions, bool) or max_exceptions < 0):
            raise KeelError(f"max_exceptions = {max_exceptions} must be 0 or more, or None for any number")
        self.max_exceptions = max_exceptions
        self.errors: list[Exception] = []

    def add(self, error: Exception) -> None:
        self.errors.append(error)
        if self.max_exceptions is not None and len(self.errors) > self.max_exceptions:
            raise TooManyExceptions(self.errors, self.max_exceptions)


async def _gather_or_cancel(awaitables: Sequence[Any]) -> list[Any]:
    """Every result, or the first failure with the rest cancelled and awaited."""
    tasks = [asyncio.ensure_future(call) for call in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cancel(item: Any) -> None:
    """Close a coroutine that never began, cancel a task; nothing to do for what has ended."""
    if inspect.iscoroutine(item):
        item.close()
    elif isinstance(item, asyncio.Future):
        item.cancel()


def get_field(item: Any, name: str) -> Any:
    """A field of an object or of a table; None when it is not there."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _as_choice(item: Any) -> Any:
    """The choice that an item is or holds; None for a message."""
    several = get_field(item, "choices")
    if several is not None:
        if len(several) != 1:
            raise KeelError(
                f"a response with {len(several)} choices: put in the one that the conversation goes on from"
            )
        return several[0]
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
