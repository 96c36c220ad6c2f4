"""A world for the scheduler without real time: a runner that fails in every way, on the virtual clock of
`keel.tools.simulate`, which raises `Deadlock` where real asyncio would wait for ever.
"""

import asyncio
import collections
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from keel.rollout.scheduler.accounts import RolloutBatch
from keel.rollout.scheduler.groups import DroppedRollout, RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource


@dataclass(frozen=True)
class Job:
    id: str


def jobs(count: int, name: str = "task") -> list[Job]:
    return [Job(f"{name}{number}") for number in range(count)]


@dataclass(frozen=True)
class Told:
    """A rollout, as far as the scheduler looks at it."""

    group: str
    member: int
    attempt: int
    oldest_version: int | None = 0
    reward: float = 1.0
    error: str | None = None
    error_kind: str | None = None


Name = tuple[str, int, int]


def name_of(thing: RolloutRequest | DroppedRollout | Told) -> Name:
    return thing.group, thing.member, thing.attempt


@dataclass
class Faults:
    """How often what happens, and how long an answer takes."""

    error: float = 0.0
    """Returned as data: timeouts, empty answers, engine errors."""
    raises: float = 0.0
    cancels_itself: float = 0.0
    hangs: float = 0.0
    """Needs a watchdog."""
    returns_junk: float = 0.0
    slow: float = 0.0
    """Takes a hundred times as long."""
    deaf: float = 0.0
    """Answers when it is cancelled, instead of ending."""
    lags: float = 0.0
    """Samples from weights some versions older than the newest."""


@dataclass
class Engine:
    """Runs rollouts in virtual time. What becomes of one depends on its name and the seed, when it does on `pace`."""

    seed: int = 0
    pace: int = 0
    faults: Faults = field(default_factory=Faults)
    version: int = 0
    dispatched: collections.Counter[Name] = field(default_factory=collections.Counter)
    order: list[RolloutRequest] = field(default_factory=list)
    running: int = 0
    most: int = 0
    cancelled: int = 0

    def __call__(self, dispatch: RolloutRequest) -> Coroutine[Any, Any, Any]:
        # counted here: what is cancelled before its task has begun was dispatched too
        self.dispatched[name_of(dispatch)] += 1
        self.order.append(dispatch)
        return self._running(name_of(dispatch))

    async def _running(self, name: Name) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._episode(name)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def fate(self, name: Name) -> "Fate":
        """What becomes of a rollout, whenever it runs."""
        chance, faults = random.Random(f"{self.seed}{name}"), self.faults
        outcome = Fate(
            lag=chance.randrange(1, 4) if chance.random() < faults.lags else 0,
            slow=chance.random() < faults.slow,
            hangs=chance.random() < faults.hangs,
            deaf=chance.random() < faults.deaf,
        )
        for ending in ("raises", "cancels_itself", "returns_junk", "error"):
            if chance.random() < getattr(faults, ending):
                fate.ending = ending
                fate.kind = chance.choice(["timeout", "empty", "engine", "over_length"])
        return fate

    async def _episode(self, name: Name) -> Any:
        fate, loop = self.fate(name), asyncio.get_running_loop()
        oldest = self.version - fate.lag
        seconds = random.Random(f"{self.pace}{name}").random() * (100.0 if fate.slow else 1.0)
        end = loop.time() + (1e6 if fate.hangs else seconds)
        while (left := end - loop.time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                if not fate.deaf:
                    raise
                await asyncio.sleep(min(left, 0.5))
                break
        if fate.ending == "raises":
            raise RuntimeError(f"{name} broke")
        if fate.ending == "cancels_itself":
            raise asyncio.CancelledError
        if fate.ending == "returns_junk":
            return "not a rollout"
        if fate.ending == "error":
            return Told(*name, None, 0.0, "went wrong", fate.kind)
        return Told(*name, oldest)


@dataclass
class Fate:
    lag: int
    slow: bool
    hangs: bool
    deaf: bool
    ending: str = "succeeds"
    kind: str = ""


@dataclass
class Ledger:
    """What was emitted, checked as it comes: nothing twice, nothing that was not dispatched."""

    emitted: dict[Name, str] = field(default_factory=dict)
    batches: list[RolloutBatch] = field(default_factory=list)

    def note(self, name: Name, how: str) -> None:
        assert name not in self.emitted, f"{name} emitted as {self.emitted[name]} and as {how}"
        self.emitted[name] = how

    def refused(self, refusals: Iterable[DroppedRollout]) -> None:
        for refusal in refusals:
            assert refusal.reason
            if refusal.rollout is not None:
                assert name_of(refusal.rollout) == name_of(refusal)
            self.note(name_of(refusal), refusal.reason)

    def batch(self, batch: RolloutBatch) -> RolloutBatch:
        self.batches.append(batch)
        for group in batch.groups:
            for member in group.members:
                if member.rollout is not None:
                    assert name_of(member.rollout) == (group.id, member.member, member.attempt)
                self.note((group.id, member.member, member.attempt), f"trained {member.reason}")
        self.refused(batch.dropped)
        return batch

    def check_against(self, dispatched: Iterable[Name]) -> None:
        """Every rollout dispatched was emitted, and nothing else was."""
        dispatched = set(dispatched)
        assert dispatched - set(self.emitted) == set(), "lost"
        assert set(self.emitted) - dispatched == set(), "invented"


def sources(*weights: float, tasks: int | None = None) -> list[TaskSource]:
    """Environments a, b, ... with these weights; with `tasks`, of so many tasks each, once."""
    made = []
    for letter, weight in zip("abcdefgh", weights, strict=False):
        listed = jobs(tasks or 5, letter)
        made.append(TaskSource(letter, iter(listed) if tasks else listed, weight))
    return made


def held(scheduler: Scheduler) -> int:
    """How many things the scheduler's structures hold; what was refused and not yet emitted apart."""
    parts: list[Callable[[], Any]] = [
        lambda: scheduler._group_queue._groups,
        lambda: scheduler._in_flight._slots,
        lambda: scheduler._in_flight._abandoned,
        lambda: scheduler._slot_queue,
        lambda: scheduler._new_slots,
        lambda: scheduler._accounts.counts,
        lambda: scheduler._accounts.reasons,
    ]
    return sum(len(part()) for part in parts)
