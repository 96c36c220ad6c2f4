"""Try reward functions on sampled completions, before any training."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keel.config.rollout import EpisodeLimits, Sampling
from keel.inference.protocol import Engine
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.environment import Task
from keel.rollout.environments.rewards.workers import RewardError
from keel.rollout.policy_client import PolicyClient, derive_seed
from keel.rollout.rendering.renderer import Renderer

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
        names = sorted({name for c in self.scored for name in c.components})
        components = {
            name: float(np.mean([c.components[name] for c in self.scored if name in c.components])) for name in names
        }
        return {
            "completions": len(self.completions),
            "failures": len(self.failures),
            "first_failure": self.failures[0].error if self.failures else None,
            "mean": float(np.mean(rewards)) if rewards else None,
            "std": float(np.std(rewards)) if rewards else None,
            "min": min(rewards, default=None),
            "max": max(rewards, default=None),
            "components": components,
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

    async def play(task: Task, index: int) -> ScoredCompletion:
        nonlocal finished
        own = sampling.model_copy(update={"seed": derive_seed(seed, "reward", task.id, index)})
        async with slots:
            client = PolicyClient(engine, renderer, own, EpisodeLimits(), group=task.id)
            messages = environment.messages(task)
            reply = await client.chat(messages)
            start = time.monotonic()
            reward, components, error = None, {}, None
            try:
                result = await environment.score(task, messages, reply)
                reward, components = result.reward, dict(result.reward_components)
            except RewardError as raised:
                error = str(raised)
            seconds = time.monotonic() - start
        finished += 1
        if progress is not None:
            progress(finished, len(tasks) * samples_per_task)
        prompt = str(messages[-1]["content"])
        return ScoredCompletion(task.id, prompt, reply.text, reward, components, error, seconds)

    async with asyncio.TaskGroup() as group:
        plays = [[group.create_task(play(task, index)) for index in range(samples_per_task)] for task in tasks]
    return RewardTrial([[task.result() for task in row] for row in plays])
