"""A run in virtual time: the real scheduler, simulated engines, and a trainer that only takes its time.

The order of things is that of `keel/run/loop.py`: take a batch, train, count the version up, publish, save. What comes
of it is an account of each step; `prediction` makes numbers of them. Evaluations are left out: how long they take has
nothing to do with how fast a run trains.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from keel.config import EnvironmentSettings, RunSettings
from keel.config.simulate import SimulateSettings
from keel.errors import KeelError
from keel.rollout.scheduler.accounts import Batch, NothingToTrain
from keel.rollout.scheduler.groups import Group
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import Source
from keel.tools.simulate.draws import Chance
from keel.tools.simulate.publishing import Publisher
from keel.tools.simulate.simulated_pool import Fleet, Totals
from keel.tools.simulate.virtual_clock import run_virtually

NO_SIGNAL = "no_signal"
STEPS = 50
"""That are simulated of a longer run: enough to see what it settles at."""
PATIENCE = 1000
"""Times the rollouts of a batch that may be dispatched for one batch before the run is called hopeless."""

Watch = Callable[[int, int], None]
"""Told the number of the step that ended, and of how many."""


@dataclass(frozen=True)
class Task:
    """All that the scheduler asks of one."""

    id: str


@dataclass
class Step:
    """What one step came to."""

    ended: float = 0.0
    waited: float = 0.0
    """Seconds until the batch was there."""
    trained: float = 0.0
    """Seconds of the trainer's work."""
    published: float = 0.0
    """Seconds for which weights that travelled kept the trainer waiting."""
    saved: float = 0.0
    rollouts: int = 0
    """That trained."""
    tokens: int = 0
    """Sampled, that trained."""
    computed: int = 0
    """Tokens that the trainer computed: prompts once for each group."""
    cut: int = 0
    """Rollouts that trained and were cut at their longest."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rollouts by reason."""
    wasted: Counter[str] = field(default_factory=Counter)
    """Their tokens."""
    ages: Counter[int] = field(default_factory=Counter)
    """Tokens that trained, by how many versions old they were."""
    totals: Totals = field(default_factory=Totals)
    """Of the engines, when the step ended."""


def ranks_of(settings: RunSettings, assumed: SimulateSettings) -> int:
    """Of the trainer."""
    return assumed.ranks or int(getattr(settings.trainer, "ranks", 1) or 1)


def trainer_seconds(assumed: SimulateSettings, ranks: int, tokens: int) -> float:
    """A step of so many tokens."""
    speed = assumed.trainer_tokens_per_second * (1 + (ranks - 1) * assumed.rank_efficiency)
    return assumed.step_seconds + tokens / speed


