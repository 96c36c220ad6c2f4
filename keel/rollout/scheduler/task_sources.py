"""Task sources: draw tasks from weighted environments by stride scheduling.

The environment of the k-th group depends only on weights and counts, and its task on the order of the environment
(`task_orders`), so that both are the same after a restart; where the order depends on pass rates (`pass_rates`), on the
batches cut before the draw too.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keel.config.rollout import CurriculumSettings
from keel.errors import KeelError
from keel.rollout.scheduler.groups import PendingGroup
from keel.rollout.scheduler.pass_rates import PassRates, TaskRecord
from keel.rollout.scheduler.task_orders import make_order

NUM_CHECKED_IDS = 16
"""Tasks whose ids are compared after a restart; reading all of a large data set would take long."""


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


class TaskChanges(NamedTuple):
    """What a batch changed about the tasks, to be saved with it."""

    records: list[TaskRecord]
    metrics: dict[str, float]


class RepeatedTasks:
    """Draws from a sequence of tasks, indefinitely."""

    def __init__(self, source: TaskSource, tasks: Sequence[Any]) -> None:
        self._environment, self._tasks = source.environment, tasks
        self.rates = PassRates(source.environment, len(tasks), source.curriculum)
        self._order = make_order(source.curriculum, self.rates, source.seed)

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

    def restore_rates(self, step: int, records: list[TaskRecord]) -> None:
        """Continue with the pass rates of earlier steps; compare the ids of the tasks sampled last."""
        for record in sorted(records, key=lambda record: -record.last_step)[:NUM_CHECKED_IDS]:
            task_id = self._tasks[record.task_index].id if record.task_index < len(self._tasks) else "missing"
            if task_id != record.task_id:
                raise KeelError(
                    f"task {record.task_index} of environment {self._environment} is {task_id}, but was"
                    f" {record.task_id} in an earlier step; resume with the same tasks in the same order"
                )
        self.rates.restore(step, records)


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
        self._rates = {name: tasks.rates for name, tasks in self._tasks.items() if isinstance(tasks, RepeatedTasks)}
        self._replaced: list[tuple[str, int, str, list[float]]] = []
        """Groups that count in the next batch: environment, index and id of the task, and rewards."""
        self._step = 0
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

    # -- pass rates ---------------------------------------------------------------------------------------------------

    def record_batch(self, groups: Iterable[PendingGroup]) -> None:
        """Count the groups of a batch, and those that were replaced for it, in the pass rates of their tasks."""
        self._step += 1
        for rates in self._rates.values():
            rates.begin_step()
        batch = [(group.environment, group.task_index, group.task_id, _rewards(group)) for group in groups]
        for environment, task_index, task_id, rewards in (*self._replaced, *batch):
            if environment in self._rates:
                self._rates[environment].record_group(task_index, task_id, rewards)
        for rates in self._rates.values():
            rates.end_step()
        self._replaced = []

    def record_replaced(self, group: PendingGroup) -> None:
        """Count a complete group that takes no place in a batch with the groups of the next batch."""
        self._replaced.append((group.environment, group.task_index, group.task_id, _rewards(group)))

    def discard_replaced(self) -> None:
        """Forget the replaced groups: there is no next batch."""
        self._replaced = []

    def drain_changes(self) -> TaskChanges:
        """Return the task records that changed since the last call, and the metrics of all tasks."""
        rates = self._rates.values()
        return TaskChanges(
            [record for each in rates for record in each.drain_changes()],
            {name: value for each in rates for name, value in each.metrics().items()},
        )

    # -- restarts -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state needed to resume, except the task records, as JSON-serializable data."""
        return {
            "step": self._step,
            "replaced": [list(group) for group in self._replaced],
            "environments": {
                name: {"drawn": self._num_drawn[name], **tasks.state()} for name, tasks in self._tasks.items()
            },
        }

    def resume(
        self, state: Mapping[str, Any], task_indices: Mapping[str, set[int]], records: Iterable[TaskRecord] = ()
    ) -> dict[tuple[str, int], Any]:
        """Continue after this state, and return the tasks with these indices by environment and index."""
        environments = state["environments"]
        self._check_environments(environments)
        self._step, self._replaced = state["step"], [tuple(group) for group in state["replaced"]]
        by_environment: dict[str, list[TaskRecord]] = {}
        for record in records:
            by_environment.setdefault(record.environment, []).append(record)
        resumed_tasks: dict[tuple[str, int], Any] = {}
        for name, tasks in self._tasks.items():
            resumed = tasks.resume(environments[name], task_indices.get(name, set()))
            resumed_tasks |= {(name, index): task for index, task in resumed.items()}
            self._num_drawn[name] = environments[name]["drawn"]
            if isinstance(tasks, RepeatedTasks):
                tasks.restore_rates(self._step, by_environment.get(name, []))
        self._stride_heap = [
            (self._num_drawn[name] / source.weight, index, source)
            for index, (name, source) in enumerate(self._sources.items())
        ]
        heapq.heapify(self._stride_heap)
        return resumed_tasks

    def _check_environments(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self._sources):
            raise KeelError(
                f"the scheduler snapshot has environments {sorted(state)}, but the run has {sorted(self._sources)};"
                " resume with the same ones"
            )


def _rewards(group: PendingGroup) -> list[float]:
    """Return the rewards of the valid rollouts of a group; none if it was dropped."""
    rewards = (getattr(slot.rollout, "reward", None) for slot in group.slots if slot.reason is None)
    return [float(reward) for reward in rewards if reward is not None]
