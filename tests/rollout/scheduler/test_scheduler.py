"""The scheduler, one claim at a time, in virtual time and with runners that do exactly what the claim needs."""

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
from tests.support.scheduler_fakes import Engine, Faults, Job, Ledger, Told, jobs, sources

Runner = Callable[[RolloutRequest], Awaitable[Any]]


class Script:
    """A runner that does as it is told by (task id, member, attempt), and otherwise succeeds after a second."""

    def __init__(self, lines: dict[tuple[str, int, int], Any] | None = None, version: int = 0) -> None:
        self.lines = lines or {}
        self.version = version
        self.dispatched: list[tuple[str, int, int]] = []
        self.cancelled: list[tuple[str, int, int]] = []

    async def __call__(self, dispatch: RolloutRequest) -> Told:
        key = dispatch.task_id, dispatch.member, dispatch.attempt
        self.dispatched.append(key)
        version, line = self.version, self.lines.get(key)
        name = dispatch.group, dispatch.member, dispatch.attempt
        try:
            await asyncio.sleep(line if isinstance(line, float) else 1.0)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        if isinstance(line, str):
            return Told(*name, None, 0.0, f"{key} went wrong", line)
        if isinstance(line, BaseException):
            raise line
        return Told(*name, version)


def scheduler(run: Runner, tasks: Any = None, **given: Any) -> Scheduler:
    chosen = {"groups_per_step": 2, "group_size": 2, "max_off_policy_steps": 0, **given}
    return Scheduler(run, [TaskSource("a", jobs(100) if tasks is None else tasks)], SchedulerSettings(**chosen))


def batches(made: Scheduler, versions: Any = (0,)) -> list[RolloutBatch]:
    """A trainer that publishes each version before it asks for the next batch."""

    async def main() -> list[RolloutBatch]:
        found = []
        for made._run_rollout.version in versions:
            found.append(await made.next_batch(made._run_rollout.version))
        return found

    return run_virtually(main())


def ids(batch: RolloutBatch) -> list[str]:
    return [group.task_id for group in batch.groups]


def refused(batch: RolloutBatch) -> list[tuple[str, int, int, str]]:
    return sorted((r.task_id, r.member, r.attempt, r.reason) for r in batch.dropped)


# -- groups and retries -----------------------------------------------------------------------------------------------


def test_a_batch_holds_whole_groups_in_order_of_dispatch() -> None:
    script = Script({("task0", 1, 0): 9.0})
    (batch,) = batches(scheduler(script, group_size=3))
    assert ids(batch) == ["task0", "task1"]
    assert [member.member for member in batch.groups[0].members] == [0, 1, 2]
    assert all(member.valid for group in batch.groups for member in group.members)
    assert batch.dropped == []
    assert batch.counters == {"dispatched": 6, "succeeded": 6, "groups_trained": 2}


def test_one_attempt_means_one_retry() -> None:
    script = Script({("task0", 0, 0): "timeout", ("task1", 1, 0): "empty", ("task1", 1, 1): "empty"})
    (batch,) = batches(scheduler(script, max_error_reschedule_attempts=1))
    assert ids(batch) == ["task0"]
    assert [member.attempt for member in batch.groups[0].members] == [1, 0]
    assert refused(batch) == [
        ("task0", 0, 0, "timeout"),
        ("task1", 0, 0, "group_dropped"),
        ("task1", 1, 0, "empty"),
        ("task1", 1, 1, "empty"),
    ]
    assert ("task1", 1, 2) not in script.dispatched


def test_members_that_fail_in_the_same_round_count_once_however_far_apart() -> None:
    lines: dict[Any, Any] = {("task0", member, 0): "engine" for member in range(4)}
    made = scheduler(Script(lines), groups_per_step=1, group_size=4, max_error_reschedule_attempts=1, max_in_flight=1)
    (batch,) = batches(made)
    assert ids(batch) == ["task0"]
    assert batch.counters["retry_rounds"] == 1
    assert batch.counters["failed"] == 4


def test_without_attempts_the_first_failure_drops_the_group_and_cancels_the_rest() -> None:
    script = Script({("task0", 0, 0): "exception", ("task0", 1, 0): 50.0})
    (batch,) = batches(scheduler(script, max_error_reschedule_attempts=0))
    assert ids(batch) == ["task1"]
    assert refused(batch) == [("task0", 0, 0, "exception"), ("task0", 1, 0, "group_dropped")]
    assert script.cancelled == [("task0", 1, 0)]
    assert batch.counters["groups_dropped"] == batch.counters["cancelled"] == 1


