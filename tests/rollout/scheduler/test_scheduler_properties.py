"""The scheduler's invariants and bounds over thousands of generated runs in virtual time.

Each run has its own settings, fault rates and a trainer that takes time and publishes weights. Some calls are
cancelled, some dropped rollouts are drained early, and some runs crash and restart from the last saved snapshot.
"""

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import CurriculumSettings, SchedulerSettings
from keel.rollout.scheduler.accounts import NothingToTrain, RolloutBatch, TasksExhausted
from keel.rollout.scheduler.group_queue import GroupQueue
from keel.rollout.scheduler.group_scoring import GroupScorer
from keel.rollout.scheduler.groups import Group, PendingGroup, RolloutRequest
from keel.rollout.scheduler.pass_rates import TaskRecord
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSampler, TaskSource
from keel.tools.simulate.virtual_clock import run_virtually
from tests.support.scheduler_fakes import (
    EmissionLog,
    FakeRollout,
    Faults,
    FaultyRunner,
    Name,
    fake_tasks,
    held_objects,
    task_sources,
)

rate = st.sampled_from([0.0, 0.0, 0.05, 0.3])


@st.composite
def scheduler_settings(draw: st.DrawFn) -> SchedulerSettings:
    attempts = draw(st.sampled_from([None, 0, 1, 1, 2]))
    size = draw(st.integers(1, 4))
    return SchedulerSettings(
        groups_per_step=draw(st.integers(1, 4)),
        group_size=size,
        max_in_flight=draw(st.integers(1, 12)),
        max_error_reschedule_attempts=attempts,
        min_group_size=None if attempts is None else draw(st.none() | st.integers(1, size)),
        max_off_policy_steps=draw(st.integers(0, 3)),
        on_stale=draw(st.sampled_from(["drop", "resample"])),
        window_batches=draw(st.integers(0, 2)),
        refill=draw(st.sampled_from([None, False, True])),
        max_refill_factor=draw(st.sampled_from([1.0, 1.5, 3.0])),
        max_empty_steps=draw(st.sampled_from([None, 2])),
        rollout_timeout=500.0,
    )


faults = st.builds(
    Faults,
    error=rate,
    raises=rate,
    cancels_itself=rate,
    hangs=st.sampled_from([0.0, 0.02]),
    returns_junk=rate,
    slow=rate,
    ignores_cancel=rate,
    lags=rate,
)


curricula = st.sampled_from(
    [
        CurriculumSettings(order="epoch", retire_after=2, retest_after=2),
        CurriculumSettings(order="uniform"),
        CurriculumSettings(order="difficulty", floor=0.2, retire_after=1, retest_after=3),
    ]
)


@dataclass
class SavedState:
    """What the caller saved with its last batch: all that survives a crash."""

    snapshot: str
    emitted: dict[Name, str]
    dispatched: list[Name]
    batches: int
    task_records: dict[tuple[str, int], TaskRecord]


