"""Where built-in environments get their tasks from: a supply that is cut into train and eval once and for all.

A task is in eval or in train by what it asks, not by a seed or its place in a list: the evaluation of any run is
disjoint from the training of any other. Deterministic from the seed, without repetition.
"""

import hashlib
import random
from collections.abc import Callable, Hashable
from typing import Annotated, TypeVar

from pydantic import Field

from keel.common.settings import Settings
from keel.rollout.environments.environment import Split

EVAL_ONE_IN = 8
"""One in so many different questions is for evaluation."""
_MAX_IDLE_DRAWS = 1000
"""Draws in a row without anything new after which a supply counts as used up."""

TaskT = TypeVar("TaskT", bound=Hashable)


class TaskSetOptions(Settings):
    """The options that every built-in environment has."""

    seed: int = 0
    """Which tasks are drawn, and in which order. Where each belongs does not depend on it."""
    train_tasks: Annotated[int, Field(ge=1)] = 2000
    """At most so many different ones; there may be fewer."""
    eval_tasks: Annotated[int, Field(ge=1)] = 200


def split_of(question: str) -> Split:
    """Where a question belongs, for ever."""
    return "eval" if hashlib.sha256(question.encode()).digest()[0] % EVAL_ONE_IN == 0 else "train"


def sample_tasks(
    generate: Callable[[random.Random], TaskT], key: Callable[[TaskT], str], split: Split, options: TaskSetOptions
) -> list[TaskT]:
    """Different tasks of a split, as many as asked for or as there are. `named` tells tasks apart."""
    chance = random.Random(f"{options.seed}/{split}")
    wanted = options.train_tasks if split == "train" else options.eval_tasks
    found: dict[str, TaskT] = {}
    idle = 0
    while len(found) < wanted and idle < _MAX_IDLE_DRAWS:
        drawn = generate(chance)
        name = key(drawn)
        if name in found or split_of(name) != split:
            idle += 1
        else:
            found[name], idle = drawn, 0
    return list(found.values())
