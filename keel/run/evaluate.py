"""How well a policy does on tasks that it never trains on: the held-out split, played to the end, with intervals.

Every answer has a seed of its own that depends on the task and on nothing else, so that two evaluations of the same
weights on the same engine agree whatever the number in flight. Nothing of it trains. An episode that fails counts as
reward 0 and is counted: leaving it out would pay a policy for breaking its environment.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from keel.config.rollout import EpisodeLimits, Sampling
from keel.errors import ConfigError, KeelError
from keel.inference.protocol import Engine
from keel.rollout.environments.environment import Environment, Task, run_episode
from keel.rollout.policy_client import PolicyClient, derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout import Rollout
from keel.run.intervals import Estimate, mean_reward_interval, pass_at_k_interval, pass_k_values

PASS_THRESHOLD = 1 - 1e-9
"""An answer passes from this reward on: full marks, to rounding. Partial credit is in the reward and not in pass@k."""


@dataclass(frozen=True)
class EvaluationResult:
    """What came of the held-out tasks of one environment."""

    environment: str
    reward: float
    """Mean over all answers."""
    low: float
    high: float
    """Its 95 % interval over tasks; NaN where one task alone gives none."""
    num_tasks: int
    samples_per_task: int
    """Answers for each task."""
    pass_at_k: Mapping[int, float]
    """pass@k by k."""
    failed_episodes: int
    """Episodes that ended in an error, of tasks * samples."""
    seconds: float
    pass_at_k_intervals: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """The 95 % interval of each pass@k."""
    first_error: str = ""
    """Of the first episode that failed."""

    def scalars(self) -> dict[str, float]:
        """For the ledger and the log; what is not known is left out."""
        found = {
            "reward": self.reward,
            "low": self.low,
            "high": self.high,
            "tasks": float(self.num_tasks),
            "samples": float(self.samples_per_task),
            "failed": float(self.failed_episodes),
            "seconds": self.seconds,
        }
        found |= {f"pass@{k}": value for k, value in self.pass_at_k.items()}
        for k, (low, high) in self.pass_at_k_intervals.items():
            found |= {f"pass@{k}/low": low, f"pass@{k}/high": high}
        return {name: value for name, value in found.items() if math.isfinite(value)}


async def evaluate(
    engine: Engine,
    renderer: Renderer,
    environment: Environment,
    *,
    num_tasks: int,
    samples_per_task: int,
    sampling: Sampling,
    limits: EpisodeLimits,
    seed: int,
    max_in_flight: int = 64,
    progress: Callable[[int, int], None] | None = None,
    name: str | None = None,
) -> EvaluationResult:
    """Play the first `tasks` held-out tasks, `samples` times each.

    `progress` is told how many of how many episodes have ended. `name`: what the environment is called in this run,
    where it is not its own name. When every episode fails that is an error, which says how the first one did.
    """
    called = name or environment.name
    if samples_per_task > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"samples = {samples_per_task} cannot act: with sampling.temperature = 0 every answer to a task is the same"
        )
    chosen = list(itertools.islice(environment.tasks("eval"), num_tasks))
    if not chosen:
        raise ConfigError(f'environment "{called}" has no tasks for evaluation: its tasks("eval") is empty')
    began = time.monotonic()
    room = asyncio.Semaphore(max_in_flight)
    ended = 0

    async def play(task: Task, number: int) -> Rollout:
        nonlocal ended
        own = sampling.model_copy(update={"seed": derive_seed(seed, "eval", task.id, number)})
        async with room:
            client = PolicyClient(engine, renderer, own, limits, group=f"eval/{task.id}", evaluation=True)
            rollout = await run_episode(environment, task, client, limits)
        ended += 1
        if progress is not None:
            progress(ended, len(chosen) * samples_per_task)
        return rollout

    async with asyncio.TaskGroup() as group:
        playing = [[group.create_task(play(task, number)) for number in range(samples_per_task)] for task in chosen]
    return summarize_rollouts(called, [[one.result() for one in task] for task in playing], time.monotonic() - began)


def summarize_rollouts(environment: str, rollouts: Sequence[Sequence[Rollout]], seconds: float) -> EvaluationResult:
    """The numbers, from the rollouts of each task: as many for one as for another."""
    everything = [rollout for task in rollouts for rollout in task]
    samples = len(rollouts[0])
    errors = [f"{one.task_id}: {one.error}" for one in everything if one.error is not None]
    if len(errors) == len(everything):
        raise KeelError(f'evaluation of "{environment}": all {len(errors)} episodes failed; the first, {errors[0]}')
    rewards = [[_reward(rollout) for rollout in task] for task in rollouts]
    mean = mean_reward_interval(rewards)
    passed = [sum(reward >= PASS_THRESHOLD for reward in task) for task in rewards]
    passes: dict[int, Estimate] = {k: pass_at_k_interval(k, passed, samples) for k in pass_k_values(samples)}
    return EvaluationResult(
        environment=environment,
        reward=mean.mean,
        low=mean.low,
        high=mean.high,
        num_tasks=len(rollouts),
        samples_per_task=samples,
        pass_at_k={k: one.mean for k, one in passes.items()},
        failed_episodes=len(errors),
        seconds=seconds,
        pass_at_k_intervals={k: (one.low, one.high) for k, one in passes.items()},
        first_error=errors[0] if errors else "",
    )


def _reward(rollout: Rollout) -> float:
    return rollout.reward if rollout.error is None and rollout.reward is not None else 0.0
