"""Try reward functions on sampled completions, before any training."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from keel.common.tasks import gather_or_cancel
from keel.config.rollout import EpisodeLimits, Sampling
from keel.inference.protocol import Engine
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.environment import EpisodeResult, Task
from keel.rollout.environments.rewards.workers import RewardError
from keel.rollout.policy_client import PolicyClient, derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout_metrics import mean_by_name

MAX_IN_FLIGHT = 64


@dataclass(frozen=True)
class ScoredCompletion:
    """One completion and its reward, or the failure of its reward function."""

    task: str
    prompt: str
    completion: str
    reward: float | None
    components: dict[str, float]
    error: str | None
    seconds: float
    """Time that scoring took."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other values that the rewards reported, such as the cost of a judge."""


@dataclass(frozen=True)
class RewardTrial:
    """Rewards of sampled completions."""

    groups: list[list[ScoredCompletion]]
    """The completions of each task."""

    @property
    def completions(self) -> list[ScoredCompletion]:
        return [completion for group in self.groups for completion in group]

    @property
    def scored(self) -> list[ScoredCompletion]:
        """The completions with a reward, best first."""
        return sorted((c for c in self.completions if c.reward is not None), key=lambda c: -(c.reward or 0.0))

    @property
    def failures(self) -> list[ScoredCompletion]:
        return [completion for completion in self.completions if completion.error is not None]

    @property
    def groups_with_signal(self) -> int:
        """Groups whose rewards are not all equal: only these train."""
        return sum(len({c.reward for c in group if c.reward is not None}) > 1 for group in self.groups)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the trial as JSON."""
        rewards = [c.reward for c in self.scored if c.reward is not None]
        return {
            "completions": len(self.completions),
            "failures": len(self.failures),
            "first_failure": self.failures[0].error if self.failures else None,
            "mean": float(np.mean(rewards)) if rewards else None,
            "std": float(np.std(rewards)) if rewards else None,
            "min": min(rewards, default=None),
            "max": max(rewards, default=None),
            "components": mean_by_name(c.components for c in self.scored),
            "metrics": mean_by_name(c.metrics for c in self.scored),
            "groups": len(self.groups),
            "groups_with_signal": self.groups_with_signal,
            "median_seconds": float(np.median([c.seconds for c in self.completions])),
            "max_seconds": max(c.seconds for c in self.completions),
        }

    def as_json(self) -> dict[str, Any]:
        return {**self.summary(), "scored": [asdict(completion) for completion in self.completions]}


async def try_rewards(
    environment: DatasetEnvironment,
    engine: Engine,
    renderer: Renderer,
    *,
    sampling: Sampling,
    num_tasks: int,
    samples_per_task: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RewardTrial:
    """Sample `samples_per_task` completions of training tasks, chosen by the seed, and score them."""
    available = environment.tasks("train")
    tasks = [available[int(index)] for index in np.random.default_rng(seed).permutation(len(available))[:num_tasks]]
    slots, finished = asyncio.Semaphore(MAX_IN_FLIGHT), 0

    async def play(task: Task, index: int) -> _Attempt:
        nonlocal finished
        own = sampling.model_copy(update={"seed": derive_seed(seed, "reward", task.id, index)})
        async with slots:
            client = PolicyClient(engine, renderer, own, EpisodeLimits(), group=task.id)
            messages = environment.messages(task)
            reply = await client.chat(messages)
            start = time.monotonic()
            result: EpisodeResult | RewardError
            try:
                result = await environment.score(task, messages, reply)
            except RewardError as raised:
                result = raised
            attempt = _Attempt(str(messages[-1]["content"]), reply.text, result, time.monotonic() - start)
        finished += 1
        if progress is not None:
            progress(finished, len(tasks) * samples_per_task)
        return attempt

    async def play_group(task: Task) -> list[ScoredCompletion]:
        attempts = await gather_or_cancel([play(task, index) for index in range(samples_per_task)])
        return [attempt.as_scored(task) for attempt in await _score_group(environment, task, attempts)]

    return RewardTrial(await gather_or_cancel([play_group(task) for task in tasks]))


@dataclass(frozen=True)
class _Attempt:
    """A completion while its group is being scored."""

    prompt: str
    completion: str
    result: EpisodeResult | RewardError
    seconds: float

    def as_scored(self, task: Task) -> ScoredCompletion:
        text = (task.id, self.prompt, self.completion)
        if isinstance(self.result, RewardError):
            return ScoredCompletion(*text, None, {}, str(self.result), self.seconds)
        result = self.result
        return ScoredCompletion(
            *text, result.reward, dict(result.reward_components), None, self.seconds, dict(result.metrics)
        )


async def _score_group(environment: DatasetEnvironment, task: Task, attempts: Sequence[_Attempt]) -> Sequence[_Attempt]:
    """Compute the rewards that need the whole group; its seconds are divided among the completions."""
    waiting = {
        index: attempt.result
        for index, attempt in enumerate(attempts)
        if isinstance(attempt.result, EpisodeResult) and attempt.result.reward is None
    }
    if not waiting:
        return attempts
    start = time.monotonic()
    try:
        results = await environment.score_group(task, list(waiting.values()))
    except RewardError as error:
        results = [error] * len(waiting)
    seconds = (time.monotonic() - start) / len(waiting)
    final = list(attempts)
    for index, result in zip(waiting, results, strict=True):
        final[index] = replace(attempts[index], result=result, seconds=attempts[index].seconds + seconds)
    return final