@dataclass
class SimulatedRun:
    """One run with its crashes, and the checks after every step."""

    settings: SchedulerSettings
    faults: Faults
    seed: int
    steps: int = 8
    tasks: int | None = None
    group_sizes: dict[str, int] = field(default_factory=dict)
    """Group sizes of environments that do not have the one of the settings."""
    curriculum: CurriculumSettings | None = None
    crashes: bool = True
    log: EmissionLog = field(default_factory=EmissionLog)
    saved: SavedState | None = None
    stored: dict[Name, FakeRollout] = field(default_factory=dict)
    task_of: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        self.rng = random.Random(self.seed)
        while not run_virtually(self._run_until_crash()):
            pass
        self.log.check_against(self.dispatched)
        check_window(self.log, self.settings)

    def _start(self) -> Scheduler:
        self.engine = FaultyRunner(self.seed, self.rng.random(), self.faults)
        curriculum = self.curriculum if self.tasks is None else None
        sources = task_sources(1.0, 2.5, tasks=self.tasks, group_sizes=self.group_sizes, curriculum=curriculum)
        if self.saved is None:
            self.log, self.before, self.task_records = EmissionLog(), [], {}
            return Scheduler(
                self._store,
                sources,
                self.settings,
                is_zero_variance=self._is_zero_variance,
                score_group=self._group_scorer(),
            )
        self.log = EmissionLog(dict(self.saved.emitted), self.log.batches[: self.saved.batches])
        self.before, self.task_records = list(self.saved.dispatched), dict(self.saved.task_records)
        self.engine.version = len(self.log.batches)
        lookup = (lambda *name: self.stored.get(name)) if self.seed % 2 else None
        snapshot = json.loads(self.saved.snapshot)
        return Scheduler.restore(
            snapshot,
            self._store,
            sources,
            self.settings,
            lookup=lookup,
            task_records=self.task_records.values(),
            is_zero_variance=self._is_zero_variance,
            score_group=self._group_scorer(),
        )

    def _group_scorer(self) -> GroupScorer | None:
        return None

    def _is_zero_variance(self, group: Group) -> bool:
        return zero_variance_of(self.seed, group.id, [member.attempt for member in group.members])

    def _store(self, request: RolloutRequest) -> Awaitable[FakeRollout]:
        """Store finished rollouts by name; runs with an odd seed look them up after a crash."""
        running = self.engine(request)

        async def stored() -> FakeRollout:
            rollout = await running
            if isinstance(rollout, FakeRollout):
                rollout = replace(rollout, reward=reward_of(self.seed, request))
                self.stored[request.group, request.member, request.attempt] = rollout
            return rollout

        return stored()

    @property
    def dispatched(self) -> list[Name]:
        assert not self.engine.dispatched or max(self.engine.dispatched.values()) == 1, "dispatched twice"
        return self.before + list(self.engine.dispatched)

    async def _run_until_crash(self) -> bool:
        """Run from a start to the end or a crash; return whether the end was reached."""
        scheduler = self._start()
        while len(self.log.batches) < self.steps:
            if self.crashes and self.rng.random() < 0.15:
                self.crashes = self.rng.random() < 0.7
                await self._partial_step(scheduler)
                await scheduler.close()  # the dropped rollouts it returns are lost in the crash
                return False
            if not await self._step(scheduler):
                break
        self.log.add_dropped(await scheduler.close())
        assert self.engine.running == 0 or self.faults.ignores_cancel
        for request in self.engine.order:
            assert self.task_of.setdefault(request.group, request.task_id) == request.task_id
        return True

    async def _partial_step(self, scheduler: Scheduler) -> None:
        with contextlib.suppress(TimeoutError, TasksExhausted, NothingToTrain):
            await asyncio.wait_for(scheduler.next_batch(len(self.log.batches)), self.rng.random() * 3)

    async def _step(self, scheduler: Scheduler) -> bool:
        version, patience = len(self.log.batches), self.rng.choice([None, 0.0, 0.3])
        while True:
            try:
                batch, reasons = await asyncio.wait_for(scheduler.next_batch(version), patience), None
                break
            except TimeoutError:
                patience = None
            except NothingToTrain as halt:
                batch, reasons = halt.batch, halt.reasons
                break
            except TasksExhausted:
                return False
        running = self.engine.running
        assert reasons is None or (not batch.groups and sum(reasons.values()) >= len(batch.dropped))
        self.log.add_batch(batch)
        self._check(scheduler, batch.groups, version, running)
        self._check_refill(batch)
        self._check_pass_rates(scheduler, batch)
        self._save(scheduler)
        await asyncio.sleep(self.rng.random() * 2)
        self.engine.version = version + 1
        if self.rng.random() < 0.2:
            # rollouts emitted between two batches are saved with their own snapshot
            self.log.add_dropped(scheduler.drain_dropped())
            self._save(scheduler)
        return True

    def _check(self, scheduler: Scheduler, groups: list, version: int, running: int) -> None:
        chosen = self.settings
        assert len(groups) <= chosen.groups_per_step
        for group in groups:
            size = self.group_sizes.get(group.environment, chosen.group_size)
            assert len(group.members) == size
            assert len(group.rollouts) >= min(chosen.min_group_size or size, size)
            assert all(rollout.error_kind is None for rollout in group.rollouts)
            oldest = min(rollout.oldest_version for rollout in group.rollouts)
            assert version - oldest <= chosen.max_off_policy_steps, "stale"
        if chosen.max_off_policy_steps == 0:
            assert len(scheduler._in_flight) == 0 and len(scheduler._group_queue) == 0
            assert running <= scheduler.status().abandoned
        if not scheduler.status().abandoned:
            assert self.engine.running <= chosen.max_in_flight
        limit = (chosen.max_off_policy_steps + 1) * chosen.groups_per_step
        largest = max(chosen.group_size, *self.group_sizes.values(), 1)
        assert held_objects(scheduler) <= limit * (1 + largest) + chosen.max_in_flight + 60

    def _check_refill(self, batch: RolloutBatch) -> None:
        """Assert that no batch is refilled beyond its limit, and that it is refilled up to it."""
        refilled = batch.counters.get("groups_refilled", 0)
        assert refilled <= self.settings.max_refilled_groups
        assert (
            refilled + self.settings.groups_per_step <= self.settings.max_refill_factor * self.settings.groups_per_step
        )
        if refilled < self.settings.max_refilled_groups:
            assert not any(map(self._is_zero_variance, batch.groups))

    def _check_pass_rates(self, scheduler: Scheduler, batch: RolloutBatch) -> None:
        """Assert that the groups of the batch and those replaced for it count, each once."""
        if self.tasks is not None:
            return  # an iterator has no pass rates
        before = sum(record.groups for record in self.task_records.values())
        changes = scheduler.drain_task_changes().records
        self.task_records |= {(record.environment, record.task_index): record for record in changes}
        counted = sum(record.groups for record in self.task_records.values()) - before
        assert counted == len(batch.groups) + batch.counters.get("groups_refilled", 0)

    def _save(self, scheduler: Scheduler) -> None:
        snapshot = json.dumps(scheduler.snapshot())
        self.saved = SavedState(
            snapshot, dict(self.log.emitted), self.dispatched, len(self.log.batches), dict(self.task_records)
        )


