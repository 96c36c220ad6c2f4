"""Fakes for scheduler tests in virtual time: tasks, rollouts, a runner that fails in every way, a log of emissions.

They run on the virtual clock of `keel.tools.simulate`, which raises `Deadlock` where asyncio would wait indefinitely.
"""

import asyncio
import collections
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.config import CurriculumSettings
from keel.rollout.scheduler.accounts import RolloutBatch
from keel.rollout.scheduler.groups import DroppedRollout, RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource


@dataclass(frozen=True)
class FakeTask:
    id: str


def fake_tasks(count: int, name: str = "task") -> list[FakeTask]:
    return [FakeTask(f"{name}{number}") for number in range(count)]


@dataclass(frozen=True)
class FakeRollout:
    """A rollout with the attributes that the scheduler reads."""

    group: str
    member: int
    attempt: int
    oldest_version: int | None = 0
    reward: float = 1.0
    error: str | None = None
    error_kind: str | None = None


Name = tuple[str, int, int]


def name_of(rollout: RolloutRequest | DroppedRollout | FakeRollout) -> Name:
    return rollout.group, rollout.member, rollout.attempt


ERROR_KINDS = ["timeout", "empty", "engine", "over_length", "exception", "prompt_too_long"]


@dataclass
class Faults:
    """Probabilities of faults per rollout."""

    error: float = 0.0
    """Returns a rollout with an error of one of `ERROR_KINDS`."""
    raises: float = 0.0
    cancels_itself: float = 0.0
    hangs: float = 0.0
    """Never ends; needs the watchdog."""
    returns_junk: float = 0.0
    slow: float = 0.0
    """Takes a hundred times as long."""
    ignores_cancel: float = 0.0
    """Returns a result when it is cancelled, instead of ending."""
    lags: float = 0.0
    """Samples from weights some versions older than the newest."""


@dataclass
class FaultyRunner:
    """Runs rollouts in virtual time. The outcome depends on the name and `seed`, its duration on `pace`."""

    seed: int = 0
    pace: int = 0
    faults: Faults = field(default_factory=Faults)
    version: int = 0
    dispatched: collections.Counter[Name] = field(default_factory=collections.Counter)
    order: list[RolloutRequest] = field(default_factory=list)
    running: int = 0
    max_running: int = 0
    cancelled: int = 0

    def __call__(self, dispatch: RolloutRequest) -> Coroutine[Any, Any, Any]:
        # counted here, so that rollouts cancelled before their task starts are included
        self.dispatched[name_of(dispatch)] += 1
        self.order.append(dispatch)
        return self._run(name_of(dispatch))

    async def _run(self, name: Name) -> Any:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await self._episode(name)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def planned_outcome(self, name: Name) -> "PlannedOutcome":
        """Return the outcome of a rollout, independent of when it runs."""
        rng, faults = random.Random(f"{self.seed}{name}"), self.faults
        planned_outcome = PlannedOutcome(
            lag=rng.randrange(1, 4) if rng.random() < faults.lags else 0,
            slow=rng.random() < faults.slow,
            hangs=rng.random() < faults.hangs,
            ignores_cancel=rng.random() < faults.ignores_cancel,
        )
        for ending in ("raises", "cancels_itself", "returns_junk", "error"):
            if rng.random() < getattr(faults, ending):
                planned_outcome.ending = ending
                planned_outcome.kind = rng.choice(ERROR_KINDS)
        return planned_outcome

    async def _episode(self, name: Name) -> Any:
        planned_outcome, loop = self.planned_outcome(name), asyncio.get_running_loop()
        oldest = self.version - planned_outcome.lag
        seconds = random.Random(f"{self.pace}{name}").random() * (100.0 if planned_outcome.slow else 1.0)
        end = loop.time() + (1e6 if planned_outcome.hangs else seconds)
        while (left := end - loop.time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                if not planned_outcome.ignores_cancel:
                    raise
                await asyncio.sleep(min(left, 0.5))
                break
        if planned_outcome.ending == "raises":
            raise RuntimeError(f"{name} broke")
        if planned_outcome.ending == "cancels_itself":
            raise asyncio.CancelledError
        if planned_outcome.ending == "returns_junk":
            return "not a rollout"
        if planned_outcome.ending == "error":
            return FakeRollout(*name, None, 0.0, "failed", planned_outcome.kind)
        return FakeRollout(*name, oldest)


@dataclass
class PlannedOutcome:
    lag: int
    slow: bool
    hangs: bool
    ignores_cancel: bool
    ending: str = "succeeds"
    kind: str = ""


@dataclass
class EmissionLog:
    """Records what the scheduler emits, and asserts that nothing is emitted twice."""

    emitted: dict[Name, str] = field(default_factory=dict)
    batches: list[RolloutBatch] = field(default_factory=list)

    def note(self, name: Name, outcome: str) -> None:
        assert name not in self.emitted, f"{name} emitted as {self.emitted[name]} and as {outcome}"
        self.emitted[name] = outcome

    def add_dropped(self, dropped: Iterable[DroppedRollout]) -> None:
        for rollout in dropped:
            assert rollout.reason
            if rollout.rollout is not None:
                assert name_of(rollout.rollout) == name_of(rollout)
            self.note(name_of(rollout), rollout.reason)

    def add_batch(self, batch: RolloutBatch) -> RolloutBatch:
        self.batches.append(batch)
        for group in batch.groups:
            for member in group.members:
                if member.rollout is not None:
                    assert name_of(member.rollout) == (group.id, member.member, member.attempt)
                self.note((group.id, member.member, member.attempt), f"trained {member.reason}")
        self.add_dropped(batch.dropped)
        return batch

    def check_against(self, dispatched: Iterable[Name]) -> None:
        """Assert that every dispatched rollout was emitted, and nothing else."""
        dispatched = set(dispatched)
        assert dispatched - set(self.emitted) == set(), "lost"
        assert set(self.emitted) - dispatched == set(), "emitted without dispatch"


def task_sources(
    *weights: float,
    tasks: int | None = None,
    group_sizes: Mapping[str, int] | None = None,
    curriculum: CurriculumSettings | None = None,
) -> list[TaskSource]:
    """Return sources for environments a, b, ... with these weights; with `tasks`, each has that many, used once."""
    task_sources = []
    for letter, weight in zip("abcdefgh", weights, strict=False):
        tasks_of_source = fake_tasks(tasks or 5, letter)
        task_sources.append(
            TaskSource(
                letter,
                iter(tasks_of_source) if tasks else tasks_of_source,
                weight,
                group_size=(group_sizes or {}).get(letter),
                curriculum=curriculum or CurriculumSettings(order="given"),
            )
        )
    return task_sources


def held_objects(scheduler: Scheduler) -> int:
    """Return how many objects the scheduler holds, except dropped rollouts that were not emitted yet."""
    parts: list[Callable[[], Any]] = [
        lambda: scheduler._group_queue._groups,
        lambda: scheduler._in_flight._slots,
        lambda: scheduler._in_flight._abandoned,
        lambda: scheduler._scoring,
        lambda: scheduler._slot_queue,
        lambda: scheduler._new_slots,
        lambda: scheduler._accounts.counts,
        lambda: scheduler._accounts.reasons,
    ]
    return sum(len(part()) for part in parts)