def test_by_default_failures_are_tried_again_for_ever_with_growing_pauses() -> None:
    lines: dict[Any, Any] = {("task0", 0, attempt): "engine" for attempt in range(40)}

    async def main() -> tuple[RolloutBatch, float]:
        batch = await scheduler(Script(lines)).next_batch(0)
        return batch, asyncio.get_running_loop().time()

    batch, seconds = run_virtually(main())
    assert batch.groups[0].members[0].attempt == 40
    assert len(batch.dropped) == 40
    doubling = sum(min(0.1 * 2**n, 30.0) for n in range(39))
    assert seconds == pytest.approx(41 + doubling)


def test_survivors_train_and_failed_members_have_no_vote() -> None:
    script = Script({("task0", 1, 0): "timeout", ("task1", 0, 0): "empty", ("task1", 1, 0): "empty"})
    (batch,) = batches(scheduler(script, group_size=3, max_error_reschedule_attempts=0, min_group_size=2))
    assert ids(batch) == ["task0"]
    group = batch.groups[0]
    assert [member.valid for member in group.members] == [True, False, True]
    assert group.members[1].reason == "timeout"
    assert group.members[1].rollout.error_kind == "timeout"
    assert [told.member for told in group.rollouts] == [0, 2]
    assert ("task0", 1, 0, "timeout") not in refused(batch), "emitted with its group, and only there"


