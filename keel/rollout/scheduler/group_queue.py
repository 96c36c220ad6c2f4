"""The line of groups that wait to be cut into batches, and the rule of who may leave it first.

Knows nothing of time, tasks or failures: a group is resolved (it will train, or it was dropped and only its place is
left) or it is not.
"""

from collections.abc import Iterator
from itertools import islice

from keel.rollout.scheduler.groups import PendingGroup


class GroupQueue:
    """Groups in order of dispatch, none of which has been cut yet.

    The window rule, with B groups a batch and a window of w batches: a batch takes the first B resolved groups among
    the first (w + 1) * B of the line, in their order, but not if that would leave an unresolved group overtaken by more
    than w * B groups in all; then the batch waits for that group. It follows that

    - a group overtakes at most w * B groups that were dispatched before it, and
    - a group is overtaken by at most w * B groups that were dispatched after it, however slow it is.

    With w = 0 batches are exactly the groups in order of dispatch. Only the first unresolved group has to be looked at:
    whoever overtakes a later one overtakes it too.
    """

    def __init__(self, groups_per_batch: int, window_batches: int) -> None:
        self._lookahead = (window_batches + 1) * groups_per_batch
        self._max_overtakes = window_batches * groups_per_batch
        self._groups: dict[str, PendingGroup] = {}
        self._missing_groups = 0
        self._blocker: PendingGroup | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[PendingGroup]:
        return iter(self._groups.values())

    def get(self, group_id: str) -> PendingGroup | None:
        return self._groups.get(group_id)

    def append(self, group: PendingGroup) -> None:
        self._groups[group.id] = group

    def remove(self, group: PendingGroup) -> None:
        """Without being cut: it overtakes nobody."""
        del self._groups[group.id]
        self.invalidate()

    def on_resolved(self, group: PendingGroup) -> None:
        if self._blocker is None or self._blocker is group:
            self._missing_groups -= 1

    @property
    def may_have_batch(self) -> bool:
        """Whether `select` may find more than it did last time. In constant time, so that a line that waits for one
        group is not walked along whenever another one is resolved."""
        return self._missing_groups <= 0

    def invalidate(self) -> None:
        self._missing_groups, self._blocker = 0, None

    def select(self, count: int) -> list[PendingGroup] | None:
        """The groups of the next batch, `count` of them, or None while the rule says to wait. Takes nothing away."""
        chosen: list[PendingGroup] = []
        slowest: PendingGroup | None = None
        budget = count
        for group in islice(self._groups.values(), self._lookahead):
            if group.state == "open":
                if slowest is None:
                    slowest, budget = group, self._max_overtakes - group.overtaken
            elif slowest is None or budget > 0:
                chosen.append(group)
                if slowest is not None:
                    budget -= 1
            if len(chosen) == count:
                return chosen
            if slowest is not None and budget <= 0:
                break
        blocked = slowest is not None and budget <= 0
        self._blocker = slowest if blocked else None
        self._missing_groups = 1 if blocked else count - len(chosen)
        return None if len(chosen) < count else chosen

    def pop(self, chosen: list[PendingGroup]) -> None:
        """Cut these, as `select` gave them."""
        later = len(chosen)
        for group in islice(self._groups.values(), self._lookahead):
            if not later:
                break
            if group.state == "open":
                group.overtaken += later
            else:
                later -= 1
        for group in chosen:
            del self._groups[group.id]
        self.invalidate()
