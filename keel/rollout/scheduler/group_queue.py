"""The queue of groups that wait to be cut into batches, and the window rule that limits reordering.

Independent of time, tasks and failures: a group is either resolved (it will train, or it was dropped and only occupies
its position) or unresolved.
"""

from collections.abc import Iterator
from itertools import islice

from keel.rollout.scheduler.groups import PendingGroup


class GroupQueue:
    """Groups in order of dispatch that have not been cut into a batch.

    The window rule, with B groups per batch and a window of w batches: a batch takes the first B resolved groups among
    the first (w + 1) * B of the queue, in order. If that would let more than w * B groups in total overtake an
    unresolved group, the batch waits for that group instead. Therefore

    - a group overtakes at most w * B groups that were dispatched before it, and
    - a group is overtaken by at most w * B groups that were dispatched after it, however slow it is.

    With w = 0 batches are exactly the groups in order of dispatch. Only the first unresolved group needs checking: a
    group that overtakes a later one overtakes the first one too.
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
        """Remove a group that is not cut into a batch; no group counts as overtaken by it."""
        del self._groups[group.id]
        self.invalidate()

    def on_resolved(self, group: PendingGroup) -> None:
        if self._blocker is None or self._blocker is group:
            self._missing_groups -= 1

    @property
    def may_have_batch(self) -> bool:
        """Whether `select` may now find a batch.

        Takes constant time, so that the queue is not scanned for every resolved group while it waits for another one.
        """
        return self._missing_groups <= 0

    def invalidate(self) -> None:
        """Make `may_have_batch` true until the next `select`."""
        self._missing_groups, self._blocker = 0, None

    def select(self, count: int) -> list[PendingGroup] | None:
        """Return the `count` groups of the next batch, or None while the window rule says to wait; remove nothing."""
        chosen: list[PendingGroup] = []
        slowest: PendingGroup | None = None
        budget = count  # how many more groups may overtake the first unresolved one
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
        """Remove the groups that `select` returned and count the groups they overtake."""
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