def simulate(settings: RunSettings, assumed: SimulateSettings, watch: Watch | None = None) -> list[Step]:
    """Every step of the run, or of as many as are asked for. The same settings give the same steps, always."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here is in a cycle, and looking for one takes a fifth of the time of a large simulation
    try:
        return run_virtually(World(settings, assumed, watch).run())
    finally:
        if collecting:
            gc.enable()


class World:
    """One simulated run."""

    def __init__(self, settings: RunSettings, assumed: SimulateSettings, watch: Watch | None) -> None:
        self._settings, self._assumed = settings, assumed
        self._watch = watch or (lambda _step, _of: None)
        self._environments = settings.environments or {"simulated": EnvironmentSettings(name="simulated")}
        self._ranks = ranks_of(settings, assumed)
        self._chance = Chance(settings.seed)
        self._version = 0
        self._patience = 0

    async def run(self) -> list[Step]:
        fleet = Fleet(self._settings, self._assumed, self._environments, self._dispatched)
        sources = [Source(name, [Task(name)], one.weight) for name, one in self._environments.items()]
        scheduler = Scheduler(fleet, sources, self._settings.scheduler)
        self._hopeless: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scheduler.live(self._version)
        publisher = Publisher(self._settings, self._assumed, fleet, scheduler.live)
        count = self._assumed.steps or min(self._settings.steps, STEPS)
        steps: list[Step] = []
        for number in range(1, count + 1):
            steps.append(await self._step(number, scheduler, fleet, publisher))
            self._halt_if_barren(steps)
            self._watch(number, count)
        await publisher.live()
        fleet.close()
        await scheduler.close()
        return steps

    async def _step(self, number: int, scheduler: Scheduler, fleet: Fleet, publisher: Publisher) -> Step:
        step, clock = Step(), asyncio.get_running_loop().time
        began = clock()
        batch = await self._batch(number, scheduler)
        step.waited = clock() - began
        self._account(step, batch)
        if step.rollouts:
            step.published = await _timed(publisher.taken())
            fleet.share_machine(True)
            step.trained = await _timed(asyncio.sleep(trainer_seconds(self._assumed, self._ranks, step.computed)))
            fleet.share_machine(False)
            self._version += 1
            if self._version % self._settings.engine.publish_every == 0:
                step.published += await _timed(publisher.publish(self._version))
        if number % self._settings.checkpoints.every == 0 and self._assumed.checkpoint_seconds:
            step.published += await _timed(publisher.taken())
            step.saved = await _timed(asyncio.sleep(self._assumed.checkpoint_seconds))
        step.ended, step.totals = clock(), fleet.totals()
        return step

    async def _batch(self, number: int, scheduler: Scheduler) -> Batch:
        self._patience = PATIENCE * self._settings.scheduler.groups * self._settings.scheduler.group_size
        taking = asyncio.ensure_future(scheduler.next_batch(self._version))
        either: set[asyncio.Future[Any]] = {taking, self._hopeless}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            raise KeelError(
                f"the simulated run does not get beyond step {number}: {PATIENCE} times the rollouts of a batch were"
                " dispatched and none came of it; look at limits.tokens, rollout_failures and the length of answers"
            )
        try:
            return taking.result()
        except NothingToTrain as halt:
            raise KeelError(f"the simulated run stops at step {number}, as a real one would: {halt}") from None

    def _halt_if_barren(self, steps: list[Step]) -> None:
        limit = self._settings.scheduler.halt_after
        if limit is not None and len(steps) >= limit and not any(step.rollouts for step in steps[-limit:]):
            raise KeelError(
                f"the simulated run stops at step {len(steps)}, as a real one would: {limit} steps in a row trained"
                f" nothing (scheduler.halt_after = {limit}); look at no_signal = {self._assumed.no_signal:g}"
            )

    def _dispatched(self) -> None:
        self._patience -= 1
        if self._patience < 0 and not self._hopeless.done():
            self._hopeless.set_result(None)

    def _account(self, step: Step, batch: Batch) -> None:
        for group in batch.groups:
            if self._silent(group):
                step.refused[NO_SIGNAL] += len(group.rollouts)
                step.wasted[NO_SIGNAL] += sum(one.tokens for one in group.rollouts)
            else:
                self._train(step, group)
            for member in group.members:
                if member.reason is not None:
                    step.refused[member.reason] += 1
                    step.wasted[member.reason] += member.rollout.tokens if member.rollout is not None else 0
        for one in batch.refused:
            step.refused[one.reason] += 1
            step.wasted[one.reason] += one.rollout.tokens if one.rollout is not None else 0

    def _silent(self, group: Group) -> bool:
        """Whether its rewards are all equal, and it does not train for that."""
        if not self._assumed.no_signal or self._settings.advantages.zero_variance_groups == "train":
            return False
        return self._chance.draws(f"{NO_SIGNAL}/{group.id}")[0] < self._assumed.no_signal

    def _train(self, step: Step, group: Group) -> None:
        ages, now = step.ages, self._version
        step.computed += self._assumed.prompt
        for one in group.rollouts:
            step.rollouts += 1
            step.tokens += one.tokens
            step.computed += one.tokens
            step.cut += one.cut
            for version, tokens in one.parts:
                ages[now - version] += tokens


async def _timed(work: Coroutine[Any, Any, None]) -> float:
    """Virtual seconds that it takes."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await work
    return clock() - began
