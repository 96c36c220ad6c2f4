"""Groups that are scored after their last rollout, one claim per test, in virtual time."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from keel.config import SchedulerSettings
from keel.errors import FatalEnvironmentError
from keel.rollout.scheduler.accounts import RolloutBatch
from keel.rollout.scheduler.groups import Group, RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource
from keel.tools.simulate.virtual_clock import run_virtually
from tests.support.scheduler_fakes import EmissionLog, FakeRollout, fake_tasks, name_of


async def succeed(request: RolloutRequest) -> FakeRollout:
    await asyncio.sleep(1.0)
    return FakeRollout(*name_of(request), reward=0.0)


async def fail_first_member(request: RolloutRequest) -> FakeRollout:
    rollout = await succeed(request)
    return replace(rollout, error="broken", error_kind="engine") if request.member == 0 else rollout


class Scorer:
    """Gives reward 1 + member to unscored rollouts after a second; `failures` are errors of the first calls."""

    def __init__(self, *failures: Any) -> None:
        self.failures = list(failures)
        self.calls: list[list[tuple[int, int]]] = []

    def __call__(self, group: Group) -> Any:
        return self._score(group) if any(rollout.reward == 0.0 for rollout in group.rollouts) else None

    async def _score(self, group: Group) -> Sequence[FakeRollout]:
        self.calls.append([(rollout.member, rollout.attempt) for rollout in group.rollouts])
        await asyncio.sleep(1.0)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, BaseException):
            raise failure
        return [
            replace(rollout, error="no reward", error_kind="exception")
            if failure == rollout.member
            else replace(rollout, reward=1.0 + rollout.member)
            for rollout in group.rollouts
        ]


def make_scheduler(scorer: Any, run: Any = succeed, **settings: Any) -> Scheduler:
    defaults = {"groups_per_step": 1, "group_size": 3, "max_off_policy_steps": 0, **settings}
    source = TaskSource("a", fake_tasks(100))
    return Scheduler(run, [source], SchedulerSettings(**defaults), score_group=scorer)


def first_batch(scheduler: Scheduler) -> RolloutBatch:
    log = EmissionLog()

    async def main() -> RolloutBatch:
        batch = log.add_batch(await scheduler.next_batch(0))
        log.add_dropped(await scheduler.close())
        return batch

    return run_virtually(main())


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_group_is_scored_in_one_call_and_cut_with_its_rewards(ahead: int) -> None:
    scorer = Scorer()
    batch = first_batch(make_scheduler(scorer, max_off_policy_steps=ahead))
    assert scorer.calls[0] == [(0, 0), (1, 0), (2, 0)]
    assert [rollout.reward for rollout in batch.groups[0].rollouts] == [1.0, 2.0, 3.0]


def test_failed_rollouts_are_absent_from_the_call() -> None:
    scorer = Scorer()
    settings = {"max_error_reschedule_attempts": 0, "min_group_size": 2}
    batch = first_batch(make_scheduler(scorer, fail_first_member, **settings))
    assert scorer.calls == [[(1, 0), (2, 0)]]
    assert [member.reason for member in batch.groups[0].members] == ["engine", None, None]


def test_a_member_whose_scoring_failed_is_sampled_again_and_the_group_scored_again() -> None:
    scorer = Scorer(1)
    batch = first_batch(make_scheduler(scorer))
    assert scorer.calls == [[(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 1), (2, 0)]]
    assert [(dropped.member, dropped.reason, dropped.error) for dropped in batch.dropped] == [
        (1, "exception", "no reward")
    ]
    assert [rollout.reward for rollout in batch.groups[0].rollouts] == [1.0, 2.0, 3.0]


def test_a_group_whose_scoring_fails_in_the_same_way_twice_is_dropped() -> None:
    scorer = Scorer(1, 1)
    batch = first_batch(make_scheduler(scorer))
    assert not batch.groups
    assert sorted((dropped.member, dropped.attempt, dropped.reason) for dropped in batch.dropped) == [
        (0, 0, "group_dropped"),
        (1, 0, "exception"),
        (1, 1, "exception"),
        (2, 0, "group_dropped"),
    ]


def test_an_exception_of_the_scorer_fails_every_rollout_of_the_group_once() -> None:
    scorer = Scorer(RuntimeError("broken"))
    batch = first_batch(make_scheduler(scorer))
    assert [(dropped.member, dropped.error) for dropped in batch.dropped] == [
        (member, "RuntimeError: broken") for member in range(3)
    ]
    assert scorer.calls[1] == [(0, 1), (1, 1), (2, 1)]
    assert len(batch.groups) == 1


def test_a_fatal_error_of_the_scorer_stops_the_run() -> None:
    with pytest.raises(FatalEnvironmentError, match="stop"):
        first_batch(make_scheduler(Scorer(FatalEnvironmentError("stop"))))


def test_other_groups_are_sampled_while_a_group_is_scored() -> None:
    scheduler = make_scheduler(Scorer(), groups_per_step=2, max_in_flight=3)

    async def main() -> float:
        await scheduler.next_batch(0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(3.0)  # 1 s per group in turn, and the scoring of the last


def test_status_names_groups_that_are_being_scored() -> None:
    scheduler = make_scheduler(Scorer())

    async def main() -> str:
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(1.5)
        status = str(scheduler.status())
        await waiting
        return status

    assert "0 rollouts in flight (0 being cancelled); 0 queued; 1 groups being scored" in run_virtually(main())


def test_closing_cancels_the_scoring_and_emits_the_rollouts() -> None:
    scheduler, log = make_scheduler(Scorer()), EmissionLog()

    async def main() -> None:
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(1.5)
        log.add_dropped(await scheduler.close())
        await asyncio.gather(waiting, return_exceptions=True)

    run_virtually(main())
    assert log.emitted == {("a#0", member, 0): "run_ended" for member in range(3)}


@pytest.mark.parametrize("scored", [False, True])
def test_a_group_that_was_not_scored_before_a_restart_is_scored_after_it(scored: bool) -> None:
    scheduler = make_scheduler(Scorer(), max_off_policy_steps=1)
    snapshots = []

    async def until_scoring() -> None:
        waiting = asyncio.ensure_future(scheduler.next_batch(0))
        await asyncio.sleep(1.5)
        snapshots.append(scheduler.snapshot())
        await scheduler.close()
        await asyncio.gather(waiting, return_exceptions=True)

    run_virtually(until_scoring())
    scorer = Scorer()

    def lookup(group: str, member: int, attempt: int) -> FakeRollout:
        return FakeRollout(group, member, attempt, reward=1.0 + member if scored else 0.0)

    restored = Scheduler.restore(
        snapshots[0],
        succeed,
        [TaskSource("a", fake_tasks(100))],
        scheduler.settings,
        lookup=lookup,
        score_group=scorer,
    )
    batch = run_virtually(restored.next_batch(0))
    assert [rollout.reward for rollout in batch.groups[0].rollouts] == [1.0, 2.0, 3.0]
    assert (scorer.calls[:1] == []) if scored else (scorer.calls[0] == [(0, 0), (1, 0), (2, 0)])
