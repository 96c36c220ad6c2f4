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
from keel.rollout.scheduler.accounts import NothingToTrain, RolloutBatch
from keel.rollout.scheduler.groups import Group
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource
from keel.tools.simulate.draws import SeededDraws
from keel.tools.simulate.publishing import SimulatedPublisher
from keel.tools.simulate.simulated_pool import EngineTotals, SimulatedPool
from keel.tools.simulate.virtual_clock import run_virtually

ZERO_VARIANCE = "zero_variance"
MAX_DEFAULT_STEPS = 50
"""That are simulated of a longer run: enough to see what it settles at."""
MAX_DISPATCH_FACTOR = 1000
"""Times the rollouts of a batch that may be dispatched for one batch before the run is called hopeless."""

ProgressCallback = Callable[[int, int], None]
"""Told the number of the step that ended, and of how many."""


@dataclass(frozen=True)
class SimulatedTask:
    """All that the scheduler asks of one."""

    id: str


@dataclass
class SimulatedStep:
    """What one step came to."""

    ended_at: float = 0.0
    waiting_seconds: float = 0.0
    """Seconds until the batch was there."""
    training_seconds: float = 0.0
    """Seconds of the trainer's work."""
    publishing_seconds: float = 0.0
    """Seconds for which weights that travelled kept the trainer waiting."""
    saving_seconds: float = 0.0
    trained_rollouts: int = 0
    """That trained."""
    trained_tokens: int = 0
    """Sampled, that trained."""
    computed_tokens: int = 0
    """Tokens that the trainer computed: prompts once for each group."""
    truncated: int = 0
    """Rollouts that trained and were cut at their longest."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rollouts by reason."""
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    """Their tokens."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Tokens that trained, by how many versions old they were."""
    engine_totals: EngineTotals = field(default_factory=EngineTotals)
    """Of the engines, when the step ended."""


def resolve_ranks(settings: RunSettings, assumed: SimulateSettings) -> int:
    """Of the trainer."""
    return assumed.ranks or int(getattr(settings.trainer, "ranks", 1) or 1)


def trainer_seconds(assumed: SimulateSettings, ranks: int, tokens: int) -> float:
    """A step of so many tokens."""
    speed = assumed.trainer_tokens_per_second * (1 + (ranks - 1) * assumed.rank_efficiency)
    return assumed.step_seconds + tokens / speed


