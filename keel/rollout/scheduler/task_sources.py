"""Task sources: draw tasks from weighted environments by stride scheduling.

The environment of the k-th group depends only on weights and counts, and its task on the order of the environment
(`task_orders`), so that both are the same regardless of timing and restarts.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keel.config.rollout import CurriculumSettings
from keel.errors import KeelError
from keel.rollout.scheduler.task_orders import make_order


@dataclass(frozen=True)
class TaskSource:
    """The tasks of one environment; each has an `id`."""

    environment: str
    tasks: Sequence[Any] | Iterable[Any]
    """A sequence is repeated indefinitely; any other iterable is used once, as given."""
    weight: float = 1.0
    """The share of groups relative to the other environments."""
    curriculum: CurriculumSettings = field(default_factory=lambda: CurriculumSettings(order="given"))
    """The order of the tasks."""
    seed: int = 0
    """Decides the order where it is random."""
    group_size: int | None = None
    """The number of rollouts in a group; None: `SchedulerSettings.group_size`."""

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise KeelError(f"environment {self.environment}: weight = {self.weight} must be above 0")
        if isinstance(self.tasks, Sequence):
            if not self.tasks:
                raise KeelError(f"environment {self.environment} has no tasks; leave it out")
        elif self.curriculum.order != "given":
            raise KeelError(
                f'environment {self.environment}: curriculum.order = "{self.curriculum.order}" needs a sequence of'
                " tasks, not an iterator"
            )


class DrawnTask(NamedTuple):
    environment: str
    task_index: int
    """The index of the task among those of its environment."""
    task: Any
    group_size: int | None
    """The group size of the environment, if it has its own."""


class RepeatedTasks:
    """Draws from a sequence of tasks, indefinitely."""

    def __init__(self, source: TaskSource, tasks: Sequence[Any]) -> None:
        self._environment, self._tasks = source.environment, tasks
        self._order = make_order(source.curriculum, len(tasks), source.seed, source.environment)

    def draw(self) -> tuple[int, Any] | None:
        """Return the next task and its index; None if there is none left."""
        index = self._order.next_index()
        return index, self._tasks[index]

    def state(self) -> dict[str, Any]:
        """Return what `resume` needs."""
        return {"cursor": self._order.cursor, "num_tasks": len(self._tasks)}

    def resume(self, state: Mapping[str, Any], indices: set[int]) -> dict[int, Any]:
        """Continue after `state` and return the tasks with these indices."""
        if state["num_tasks"] != len(self._tasks):
            raise KeelError(
                f"environment {self._environment} had {state['num_tasks']} tasks before the restart and now has"
                f" {len(self._tasks)}; resume with the same tasks"
            )
        self._order.cursor = state["cursor"]
        return {index: self._tasks[index] for index in indices}


class IteratedTasks:
    """Draws the tasks of an iterator, once. Has the methods of `RepeatedTasks`."""

    def __init__(self, source: TaskSource) -> None:
        self._environment, self._tasks = source.environment, enumerate(source.tasks)
        self._count = 0

    def draw(self) -> tuple[int, Any] | None:
        drawn = next(self._tasks, None)
        self._count += drawn is not None
        return drawn

    def state(self) -> dict[str, Any]:
        return {"cursor": self._count}

    def resume(self, state: Mapping[str, Any], indices: set[int]) -> dict[int, Any]:
        tasks = {}
        for _ in range(state["cursor"]):
            drawn = self.draw()
            if drawn is None:
                raise KeelError(
                    f"environment {self._environment} supplied {state['cursor']} tasks before the restart and now has"
                    " fewer; resume with the same tasks"
                )
            if drawn[0] in indices:
                tasks[drawn[0]] = drawn[1]
        return tasks


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
        self._tasks = {
            source.environment: (
                RepeatedTasks(source, source.tasks) if isinstance(source.tasks, Sequence) else IteratedTasks(source)
            )
            for source in listed
        }
        self._num_drawn = dict.fromkeys(self._sources, 0)
        self._stride_heap = [(0.0, index, source) for index, source in enumerate(listed)]

    @property
    def exhausted(self) -> bool:
        """Whether no task is left; known only after a draw has failed."""
        return not self._stride_heap

    def next_task(self) -> DrawnTask | None:
        while self._stride_heap:
            _, index, source = self._stride_heap[0]
            name = source.environment
            drawn = self._tasks[name].draw()
            if drawn is None:
                heapq.heappop(self._stride_heap)
                continue
            self._num_drawn[name] += 1
            heapq.heapreplace(self._stride_heap, (self._num_drawn[name] / source.weight, index, source))
            return DrawnTask(name, *drawn, source.group_size)
        return None

    def state(self) -> dict[str, Any]:
        """Return the state needed to resume, as JSON-serializable data: for each environment, how far it is."""
        return {name: {"drawn": self._num_drawn[name], **tasks.state()} for name, tasks in self._tasks.items()}

    def resume(self, state: Mapping[str, Any], task_indices: Mapping[str, set[int]]) -> dict[tuple[str, int], Any]:
        """Continue after this state, and return the tasks with these indices by environment and index."""
        self._check_environments(state)
        found: dict[tuple[str, int], Any] = {}
        for name, tasks in self._tasks.items():
            resumed = tasks.resume(state[name], task_indices.get(name, set()))
            found |= {(name, index): task for index, task in resumed.items()}
            self._num_drawn[name] = state[name]["drawn"]
        self._stride_heap = [
            (self._num_drawn[name] / source.weight, index, source)
            for index, (name, source) in enumerate(self._sources.items())
        ]
        heapq.heapify(self._stride_heap)
        return found

    def _check_environments(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self._sources):
            raise KeelError(
                f"the scheduler snapshot has environments {sorted(state)}, but the run has {sorted(self._sources)};"
                " resume with the same ones"
            )
