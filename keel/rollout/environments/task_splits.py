"""Train and eval tasks of the built-in environments.

A hash of the question decides the split, not a seed or an index: the eval tasks of any run are disjoint from the train
tasks of any other. Tasks are unique and deterministic given the seed.
"""

import hashlib
import random
from collections.abc import Callable, Hashable
from typing import Annotated, TypeVar

from pydantic import Field

from keel.common.settings import Settings
from keel.rollout.environments.environment import Split

EVAL_ONE_IN = 8
"""One in this many distinct questions is an eval task."""
_MAX_IDLE_DRAWS = 1000
"""Consecutive draws without a new task after which the generator counts as exhausted."""

TaskT = TypeVar("TaskT", bound=Hashable)


class TaskSetOptions(Settings):
    """Options of every built-in environment."""

    seed: int = 0
    """Decides which tasks are generated. The split of a task does not depend on it, and their order in a run depends on
    the seed of the run."""
    train_tasks: Annotated[int, Field(ge=1)] = 2000
    """The maximum number of distinct tasks; there may be fewer."""
    eval_tasks: Annotated[int, Field(ge=1)] = 200


def split_of(question: str) -> Split:
    """Return the split of a question, which never changes."""
    return "eval" if hashlib.sha256(question.encode()).digest()[0] % EVAL_ONE_IN == 0 else "train"


def sample_tasks(
    generate: Callable[[random.Random], TaskT], key: Callable[[TaskT], str], split: Split, options: TaskSetOptions
) -> list[TaskT]:
    """Return distinct tasks of a split, as many as the options ask for or as exist.

    Tasks with the same `key` are duplicates; the key also decides the split.
    """
    rng = random.Random(f"{options.seed}/{split}")
    num_tasks = options.train_tasks if split == "train" else options.eval_tasks
    tasks: dict[str, TaskT] = {}
    idle_draws = 0
    while len(tasks) < num_tasks and idle_draws < _MAX_IDLE_DRAWS:
        task = generate(rng)
        task_key = key(task)
        if task_key in tasks or split_of(task_key) != split:
            idle_draws += 1
        else:
            tasks[task_key], idle_draws = task, 0
    return list(tasks.values())