def reward_of(seed: int, request: RolloutRequest) -> float:
    """Return a reward of 0 or 1; each task has its own pass rate."""
    chance = random.Random(request.task_id).choice([0.0, 0.5, 0.9, 1.0])
    name = (request.group, request.member, request.attempt)
    return float(random.Random(f"reward{seed}{name}").random() < chance)


def zero_variance_of(seed: int, group: str, attempts: list[int]) -> bool:
    """Return whether a group does not train: about a third of them, depending on its name and its members' attempts."""
    return random.Random(f"{seed}{group}{attempts}").random() < 0.33


def group_number(group: str) -> int:
    return int(group.split("#")[1])


def check_window(log: EmissionLog, chosen: SchedulerSettings) -> None:
    """Assert the window rule from the emitted batches alone."""
    cut = {group_number(group.id): index for index, batch in enumerate(log.batches) for group in batch.groups}
    limit = chosen.window_batches * chosen.groups_per_step
    for mine, index in cut.items():
        overtakes = sum(other < mine and theirs > index for other, theirs in cut.items())
        overtaken = sum(other > mine and theirs < index for other, theirs in cut.items())
        assert overtakes <= limit, f"group {mine} overtook {overtakes}"
        assert overtaken <= limit, f"group {mine} was overtaken by {overtaken}"
    for batch in log.batches:
        numbers = [group_number(group.id) for group in batch.groups]
        assert numbers == sorted(numbers)


@pytest.mark.fuzz
@settings(max_examples=2000)
@given(
    scheduler_settings(),
    faults,
    st.integers(0, 2**32),
    st.sampled_from([None, None, 7]),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 5)),
    st.none() | curricula,
)
def test_every_rollout_is_emitted_exactly_once_and_counts_once_in_the_pass_rate_of_its_task(
    chosen: SchedulerSettings,
    faults: Faults,
    seed: int,
    tasks: int | None,
    group_sizes: dict[str, int],
    curriculum: CurriculumSettings | None,
) -> None:
    SimulatedRun(chosen, faults, seed, tasks=tasks, group_sizes=group_sizes, curriculum=curriculum).run()


