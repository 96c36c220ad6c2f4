"""The scheduler, one claim per test, in virtual time with scripted runners."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keel.config import SchedulerSettings
from keel.errors import ConfigError, KeelError
from keel.rollout.scheduler.accounts import NothingToTrain, RolloutBatch, SchedulerClosed, TasksExhausted
from keel.rollout.scheduler.groups import RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource
from keel.tools.simulate.virtual_clock import run_virtually
from tests.support.scheduler_fakes import (
    EmissionLog,
    FakeRollout,
    FakeTask,
    Faults,
    FaultyRunner,
    fake_tasks,
    task_sources,
)

Runner = Callable[[RolloutRequest], Awaitable[Any]]


class Raised(str):
    """The error of a rollout whose environment raised."""


class Script:
    """A runner whose results are scripted by (task id, member, attempt); others succeed after a second."""

    def __init__(self, results: dict[tuple[str, int, int], Any] | None = None, version: int = 0) -> None:
        self.results = results or {}
        self.version = version
        self.dispatched: list[tuple[str, int, int]] = []
        self.cancelled: list[tuple[str, int, int]] = []

    async def __call__(self, request: RolloutRequest) -> FakeRollout:
        key = request.task_id, request.member, request.attempt
        self.dispatched.append(key)
        version, result = self.version, self.results.get(key)
        name = request.group, request.member, request.attempt
        try:
            await asyncio.sleep(result if isinstance(result, float) else 1.0)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        if isinstance(result, Raised):
            return FakeRollout(*name, None, 0.0, str(result), "exception")
        if isinstance(result, str):
            return FakeRollout(*name, None, 0.0, f"{key} failed", result)
        if isinstance(result, BaseException):
            raise result
        return FakeRollout(*name, version)


def make_scheduler(run: Runner, tasks: Any = None, **settings: Any) -> Scheduler:
    defaults = {"groups_per_step": 2, "group_size": 2, "max_off_policy_steps": 0, **settings}
    return Scheduler(run, [TaskSource("a", fake_tasks(100) if tasks is None else tasks)], SchedulerSettings(**defaults))


def batches(scheduler: Scheduler, versions: Any = (0,)) -> list[RolloutBatch]:
    """Return the batches of a trainer that publishes each version before it requests the next batch."""

    async def main() -> list[RolloutBatch]:
        cut = []
        for scheduler._run_rollout.version in versions:
            cut.append(await scheduler.next_batch(scheduler._run_rollout.version))
        return cut

    return run_virtually(main())


def ids(batch: RolloutBatch) -> list[str]:
    return [group.task_id for group in batch.groups]


def dropped(batch: RolloutBatch) -> list[tuple[str, int, int, str]]:
    return sorted((r.task_id, r.member, r.attempt, r.reason) for r in batch.dropped)


# -- refill -----------------------------------------------------------------------------------------------------------


def refilling(run: Runner, equal: set[str], **settings: Any) -> Scheduler:
    """Return a scheduler with groups of two per step of which those of the tasks in `equal` have equal rewards."""
    chosen = SchedulerSettings(**{"groups_per_step": 2, "group_size": 2, "max_off_policy_steps": 0} | settings)
    return Scheduler(
        run, [TaskSource("a", fake_tasks(100))], chosen, is_zero_variance=lambda group: group.task_id in equal
    )


@pytest.mark.parametrize(
    "settings", [{"refill": True}, {"max_off_policy_steps": 1}, {"max_off_policy_steps": 1, "refill": True}]
)
def test_a_zero_variance_group_takes_no_place_in_the_batch(settings: dict[str, Any]) -> None:
    first, second = batches(refilling(Script(), {"task0", "task3"}, **settings), range(2))
    assert ids(first) == ["task1", "task2"]
    assert ids(second) == ["task4", "task5"]
    assert [row for row in dropped(first) if row[0] == "task0"] == [
        ("task0", 0, 0, "zero_variance"),
        ("task0", 1, 0, "zero_variance"),
    ]
    assert all(rollout.rollout is not None for rollout in first.dropped)
    assert first.counters["groups_refilled"] + second.counters.get("groups_refilled", 0) == 2


@pytest.mark.parametrize("settings", [{}, {"refill": False}, {"max_off_policy_steps": 1, "refill": False}])
def test_without_refill_a_zero_variance_group_is_part_of_the_batch(settings: dict[str, Any]) -> None:
    (batch,) = batches(refilling(Script(), {"task0"}, **settings))
    assert ids(batch) == ["task0", "task1"]
    assert batch.dropped == [] and "groups_refilled" not in batch.counters


@pytest.mark.parametrize(("factor", "replaced"), [(1.0, 0), (1.4, 0), (1.5, 1), (3.0, 4)])
def test_a_batch_is_refilled_up_to_a_limit_and_then_cut_with_what_there_is(factor: float, replaced: int) -> None:
    equal = {f"task{number}" for number in range(100)}
    first, second = batches(refilling(Script(), equal, refill=True, max_refill_factor=factor), range(2))
    assert ids(first) == [f"task{replaced}", f"task{replaced + 1}"]
    assert first.counters.get("groups_refilled", 0) == second.counters.get("groups_refilled", 0) == replaced
    assert {rollout.task_id for rollout in first.dropped} == {f"task{number}" for number in range(replaced)}


def test_an_asynchronous_batch_is_refilled_as_soon_as_a_group_is_complete() -> None:
    script = Script({("task1", 0, 0): 50.0})

    async def main() -> float:
        scheduler = refilling(script, {"task0"}, max_off_policy_steps=1, window_batches=0)
        await scheduler.next_batch(0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 50.0, "the replacement is sampled while task1 is in flight"
    assert ("task4", 0, 0) in script.dispatched


def test_a_failed_member_of_a_replaced_group_keeps_its_own_reason() -> None:
    script = Script({("task0", 1, 0): "timeout"})
    limits = {"max_error_reschedule_attempts": 0, "min_group_size": 1}
    (batch,) = batches(refilling(script, {"task0"}, refill=True, **limits))
    assert ids(batch) == ["task1", "task2"]
    assert dropped(batch) == [("task0", 0, 0, "zero_variance"), ("task0", 1, 0, "timeout")]


def test_a_restart_does_not_extend_the_limit_of_a_refill() -> None:
    equal = {f"task{number}" for number in range(100)}
    settings = {"max_off_policy_steps": 1, "max_refill_factor": 1.5, "window_batches": 0}

    async def main() -> RolloutBatch:
        scheduler = refilling(Script({("task1", 0, 0): 60.0, ("task2", 0, 0): 60.0}), equal, **settings)
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(30)
        snapshot = json.loads(json.dumps(scheduler.snapshot()))
        waiting.cancel()
        await scheduler.close()
        assert snapshot["counts"]["groups_refilled"] == 1
        resumed = Scheduler.restore(
            snapshot,
            Script(),
            [TaskSource("a", fake_tasks(100))],
            scheduler.settings,
            is_zero_variance=lambda group: group.task_id in equal,
        )
        return await resumed.next_batch(0)

    batch = run_virtually(main())
    assert batch.counters["groups_refilled"] == 1
    assert {rollout.task_id for rollout in batch.dropped if rollout.reason == "zero_variance"} == {"task0"}
    assert len(batch.groups) == 2


def test_groups_replaced_for_a_batch_that_was_never_cut_end_with_the_run() -> None:
    async def main() -> tuple[Any, Any]:
        script = Script({("task2", 0, 0): 5.0, ("task3", 0, 0): 60.0})
        scheduler = refilling(script, {"task2"}, max_off_policy_steps=1)
        batch = await scheduler.next_batch(0)
        await asyncio.sleep(10)
        return batch, await scheduler.close()

    batch, remaining = run_virtually(main())
    assert ids(batch) == ["task0", "task1"] and "groups_refilled" not in batch.counters
    assert {rollout.task_id for rollout in remaining} >= {"task2", "task3"}
    assert {rollout.reason for rollout in remaining} == {"run_ended"}


def test_refill_is_on_by_default_in_asynchronous_runs_only() -> None:
    assert SchedulerSettings(max_off_policy_steps=1).refills and not SchedulerSettings(max_off_policy_steps=0).refills
    assert SchedulerSettings(groups_per_step=20, max_refill_factor=1.15).max_refilled_groups == 3


# -- groups and retries -----------------------------------------------------------------------------------------------


def test_a_batch_holds_complete_groups_in_order_of_dispatch() -> None:
    script = Script({("task0", 1, 0): 9.0})
    (batch,) = batches(make_scheduler(script, group_size=3))
    assert ids(batch) == ["task0", "task1"]
    assert [member.member for member in batch.groups[0].members] == [0, 1, 2]
    assert all(member.valid for group in batch.groups for member in group.members)
    assert batch.dropped == []
    assert batch.counters == {"dispatched": 6, "succeeded": 6, "groups_trained": 2}


def test_one_reschedule_attempt_is_one_retry() -> None:
    script = Script({("task0", 0, 0): "timeout", ("task1", 1, 0): "empty", ("task1", 1, 1): "empty"})
    (batch,) = batches(make_scheduler(script, max_error_reschedule_attempts=1))
    assert ids(batch) == ["task0"]
    assert [member.attempt for member in batch.groups[0].members] == [1, 0]
    assert dropped(batch) == [
        ("task0", 0, 0, "timeout"),
        ("task1", 0, 0, "group_dropped"),
        ("task1", 1, 0, "empty"),
        ("task1", 1, 1, "empty"),
    ]
    assert ("task1", 1, 2) not in script.dispatched


def test_members_that_fail_in_the_same_round_count_as_one_retry_round() -> None:
    results: dict[Any, Any] = {("task0", member, 0): "engine" for member in range(4)}
    scheduler = make_scheduler(
        Script(results), groups_per_step=1, group_size=4, max_error_reschedule_attempts=1, max_in_flight=1
    )
    (batch,) = batches(scheduler)
    assert ids(batch) == ["task0"]
    assert batch.counters["retry_rounds"] == 1
    assert batch.counters["failed"] == 4


def test_without_retries_the_first_failure_drops_the_group_and_cancels_the_rest() -> None:
    script = Script({("task0", 0, 0): "exception", ("task0", 1, 0): 50.0})
    (batch,) = batches(make_scheduler(script, max_error_reschedule_attempts=0))
    assert ids(batch) == ["task1"]
    assert dropped(batch) == [("task0", 0, 0, "exception"), ("task0", 1, 0, "group_dropped")]
    assert script.cancelled == [("task0", 1, 0)]
    assert batch.counters["groups_dropped"] == batch.counters["cancelled"] == 1


def test_by_default_a_failed_rollout_is_retried_three_times() -> None:
    script = Script({("task0", 0, attempt): "engine" for attempt in range(40)})
    (batch,) = batches(make_scheduler(script))
    assert ids(batch) == ["task1"], "the batch is cut without the group that fails"
    assert [attempt for task, member, attempt in script.dispatched if (task, member) == ("task0", 0)] == [0, 1, 2, 3]


def raised_in_turn(*errors: str) -> dict[Any, Any]:
    """Return results of which the attempts of the first member report these exceptions of their environment."""
    return {("task0", 0, attempt): Raised(error) for attempt, error in enumerate(errors)}


@pytest.mark.parametrize(
    ("errors", "attempts", "trains"),
    [
        (["ValueError: a (env.py:3)"] * 9, 2, False),
        (["ValueError: a (env.py:3)", "ValueError: b (env.py:3)"] * 9, 4, False),
        (["ValueError: a (env.py:3)", "ValueError: a (env.py:4)", "ValueError: a (env.py:4)"], 3, False),
        (["ValueError: a (env.py:3)", "ValueError: b (env.py:3)"], 3, True),
    ],
    ids=["the same exception", "other messages", "the same after another", "succeeds at last"],
)
@pytest.mark.parametrize("limit", [3, None])
def test_an_exception_that_repeats_is_not_retried_again(
    errors: list[str], attempts: int, trains: bool, limit: int | None
) -> None:
    script = Script(raised_in_turn(*errors))
    (batch,) = batches(make_scheduler(script, max_error_reschedule_attempts=limit))
    if limit is None and len(errors) == 18:
        attempts, trains = 19, True
    assert len([key for key in script.dispatched if key[:2] == ("task0", 0)]) == attempts
    assert ids(batch) == (["task0", "task1"] if trains else ["task1"])


def test_members_that_raise_the_same_exception_once_are_all_retried() -> None:
    error = Raised("ValueError: a (env.py:3)")
    script = Script({("task0", member, 0): error for member in range(2)})
    (batch,) = batches(make_scheduler(script))
    assert ids(batch) == ["task0", "task1"]


def test_a_prompt_that_is_too_long_is_not_retried() -> None:
    script = Script({("task0", 0, attempt): "prompt_too_long" for attempt in range(9)})
    (batch,) = batches(make_scheduler(script, max_error_reschedule_attempts=None))
    assert ids(batch) == ["task1"]
    assert ("task0", 0, 0, "prompt_too_long") in dropped(batch)
    assert ("task0", 0, 1) not in script.dispatched


def test_an_exception_that_repeats_after_a_restart_is_not_retried_again() -> None:
    script = Script({("task0", 0, 0): Raised("ValueError: a (env.py:3)"), ("task0", 0, 1): 500.0})

    async def main() -> RolloutBatch:
        scheduler = make_scheduler(script)
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(60)
        snapshot = json.loads(json.dumps(scheduler.snapshot()))
        waiting.cancel()
        await scheduler.close()
        script.results = {("task0", 0, 2): Raised("ValueError: a (env.py:3)")}
        return await restored(snapshot, script).next_batch(0)

    batch = run_virtually(main())
    assert ids(batch) == ["task1"]


def test_without_a_limit_failures_are_retried_with_backoff() -> None:
    results: dict[Any, Any] = {("task0", 0, attempt): "engine" for attempt in range(40)}

    async def main() -> tuple[RolloutBatch, float]:
        batch = await make_scheduler(Script(results), max_error_reschedule_attempts=None).next_batch(0)
        return batch, asyncio.get_running_loop().time()

    batch, seconds = run_virtually(main())
    assert batch.groups[0].members[0].attempt == 40
    assert len(batch.dropped) == 40
    doubling = sum(min(0.1 * 2**n, 30.0) for n in range(39))
    assert seconds == pytest.approx(41 + doubling)


def test_a_group_trains_without_its_failed_members() -> None:
    script = Script({("task0", 1, 0): "timeout", ("task1", 0, 0): "empty", ("task1", 1, 0): "empty"})
    (batch,) = batches(make_scheduler(script, group_size=3, max_error_reschedule_attempts=0, min_group_size=2))
    assert ids(batch) == ["task0"]
    group = batch.groups[0]
    assert [member.valid for member in group.members] == [True, False, True]
    assert group.members[1].reason == "timeout"
    assert group.members[1].rollout.error_kind == "timeout"
    assert [rollout.member for rollout in group.rollouts] == [0, 2]
    assert ("task0", 1, 0, "timeout") not in dropped(batch), "emitted with its group only"


def test_a_group_is_dropped_as_soon_as_too_few_members_can_succeed() -> None:
    script = Script({("task0", 0, 0): "empty", ("task0", 1, 0): 60.0, ("task0", 2, 0): 60.0})

    async def main() -> float:
        scheduler = make_scheduler(
            script, groups_per_step=1, group_size=3, max_error_reschedule_attempts=0, min_group_size=3
        )
        await scheduler.next_batch(0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 1.0


def test_a_min_group_size_without_effect_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no effect"):
        SchedulerSettings(min_group_size=2, max_error_reschedule_attempts=None)


def test_consecutive_empty_batches_raise_with_the_reasons() -> None:
    results: dict[Any, Any] = {
        (f"task{task}", member, 0): kind for task in (0, 1, 4, 5, 6, 7) for member, kind in enumerate(["timeout", 9.0])
    }
    scheduler = make_scheduler(Script(results), max_error_reschedule_attempts=0, max_empty_steps=2)

    async def main() -> None:
        assert (await scheduler.next_batch(0)).groups == []
        assert len((await scheduler.next_batch(0)).groups) == 2, "a batch that trains resets the count"
        assert (await scheduler.next_batch(0)).groups == []
        with pytest.raises(NothingToTrain, match="2 consecutive batches") as halt:
            await scheduler.next_batch(0)
        assert halt.value.reasons == {"timeout": 4, "group_dropped": 4}
        assert len(halt.value.batch.dropped) == 4
        assert "dropped: timeout 4, group_dropped 4; the last error: ('task7', 0, 0) failed" in str(halt.value)
        assert len((await scheduler.next_batch(0)).groups) == 2, "the scheduler continues if the error is caught"

    run_virtually(main())


@pytest.mark.parametrize(
    "raised",
    [RuntimeError("broke"), asyncio.CancelledError(), TimeoutError(), KeelError("no")],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_of_the_runner_is_the_rollouts_error(raised: BaseException) -> None:
    (batch,) = batches(make_scheduler(Script({("task0", 0, 0): raised})))
    assert ids(batch) == ["task0", "task1"]
    assert dropped(batch) == [("task0", 0, 0, "exception")]
    assert type(raised).__name__ in str(batch.dropped[0].error)


def test_invalid_results_and_failures_to_start_are_failed_rollouts() -> None:
    calls: Counter[int] = Counter()

    async def fine(request: RolloutRequest) -> FakeRollout:
        return FakeRollout(request.group, request.member, request.attempt)

    async def junk() -> str:
        return "junk"

    def run(request: RolloutRequest) -> Any:
        calls[request.member] += 1
        if request.attempt:
            return fine(request)
        if request.member == 0:
            raise OSError("no socket")
        return junk() if request.member == 1 else "no awaitable"

    (batch,) = batches(make_scheduler(run, groups_per_step=1, group_size=3))
    assert len(batch.groups) == 1
    assert [r.reason for r in batch.dropped] == ["exception"] * 3
    assert "no socket" in str([r.error for r in batch.dropped])


# -- bounds, fairness, order ------------------------------------------------------------------------------------------


def test_rollouts_in_flight_never_exceed_the_limit() -> None:
    engine = FaultyRunner()
    batches(make_scheduler(engine, groups_per_step=5, group_size=4, max_in_flight=7, max_off_policy_steps=3), range(4))
    assert engine.max_running == 7


def test_environments_share_groups_by_weight() -> None:
    engine = FaultyRunner()
    scheduler = Scheduler(
        engine, task_sources(1.0, 3.0), SchedulerSettings(groups_per_step=8, group_size=1, max_off_policy_steps=0)
    )
    for batch in batches(scheduler, range(3)):
        assert Counter(group.environment for group in batch.groups) == {"a": 2, "b": 6}


def test_groups_are_found_by_id_until_they_are_cut() -> None:
    async def main() -> None:
        scheduler = make_scheduler(Script(), group_size=1)
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(0.5)
        group = scheduler.find_group("a#1")
        assert group is not None and group.task_id == "task1" and group.pending == 1
        await waiting
        assert scheduler.find_group("a#1") is None

    run_virtually(main())


def slow_first(window: int, batch_count: int, slow: float = 3.5) -> list[list[str]]:
    """Return the task ids of batches with one slow group among fast ones."""
    scheduler = make_scheduler(
        Script({("task0", 0, 0): slow}), group_size=1, window_batches=window, max_off_policy_steps=8
    )
    return [ids(batch) for batch in batches(scheduler, range(batch_count))]


def test_without_a_window_batches_are_in_order_of_dispatch() -> None:
    assert slow_first(0, 3) == [["task0", "task1"], ["task2", "task3"], ["task4", "task5"]]


def test_fast_groups_overtake_a_slow_one_by_at_most_the_window() -> None:
    assert slow_first(1, 3) == [["task1", "task2"], ["task0", "task3"], ["task4", "task5"]]
    assert slow_first(2, 4) == [["task1", "task2"], ["task3", "task4"], ["task0", "task5"], ["task6", "task7"]]


def test_a_late_group_overtakes_at_most_the_window() -> None:
    results = {(f"task{task}", 0, 0): 9.0 for task in range(5)}
    scheduler = make_scheduler(Script(results), group_size=1, window_batches=1, max_off_policy_steps=8)
    first, second = batches(scheduler, range(2))
    assert ids(first) == ["task0", "task1"], "task5 and later have to wait: they may overtake two groups, not four"
    assert ids(second) == ["task2", "task3"]


# -- staleness --------------------------------------------------------------------------------------------------------


def test_staleness_is_checked_when_the_batch_is_cut() -> None:
    async def main() -> None:
        script = Script()
        scheduler = make_scheduler(script, group_size=1, max_off_policy_steps=1, on_stale="drop")
        await scheduler.next_batch(0)
        await asyncio.sleep(5)
        assert scheduler.status().ready_groups == 2, "sampled ahead with version 0"
        script.version = 2
        batch = await scheduler.next_batch(2)
        assert dropped(batch) == [("task2", 0, 0, "stale"), ("task3", 0, 0, "stale")]
        assert ids(batch) == ["task4", "task5"]
        assert batch.counters["groups_stale"] == 2
        assert batch.dropped[0].rollout is not None

    run_virtually(main())


def test_a_group_at_the_staleness_limit_is_not_stale() -> None:
    script = Script()
    scheduler = make_scheduler(script, group_size=1, max_off_policy_steps=1)
    assert [ids(batch) for batch in batches(scheduler, (0, 1))] == [["task0", "task1"], ["task2", "task3"]]


def test_a_resampled_group_keeps_its_position_and_gets_all_retries() -> None:
    async def main() -> None:
        script = Script({("task2", 0, 0): "empty", ("task2", 0, 2): "empty"})
        scheduler = make_scheduler(
            script, group_size=1, max_off_policy_steps=1, max_error_reschedule_attempts=1, window_batches=0
        )
        await scheduler.next_batch(0)
        await asyncio.sleep(5)
        script.version = 2
        batch = await scheduler.next_batch(2)
        assert ids(batch) == ["task2", "task3"]
        assert [group.members[0].attempt for group in batch.groups] == [3, 1]
        assert dropped(batch) == [
            ("task2", 0, 1, "stale"),
            ("task2", 0, 2, "empty"),
            ("task3", 0, 0, "stale"),
        ]

    run_virtually(main())


@pytest.mark.parametrize("stale", ["drop", "resample"])
def test_an_engine_that_always_lags_gives_empty_batches_and_does_not_hang(stale: str) -> None:
    scheduler = make_scheduler(Script(version=0), on_stale=stale, max_empty_steps=3)

    async def main() -> None:
        for _ in range(2):
            batch = await scheduler.next_batch(5)
            assert batch.groups == [] and {r.reason for r in batch.dropped} == {"stale"}
        with pytest.raises(NothingToTrain, match="stale 12"):
            await scheduler.next_batch(5)

    run_virtually(main())


def test_a_synchronous_scheduler_has_nothing_in_flight_between_batches() -> None:
    async def main() -> None:
        script = Script()
        scheduler = make_scheduler(script)
        for step in range(3):
            await scheduler.next_batch(step)
            assert scheduler.status().in_flight == 0
            await asyncio.sleep(100)
            assert len(script.dispatched) == 4 * (step + 1)

    run_virtually(main())


def test_work_ahead_is_limited_to_the_allowed_staleness() -> None:
    async def main() -> None:
        script = Script()
        scheduler = make_scheduler(script, max_off_policy_steps=2)
        await scheduler.next_batch(0)
        await asyncio.sleep(100)
        assert len(script.dispatched) == 3 * 4, "the batch that was cut and two more"

    run_virtually(main())


# -- timeouts, cancellation, close, exhausted tasks -------------------------------------------------------------------


def test_the_watchdog_abandons_rollouts_that_cannot_be_cancelled() -> None:
    release = asyncio.Event()

    async def run(request: RolloutRequest) -> FakeRollout:
        while request.member == 0 and request.attempt == 0 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return FakeRollout(request.group, request.member, request.attempt)

    async def main() -> None:
        scheduler = make_scheduler(run, rollout_timeout=30.0, max_in_flight=2)
        batch = await scheduler.next_batch(0)
        assert asyncio.get_running_loop().time() == 30.0
        assert len(batch.groups) == 2
        assert dropped(batch) == [("task0", 0, 0, "timeout"), ("task1", 0, 0, "timeout")]
        assert "scheduler.rollout_timeout = 30 s" in str(batch.dropped[0].error)
        assert scheduler.status().abandoned == 2
        release.set()
        await asyncio.sleep(0.1)
        assert scheduler.status().abandoned == 0
        assert scheduler.drain_dropped() == []

    run_virtually(main())


def test_status_names_the_pending_group_and_the_oldest_rollout() -> None:
    async def main() -> None:
        scheduler = make_scheduler(Script({("task1", 1, 0): 500.0}))
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(60)
        status = scheduler.status()
        assert (status.waiting, status.in_flight, status.ready_groups, status.missing_groups) == (True, 1, 1, 1)
        assert (status.first_pending_group, status.oldest_rollout, status.oldest_seconds) == ("a#1", "a#1/1/0", 60.0)
        assert "the oldest a#1/1/0 for 60 s" in str(status)
        await waiting

    run_virtually(main())


def test_a_cancelled_call_loses_no_rollout() -> None:
    async def main() -> None:
        engine, log = FaultyRunner(faults=Faults(error=0.3)), EmissionLog()
        scheduler = make_scheduler(engine, max_off_policy_steps=2)
        for version in range(5):
            for patience in (0.0, 0.1, 0.2):
                try:
                    log.add_batch(await asyncio.wait_for(scheduler.next_batch(version), patience))
                    break
                except TimeoutError:
                    pass
            else:
                log.add_batch(await scheduler.next_batch(version))
            engine.version = version + 1
        log.add_dropped(await scheduler.close())
        log.check_against(engine.dispatched)

    run_virtually(main())


def test_a_second_concurrent_call_is_rejected() -> None:
    async def main() -> None:
        scheduler = make_scheduler(Script())
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(0)
        with pytest.raises(KeelError, match="only one caller"):
            await scheduler.next_batch(0)
        assert len((await waiting).groups) == 2

    run_virtually(main())


def test_closing_emits_everything_and_raises_in_a_waiting_call() -> None:
    async def main() -> None:
        script = Script({("task1", 1, 0): 500.0, ("task1", 0, 0): "empty"})
        scheduler = make_scheduler(script, max_error_reschedule_attempts=0, min_group_size=1)
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(60)
        last = await scheduler.close()
        assert sorted((r.task_id, r.member, r.reason) for r in last) == [
            ("task0", 0, "run_ended"),
            ("task0", 1, "run_ended"),
            ("task1", 0, "empty"),
            ("task1", 1, "run_ended"),
        ]
        assert script.cancelled == [("task1", 1, 0)]
        with pytest.raises(SchedulerClosed):
            await waiting
        with pytest.raises(SchedulerClosed):
            await scheduler.next_batch(0)
        assert await scheduler.close() == []

    run_virtually(main())


def test_exhausted_tasks_give_a_smaller_last_batch_and_then_an_error() -> None:
    async def main() -> None:
        scheduler = make_scheduler(Script(), iter(fake_tasks(3)))
        assert ids(await scheduler.next_batch(0)) == ["task0", "task1"]
        assert ids(await scheduler.next_batch(0)) == ["task2"]
        with pytest.raises(TasksExhausted, match="used up"):
            await scheduler.next_batch(0)

    run_virtually(main())


def test_a_sequence_of_tasks_is_repeated() -> None:
    first, second = batches(make_scheduler(Script(), fake_tasks(3)), range(2))
    assert ids(first) + ids(second) == ["task0", "task1", "task2", "task0"]
    assert len({group.id for group in first.groups + second.groups}) == 4


def test_environments_have_groups_of_their_own_size_also_after_a_restart() -> None:
    sizes = {"a": 1, "b": 5}
    chosen = SchedulerSettings(groups_per_step=4, group_size=3, max_off_policy_steps=1, max_in_flight=7)

    async def main() -> list[tuple[str, int]]:
        engine = FaultyRunner()
        scheduler = Scheduler(engine, task_sources(1.0, 1.0, 1.0, group_sizes=sizes), chosen)
        first = await scheduler.next_batch(0)
        snapshot = json.loads(json.dumps(scheduler.snapshot()))
        await scheduler.close()
        scheduler = Scheduler.restore(snapshot, engine, task_sources(1.0, 1.0, 1.0, group_sizes=sizes), chosen)
        batches = [first, *[await scheduler.next_batch(version) for version in (0, 0)]]
        await scheduler.close()
        assert engine.max_running <= 7
        return [(group.environment, len(group.members)) for batch in batches for group in batch.groups]

    groups = run_virtually(main())
    assert len(groups) == 12
    assert set(groups) == {("a", 1), ("b", 5), ("c", 3)}


def test_too_few_successes_are_judged_by_the_size_of_the_group() -> None:
    """By default all members have to succeed, and with min_group_size as many as there are at most."""
    results: dict[Any, Any] = {(f"{letter}0", 0, 0): "empty" for letter in "ab"}

    def trained(min_group_size: int | None) -> list[str]:
        chosen = SchedulerSettings(
            groups_per_step=2,
            group_size=4,
            min_group_size=min_group_size,
            max_error_reschedule_attempts=0,
            max_off_policy_steps=0,
        )
        sources = task_sources(1.0, 1.0, group_sizes={"a": 2, "b": 6})
        (batch,) = batches(Scheduler(Script(results), sources, chosen))
        return ids(batch)

    assert trained(None) == []
    assert trained(2) == ["b0"]
    assert trained(1) == ["a0", "b0"]


def test_an_exception_of_a_task_source_is_raised_by_next_batch() -> None:
    def failing() -> Any:
        yield FakeTask("fine")
        raise OSError("no such file")

    async def main() -> None:
        scheduler = make_scheduler(Script(), failing())
        for _ in range(2):
            with pytest.raises(OSError, match="no such file"):
                await scheduler.next_batch(0)
        assert [r.reason for r in await scheduler.close()] == ["run_ended", "run_ended"]

    run_virtually(main())


def test_invalid_task_sources_are_rejected() -> None:
    with pytest.raises(KeelError, match=r"weight = 0 must be above 0"):
        TaskSource("a", fake_tasks(1), 0)
    with pytest.raises(KeelError, match="environment a has no tasks"):
        TaskSource("a", [])
    with pytest.raises(KeelError, match="only once"):
        Scheduler(Script(), [TaskSource("a", fake_tasks(1)), TaskSource("a", fake_tasks(1))])
    assert issubclass(ConfigError, KeelError)


# -- restarts ---------------------------------------------------------------------------------------------------------


def interrupted() -> tuple[dict[str, Any], dict[tuple[str, int, int], FakeRollout]]:
    """Return a snapshot of two groups, and the rollouts that ended until long after it, by name.

    One group is ready; the other has a member that failed once and is in flight again.
    """
    script = Script({("task1", 0, 0): "empty", ("task1", 0, 1): 500.0, ("task1", 1, 0): 5000.0})
    stored: dict[tuple[str, int, int], FakeRollout] = {}

    async def run(request: RolloutRequest) -> Any:
        rollout = await script(request)
        stored[request.group, request.member, request.attempt] = rollout
        return rollout

    async def main() -> Any:
        scheduler = make_scheduler(run, max_error_reschedule_attempts=1)
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(60)
        snapshot = json.loads(json.dumps(scheduler.snapshot()))
        await asyncio.sleep(1000)
        waiting.cancel()
        await scheduler.close()
        return snapshot

    return run_virtually(main()), stored


def restored(snapshot: dict[str, Any], run: Runner, tasks: Any = None, **settings: Any) -> Scheduler:
    chosen = SchedulerSettings(groups_per_step=2, group_size=2, max_off_policy_steps=0, max_error_reschedule_attempts=1)
    return Scheduler.restore(
        snapshot, run, [TaskSource("a", fake_tasks(100) if tasks is None else tasks)], chosen, **settings
    )


def test_after_a_restart_rollouts_in_flight_are_dropped_and_dispatched_again() -> None:
    snapshot, _ = interrupted()
    script = Script()
    (batch,) = batches(restored(snapshot, script))
    assert dropped(batch) == [
        ("task0", 0, 0, "interrupted"),
        ("task0", 1, 0, "interrupted"),
        ("task1", 0, 0, "empty"),
        ("task1", 0, 1, "interrupted"),
        ("task1", 1, 0, "interrupted"),
    ]
    assert sorted(script.dispatched) == [("task0", 0, 1), ("task0", 1, 1), ("task1", 0, 2), ("task1", 1, 1)]
    assert ids(batch) == ["task0", "task1"]


def test_stored_rollouts_are_not_sampled_again_after_a_restart() -> None:
    snapshot, stored = interrupted()
    script = Script()
    (batch,) = batches(restored(snapshot, script, lookup=lambda *name: stored.get(name)))
    assert script.dispatched == [("task1", 1, 1)]
    assert [member.attempt for member in batch.groups[0].members] == [0, 0]
    assert [member.attempt for member in batch.groups[1].members] == [1, 1]
    assert next(r for r in batch.dropped if r.reason == "empty").rollout.error_kind == "empty"


def test_a_restart_neither_uses_up_nor_adds_a_retry() -> None:
    snapshot, _ = interrupted()
    (batch,) = batches(restored(snapshot, Script({("task1", 0, 2): "empty", ("task1", 1, 1): "empty"})))
    assert ids(batch) == ["task0"], "member 0 of task1 had failed before: its one retry was used up"
    (batch,) = batches(restored(snapshot, Script({("task1", 1, 1): "empty"})))
    assert ids(batch) == ["task0", "task1"], "member 1 had not"


def test_after_a_restart_tasks_continue_at_their_position() -> None:
    snapshot, _ = interrupted()
    for tasks in (fake_tasks(100), iter(fake_tasks(100))):
        _, second = batches(restored(snapshot, Script(), tasks), range(2))
        assert ids(second) == ["task2", "task3"]
        assert [group.id for group in second.groups] == ["a#2", "a#3"]


def test_a_restart_with_other_tasks_or_another_format_is_rejected() -> None:
    snapshot, _ = interrupted()
    with pytest.raises(KeelError, match="task 0 of environment a is other0, but was task0"):
        restored(snapshot, Script(), fake_tasks(100, "other"))
    with pytest.raises(KeelError, match="has format 9, and this version of Keel reads 3"):
        restored(snapshot | {"format": 9}, Script())
    with pytest.raises(KeelError, match=r"has format 2.*resume with the version that wrote it"):
        restored(snapshot | {"format": 2}, Script())
    with pytest.raises(KeelError, match="environment a had 100 tasks before the restart and now has 99"):
        restored(snapshot, Script(), fake_tasks(99))
    with pytest.raises(KeelError, match="supplied 2 tasks before the restart"):
        restored(snapshot, Script(), iter(fake_tasks(1)))
    with pytest.raises(KeelError, match=r"environments \['a'\], but the run has \['b'\]"):
        Scheduler.restore(snapshot, Script(), [TaskSource("b", fake_tasks(3))])


def test_consecutive_empty_batches_are_counted_across_a_restart() -> None:
    results: dict[Any, Any] = {(f"task{task}", 0, 0): "empty" for task in range(100)}
    chosen = SchedulerSettings(
        groups_per_step=1, group_size=1, max_error_reschedule_attempts=0, max_empty_steps=2, max_off_policy_steps=0
    )

    async def main() -> None:
        scheduler = Scheduler(Script(results), [TaskSource("a", fake_tasks(100))], chosen)
        await scheduler.next_batch(0)
        resumed = Scheduler.restore(scheduler.snapshot(), Script(results), [TaskSource("a", fake_tasks(100))], chosen)
        with pytest.raises(NothingToTrain, match="empty 2"):
            await resumed.next_batch(0)

    run_virtually(main())


def test_lagging_engines_get_less_work_ahead_and_no_rollout_becomes_stale() -> None:
    """The trainer is the slower side, so that the queue is always full; new weights arrive late."""

    async def main(reports_version: bool) -> tuple[int, int]:
        engine, num_dropped = FaultyRunner(), 0
        limits = SchedulerSettings(groups_per_step=2, group_size=2, max_off_policy_steps=2, on_stale="drop")
        scheduler = Scheduler(engine, task_sources(1.0), limits)
        if reports_version:
            scheduler.set_engine_version(0)
        for version in range(1, 11):
            batch = await scheduler.next_batch(version - 1)
            num_dropped += len(batch.dropped)
            await asyncio.sleep(50.0)
            asyncio.get_running_loop().call_later(
                5.0, on_weights, version, engine, scheduler if reports_version else None
            )
        await scheduler.close()
        return num_dropped, len(engine.order)

    def on_weights(version: int, engine: FaultyRunner, scheduler: Scheduler | None) -> None:
        engine.version = version
        if scheduler is not None:
            scheduler.set_engine_version(version)

    dropped_without, dispatched_without = run_virtually(main(reports_version=False))
    dropped_with, dispatched_with = run_virtually(main(reports_version=True))
    assert dropped_without > 0
    assert dropped_with == 0
    assert dispatched_with < dispatched_without
