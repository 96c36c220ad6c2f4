"""Task sources: draw tasks from weighted environments by stride scheduling.

The order depends only on weights and counts, so the k-th group of a run has the same environment and task regardless of
timing and restarts. Tasks are not shuffled; the environment decides their order.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from keel.errors import KeelError


@dataclass(frozen=True)
class TaskSource:
    """The tasks of one environment; each has an `id`."""

    environment: str
    tasks: Sequence[Any] | Iterable[Any]
    """A sequence is repeated indefinitely; any other iterable is used once."""
    weight: float = 1.0
    """The share of groups relative to the other environments."""

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise KeelError(f"environment {self.environment}: weight = {self.weight} must be above 0")
        if isinstance(self.tasks, Sequence) and not self.tasks:
            raise KeelError(f"environment {self.environment} has no tasks; leave it out")

    def enumerate_from(self, start: int) -> Iterator[tuple[int, Any]]:
        """Return an iterator over (index, task) pairs from index `start`."""
        if isinstance(self.tasks, Sequence):
            tasks = self.tasks
            return ((index, tasks[index % len(tasks)]) for index in count(start))
        return enumerate(self.tasks, start)


class DrawnTask(NamedTuple):
    environment: str
    task_index: int
    """The index of the task among those of its environment."""
    task: Any


class TaskSampler:
    """Draws tasks from several sources in proportion to their weights.

    Invariant: while environments i and j have tasks, with c_i and c_j draws and weights w_i and w_j,
    c_i / w_i - c_j / w_j <= 1 / w_i: neither is ever ahead of its share by more than one group.
    """

    def __init__(self, sources: Iterable[TaskSource]) -> None:
        listed = list(sources)
        self._sources = {source.environment: source for source in listed}
        if not listed or len(self._sources) < len(listed):
            names = [source.environment for source in listed]
            raise KeelError(f"environments {names}: there must be at least one, and each name only once")
        self.positions = dict.fromkeys(self._sources, 0)
        """The number of tasks drawn from each environment."""
        self._task_iterators = {name: source.enumerate_from(0) for name, source in self._sources.items()}
        self._stride_heap = [(0.0, index, source) for index, source in enumerate(listed)]

    @property
    def exhausted(self) -> bool:
        """Whether no task is left; known only after a draw has failed."""
        return not self._stride_heap

    def next_task(self) -> DrawnTask | None:
        while self._stride_heap:
            _, index, source = self._stride_heap[0]
            name = source.environment
            numbered_task = next(self._task_iterators[name], None)
            if numbered_task is None:
                heapq.heappop(self._stride_heap)
                continue
            self.positions[name] += 1
            heapq.heapreplace(self._stride_heap, (self.positions[name] / source.weight, index, source))
            return DrawnTask(name, *numbered_task)
        return None

    def resume(self, positions: Mapping[str, int], task_indices: Mapping[str, set[int]]) -> dict[tuple[str, int], Any]:
        """Continue after these positions, and return the tasks with these indices by environment and index."""
        self._check_environments(positions)
        tasks: dict[tuple[str, int], Any] = {}
        for name, source in self._sources.items():
            position, indices = positions[name], task_indices.get(name, set())
            if isinstance(source.tasks, Sequence):
                tasks.update({(name, index): source.tasks[index % len(source.tasks)] for index in indices})
                self._task_iterators[name] = source.enumerate_from(position)
            else:
                for _ in range(position):
                    numbered_task = next(self._task_iterators[name], None)
                    if numbered_task is None:
                        raise KeelError(
                            f"environment {name} supplied {position} tasks before the restart and now has fewer; resume"
                            " with the same tasks"
                        )
                    index, task = numbered_task
                    if index in indices:
                        tasks[name, index] = task
            self.positions[name] = position
        self._stride_heap = [
            (self.positions[name] / source.weight, index, source)
            for index, (name, source) in enumerate(self._sources.items())
        ]
        heapq.heapify(self._stride_heap)
        return tasks

    def _check_environments(self, positions: Mapping[str, int]) -> None:
        if set(positions) != set(self._sources):
            raise KeelError(
                f"the scheduler snapshot has environments {sorted(positions)}, but the run has {sorted(self._sources)};"
                " resume with the same ones"
            )
