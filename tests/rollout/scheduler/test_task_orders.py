"""The order of tasks: what it depends on, and that a restart continues it."""

import json
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import CurriculumSettings
from keel.errors import KeelError
from keel.rollout.scheduler.task_orders import Permutation
from keel.rollout.scheduler.task_sources import TaskSampler, TaskSource
from tests.support.scheduler_fakes import fake_tasks

EPOCH, GIVEN = CurriculumSettings(order="epoch"), CurriculumSettings(order="given")


def sampler(num_tasks: int, curriculum: CurriculumSettings = EPOCH, seed: int = 0, name: str = "a") -> TaskSampler:
    return TaskSampler([TaskSource(name, fake_tasks(num_tasks), curriculum=curriculum, seed=seed)])


def draw(tasks: TaskSampler, count: int) -> list[int]:
    drawn = [tasks.next_task() for _ in range(count)]
    return [each.task_index for each in drawn if each is not None]


@given(st.integers(1, 300), st.text(max_size=5))
def test_a_permutation_contains_every_number_once(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_every_place_of_a_permutation_is_taken_by_every_number_about_equally_often() -> None:
    size, rounds = 7, 2000
    counts = Counter((index, Permutation(size, str(key))[index]) for key in range(rounds) for index in range(size))
    assert len(counts) == size**2
    assert all(0.7 < count / (rounds / size) < 1.3 for count in counts.values())


def test_the_order_depends_on_the_seed_and_the_environment() -> None:
    first = draw(sampler(100), 100)
    assert first == draw(sampler(100), 100)
    assert first != draw(sampler(100, seed=1), 100)
    assert first != draw(sampler(100, name="b"), 100)
    assert sorted(first) == list(range(100)) != first


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 4))
def test_an_epoch_draws_every_task_once_before_any_repeats(num_tasks: int, seed: int, epochs: int) -> None:
    drawn = draw(sampler(num_tasks, seed=seed), epochs * num_tasks)
    for epoch in range(epochs):
        assert sorted(drawn[epoch * num_tasks : (epoch + 1) * num_tasks]) == list(range(num_tasks))


def test_every_epoch_has_another_order() -> None:
    drawn = draw(sampler(50), 200)
    epochs = [drawn[start : start + 50] for start in range(0, 200, 50)]
    assert all(first != second for first, second in pairwise(epochs))


def test_the_given_order_is_that_of_the_tasks_in_every_epoch_and_for_every_seed() -> None:
    assert draw(sampler(5, GIVEN, seed=3), 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(0, 90), st.sampled_from([EPOCH, GIVEN]))
def test_a_restart_continues_the_same_order(num_tasks: int, after: int, curriculum: CurriculumSettings) -> None:
    expected = draw(sampler(num_tasks, curriculum), after + 40)
    first, second = sampler(num_tasks, curriculum), sampler(num_tasks, curriculum)
    drawn = draw(first, after)
    state: dict[str, Any] = json.loads(json.dumps(first.state()))
    assert second.resume(state, {"a": set(drawn[-3:])}) == {
        ("a", index): fake_tasks(num_tasks)[index] for index in drawn[-3:]
    }
    assert drawn + draw(second, 40) == expected


def test_an_iterator_cannot_be_shuffled() -> None:
    with pytest.raises(KeelError, match=r'environment a: curriculum.order = "epoch" needs a sequence'):
        TaskSource("a", iter(fake_tasks(3)), curriculum=EPOCH)


def test_an_order_of_a_million_tasks_holds_nothing_per_task() -> None:
    tracemalloc.start()
    try:
        tasks = TaskSampler([TaskSource("a", range(1_000_000), curriculum=EPOCH)])
        drawn = draw(tasks, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(drawn)) == 1000
    assert max(drawn) > 900_000
    assert peak < 1_000_000