SCORED = 2.0
"""The reward of a rollout of a scored group; unscored ones have 1."""


@dataclass
class ScoredRun(SimulatedRun):
    """A run whose groups are scored after their last rollout, by a scorer that takes time and fails in every way."""

    def _group_scorer(self) -> GroupScorer | None:
        return lambda group: None if all(r.reward == SCORED for r in group.rollouts) else self._score(group)

    async def _score(self, group: Group) -> list[FakeRollout]:
        rng = random.Random(f"{self.seed}{[(member.member, member.attempt) for member in group.members]}")
        await asyncio.sleep(random.Random(f"{self.engine.pace}{group.id}").random())
        failure = rng.random()
        if failure < 0.1:
            raise RuntimeError("the scorer broke")
        if failure < 0.15:
            raise asyncio.CancelledError
        if failure < 0.2:
            return group.rollouts[1:]
        scored = [
            replace(rollout, error="no reward", error_kind=rng.choice(["exception", "timeout"]))
            if rng.random() < 0.1
            else replace(rollout, reward=SCORED)
            for rollout in group.rollouts
        ]
        for rollout in scored:
            if rollout.error is None:
                self.stored[rollout.group, rollout.member, rollout.attempt] = rollout
        return scored

    def _is_zero_variance(self, group: Group) -> bool:
        assert all(rollout.reward == SCORED for rollout in group.rollouts), "judged before it was scored"
        return super()._is_zero_variance(group)

    def _check(self, scheduler: Scheduler, groups: list, version: int, running: int) -> None:
        super()._check(scheduler, groups, version, running)
        assert all(rollout.reward == SCORED for group in groups for rollout in group.rollouts), "cut unscored"
        if self.settings.max_off_policy_steps == 0:
            assert len(scheduler._scoring) == 0


@pytest.mark.fuzz
@settings(max_examples=1000)
@given(scheduler_settings(), faults, st.integers(0, 2**32), st.sampled_from([None, None, 7]))
def test_every_rollout_is_emitted_exactly_once_and_scored_when_groups_are_scored(
    chosen: SchedulerSettings, faults: Faults, seed: int, tasks: int | None
) -> None:
    ScoredRun(chosen, faults, seed, tasks=tasks).run()


@dataclass
class Oracle:
    """Predicts the result of a group from the planned outcomes of its rollouts."""

    engine: FaultyRunner
    chosen: SchedulerSettings

    def last_attempt(self, group: str, member: int) -> tuple[int, bool]:
        """Return the last attempt of a member and whether it succeeds.

        All exceptions that a rollout of the fake runner reports are equal: two in a row end the attempts.
        """
        kind = ""
        for attempt in range((self.chosen.max_error_reschedule_attempts or 0) + 1):
            planned, before = self.engine.planned_outcome((group, member, attempt)), kind
            if planned.ending == "succeeds":
                return attempt, True
            kind = planned.kind if planned.ending == "error" else ""
            if kind == "prompt_too_long" or before == kind == "exception":
                break
        return attempt, False

    def attempt(self, group: str, member: int) -> int | None:
        """Return the first allowed attempt that succeeds, or None."""
        attempt, succeeds = self.last_attempt(group, member)
        return attempt if succeeds else None

    def group(self, group: str) -> list[int | None] | None:
        attempts = [self.attempt(group, member) for member in range(self.chosen.group_size)]
        required = self.chosen.min_group_size or self.chosen.group_size
        return attempts if sum(attempt is not None for attempt in attempts) >= required else None


bounded = scheduler_settings().filter(lambda chosen: chosen.max_error_reschedule_attempts is not None)


