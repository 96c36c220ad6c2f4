"""Scoring of complete groups, between the end of their last rollout and the moment they may be cut into a batch.

One asyncio task per group. A group that is being scored stays open: it is neither cut nor judged for zero variance
before its rewards are known. The time limit is the scorer's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from keel.rollout.scheduler.groups import Group, PendingGroup, RolloutLike

GroupScorer = Callable[[Group], Awaitable[Sequence[RolloutLike]] | None]
"""Returns None if the group has its rewards, or an awaitable of the rollouts of `group.rollouts` with their rewards, in
the same order; one with an error counts as failed."""


class GroupScoring:
    """The groups that are being scored. `on_scored` is called once for each scoring that was not cancelled."""

    def __init__(
        self, scorer: GroupScorer | None, on_scored: Callable[[PendingGroup, asyncio.Future[Any]], None]
    ) -> None:
        self._scorer, self._on_scored = scorer, on_scored
        self._tasks: dict[asyncio.Future[Any], PendingGroup] = {}
        self._postponed: list[PendingGroup] = []

    def __len__(self) -> int:
        """Return the number of groups that wait for their rewards."""
        return len(self._tasks) + len(self._postponed)

    def start(self, group: PendingGroup) -> bool:
        """Score a complete group unless it has its rewards; return whether it must wait for them."""
        rewards = None if self._scorer is None else self._scorer(group.to_group())
        if rewards is None:
            return False
        task = asyncio.ensure_future(rewards)
        self._tasks[task] = group
        task.add_done_callback(self._on_task_done)
        return True

    def postpone(self, group: PendingGroup) -> None:
        """Score a complete group at the next call of `start_postponed`: there may be no event loop yet."""
        if self._scorer is not None:
            group.state = "open"
            self._postponed.append(group)

    def start_postponed(self) -> None:
        """Score the postponed groups; those that have their rewards are ready."""
        postponed, self._postponed = self._postponed, []
        for group in postponed:
            if not self.start(group):
                group.state = "ready"

    async def cancel(self, grace: float) -> None:
        """Cancel all scoring and wait up to `grace` seconds for it to end."""
        tasks, self._tasks, self._postponed = list(self._tasks), {}, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace)

    def _on_task_done(self, task: asyncio.Future[Any]) -> None:
        group = self._tasks.pop(task, None)
        if group is not None:
            self._on_scored(group, task)
        elif not task.cancelled():
            task.exception()  # asyncio would otherwise log it