def test_a_group_is_dropped_as_soon_as_too_few_can_succeed() -> None:
    script = Script({("task0", 0, 0): "empty", ("task0", 1, 0): 60.0, ("task0", 2, 0): 60.0})

    async def main() -> float:
        made = scheduler(script, groups_per_step=1, group_size=3, max_error_reschedule_attempts=0, min_group_size=3)
        await made.next_batch(0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 1.0


def test_a_minimum_that_could_not_act_is_refused() -> None:
    with pytest.raises(ValueError, match="has no effect"):
        SchedulerSettings(min_group_size=2)


def test_it_halts_after_batches_in_a_row_with_nothing_to_train_on_and_says_why() -> None:
    lines: dict[Any, Any] = {
        (f"task{task}", member, 0): kind for task in (0, 1, 4, 5, 6, 7) for member, kind in enumerate(["timeout", 9.0])
    }
    made = scheduler(Script(lines), max_error_reschedule_attempts=0, max_empty_steps=2)

    async def main() -> None:
        assert (await made.next_batch(0)).groups == []
        assert len((await made.next_batch(0)).groups) == 2, "a batch that trains starts the count again"
        assert (await made.next_batch(0)).groups == []
        with pytest.raises(NothingToTrain, match="2 batches in a row") as halt:
            await made.next_batch(0)
        assert halt.value.reasons == {"timeout": 4, "group_dropped": 4}
        assert len(halt.value.batch.dropped) == 4
        assert "refused: timeout 4, group_dropped 4; the last error: ('task7', 0, 0) went wrong" in str(halt.value)
        assert len((await made.next_batch(0)).groups) == 2, "whoever catches it may go on"

    run_virtually(main())


@pytest.mark.parametrize(
    "broken",
    [RuntimeError("broke"), asyncio.CancelledError(), TimeoutError(), KeelError("no")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_escapes_the_runner_is_that_rollouts_error(broken: BaseException) -> None:
    (batch,) = batches(scheduler(Script({("task0", 0, 0): broken})))
    assert ids(batch) == ["task0", "task1"]
    assert refused(batch) == [("task0", 0, 0, "exception")]
    assert type(broken).__name__ in str(batch.dropped[0].error)


def test_runners_that_return_junk_or_cannot_begin_have_failed_like_any_other() -> None:
    calls: Counter[int] = Counter()

    async def fine(dispatch: RolloutRequest) -> Told:
        return Told(dispatch.group, dispatch.member, dispatch.attempt)

    async def junk() -> str:
        return "junk"

    def run(dispatch: RolloutRequest) -> Any:
        calls[dispatch.member] += 1
        if dispatch.attempt:
            return fine(dispatch)
        if dispatch.member == 0:
            raise OSError("no socket")
        return junk() if dispatch.member == 1 else "no awaitable"

    (batch,) = batches(scheduler(run, groups_per_step=1, group_size=3))
    assert len(batch.groups) == 1
    assert [r.reason for r in batch.dropped] == ["exception"] * 3
    assert "no socket" in str([r.error for r in batch.dropped])


# -- bounds, fairness, order ------------------------------------------------------------------------------------------


def test_no_more_than_allowed_is_ever_in_flight() -> None:
    engine = Engine()
    batches(scheduler(engine, groups_per_step=5, group_size=4, max_in_flight=7, max_off_policy_steps=3), range(4))
    assert engine.most == 7


def test_environments_share_groups_by_weight() -> None:
    engine = Engine()
    made = Scheduler(
        engine, sources(1.0, 3.0), SchedulerSettings(groups_per_step=8, group_size=1, max_off_policy_steps=0)
    )
    for batch in batches(made, range(3)):
        assert Counter(group.environment for group in batch.groups) == {"a": 2, "b": 6}


def test_groups_are_found_by_id_until_they_are_cut() -> None:
    async def main() -> None:
        made = scheduler(Script(), group_size=1)
        waiting = asyncio.ensure_future(made.next_batch(0))
        await asyncio.sleep(0.5)
        group = made.find_group("a#1")
        assert group is not None and group.task_id == "task1" and group.pending == 1
        await waiting
        assert made.find_group("a#1") is None

    run_virtually(main())


def slow_first(window: int, batch_count: int, slow: float = 3.5) -> list[list[str]]:
    """One slow group among quick ones, a batch cut each second or so."""
    made = scheduler(Script({("task0", 0, 0): slow}), group_size=1, window_batches=window, max_off_policy_steps=8)
    return [ids(batch) for batch in batches(made, range(batch_count))]


def test_without_a_window_batches_are_in_order_of_dispatch_whatever_is_slow() -> None:
    assert slow_first(0, 3) == [["task0", "task1"], ["task2", "task3"], ["task4", "task5"]]


def test_short_answers_overtake_a_long_one_by_a_window_of_batches_and_no_more() -> None:
    assert slow_first(1, 3) == [["task1", "task2"], ["task0", "task3"], ["task4", "task5"]]
    assert slow_first(2, 4) == [["task1", "task2"], ["task3", "task4"], ["task0", "task5"], ["task6", "task7"]]


def test_a_group_far_down_the_line_does_not_overtake_more_than_the_window() -> None:
    lines = {(f"task{task}", 0, 0): 9.0 for task in range(5)}
    made = scheduler(Script(lines), group_size=1, window_batches=1, max_off_policy_steps=8)
    first, second = batches(made, range(2))
    assert ids(first) == ["task0", "task1"], "task5 and later had to wait: they may pass two groups, not four"
    assert ids(second) == ["task2", "task3"]


# -- staleness --------------------------------------------------------------------------------------------------------


def test_staleness_counts_the_time_in_the_queue_and_is_checked_when_the_batch_is_cut() -> None:
    async def main() -> None:
        script = Script()
        made = scheduler(script, group_size=1, max_off_policy_steps=1, on_stale="drop")
        await made.next_batch(0)
        await asyncio.sleep(5)
        assert made.status().ready_groups == 2, "sampled ahead, at version 0, and ready"
        script.version = 2
        batch = await made.next_batch(2)
        assert refused(batch) == [("task2", 0, 0, "stale"), ("task3", 0, 0, "stale")]
        assert ids(batch) == ["task4", "task5"]
        assert batch.counters["groups_stale"] == 2
        assert batch.dropped[0].rollout is not None

    run_virtually(main())


def test_exactly_as_old_as_allowed_is_not_stale() -> None:
    script = Script()
    made = scheduler(script, group_size=1, max_off_policy_steps=1)
    assert [ids(batch) for batch in batches(made, (0, 1))] == [["task0", "task1"], ["task2", "task3"]]


def test_a_stale_group_is_sampled_again_in_its_place_with_all_its_retries() -> None:
    async def main() -> None:
        script = Script({("task2", 0, 0): "empty", ("task2", 0, 2): "empty"})
        made = scheduler(
            script, group_size=1, max_off_policy_steps=1, max_error_reschedule_attempts=1, window_batches=0
        )
        await made.next_batch(0)
        await asyncio.sleep(5)
        script.version = 2
        batch = await made.next_batch(2)
        assert ids(batch) == ["task2", "task3"]
        assert [group.members[0].attempt for group in batch.groups] == [3, 1]
        assert refused(batch) == [
            ("task2", 0, 1, "stale"),
            ("task2", 0, 2, "empty"),
            ("task3", 0, 0, "stale"),
        ]

    run_virtually(main())


@pytest.mark.parametrize("stale", ["drop", "resample"])
def test_an_engine_that_lags_behind_for_ever_leaves_batches_empty_and_does_not_hang(stale: str) -> None:
    made = scheduler(Script(version=0), on_stale=stale, max_empty_steps=3)

    async def main() -> None:
        for _ in range(2):
            batch = await made.next_batch(5)
            assert batch.groups == [] and {r.reason for r in batch.dropped} == {"stale"}
        with pytest.raises(NothingToTrain, match="stale 12"):
            await made.next_batch(5)

    run_virtually(main())


def test_synchronous_means_nothing_is_in_flight_when_a_batch_is_cut_and_nothing_after() -> None:
    async def main() -> None:
        script = Script()
        made = scheduler(script)
        for step in range(3):
            await made.next_batch(step)
            assert made.status().in_flight == 0
            await asyncio.sleep(100)
            assert len(script.dispatched) == 4 * (step + 1)

    run_virtually(main())


def test_work_ahead_is_what_can_still_be_fresh_enough() -> None:
    async def main() -> None:
        script = Script()
        made = scheduler(script, max_off_policy_steps=2)
        await made.next_batch(0)
        await asyncio.sleep(100)
        assert len(script.dispatched) == 3 * 4, "the batch that was cut, and two more"

    run_virtually(main())


# -- never hangs, never loses -----------------------------------------------------------------------------------------


def test_the_watchdog_gives_up_what_never_comes_back_even_if_it_cannot_be_cancelled() -> None:
    release = asyncio.Event()

    async def run(dispatch: RolloutRequest) -> Told:
        while dispatch.member == 0 and dispatch.attempt == 0 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return Told(dispatch.group, dispatch.member, dispatch.attempt)

    async def main() -> None:
        made = scheduler(run, rollout_timeout=30.0, max_in_flight=2)
        batch = await made.next_batch(0)
        assert asyncio.get_running_loop().time() == 30.0
        assert len(batch.groups) == 2
        assert refused(batch) == [("task0", 0, 0, "timeout"), ("task1", 0, 0, "timeout")]
        assert "scheduler.rollout_timeout = 30 s" in str(batch.dropped[0].error)
        assert made.status().abandoned == 2
        release.set()
        await asyncio.sleep(0.1)
        assert made.status().abandoned == 0
        assert made.drain_dropped() == []

    run_virtually(main())


def test_status_says_what_is_waited_for() -> None:
    async def main() -> None:
        made = scheduler(Script({("task1", 1, 0): 500.0}))
        waiting = asyncio.ensure_future(made.next_batch(0))
        await asyncio.sleep(60)
        status = made.status()
        assert (status.waiting, status.in_flight, status.ready_groups, status.missing_groups) == (True, 1, 1, 1)
        assert (status.first_pending_group, status.oldest_rollout, status.oldest_seconds) == ("a#1", "a#1/1/0", 60.0)
        assert "the oldest a#1/1/0 for 60 s" in str(status)
        await waiting

    run_virtually(main())


def test_a_cancelled_call_loses_nothing_and_the_next_one_goes_on() -> None:
    async def main() -> None:
        engine, ledger = Engine(faults=Faults(error=0.3)), Ledger()
        made = scheduler(engine, max_off_policy_steps=2)
        for version in range(5):
            for patience in (0.0, 0.1, 0.2):
                try:
                    ledger.batch(await asyncio.wait_for(made.next_batch(version), patience))
                    break
                except TimeoutError:
                    pass
            else:
                ledger.batch(await made.next_batch(version))
            engine.version = version + 1
        ledger.refused(await made.close())
        ledger.check_against(engine.dispatched)

    run_virtually(main())


def test_one_caller_at_a_time() -> None:
    async def main() -> None:
        made = scheduler(Script())
        waiting = asyncio.ensure_future(made.next_batch(0))
        await asyncio.sleep(0)
        with pytest.raises(KeelError, match="already waiting"):
            await made.next_batch(0)
        assert len((await waiting).groups) == 2

    run_virtually(main())


def test_closing_emits_everything_and_tells_whoever_waits() -> None:
    async def main() -> None:
        script = Script({("task1", 1, 0): 500.0, ("task1", 0, 0): "empty"})
        made = scheduler(script, max_error_reschedule_attempts=0, min_group_size=1)
        waiting = asyncio.ensure_future(made.next_batch(0))
        await asyncio.sleep(60)
        last = await made.close()
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
            await made.next_batch(0)
        assert await made.close() == []

    run_virtually(main())


def test_tasks_that_run_out_give_a_last_smaller_batch_and_then_an_error_that_says_so() -> None:
    async def main() -> None:
        made = scheduler(Script(), iter(jobs(3)))
        assert ids(await made.next_batch(0)) == ["task0", "task1"]
        assert ids(await made.next_batch(0)) == ["task2"]
        with pytest.raises(TasksExhausted, match="used up"):
            await made.next_batch(0)

    run_virtually(main())


def test_a_sequence_of_tasks_is_gone_through_again_and_again() -> None:
    first, second = batches(scheduler(Script(), jobs(3)), range(2))
    assert ids(first) + ids(second) == ["task0", "task1", "task2", "task0"]
    assert len({group.id for group in first.groups + second.groups}) == 4


def test_tasks_that_cannot_be_made_stop_the_run_and_not_silently() -> None:
    def broken() -> Any:
        yield Job("fine")
        raise OSError("no such file")

    async def main() -> None:
        made = scheduler(Script(), broken())
        for _ in range(2):
            with pytest.raises(OSError, match="no such file"):
                await made.next_batch(0)
        assert [r.reason for r in await made.close()] == ["run_ended", "closed"]

    run_virtually(main())


def test_sources_that_could_not_act_are_refused() -> None:
    with pytest.raises(KeelError, match=r"weight = 0 must be above 0"):
        TaskSource("a", jobs(1), 0)
    with pytest.raises(KeelError, match="environment a has no tasks"):
        TaskSource("a", [])
    with pytest.raises(KeelError, match="only once"):
        Scheduler(Script(), [TaskSource("a", jobs(1)), TaskSource("a", jobs(1))])
    assert issubclass(ConfigError, KeelError)


# -- restarts ---------------------------------------------------------------------------------------------------------


def interrupted() -> tuple[dict[str, Any], dict[tuple[str, int, int], Told]]:
    """A snapshot of two groups: one ready, one with a member that failed once, was tried again and is in flight.

    And what had ended a good while after it, by name.
    """
    script = Script({("task1", 0, 0): "empty", ("task1", 0, 1): 500.0, ("task1", 1, 0): 5000.0})
    stored: dict[tuple[str, int, int], Told] = {}

    async def run(dispatch: RolloutRequest) -> Any:
        told = await script(dispatch)
        stored[dispatch.group, dispatch.member, dispatch.attempt] = told
        return told

    async def main() -> Any:
        made = scheduler(run, max_error_reschedule_attempts=1)
        waiting = asyncio.ensure_future(made.next_batch(0))
        await asyncio.sleep(60)
        snapshot = json.loads(json.dumps(made.snapshot()))
        await asyncio.sleep(1000)
        waiting.cancel()
        await made.close()
        return snapshot

    return run_virtually(main()), stored


def restored(snapshot: dict[str, Any], run: Runner, tasks: Any = None, **given: Any) -> Scheduler:
    chosen = SchedulerSettings(groups_per_step=2, group_size=2, max_off_policy_steps=0, max_error_reschedule_attempts=1)
    return Scheduler.restore(snapshot, run, [TaskSource("a", jobs(100) if tasks is None else tasks)], chosen, **given)


def test_after_a_restart_what_was_in_flight_is_refused_and_dispatched_as_the_next_attempt() -> None:
    snapshot, _ = interrupted()
    script = Script()
    (batch,) = batches(restored(snapshot, script))
    assert refused(batch) == [
        ("task0", 0, 0, "interrupted"),
        ("task0", 1, 0, "interrupted"),
        ("task1", 0, 0, "empty"),
        ("task1", 0, 1, "interrupted"),
        ("task1", 1, 0, "interrupted"),
    ]
    assert sorted(script.dispatched) == [("task0", 0, 1), ("task0", 1, 1), ("task1", 0, 2), ("task1", 1, 1)]
    assert ids(batch) == ["task0", "task1"]


def test_what_had_ended_before_or_after_the_snapshot_and_is_recalled_is_not_sampled_again() -> None:
    snapshot, stored = interrupted()
    script = Script()
    (batch,) = batches(restored(snapshot, script, recall=lambda *name: stored.get(name)))
    assert script.dispatched == [("task1", 1, 1)]
    assert [member.attempt for member in batch.groups[0].members] == [0, 0]
    assert [member.attempt for member in batch.groups[1].members] == [1, 1]
    assert next(r for r in batch.dropped if r.reason == "empty").rollout.error_kind == "empty"


def test_a_restart_neither_uses_up_a_retry_nor_gives_one() -> None:
    snapshot, _ = interrupted()
    (batch,) = batches(restored(snapshot, Script({("task1", 0, 2): "empty", ("task1", 1, 1): "empty"})))
    assert ids(batch) == ["task0"], "member 0 of task1 had failed before: its one retry was used up"
    (batch,) = batches(restored(snapshot, Script({("task1", 1, 1): "empty"})))
    assert ids(batch) == ["task0", "task1"], "member 1 had not"


def test_after_a_restart_tasks_go_on_where_they_were() -> None:
    snapshot, _ = interrupted()
    for tasks in (jobs(100), iter(jobs(100))):
        _, second = batches(restored(snapshot, Script(), tasks), range(2))
        assert ids(second) == ["task2", "task3"]
        assert [group.id for group in second.groups] == ["a#2", "a#3"]


def test_a_restart_with_other_tasks_or_from_another_format_is_refused() -> None:
    snapshot, _ = interrupted()
    with pytest.raises(KeelError, match="task 0 of environment a is other0, and was task0"):
        restored(snapshot, Script(), jobs(100, "other"))
    with pytest.raises(KeelError, match="has format 9, and this version reads 1"):
        restored(snapshot | {"format": 9}, Script())
    with pytest.raises(KeelError, match="had given 2 tasks"):
        restored(snapshot, Script(), iter(jobs(1)))
    with pytest.raises(KeelError, match=r"environments \['a'\], and these are \['b'\]"):
        Scheduler.restore(snapshot, Script(), [TaskSource("b", jobs(3))])


def test_empty_batches_in_a_row_are_counted_across_a_restart() -> None:
    lines: dict[Any, Any] = {(f"task{task}", 0, 0): "empty" for task in range(100)}
    chosen = SchedulerSettings(
        groups_per_step=1, group_size=1, max_error_reschedule_attempts=0, max_empty_steps=2, max_off_policy_steps=0
    )

    async def main() -> None:
        made = Scheduler(Script(lines), [TaskSource("a", jobs(100))], chosen)
        await made.next_batch(0)
        again = Scheduler.restore(made.snapshot(), Script(lines), [TaskSource("a", jobs(100))], chosen)
        with pytest.raises(NothingToTrain, match="empty 2"):
            await again.next_batch(0)

    run_virtually(main())


def test_engines_that_are_behind_are_given_less_work_ahead_and_nothing_gets_too_old_for_that() -> None:
    """The trainer is the slower side, so that the line is always full; new weights take a while to arrive."""

    async def main(told: bool) -> tuple[int, int]:
        engine, refused = Engine(), 0
        limits = SchedulerSettings(groups_per_step=2, group_size=2, max_off_policy_steps=2, on_stale="drop")
        scheduler = Scheduler(engine, sources(1.0), limits)
        if told:
            scheduler.set_engine_version(0)
        for version in range(1, 11):
            batch = await scheduler.next_batch(version - 1)
            refused += len(batch.dropped)
            await asyncio.sleep(50.0)
            asyncio.get_running_loop().call_later(5.0, arrived, version, engine, scheduler if told else None)
        await scheduler.close()
        return refused, len(engine.order)

    def arrived(version: int, engine: Engine, scheduler: Scheduler | None) -> None:
        engine.version = version
        if scheduler is not None:
            scheduler.set_engine_version(version)

    untold, wasteful = run_virtually(main(told=False))
    refused, dispatched = run_virtually(main(told=True))
    assert untold > 0
    assert refused == 0
    assert dispatched < wasteful