@settings(max_examples=200)
@given(bounded, faults, st.integers(0, 2**32))
def test_a_group_trains_exactly_when_enough_members_succeed_within_their_attempts(
    chosen: SchedulerSettings, faults: Faults, seed: int
) -> None:
    chosen = chosen.model_copy(update={"max_empty_steps": None, "max_off_policy_steps": 20})
    engine = FaultyRunner(seed, 0, replace(faults, lags=0.0, hangs=0.0))
    oracle, log = Oracle(engine, chosen), EmissionLog()

    async def main() -> None:
        scheduler = Scheduler(engine, task_sources(1.0, 2.0), chosen)
        for version in range(6):
            log.add_batch(await scheduler.next_batch(version))
        log.add_dropped(await scheduler.close())

    run_virtually(main())
    log.check_against(engine.dispatched)
    for batch in log.batches:
        for group in batch.groups:
            expected = oracle.group(group.id)
            assert expected == [member.attempt if member.valid else None for member in group.members]
            assert all(member.attempt == oracle.last_attempt(group.id, member.member)[0] for member in group.members)
        for rollout in batch.dropped:
            if rollout.reason == "group_dropped":
                assert oracle.group(rollout.group) is None
            assert rollout.attempt <= chosen.max_error_reschedule_attempts
    rounds: dict[str, int] = defaultdict(int)
    for group, _, attempt in engine.dispatched:
        rounds[group] = max(rounds[group], attempt)
    counted = sum(batch.counters.get("retry_rounds", 0) for batch in log.batches)
    finished = {name[0] for batch in log.batches for name in [(group.id, 0) for group in batch.groups]}
    assert sum(rounds[group] for group in finished) <= counted
    dropped = sum(batch.counters.get("groups_dropped", 0) for batch in log.batches)
    places = sum(len(batch.groups) for batch in log.batches) + dropped
    assert 6 * chosen.groups_per_step <= places


@settings(max_examples=150)
@given(bounded, faults, st.integers(0, 2**32), st.integers(0, 3))
def test_synchronous_batches_depend_on_outcomes_and_not_on_timing(
    chosen: SchedulerSettings, faults: Faults, seed: int, crash_after: int
) -> None:
    chosen = chosen.model_copy(update={"max_empty_steps": None, "max_off_policy_steps": 0})

    async def run_steps(engine: FaultyRunner, scheduler: Scheduler, steps: range) -> list:
        batches = []
        for version in steps:
            engine.version = version
            batch = await scheduler.next_batch(version)
            assert engine.running == 0 and not scheduler._group_queue
            batches.append([(g.id, g.task_id, [(m.attempt, m.valid) for m in g.members]) for g in batch.groups])
        return batches

    def run(pace: int, crash: int) -> list:
        engine = FaultyRunner(seed, pace, replace(faults, lags=0.0, hangs=0.0))

        async def main() -> list:
            scheduler = Scheduler(engine, task_sources(1.0, 2.0), chosen)
            before = await run_steps(engine, scheduler, range(crash))
            snapshot = json.loads(json.dumps(scheduler.snapshot()))
            await scheduler.close()
            return before + await run_steps(
                engine, Scheduler.restore(snapshot, engine, task_sources(1.0, 2.0), chosen), range(crash, 4)
            )

        return run_virtually(main())

    first = run(0, 0)
    assert run(1, crash_after) == first
    oracle = Oracle(FaultyRunner(seed, 0, replace(faults, lags=0.0, hangs=0.0)), chosen)
    names = [
        f"{draw.environment}#{index}" for index, draw in enumerate(draw_tasks([1.0, 2.0], 4 * chosen.groups_per_step))
    ]
    for index, batch in enumerate(first):
        mine = names[index * chosen.groups_per_step : (index + 1) * chosen.groups_per_step]
        assert [group for group, _, _ in batch] == [group for group in mine if oracle.group(group) is not None]