def simulate(
    settings: RunSettings, assumed: SimulateSettings, on_progress: ProgressCallback | None = None
) -> list[SimulatedStep]:
    """Every step of the run, or of as many as are asked for. The same settings give the same steps, always."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here is in a cycle, and looking for one takes a fifth of the time of a large simulation
    try:
        return run_virtually(SimulatedRun(settings, assumed, on_progress).run())
    finally:
        if collecting:
            gc.enable()


class SimulatedRun:
    """One simulated run."""

    def __init__(self, settings: RunSettings, assumed: SimulateSettings, on_progress: ProgressCallback | None) -> None:
        self._settings, self._assumed = settings, assumed
        self._on_progress = on_progress or (lambda _step, _of: None)
        self._environments = settings.environments or {"simulated": EnvironmentSettings(name="simulated")}
        self._ranks = resolve_ranks(settings, assumed)
        self._draws = SeededDraws(settings.seed)
        self._version = 0
        self._dispatch_budget = 0

    async def run(self) -> list[SimulatedStep]:
        fleet = SimulatedPool(self._settings, self._assumed, self._environments, self._on_dispatch)
        sources = [TaskSource(name, [SimulatedTask(name)], one.weight) for name, one in self._environments.items()]
        scheduler = Scheduler(fleet, sources, self._settings.scheduler)
        self._budget_exhausted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scheduler.set_engine_version(self._version)
        publisher = SimulatedPublisher(self._settings, self._assumed, fleet, scheduler.set_engine_version)
        count = self._assumed.steps or min(self._settings.steps, MAX_DEFAULT_STEPS)
        steps: list[SimulatedStep] = []
        for number in range(1, count + 1):
            steps.append(await self._run_step(number, scheduler, fleet, publisher))
            self._stop_if_nothing_trains(steps)
            self._on_progress(number, count)
        await publisher.wait_live()
        fleet.close()
        await scheduler.close()
        return steps

    async def _run_step(
        self, number: int, scheduler: Scheduler, pool: SimulatedPool, publisher: SimulatedPublisher
    ) -> SimulatedStep:
        step, clock = SimulatedStep(), asyncio.get_running_loop().time
        began = clock()
        batch = await self._next_batch(number, scheduler)
        step.waiting_seconds = clock() - began
        self._record_batch(step, batch)
        if step.trained_rollouts:
            step.publishing_seconds = await _timed(publisher.snapshot_done())
            pool.set_trainer_computing(True)
            step.training_seconds = await _timed(
                asyncio.sleep(trainer_seconds(self._assumed, self._ranks, step.computed_tokens))
            )
            pool.set_trainer_computing(False)
            self._version += 1
            if self._version % self._settings.publish.every == 0:
                step.publishing_seconds += await _timed(publisher.publish(self._version))
        if number % self._settings.checkpoints.every == 0 and self._assumed.checkpoint_seconds:
            step.publishing_seconds += await _timed(publisher.snapshot_done())
            step.saving_seconds = await _timed(asyncio.sleep(self._assumed.checkpoint_seconds))
        step.ended_at, step.engine_totals = clock(), pool.totals()
        return step

    async def _next_batch(self, number: int, scheduler: Scheduler) -> RolloutBatch:
        self._dispatch_budget = (
            MAX_DISPATCH_FACTOR * self._settings.scheduler.groups_per_step * self._settings.scheduler.group_size
        )
        taking = asyncio.ensure_future(scheduler.next_batch(self._version))
        either: set[asyncio.Future[Any]] = {taking, self._budget_exhausted}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            raise KeelError(
                f"the simulated run does not get beyond step {number}: {MAX_DISPATCH_FACTOR} times the rollouts of a batch were"
                " dispatched and none came of it; look at limits.max_sequence_tokens, rollout_failures and the length of answers"
            )
        try:
            return taking.result()
        except NothingToTrain as halt:
            raise KeelError(f"the simulated run stops at step {number}, as a real one would: {halt}") from None

    def _stop_if_nothing_trains(self, steps: list[SimulatedStep]) -> None:
        limit = self._settings.scheduler.max_empty_steps
        if limit is not None and len(steps) >= limit and not any(step.trained_rollouts for step in steps[-limit:]):
            raise KeelError(
                f"the simulated run stops at step {len(steps)}, as a real one would: {limit} steps in a row trained"
                f" nothing (scheduler.max_empty_steps = {limit}); look at zero_variance_share = {self._assumed.zero_variance_share:g}"
            )

    def _on_dispatch(self) -> None:
        self._dispatch_budget -= 1
        if self._dispatch_budget < 0 and not self._budget_exhausted.done():
            self._budget_exhausted.set_result(None)

    def _record_batch(self, step: SimulatedStep, batch: RolloutBatch) -> None:
        for group in batch.groups:
            if self._is_zero_variance(group):
                step.dropped[ZERO_VARIANCE] += len(group.rollouts)
                step.wasted_tokens[ZERO_VARIANCE] += sum(one.tokens for one in group.rollouts)
            else:
                self._record_trained(step, group)
            for member in group.members:
                if member.reason is not None:
                    step.dropped[member.reason] += 1
                    step.wasted_tokens[member.reason] += member.rollout.tokens if member.rollout is not None else 0
        for one in batch.dropped:
            step.dropped[one.reason] += 1
            step.wasted_tokens[one.reason] += one.rollout.tokens if one.rollout is not None else 0

    def _is_zero_variance(self, group: Group) -> bool:
        """Whether its rewards are all equal, and it does not train for that."""
        if not self._assumed.zero_variance_share or self._settings.advantages.zero_variance_groups == "train":
            return False
        return self._draws.uniforms(f"{ZERO_VARIANCE}/{group.id}")[0] < self._assumed.zero_variance_share

    def _record_trained(self, step: SimulatedStep, group: Group) -> None:
        ages, now = step.staleness, self._version
        step.computed_tokens += self._assumed.prompt_tokens
        for one in group.rollouts:
            step.trained_rollouts += 1
            step.trained_tokens += one.tokens
            step.computed_tokens += one.tokens
            step.truncated += one.truncated
            for version, tokens in one.tokens_by_version:
                ages[now - version] += tokens


async def _timed(work: Coroutine[Any, Any, None]) -> float:
    """Virtual seconds that it takes."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await work
    return clock() - began
