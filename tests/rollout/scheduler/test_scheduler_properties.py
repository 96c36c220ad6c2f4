"""The scheduler's invariant and its bounds, over thousands of generated schedules in virtual time.

Each schedule is a run: settings, rates of faults, a trainer that takes its time and publishes weights, and now and then
a cancelled call, refusals taken early, or a crash and a restart from what was last written down.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import SchedulerSettings
from keel.rollout.scheduler.accounts import NothingToTrain, TasksExhausted
from keel.rollout.scheduler.group_queue import GroupQueue
from keel.rollout.scheduler.groups import PendingGroup, RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSampler, TaskSource
from keel.tools.simulate.virtual_clock import run_virtually
from tests.support.scheduler_fakes import Engine, Faults, Ledger, Name, Told, held, jobs, sources

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
    deaf=rate,
    lags=rate,
)


@dataclass
class Written:
    """What a caller wrote down with its last batch: all that is left after a crash."""

    snapshot: str
    emitted: dict[Name, str]
    dispatched: list[Name]
    batches: int


@dataclass
class Story:
    """One run, with its crashes, and everything that is checked on the way."""

    settings: SchedulerSettings
    faults: Faults
    seed: int
    steps: int = 8
    tasks: int | None = None
    crashes: bool = True
    ledger: Ledger = field(default_factory=Ledger)
    written: Written | None = None
    stored: dict[Name, Told] = field(default_factory=dict)
    task_of: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        self.chance = random.Random(self.seed)
        while not run_virtually(self._life()):
            pass
        self.ledger.check_against(self.dispatched)
        check_window(self.ledger, self.settings)

    def _begin(self) -> Scheduler:
        self.engine = Engine(self.seed, self.chance.random(), self.faults)
        listed = sources(1.0, 2.5, tasks=self.tasks)
        if self.written is None:
            self.ledger, self.before = Ledger(), []
            return Scheduler(self._store, listed, self.settings)
        self.ledger = Ledger(dict(self.written.emitted), self.ledger.batches[: self.written.batches])
        self.before = list(self.written.dispatched)
        self.engine.version = len(self.ledger.batches)
        recall = (lambda *name: self.stored.get(name)) if self.seed % 2 else None
        return Scheduler.restore(json.loads(self.written.snapshot), self._store, listed, self.settings, lookup=recall)

    def _store(self, dispatch: RolloutRequest) -> Awaitable[Told]:
        """Every other caller stores what has ended, by name, and has it recalled after a crash."""
        running = self.engine(dispatch)

        async def stored() -> Told:
            told = await running
            if isinstance(told, Told):
                self.stored[dispatch.group, dispatch.member, dispatch.attempt] = told
            return told

        return stored()

    @property
    def dispatched(self) -> list[Name]:
        assert not self.engine.dispatched or max(self.engine.dispatched.values()) == 1, "dispatched twice"
        return self.before + list(self.engine.dispatched)

    async def _life(self) -> bool:
        """From a start to the end, which is True, or to a crash."""
        scheduler = self._begin()
        while len(self.ledger.batches) < self.steps:
            if self.crashes and self.chance.random() < 0.15:
                self.crashes = self.chance.random() < 0.7
                await self._some_work(scheduler)
                await scheduler.close()  # its loop ends with it; what it says is lost
                return False
            if not await self._step(scheduler):
                break
        self.ledger.refused(await scheduler.close())
        assert self.engine.running == 0 or self.faults.deaf
        for dispatch in self.engine.order:
            assert self.task_of.setdefault(dispatch.group, dispatch.task_id) == dispatch.task_id
        return True

    async def _some_work(self, scheduler: Scheduler) -> None:
        with contextlib.suppress(TimeoutError, TasksExhausted, NothingToTrain):
            await asyncio.wait_for(scheduler.next_batch(len(self.ledger.batches)), self.chance.random() * 3)

    async def _step(self, scheduler: Scheduler) -> bool:
        version, patience = len(self.ledger.batches), self.chance.choice([None, 0.0, 0.3])
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
        self.ledger.batch(batch)
        self._check(scheduler, batch.groups, version, running)
        self._write(scheduler)
        await asyncio.sleep(self.chance.random() * 2)
        self.engine.version = version + 1
        if self.chance.random() < 0.2:
            # what is emitted between two batches has to be written down too, with a snapshot of its own
            self.ledger.refused(scheduler.drain_dropped())
            self._write(scheduler)
        return True

    def _check(self, scheduler: Scheduler, groups: list, version: int, running: int) -> None:
        chosen = self.settings
        needed = chosen.min_group_size or chosen.group_size
        assert len(groups) <= chosen.groups_per_step
        for group in groups:
            assert len(group.members) == chosen.group_size
            assert len(group.rollouts) >= needed
            assert all(told.error_kind is None for told in group.rollouts)
            oldest = min(told.oldest_version for told in group.rollouts)
            assert version - oldest <= chosen.max_off_policy_steps, "stale"
        if chosen.max_off_policy_steps == 0:
            assert len(scheduler._in_flight) == 0 and len(scheduler._group_queue) == 0
            assert running <= scheduler.status().abandoned
        if not scheduler.status().abandoned:
            assert self.engine.running <= chosen.max_in_flight
        most = (chosen.max_off_policy_steps + 1) * chosen.groups_per_step
        assert held(scheduler) <= most * (1 + chosen.group_size) + chosen.max_in_flight + 60

    def _write(self, scheduler: Scheduler) -> None:
        snapshot = json.dumps(scheduler.snapshot())
        self.written = Written(snapshot, dict(self.ledger.emitted), self.dispatched, len(self.ledger.batches))


def number(group: str) -> int:
    return int(group.split("#")[1])


def check_window(ledger: Ledger, chosen: SchedulerSettings) -> None:
    """From outside: who was dispatched before whom, and cut after."""
    cut = {number(group.id): place for place, batch in enumerate(ledger.batches) for group in batch.groups}
    most = chosen.window_batches * chosen.groups_per_step
    for mine, place in cut.items():
        overtakes = sum(other < mine and theirs > place for other, theirs in cut.items())
        overtaken = sum(other > mine and theirs < place for other, theirs in cut.items())
        assert overtakes <= most, f"group {mine} overtook {overtakes}"
        assert overtaken <= most, f"group {mine} was overtaken by {overtaken}"
    for batch in ledger.batches:
        numbers = [number(group.id) for group in batch.groups]
        assert numbers == sorted(numbers)


@settings(max_examples=2000)
@given(scheduler_settings(), faults, st.integers(0, 2**32), st.sampled_from([None, None, 7]))
def test_every_rollout_is_emitted_exactly_once_whatever_happens(
    chosen: SchedulerSettings, faults: Faults, seed: int, tasks: int | None
) -> None:
    Story(chosen, faults, seed, tasks=tasks).run()


@dataclass
class Oracle:
    """What must become of a group, from the fates of its rollouts alone."""

    engine: Engine
    chosen: SchedulerSettings

    def attempt(self, group: str, member: int) -> int | None:
        """The attempt that succeeds, if one is allowed."""
        for attempt in range((self.chosen.max_error_reschedule_attempts or 0) + 1):
            if self.engine.fate((group, member, attempt)).ending == "succeeds":
                return attempt
        return None

    def group(self, group: str) -> list[int | None] | None:
        found = [self.attempt(group, member) for member in range(self.chosen.group_size)]
        enough = self.chosen.min_group_size or self.chosen.group_size
        return found if sum(attempt is not None for attempt in found) >= enough else None


bounded = scheduler_settings().filter(lambda chosen: chosen.max_error_reschedule_attempts is not None)


@settings(max_examples=200)
@given(bounded, faults, st.integers(0, 2**32))
def test_a_group_trains_exactly_when_enough_members_succeed_within_their_attempts(
    chosen: SchedulerSettings, faults: Faults, seed: int
) -> None:
    chosen = chosen.model_copy(update={"max_empty_steps": None, "max_off_policy_steps": 20})
    engine = Engine(seed, 0, replace(faults, lags=0.0, hangs=0.0))
    oracle, ledger = Oracle(engine, chosen), Ledger()

    async def main() -> None:
        scheduler = Scheduler(engine, sources(1.0, 2.0), chosen)
        for version in range(6):
            ledger.batch(await scheduler.next_batch(version))
        ledger.refused(await scheduler.close())

    run_virtually(main())
    ledger.check_against(engine.dispatched)
    for batch in ledger.batches:
        for group in batch.groups:
            expected = oracle.group(group.id)
            last = chosen.max_error_reschedule_attempts
            assert expected == [member.attempt if member.valid else None for member in group.members]
            assert all(member.attempt == last for member in group.members if not member.valid)
        for refusal in batch.dropped:
            if refusal.reason == "group_dropped":
                assert oracle.group(refusal.group) is None
            assert refusal.attempt <= chosen.max_error_reschedule_attempts
    rounds: dict[str, int] = defaultdict(int)
    for group, _, attempt in engine.dispatched:
        rounds[group] = max(rounds[group], attempt)
    counted = sum(batch.counters.get("retry_rounds", 0) for batch in ledger.batches)
    finished = {name[0] for batch in ledger.batches for name in [(group.id, 0) for group in batch.groups]}
    assert sum(rounds[group] for group in finished) <= counted
    dropped = sum(batch.counters.get("groups_dropped", 0) for batch in ledger.batches)
    places = sum(len(batch.groups) for batch in ledger.batches) + dropped
    assert 6 * chosen.groups_per_step <= places


@settings(max_examples=150)
@given(bounded, faults, st.integers(0, 2**32), st.integers(0, 3))
def test_synchronous_batches_are_those_of_the_outcomes_and_not_of_time(
    chosen: SchedulerSettings, faults: Faults, seed: int, crash_after: int
) -> None:
    chosen = chosen.model_copy(update={"max_empty_steps": None, "max_off_policy_steps": 0})

    async def life(engine: Engine, scheduler: Scheduler, steps: range) -> list:
        batches = []
        for version in steps:
            engine.version = version
            batch = await scheduler.next_batch(version)
            assert engine.running == 0 and not scheduler._group_queue
            batches.append([(g.id, g.task_id, [(m.attempt, m.valid) for m in g.members]) for g in batch.groups])
        return batches

    def run(pace: int, crash: int) -> list:
        engine = Engine(seed, pace, replace(faults, lags=0.0, hangs=0.0))

        async def main() -> list:
            scheduler = Scheduler(engine, sources(1.0, 2.0), chosen)
            before = await life(engine, scheduler, range(crash))
            snapshot = json.loads(json.dumps(scheduler.snapshot()))
            await scheduler.close()
            return before + await life(
                engine, Scheduler.restore(snapshot, engine, sources(1.0, 2.0), chosen), range(crash, 4)
            )

        return run_virtually(main())

    first = run(0, 0)
    assert run(1, crash_after) == first
    oracle = Oracle(Engine(seed, 0, replace(faults, lags=0.0, hangs=0.0)), chosen)
    names = [f"{draw.environment}#{place}" for place, draw in enumerate(draws([1.0, 2.0], 4 * chosen.groups_per_step))]
    for place, batch in enumerate(first):
        mine = names[place * chosen.groups_per_step : (place + 1) * chosen.groups_per_step]
        assert [group for group, _, _ in batch] == [group for group in mine if oracle.group(group) is not None]


def draws(weights: list[float], count: int) -> list:
    made = TaskSampler(sources(*weights))
    return [made.next_task() for _ in range(count)]


@settings(max_examples=100)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_no_environment_is_ahead_of_another_by_more_than_one_group_of_its_own(weights: list[float], count: int) -> None:
    made: Counter[str] = Counter()
    for draw in draws(weights, count):
        made[draw.environment] += 1
        for name, weight in zip("abcdef", weights, strict=False):
            for other, against in zip("abcdef", weights, strict=False):
                assert made[name] / weight - made[other] / against <= 1 / weight + 1e-9


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 100), st.booleans())
def test_sources_go_on_after_a_restart_as_if_nothing_had_happened(weights: list[float], after: int, once: bool) -> None:
    def fresh() -> TaskSampler:
        return TaskSampler(sources(*weights, tasks=60 if once else None))

    whole = fresh()
    expected = [whole.next_task() for _ in range(after + 20)]
    first, second = fresh(), fresh()
    drawn = [first.next_task() for _ in range(after)]
    wanted: dict[str, set[int]] = defaultdict(set)
    for draw in filter(None, drawn[-5:]):
        wanted[draw.environment].add(draw.task_index)
    again = second.resume(json.loads(json.dumps(first.positions)), wanted)
    assert again == {(draw.environment, draw.task_index): draw.task for draw in filter(None, drawn[-5:])}
    assert drawn + [second.next_task() for _ in range(20)] == expected


@settings(max_examples=300)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32))
def test_the_hint_of_the_line_never_hides_a_batch(size: int, window: int, seed: int) -> None:
    """`hopeful` may be wrong only by saying yes: whenever `select` finds a batch, it had said so."""
    chance, line, serial = random.Random(seed), GroupQueue(size, window), 0
    for _ in range(120):
        if chance.random() < 0.4 and len(line) < 3 * size * (window + 1):
            line.append(PendingGroup(serial, "a", serial, jobs(1)[0], 1, 0))
            serial += 1
        waiting = [group for group in line if group.state == "open"]
        if waiting and chance.random() < 0.6:
            group = chance.choice(waiting)
            group.state = "ready"
            line.on_resolved(group)
        said = line.may_have_batch
        chosen = line.select(size)
        assert said or chosen is None
        if chosen is None:
            continue
        if chance.random() < 0.2:
            line.remove(chosen[0])
        else:
            line.pop(chosen)
        assert all(group.overtaken <= window * size for group in line)


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
    engine = Engine(3, 0, Faults(error=0.3, raises=0.1, slow=0.05, deaf=0.1, hangs=0.01))
    sizes = []

    async def main() -> None:
        scheduler = Scheduler(engine, [TaskSource("a", jobs(5))], chosen)
        for version in range(300):
            await scheduler.next_batch(version)
            engine.version = version + 1
            engine.order.clear()
            sizes.append(held(scheduler))
        await scheduler.close()

    run_virtually(main())
    assert sum(engine.dispatched.values()) > 4800
    assert max(sizes[150:]) <= max(sizes[:150]) * 1.2
