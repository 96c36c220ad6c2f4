"""Simulate a run in virtual time: the real scheduler, simulated engines, and a trainer modelled by its speed.

The order of operations is that of `keel/run/loop.py`: take a batch, train, increment the version, publish, save. The
result is one record per step, which `prediction` summarises. Evaluations are left out: they do not change how fast a
run trains.
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
"""Most steps simulated of a longer run by default: enough to reach a steady state."""
MAX_DISPATCH_FACTOR = 1000
"""The simulation fails if it dispatches this many times a batch's rollouts without completing a batch."""

ProgressCallback = Callable[[int, int], None]
"""Called with the number of the step that ended and the total number of steps."""


@dataclass(frozen=True)
class SimulatedTask:
    """The fields of a task that the scheduler reads."""

    id: str


@dataclass
class SimulatedStep:
    """The record of one step."""

    ended_at: float = 0.0
    waiting_seconds: float = 0.0
    """Seconds spent waiting for the batch."""
    training_seconds: float = 0.0
    publishing_seconds: float = 0.0
    """Seconds in which the trainer waited for weights to be published."""
    saving_seconds: float = 0.0
    trained_rollouts: int = 0
    trained_tokens: int = 0
    """Sampled tokens that trained."""
    computed_tokens: int = 0
    """Tokens that the trainer computed: each group's prompt once."""
    truncated: int = 0
    """Trained rollouts that were truncated at the token limit."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped rollouts by reason."""
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of dropped rollouts by reason."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained tokens by staleness."""
    engine_totals: EngineTotals = field(default_factory=EngineTotals)
    """Totals of the engines when the step ended."""


def resolve_ranks(settings: RunSettings, assumed: SimulateSettings) -> int:
    """Return the number of trainer ranks."""
    return assumed.ranks or int(getattr(settings.trainer, "ranks", 1) or 1)


def trainer_seconds(assumed: SimulateSettings, ranks: int, tokens: int) -> float:
    """Return the seconds of a training step with this many tokens."""
    speed = assumed.trainer_tokens_per_second * (1 + (ranks - 1) * assumed.rank_efficiency)
    return assumed.step_seconds + tokens / speed


def simulate(
    settings: RunSettings, assumed: SimulateSettings, on_progress: ProgressCallback | None = None
) -> list[SimulatedStep]:
    """Simulate a run and return its steps. The same settings always give the same steps."""
    gc_was_enabled = gc.isenabled()
    gc.disable()  # a simulation creates no reference cycles, and looking for them takes a fifth of a large one's time
    try:
        return run_virtually(SimulatedRun(settings, assumed, on_progress).run())
    finally:
        if gc_was_enabled:
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
        pool = SimulatedPool(self._settings, self._assumed, self._environments, self._on_dispatch)
        sources = [
            TaskSource(name, [SimulatedTask(name)], environment.weight, group_size=environment.group_size)
            for name, environment in self._environments.items()
        ]
        replaceable = self._is_zero_variance if self._settings.advantages.drops_equal_rewards else None
        scheduler = Scheduler(pool, sources, self._settings.scheduler, is_zero_variance=replaceable)
        self._budget_exhausted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scheduler.set_engine_version(self._version)
        publisher = SimulatedPublisher(self._settings, self._assumed, pool, scheduler.set_engine_version)
        count = self._assumed.steps or min(self._settings.steps, MAX_DEFAULT_STEPS)
        steps: list[SimulatedStep] = []
        for number in range(1, count + 1):
            steps.append(await self._run_step(number, scheduler, pool, publisher))
            self._stop_if_nothing_trains(steps)
            self._on_progress(number, count)
        await publisher.wait_live()
        pool.close()
        await scheduler.close()
        return steps

    async def _run_step(
        self, number: int, scheduler: Scheduler, pool: SimulatedPool, publisher: SimulatedPublisher
    ) -> SimulatedStep:
        step, clock = SimulatedStep(), asyncio.get_running_loop().time
        start = clock()
        batch = await self._next_batch(number, scheduler)
        step.waiting_seconds = clock() - start
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
        size = max(map(self._settings.group_size, self._environments.values()))
        self._dispatch_budget = MAX_DISPATCH_FACTOR * self._settings.scheduler.groups_per_step * size
        next_batch = asyncio.ensure_future(scheduler.next_batch(self._version))
        futures: set[asyncio.Future[Any]] = {next_batch, self._budget_exhausted}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not next_batch.done():
            next_batch.cancel()
            raise KeelError(
                f"the simulated run does not get beyond step {number}: {MAX_DISPATCH_FACTOR} times the rollouts of a"
                " batch were dispatched without completing a batch; check limits.max_sequence_tokens, rollout_failures"
                " and length"
            )
        try:
            return next_batch.result()
        except NothingToTrain as error:
            raise KeelError(f"the simulated run stops at step {number}, as a real one would: {error}") from None

    def _stop_if_nothing_trains(self, steps: list[SimulatedStep]) -> None:
        limit = self._settings.scheduler.max_empty_steps
        if limit is not None and len(steps) >= limit and not any(step.trained_rollouts for step in steps[-limit:]):
            raise KeelError(
                f"the simulated run stops at step {len(steps)}, as a real one would: {limit} steps in a row trained"
                f" nothing (scheduler.max_empty_steps = {limit}); check"
                f" zero_variance_share = {self._assumed.zero_variance_share:g}"
            )

    def _on_dispatch(self) -> None:
        self._dispatch_budget -= 1
        if self._dispatch_budget < 0 and not self._budget_exhausted.done():
            self._budget_exhausted.set_result(None)

    def _record_batch(self, step: SimulatedStep, batch: RolloutBatch) -> None:
        for group in batch.groups:
            if self._is_zero_variance(group):
                step.dropped[ZERO_VARIANCE] += len(group.rollouts)
                step.wasted_tokens[ZERO_VARIANCE] += sum(rollout.tokens for rollout in group.rollouts)
            else:
                self._record_trained(step, group)
            for member in group.members:
                if member.reason is not None:
                    step.dropped[member.reason] += 1
                    step.wasted_tokens[member.reason] += member.rollout.tokens if member.rollout is not None else 0
        for dropped in batch.dropped:
            step.dropped[dropped.reason] += 1
            step.wasted_tokens[dropped.reason] += dropped.rollout.tokens if dropped.rollout is not None else 0

    def _is_zero_variance(self, group: Group) -> bool:
        """Return whether a group is dropped because its rewards are all equal."""
        if not self._assumed.zero_variance_share or self._settings.advantages.zero_variance_groups == "train":
            return False
        return self._draws.uniforms(f"{ZERO_VARIANCE}/{group.id}")[0] < self._assumed.zero_variance_share

    def _record_trained(self, step: SimulatedStep, group: Group) -> None:
        step.computed_tokens += self._assumed.prompt_tokens
        for rollout in group.rollouts:
            step.trained_rollouts += 1
            step.trained_tokens += rollout.tokens
            step.computed_tokens += rollout.tokens
            step.truncated += rollout.truncated
            for version, tokens in rollout.tokens_by_version:
                step.staleness[self._version - version] += tokens


async def _timed(work: Coroutine[Any, Any, None]) -> float:
    """Await `work` and return the virtual seconds it took."""
    clock = asyncio.get_running_loop().time
    start = clock()
    await work
    return clock() - start
