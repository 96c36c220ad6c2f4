"""Turn rollout requests of the scheduler into finished rollouts.

Every episode has its own seed, derived from the run's seed and the name of the request, so that its samples do not
depend on other episodes in flight. With a ledger, a rollout is stored as soon as it ends, and the same request after a
restart returns the stored rollout instead of sampling again.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from keel.config import CurriculumSettings, EpisodeLimits, RunSettings, Sampling
from keel.errors import ConfigError
from keel.inference.protocol import Engine
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.environment import Environment, run_episode
from keel.rollout.environments.group_rewards import awaits_group, score_group
from keel.rollout.environments.registry import load_environment
from keel.rollout.policy_client import PolicyClient, derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout import Rollout
from keel.rollout.scheduler.groups import Group, RolloutRequest
from keel.rollout.scheduler.task_sources import TaskSource


@dataclass(frozen=True)
class RunEnvironment:
    """An environment with its settings in this run."""

    environment: Environment
    sampling: Sampling
    limits: EpisodeLimits
    weight: float
    curriculum: CurriculumSettings
    group_size: int

    def task_source(self, name: str, seed: int) -> TaskSource:
        """Return the tasks to train on, in the order that the run's seed decides."""
        tasks = self.environment.tasks("train")
        return TaskSource(
            name,
            tasks if isinstance(tasks, Sequence) else list(tasks),
            self.weight,
            curriculum=self.curriculum,
            seed=seed,
            group_size=self.group_size,
        )


def build_environments(settings: RunSettings) -> dict[str, RunEnvironment]:
    """Return the environments of a run by the names of their tables; raise for settings that cannot be trained on."""
    if settings.sft is not None:
        raise ConfigError("the table [sft] is for supervised fine-tuning: run `keel sft` instead, or remove the table")
    if not settings.environments:
        raise ConfigError("environments is empty: a run needs at least one, for example [environments.arithmetic]")
    if settings.teacher is None and settings.objective.composition.reads("teacher"):
        raise ConfigError("the objective reads a teacher and none is configured: add a table [teacher] with its name")
    environments = {
        name: RunEnvironment(
            load_environment(table),
            table.sampling or settings.sampling,
            table.limits,
            table.weight,
            table.curriculum,
            settings.group_size(table),
        )
        for name, table in settings.environments.items()
    }
    for name, environment in environments.items():
        dataset = settings.environments[name].dataset
        if dataset is not None and dataset.eval_path is None and dataset.eval_fraction == 1:
            raise ConfigError(f"environments.{name}.dataset.eval_fraction = 1 leaves no row to train on; lower it")
        has_own_sampling = settings.environments[name].sampling is not None
        environment.sampling.check_trainable(f"environments.{name}.sampling" if has_own_sampling else "sampling")
    return environments


def check_prompt_lengths(
    environments: Mapping[str, RunEnvironment], renderer: Renderer, max_context: int | None
) -> None:
    """Report prompts of data sets that are too long; raise if there are more of them than the settings allow.

    `max_context` is the number of tokens that the model supports, or None if it is not known.
    """
    for table in environments.values():
        if isinstance(table.environment, DatasetEnvironment):
            limit = min(table.limits.max_sequence_tokens, max_context or table.limits.max_sequence_tokens)
            table.environment.check_lengths(
                lambda messages: len(renderer.render(messages)), limit=limit, max_tokens=table.sampling.max_tokens
            )


class FinishedRollouts(Protocol):
    """Durable storage of finished rollouts; the run's ledger implements it."""

    def store_finished(self, group: str, member: int, attempt: int, rollout: Rollout) -> None:
        """Store a finished rollout until its outcome is recorded."""
        ...

    def load_finished(self, group: str, member: int, attempt: int) -> Rollout | None:
        """Return the stored rollout, or None."""
        ...


class EpisodeRunner:
    """Runs one episode per request. Failures are returned as rollouts with an error; see `run_episode`."""

    def __init__(
        self,
        environments: Mapping[str, RunEnvironment],
        engine: Engine,
        renderer: Renderer,
        seed: int,
        ledger: FinishedRollouts | None,
        vocab_size: int | None = None,
    ) -> None:
        """Finished rollouts are stored in and loaded from `ledger`; with None every request is sampled."""
        self._environments, self._engine, self._renderer = environments, engine, renderer
        self._seed, self._ledger, self._vocab_size = seed, ledger, vocab_size

    async def __call__(self, request: RolloutRequest) -> Rollout:
        name = (request.group, request.member, request.attempt)
        stored = self.load_finished(*name)
        if stored is not None and stored.task_id == request.task_id:
            return stored
        environment = self._environments[request.environment]
        seed = self._seed if environment.sampling.seed is None else environment.sampling.seed
        sampling = environment.sampling.model_copy(update={"seed": derive_seed(seed, *name)})
        client = PolicyClient(
            self._engine, self._renderer, sampling, environment.limits, group=request.group, vocab_size=self._vocab_size
        )
        rollout = await run_episode(
            environment.environment, request.task, client, environment.limits, attempt=request.attempt
        )
        if self._ledger is not None and rollout.error_kind is None:
            self._ledger.store_finished(*name, rollout)
        return rollout

    def score_group(self, group: Group) -> Awaitable[list[Rollout]] | None:
        """Return None if the rollouts of the group have their rewards, else an awaitable of the rollouts with them.

        Rewards are stored too, so that a group is not scored again after a restart.
        """
        return self._score_group(group) if awaits_group(group.rollouts) else None

    async def _score_group(self, group: Group) -> list[Rollout]:
        environment = self._environments[group.environment]
        rollouts = await score_group(environment.environment, group.task, group.rollouts, environment.limits.timeout)
        if self._ledger is not None:
            for member, rollout in zip((member for member in group.members if member.valid), rollouts, strict=True):
                if rollout.error_kind is None:
                    self._ledger.store_finished(group.id, member.member, member.attempt, rollout)
        return rollouts

    def load_finished(self, group: str, member: int, attempt: int) -> Rollout | None:
        """Return the rollout that succeeded under this name before a restart, or None."""
        return None if self._ledger is None else self._ledger.load_finished(group, member, attempt)
