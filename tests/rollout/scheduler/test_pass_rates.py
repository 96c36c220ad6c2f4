"""Pass rates of tasks: how they are measured, which tasks they favour, and that a restart changes nothing."""

import json
import random
import time
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import CurriculumSettings
from keel.errors import KeelError
from keel.rollout.scheduler.groups import PendingGroup
from keel.rollout.scheduler.pass_rates import IndexPool, PassRates, TaskRecord
from keel.rollout.scheduler.task_orders import RandomOrder
from keel.rollout.scheduler.task_sources import TaskSampler, TaskSource
from tests.support.scheduler_fakes import FakeRollout, fake_tasks


@st.composite
def curricula(draw: st.DrawFn) -> CurriculumSettings:
    order = draw(st.sampled_from(["epoch", "given", "uniform", "difficulty"]))
    retire_after = draw(st.none() | st.integers(1, 3))
    table: dict[str, Any] = {"order": order, "retire_after": retire_after, "smoothing": draw(st.floats(0.1, 1.0))}
    if retire_after is not None:
        table["retest_after"] = draw(st.integers(1, 6))
    if order == "difficulty":
        table |= {"band": sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))), "floor": draw(st.floats(0.05, 1))}
    return CurriculumSettings.model_validate(table)


class Curriculum:
    """Draws tasks of one environment and records batches with random outcomes, as the scheduler does."""

    def __init__(self, num_tasks: int, settings: CurriculumSettings, seed: int = 0) -> None:
        self.source = TaskSource("a", fake_tasks(num_tasks), curriculum=settings, seed=seed)
        self.sampler = TaskSampler([self.source])
        self.saved: dict[int, TaskRecord] = {}
        self.number = 0

    @property
    def rates(self) -> PassRates:
        return self.sampler._rates["a"]

    @property
    def order(self) -> Any:
        tasks: Any = self.sampler._tasks["a"]
        return tasks._order

    def draw(self, rewards: list[float] | None = None) -> PendingGroup:
        drawn = self.sampler.next_task()
        assert drawn is not None
        return self.group(drawn.task_index, rewards)

    def group(self, index: int, rewards: list[float] | None) -> PendingGroup:
        """Return a finished group; None: all of its rollouts failed, and it was dropped."""
        self.number += 1
        task = self.source.tasks[index]  # type: ignore[index]
        group = PendingGroup(self.number, "a", index, task, len(rewards or [0]), 0)
        for slot, reward in zip(group.slots, rewards or [], strict=False):
            slot.finish(FakeRollout(group.id, slot.member, 0, reward=reward))
        if rewards is None:
            group.clear("dropped")
        return group

    def step(self, *groups: PendingGroup) -> None:
        self.sampler.record_batch(groups)
        self.saved |= {record.task_index: record for record in self.sampler.drain_changes().records}

    def restart(self) -> None:
        state = json.loads(json.dumps(self.sampler.state()))
        records = [TaskRecord(*row) for row in json.loads(json.dumps(list(self.saved.values())))]
        self.sampler = TaskSampler([self.source])
        self.sampler.resume(state, {}, records)

    def random_step(self, rng: random.Random) -> list[int]:
        """Draw a batch, one group of which is replaced, and record it; return the tasks."""
        outcomes: list[list[float] | None] = [None, [0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        groups = [self.draw(rng.choice(outcomes)) for _ in range(rng.randint(1, 4))]
        for group in groups[:1]:
            if group.state != "dropped" and rng.random() < 0.5:
                self.sampler.record_replaced(group)
                self.step(*groups[1:])
                return [group.task_index for group in groups]
        self.step(*groups)
        return [group.task_index for group in groups]


# measuring


def test_the_pass_rate_is_a_moving_average_over_groups() -> None:
    curriculum = Curriculum(4, CurriculumSettings(smoothing=0.25, pass_threshold=0.5))
    curriculum.step(curriculum.group(2, [0.5, 1.0, 0.4, 0.0]))
    assert curriculum.rates.records[2].pass_rate == 0.5
    curriculum.step(curriculum.group(2, [1.0, 1.0]))
    record = curriculum.rates.records[2]
    assert record.pass_rate == 0.5 + 0.25 * (1.0 - 0.5)
    assert (record.groups, record.rollouts, record.last_pass_rate, record.solved_in_a_row) == (2, 6, 1.0, 1)
    assert (record.task_id, record.last_step, record.state) == ("task2", 2, "active")


def test_a_threshold_is_reached_by_a_sum_that_rounding_makes_smaller() -> None:
    curriculum = Curriculum(1, CurriculumSettings())
    assert 0.7 + 0.2 + 0.1 < 1
    curriculum.step(curriculum.group(0, [0.7 + 0.2 + 0.1]))
    assert curriculum.rates.records[0].pass_rate == 1


def test_a_replaced_group_counts_with_the_next_batch_and_once() -> None:
    curriculum = Curriculum(3, CurriculumSettings())
    curriculum.sampler.record_replaced(curriculum.group(1, [1.0, 1.0]))
    assert not curriculum.rates.records
    curriculum.restart()
    curriculum.step(curriculum.group(0, [0.0, 1.0]))
    assert {index: record.groups for index, record in curriculum.rates.records.items()} == {0: 1, 1: 1}
    curriculum.step()
    assert curriculum.rates.records[1].groups == 1
    curriculum.sampler.record_replaced(curriculum.group(1, [1.0, 1.0]))
    curriculum.sampler.discard_replaced()
    curriculum.step()
    assert curriculum.rates.records[1].groups == 1


def test_a_group_without_a_result_leaves_the_pass_rate_and_takes_its_task_out_of_the_target() -> None:
    curriculum = Curriculum(2, CurriculumSettings(order="difficulty"))
    curriculum.step(curriculum.group(0, [1.0, 0.0]))
    assert 0 in curriculum.rates.target
    curriculum.step(curriculum.group(0, None), curriculum.group(1, None))
    assert curriculum.rates.records[0].pass_rate == 0.5
    assert curriculum.rates.records[1].pass_rate is None
    assert not len(curriculum.rates.target)
    assert curriculum.rates.metrics()["tasks_seen/a"] == 0.5
    curriculum.step(curriculum.group(0, [1.0, 0.0]))
    assert 0 in curriculum.rates.target


def test_metrics_are_shares_of_the_tasks() -> None:
    curriculum = Curriculum(8, CurriculumSettings(retire_after=1))
    assert curriculum.rates.metrics() == {}
    outcomes = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    curriculum.step(*(curriculum.group(index, rewards) for index, rewards in enumerate(outcomes)))
    assert curriculum.rates.metrics() == {
        "tasks_seen/a": 0.5,
        "pass_rate/a": 0.625,
        "tasks_solved/a": 0.5,
        "tasks_unsolved/a": 0.25,
        "tasks_retired/a": 2.0,
    }


# drawing


@given(st.integers(1, 60), st.sets(st.integers(0, 59)))
def test_a_pool_holds_the_numbers_that_are_not_excluded_in_order(size: int, excluded: set[int]) -> None:
    pool, excluded = IndexPool(size), {index for index in excluded if index < size}
    for index in [*excluded, *excluded]:
        pool.set_included(index, False)
    left = [index for index in range(size) if index not in excluded]
    assert [pool[position] for position in range(len(pool))] == left
    assert [index for index in range(size) if index in pool] == left
    for index in excluded:
        pool.set_included(index, True)
    assert len(pool) == size and pool.num_excluded == 0


@settings(max_examples=200)
@given(st.integers(1, 12), curricula(), st.integers(0, 2**32), st.integers(1, 15))
def test_every_task_that_is_not_retired_keeps_the_probability_of_the_floor(
    num_tasks: int, chosen: CurriculumSettings, seed: int, steps: int
) -> None:
    curriculum, rng = Curriculum(num_tasks, chosen), random.Random(seed)
    for _ in range(steps):
        curriculum.random_step(rng)
        order = curriculum.order
        if not isinstance(order, RandomOrder):
            return
        probabilities = [order.probability(index) for index in range(num_tasks)]
        assert sum(probabilities) == pytest.approx(1)
        active = curriculum.rates.active
        for index, probability in enumerate(probabilities):
            if index in active or not len(active):
                assert probability >= chosen.uniform_fraction / num_tasks - 1e-12
            else:
                assert probability == 0


def test_draws_have_the_stated_probabilities() -> None:
    curriculum = Curriculum(10, CurriculumSettings(order="difficulty", floor=0.2, retire_after=2))
    solved, hopeless = [1.0, 1.0], [0.0, 0.0]
    for rewards in (solved, solved):
        curriculum.step(curriculum.group(0, rewards), curriculum.group(1, hopeless), curriculum.group(2, [1.0, 0.0]))
    curriculum.step(*(curriculum.group(index, solved) for index in range(3, 8)))
    assert [index for index in range(10) if index in curriculum.rates.target] == [2, 8, 9]
    draws = 20_000
    counts = Counter(curriculum.draw().task_index for _ in range(draws))
    assert counts[0] == 0, "retired"
    for index in range(10):
        expected = curriculum.order.probability(index)
        assert counts[index] / draws == pytest.approx(expected, abs=4 * (expected / draws) ** 0.5)
        assert expected == pytest.approx(0 if index == 0 else 0.2 / 9 + (0.8 / 3 if index in (2, 8, 9) else 0))


@settings(max_examples=200)
@given(st.integers(1, 12), st.sampled_from(["epoch", "given"]), st.integers(0, 2**32), st.none() | st.integers(1, 2))
def test_an_epoch_repeats_no_task_before_all_that_are_not_retired_were_drawn(
    num_tasks: int, order: Any, seed: int, retire_after: int | None
) -> None:
    chosen = CurriculumSettings(order=order, retire_after=retire_after, retest_after=retire_after and 3)
    curriculum, rng = Curriculum(num_tasks, chosen), random.Random(seed)
    epochs: dict[int, list[int]] = {}
    for _ in range(30):
        active = {index for index in range(num_tasks) if index in curriculum.rates.active}
        group = curriculum.draw(rng.choice([[1.0, 1.0], [0.0, 1.0], None]))
        epoch = (curriculum.order.cursor - 1) // num_tasks
        if epoch not in epochs and epoch > 1 and retire_after is None:
            assert sorted(epochs[epoch - 1]) == list(range(num_tasks))
        epochs.setdefault(epoch, []).append(group.task_index)
        assert group.task_index in active or not active
        curriculum.step(group)
    for drawn in epochs.values():
        assert len(set(drawn)) == len(drawn)


@settings(max_examples=150)
@given(st.integers(1, 8), st.sampled_from(["epoch", "given", "uniform", "difficulty"]), st.integers(1, 5))
def test_retired_tasks_are_left_out_and_tested_again(num_tasks: int, order: Any, retest_after: int) -> None:
    chosen = CurriculumSettings(order=order, retire_after=2, retest_after=retest_after)
    curriculum = Curriculum(num_tasks + 1, chosen)
    for _ in range(2):
        curriculum.step(curriculum.group(0, [1.0, 1.0]))
    assert curriculum.rates.metrics()["tasks_retired/a"] == 1
    for _ in range(retest_after - 1):
        group = curriculum.draw([1.0, 0.0])
        assert group.task_index != 0
        curriculum.step(group)
    curriculum.step()
    assert 0 in curriculum.rates.active and 0 in curriculum.rates.target
    assert curriculum.saved[0].state == "retest"
    for _ in range(60 * (num_tasks + 1)):
        group = curriculum.draw([1.0, 1.0] if num_tasks % 2 else [1.0, 0.0])
        if group.task_index == 0:
            break
    assert group.task_index == 0
    curriculum.step(group)
    assert (0 not in curriculum.rates.active) == bool(num_tasks % 2), "retired again if it was solved again"


def test_if_every_task_is_retired_all_are_drawn() -> None:
    for order in ("epoch", "given", "uniform", "difficulty"):
        curriculum = Curriculum(3, CurriculumSettings(order=order, retire_after=1))
        curriculum.step(*(curriculum.group(index, [1.0]) for index in range(3)))
        assert {curriculum.draw().task_index for _ in range(60)} == {0, 1, 2}


# restarts


@settings(max_examples=300)
@given(st.integers(1, 10), curricula(), st.integers(0, 2**32), st.sets(st.integers(0, 19)))
def test_restarts_at_any_point_change_nothing(
    num_tasks: int, chosen: CurriculumSettings, seed: int, restarts: set[int]
) -> None:
    whole, interrupted = Curriculum(num_tasks, chosen, seed % 3), Curriculum(num_tasks, chosen, seed % 3)
    rng, other = random.Random(seed), random.Random(seed)
    for step in range(20):
        if step in restarts:
            interrupted.restart()
        assert whole.random_step(rng) == interrupted.random_step(other)
        assert whole.rates.records == interrupted.rates.records
        assert whole.rates.metrics() == interrupted.rates.metrics()


def test_other_tasks_under_the_same_indices_are_rejected() -> None:
    curriculum = Curriculum(3, CurriculumSettings())
    curriculum.step(curriculum.group(1, [1.0]))
    curriculum.source = TaskSource("a", fake_tasks(3, "other"), curriculum=CurriculumSettings())
    with pytest.raises(KeelError, match="task 1 of environment a is other1, but was task1 in an earlier step"):
        curriculum.restart()


# size


def test_a_million_tasks_cost_memory_and_time_only_for_those_that_were_sampled() -> None:
    seen = 20_000
    settings = CurriculumSettings(order="difficulty", retire_after=1)
    tracemalloc.start()
    try:
        rates = PassRates("a", 1_000_000, settings)
        order = RandomOrder(rates, "0/a", settings.uniform_fraction)
        order.next_index()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    for index in range(0, 50 * seen, 50):
        rates.record_group(index, "x", [float(index % 3 == 0)])
    start = time.process_time()
    drawn = [order.next_index() for _ in range(2000)]
    assert (time.process_time() - start) / 2000 < 0.0005
    assert len(set(drawn)) > 1950
