"""Where groups get their tasks: environments with weights, taken in turn by stride scheduling.

The order depends on nothing but weights and counts, so the k-th group of a run has the same environment and task
however long anything takes, and after a restart too. Shuffling is left to whoever makes the tasks.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from keel.errors import KeelError


@dataclass(frozen=True)
class TaskSource:
    """The tasks of one environment; a task has an `id`."""

    environment: str
    tasks: Sequence[Any] | Iterable[Any]
    """A sequence is gone through again and again; anything else once."""
    weight: float = 1.0
    """Its share of the groups, against the other environments."""

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise KeelError(f"environment {self.environment}: weight = {self.weight} must be above 0")
        if isinstance(self.tasks, Sequence) and not self.tasks:
            raise KeelError(f"environment {self.environment} has no tasks; leave it out")

    def enumerate_from(self, start: int) -> Iterator[tuple[int, Any]]:
        """Its tasks with their numbers, from `start` on."""
        if isinstance(self.tasks, Sequence):
            tasks = self.tasks
            return ((index, tasks[index % len(tasks)]) for index in count(start))
        return enumerate(self.tasks, start)


class DrawnTask(NamedTuple):
    environment: str
    task_index: int
    """Of the task among those of its environment."""
    task: Any


class TaskSampler:
    """Draws the next task.

    Invariant: while both have tasks, environments i and j that were drawn from c_i and c_j times, with weights w_i and
    w_j, satisfy c_i / w_i - c_j / w_j <= 1 / w_i: neither is ever ahead by more than one group of its own.
    """

    def __init__(self, sources: Iterable[TaskSource]) -> None:
        listed = list(sources)
        self._sources = {source.environment: source for source in listed}
        if not listed or len(self._sources) < len(listed):
            names = [source.environment for source in listed]
            raise KeelError(f"environments {names}: there must be at least one, and each name only once")
        self.positions = dict.fromkeys(self._sources, 0)
        """How many tasks were drawn of each."""
        self._task_iterators = {name: source.enumerate_from(0) for name, source in self._sources.items()}
        self._stride_heap = [(0.0, place, source) for place, source in enumerate(listed)]

    @property
    def exhausted(self) -> bool:
        """Whether no task is left. Known only once an attempt to draw has failed."""
        return not self._stride_heap

    def next_task(self) -> DrawnTask | None:
        while self._stride_heap:
            _, place, source = self._stride_heap[0]
            name = source.environment
            found = next(self._task_iterators[name], None)
            if found is None:
                heapq.heappop(self._stride_heap)
                continue
            self.positions[name] += 1
            heapq.heapreplace(self._stride_heap, (self.positions[name] / source.weight, place, source))
            return DrawnTask(name, *found)
        return None

    def resume(self, positions: Mapping[str, int], task_indices: Mapping[str, set[int]]) -> dict[tuple[str, int], Any]:
        """Go on after these positions, and find again the tasks of these numbers."""
        self._check_environments(positions)
        again: dict[tuple[str, int], Any] = {}
        for name, source in self._sources.items():
            position, numbers = positions[name], task_indices.get(name, set())
            if isinstance(source.tasks, Sequence):
                again.update({(name, number): source.tasks[number % len(source.tasks)] for number in numbers})
                self._task_iterators[name] = source.enumerate_from(position)
            else:
                for _ in range(position):
                    found = next(self._task_iterators[name], None)
                    if found is None:
                        raise KeelError(
                            f"environment {name} had given {position} tasks before the restart, and has fewer"
                        )
                    if found[0] in numbers:
                        again[name, found[0]] = found[1]
            self.positions[name] = position
        self._stride_heap = [
            (self.positions[name] / source.weight, place, source)
            for place, (name, source) in enumerate(self._sources.items())
        ]
        heapq.heapify(self._stride_heap)
        return again

    def _check_environments(self, positions: Mapping[str, int]) -> None:
        if set(positions) != set(self._sources):
            raise KeelError(
                f"the snapshot is of environments {sorted(positions)}, and these are {sorted(self._sources)};"
                " restore with the same ones"
            )