@settings(max_examples=150)
@given(bounded, faults, st.integers(0, 2**32), st.integers(0, 3))
def test_synchronous_refilled_batches_depend_on_outcomes_and_not_on_timing(
    chosen: SchedulerSettings, faults: Faults, seed: int, crash_after: int
) -> None:
    chosen = chosen.model_copy(update={"max_empty_steps": None, "max_off_policy_steps": 0, "refill": True})
    faults = replace(faults, lags=0.0, hangs=0.0)

    def is_zero_variance(group: Group) -> bool:
        return zero_variance_of(seed, group.id, [member.attempt for member in group.members])

    def run(pace: int, crash: int) -> list:
        engine = FaultyRunner(seed, pace, faults)

        async def main() -> list:
            batches: list = []
            scheduler = Scheduler(engine, task_sources(1.0, 2.0), chosen, is_zero_variance=is_zero_variance)
            for engine.version in range(4):
                if engine.version == crash:
                    snapshot = json.loads(json.dumps(scheduler.snapshot()))
                    await scheduler.close()
                    scheduler = Scheduler.restore(
                        snapshot, engine, task_sources(1.0, 2.0), chosen, is_zero_variance=is_zero_variance
                    )
                batch = await scheduler.next_batch(engine.version)
                replaced = sorted({each.group for each in batch.dropped if each.reason == "zero_variance"})
                assert len(replaced) == batch.counters.get("groups_refilled", 0) <= chosen.max_refilled_groups
                batches.append(([group.id for group in batch.groups], replaced))
            return batches

        return run_virtually(main())

    first = run(0, 0)
    assert run(1, crash_after) == first
    oracle = Oracle(FaultyRunner(seed, 0, faults), chosen)
    drawn = enumerate(draw_tasks([1.0, 2.0], 4 * 3 * chosen.groups_per_step))
    names = (f"{draw.environment}#{index}" for index, draw in drawn)
    assert first == [refilled_batch(names, oracle, seed) for _ in range(4)]


@settings(max_examples=100)
@given(bounded, faults, st.integers(0, 2**32), st.integers(0, 5), curricula)
def test_synchronous_draws_depend_on_outcomes_and_not_on_timing(
    chosen: SchedulerSettings, faults: Faults, seed: int, crash_after: int, curriculum: CurriculumSettings
) -> None:
    chosen = chosen.model_copy(update={"max_empty_steps": None, "max_off_policy_steps": 0, "refill": True})
    faults = replace(faults, lags=0.0, hangs=0.0)

    def run(pace: int, crash: int) -> list:
        engine = FaultyRunner(seed, pace, faults)
        records: dict[tuple[str, int], TaskRecord] = {}

        async def rewarded(request: RolloutRequest) -> Any:
            rollout = await engine(request)
            return replace(rollout, reward=reward_of(seed, request)) if isinstance(rollout, FakeRollout) else rollout

        def has_equal_rewards(group: Group) -> bool:
            return len({rollout.reward for rollout in group.rollouts}) < 2

        async def main() -> list:
            batches: list = []
            sources = task_sources(1.0, 2.0, curriculum=curriculum)
            scheduler = Scheduler(rewarded, sources, chosen, is_zero_variance=has_equal_rewards)
            for engine.version in range(6):
                if engine.version == crash:
                    snapshot = json.loads(json.dumps(scheduler.snapshot()))
                    await scheduler.close()
                    scheduler = Scheduler.restore(
                        snapshot,
                        rewarded,
                        sources,
                        chosen,
                        task_records=records.values(),
                        is_zero_variance=has_equal_rewards,
                    )
                batch = await scheduler.next_batch(engine.version)
                changes = scheduler.drain_task_changes()
                records.update({(record.environment, record.task_index): record for record in changes.records})
                batches.append(([(group.id, group.task_id) for group in batch.groups], changes))
            return batches

        return run_virtually(main())

    assert run(0, 0) == run(1, crash_after)


