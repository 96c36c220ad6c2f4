"""Evaluate a policy on the held-out tasks of an environment, with 95 % intervals.

The seed of every completion depends only on the task and the sample index, so two evaluations of the same weights on
the same engine agree whatever the number in flight. Evaluation rollouts never train. A failed episode has reward 0 and
is counted: leaving it out would reward a policy for breaking its environment. The result holds every episode;
`keel.run.evaluation.evaluation_records` stores them.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keel.common.tasks import gather_or_cancel
from keel.config.rollout import EpisodeLimits, Sampling
from keel.errors import ConfigError, KeelError
from keel.inference.pool.chat_endpoint import ChatEndpoint
from keel.inference.protocol import Engine
from keel.rollout.environments.environment import Environment, Task, run_episode
from keel.rollout.environments.group_rewards import awaits_group, score_group
from keel.rollout.policy_client import PolicyClient, derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout_metrics import completion_metrics, environment_means
from keel.rollout.text_policy_client import TextPolicyClient
from keel.run.evaluation.evaluation_records import EvaluatedEpisode
from keel.run.evaluation.intervals import Estimate, mean_reward_interval, pass_at_k_interval, pass_k_values


@dataclass(frozen=True)
class EvaluationResult:
    """The result on the held-out tasks of one environment."""

    environment: str
    reward: float
    """Mean over all episodes."""
    low: float
    high: float
    """Bounds of its 95 % interval over tasks; NaN if there is only one task."""
    num_tasks: int
    samples_per_task: int
    """Episodes per task."""
    pass_at_k: Mapping[int, float]
    """pass@k by k."""
    failed_episodes: int
    """Episodes that ended in an error, of num_tasks * samples_per_task."""
    seconds: float
    pass_at_k_intervals: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """95 % interval of each pass@k."""
    first_error: str = ""
    """Error of the first episode that failed."""
    environment_means: Mapping[str, float] = field(default_factory=dict)
    """Means of reward components and environment metrics, by `reward_components/NAME` and `environment_metrics/NAME`;
    a mean is over the episodes that reported the name."""
    completions: Mapping[str, float] = field(default_factory=dict)
    """completion_tokens, completion_tokens_max and truncated, over the episodes without an error."""
    episodes: Sequence[EvaluatedEpisode] = field(default=(), repr=False)
    """Every episode, in the order of tasks."""

    def scalars(self) -> dict[str, float]:
        """Return the finite values as metrics for the ledger and the log."""
        metrics = {
            "reward": self.reward,
            "low": self.low,
            "high": self.high,
            "tasks": float(self.num_tasks),
            "samples": float(self.samples_per_task),
            "failed": float(self.failed_episodes),
            "seconds": self.seconds,
        }
        metrics |= {f"pass@{k}": value for k, value in self.pass_at_k.items()}
        for k, (low, high) in self.pass_at_k_intervals.items():
            metrics |= {f"pass@{k}/low": low, f"pass@{k}/high": high}
        metrics |= {**self.completions, **self.environment_means}
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


async def evaluate(
    engine: Engine | ChatEndpoint,
    renderer: Renderer | None,
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
    """Run the first `num_tasks` held-out tasks, `samples_per_task` times each.

    An engine needs the renderer of its model; a `ChatEndpoint` renders messages itself and returns text only.
    `progress` is called with the number of finished episodes and the total. `name` is the environment's name in this
    run if it differs from its own. If every episode fails, raise an error that quotes the first failure.
    """
    label = name or environment.name
    if samples_per_task > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"samples_per_task = {samples_per_task} has no effect: with sampling.temperature = 0 all"
            " completions of a task are equal; set it to 1"
        )
    tasks = list(itertools.islice(environment.tasks("eval"), num_tasks))
    if not tasks:
        raise ConfigError(f'environment "{label}" has no tasks for evaluation: its tasks("eval") is empty')
    start = time.monotonic()
    slots = asyncio.Semaphore(max_in_flight)
    finished = 0

    async def play(task: Task, index: int) -> EvaluatedEpisode:
        nonlocal finished
        own = sampling.model_copy(update={"seed": derive_seed(seed, "eval", task.id, index)})
        async with slots:
            client = _make_client(engine, renderer, own, limits, f"eval/{task.id}")
            rollout = await run_episode(environment, task, client, limits)
        finished += 1
        if progress is not None:
            progress(finished, len(tasks) * samples_per_task)
        return EvaluatedEpisode(rollout, index, client.last_exchange, reference_answer(environment, task))

    async def play_group(task: Task) -> list[EvaluatedEpisode]:
        group = await gather_or_cancel([play(task, index) for index in range(samples_per_task)])
        rollouts = [episode.rollout for episode in group]
        if not awaits_group(rollouts):
            return group
        scored = await score_group(environment, task, rollouts, limits.timeout)
        return [replace(episode, rollout=rollout) for episode, rollout in zip(group, scored, strict=True)]

    # not a TaskGroup, which would wrap the error of an environment that stops the run
    groups = await gather_or_cancel([play_group(task) for task in tasks])
    episodes = [episode for group in groups for episode in group]
    return summarize_episodes(label, episodes, samples_per_task, time.monotonic() - start)


def _make_client(
    engine: Engine | ChatEndpoint, renderer: Renderer | None, sampling: Sampling, limits: EpisodeLimits, group: str
) -> PolicyClient:
    if isinstance(engine, ChatEndpoint):
        return TextPolicyClient(engine, sampling, limits, group=group)
    if renderer is None:
        raise ValueError("an engine that takes token ids needs a renderer")
    return PolicyClient(engine, renderer, sampling, limits, group=group, evaluation=True)


def reference_answer(environment: Environment, task: Task) -> str | None:
    """Return the answer that the environment's `reference_answer(task)` gives, or the task's `answer`, if any."""
    method = getattr(environment, "reference_answer", None)
    answer = method(task) if callable(method) else task.data.get("answer")
    return None if answer is None else str(answer)


def summarize_episodes(
    environment: str, episodes: Sequence[EvaluatedEpisode], samples: int, seconds: float
) -> EvaluationResult:
    """Return the result from the episodes of all tasks, `samples` per task."""
    everything = [episode.rollout for episode in episodes]
    by_task = [episodes[first : first + samples] for first in range(0, len(episodes), samples)]
    succeeded = [rollout for rollout in everything if rollout.error is None]
    errors = [f"{rollout.task_id}: {rollout.error}" for rollout in everything if rollout.error is not None]
    if len(errors) == len(everything):
        raise KeelError(f'evaluation of "{environment}": all {len(errors)} episodes failed; the first, {errors[0]}')
    mean = mean_reward_interval([[episode.reward for episode in task] for task in by_task])
    passed = [sum(episode.passed for episode in task) for task in by_task]
    passes: dict[int, Estimate] = {k: pass_at_k_interval(k, passed, samples) for k in pass_k_values(samples)}
    return EvaluationResult(
        environment=environment,
        reward=mean.mean,
        low=mean.low,
        high=mean.high,
        num_tasks=len(by_task),
        samples_per_task=samples,
        pass_at_k={k: estimate.mean for k, estimate in passes.items()},
        failed_episodes=len(errors),
        seconds=seconds,
        pass_at_k_intervals={k: (estimate.low, estimate.high) for k, estimate in passes.items()},
        first_error=errors[0] if errors else "",
        environment_means=environment_means(succeeded),
        completions=completion_metrics(succeeded),
        episodes=episodes,
    )