def refilled_batch(names: Iterator[str], oracle: "Oracle", seed: int) -> tuple[list[str], list[str]]:
    """Return the groups of the next batch and those that were replaced, from the planned outcomes alone."""
    chosen, places, replaced = oracle.chosen, list[str](), list[str]()
    while len(places) < chosen.groups_per_step:
        places += itertools.islice(names, chosen.groups_per_step - len(places))
        for name in list(places):
            attempts = [oracle.last_attempt(name, member)[0] for member in range(chosen.group_size)]
            trains = oracle.group(name) is not None and not zero_variance_of(seed, name, attempts)
            if oracle.group(name) is not None and not trains and len(replaced) < chosen.max_refilled_groups:
                places.remove(name)
                replaced.append(name)
    return [name for name in places if oracle.group(name) is not None], sorted(replaced)


def draw_tasks(weights: list[float], count: int) -> list:
    sampler = TaskSampler(task_sources(*weights))
    return [sampler.next_task() for _ in range(count)]


@settings(max_examples=100)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_no_environment_is_ahead_of_its_share_by_more_than_one_group(weights: list[float], count: int) -> None:
    counts: Counter[str] = Counter()
    for draw in draw_tasks(weights, count):
        counts[draw.environment] += 1
        for name, weight in zip("abcdef", weights, strict=False):
            for other, against in zip("abcdef", weights, strict=False):
                assert counts[name] / weight - counts[other] / against <= 1 / weight + 1e-9


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 100), st.booleans())
def test_task_order_is_unchanged_by_a_restart(weights: list[float], after: int, once: bool) -> None:
    def new_sampler() -> TaskSampler:
        return TaskSampler(task_sources(*weights, tasks=60 if once else None))

    uninterrupted = new_sampler()
    expected = [uninterrupted.next_task() for _ in range(after + 20)]
    first, second = new_sampler(), new_sampler()
    drawn = [first.next_task() for _ in range(after)]
    task_indices: dict[str, set[int]] = defaultdict(set)
    for draw in filter(None, drawn[-5:]):
        task_indices[draw.environment].add(draw.task_index)
    tasks = second.resume(json.loads(json.dumps(first.state())), task_indices)
    assert tasks == {(draw.environment, draw.task_index): draw.task for draw in filter(None, drawn[-5:])}
    assert drawn + [second.next_task() for _ in range(20)] == expected


@settings(max_examples=300)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32))
def test_may_have_batch_is_true_whenever_select_finds_a_batch(size: int, window: int, seed: int) -> None:
    """It may be true without a batch, but never false with one."""
    rng, queue, serial = random.Random(seed), GroupQueue(size, window), 0
    for _ in range(120):
        if rng.random() < 0.4 and len(queue) < 3 * size * (window + 1):
            queue.append(PendingGroup(serial, "a", serial, fake_tasks(1)[0], 1, 0))
            serial += 1
        waiting = [group for group in queue if group.state == "open"]
        if waiting and rng.random() < 0.6:
            group = rng.choice(waiting)
            group.state = "ready"
            queue.on_resolved(group)
        may_have_batch = queue.may_have_batch
        chosen = queue.select(size)
        assert may_have_batch or chosen is None
        if chosen is None:
            continue
        if rng.random() < 0.2:
            queue.remove(chosen[0])
        else:
            queue.pop(chosen)
        assert all(group.overtaken <= window * size for group in queue)


@pytest.mark.parametrize("limit", [None, 1])
def test_memory_does_not_grow_with_the_number_of_rollouts(limit: int | None) -> None:
    chosen = SchedulerSettings(
        groups_per_step=4,
        group_size=4,
        max_in_flight=24,
        max_error_reschedule_attempts=limit,
        max_empty_steps=None,
        rollout_timeout=200.0,
    )
    engine = FaultyRunner(3, 0, Faults(error=0.3, raises=0.1, slow=0.05, ignores_cancel=0.1, hangs=0.01))
    sizes = []

    async def main() -> None:
        scheduler = Scheduler(engine, [TaskSource("a", fake_tasks(5))], chosen)
        for version in range(300):
            await scheduler.next_batch(version)
            engine.version = version + 1
            engine.order.clear()
            sizes.append(held_objects(scheduler))
        await scheduler.close()

    run_virtually(main())
    assert sum(engine.dispatched.values()) > 4800
    assert max(sizes[150:]) <= max(sizes[:150]) * 1.2
