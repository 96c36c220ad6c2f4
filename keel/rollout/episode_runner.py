"""From a dispatch of the scheduler to a finished rollout.

Every episode has a seed of its own, made from the run's and its name, so that what it samples does not depend on what
else runs. With a ledger, a rollout is kept the moment it ends; after a restart the same dispatch is answered from there
instead of being sampled again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from keel.config import EpisodeLimits, RunSettings, Sampling
from keel.errors import ConfigError
from keel.inference.protocol import Engine
from keel.rollout.environments.environment import Environment, run_episode
from keel.rollout.environments.registry import load_environment
from keel.rollout.policy_client import PolicyClient, derive_seed
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout import Rollout
from keel.rollout.scheduler.groups import RolloutRequest
from keel.rollout.scheduler.task_sources import TaskSource


@dataclass(frozen=True)
class RunEnvironment:
    """An environment, and how it is played in this run."""

    environment: Environment
    sampling: Sampling
    limits: EpisodeLimits
    weight: float

    def task_source(self, name: str) -> TaskSource:
        return TaskSource(name, list(self.environment.tasks("train")), self.weight)


def build_environments(settings: RunSettings) -> dict[str, RunEnvironment]:
    """The environments of a run, by the names of their tables. What could not be trained on is refused here."""
    if not settings.environments:
        raise ConfigError("environments is empty: a run needs at least one, for example [environments.arithmetic]")
    if settings.teacher is None and settings.objective.composition.reads("teacher"):
        raise ConfigError("the objective asks a teacher and there is none: give a table [teacher] with its name")
    found = {
        name: RunEnvironment(load_environment(given), given.sampling or settings.sampling, given.limits, given.weight)
        for name, given in settings.environments.items()
    }
    for name, arena in found.items():
        own = settings.environments[name].sampling is not None
        arena.sampling.check_trainable(f"environments.{name}.sampling" if own else "sampling")
    return found


class FinishedRollouts(Protocol):
    """Durable storage of finished rollouts; the run's ledger implements it."""

    def store_finished(self, group: str, member: int, attempt: int, rollout: Rollout) -> None:
        """Store a finished rollout until its outcome is recorded."""
        ...

    def load_finished(self, group: str, member: int, attempt: int) -> Rollout | None:
        """Return the stored rollout, or None."""
        ...


class EpisodeRunner:
    """Runs one episode for each dispatch. What goes wrong in it is data; see `run_episode`."""

    def __init__(
        self,
        environments: Mapping[str, RunEnvironment],
        engine: Engine,
        renderer: Renderer,
        seed: int,
        ledger: FinishedRollouts | None,
        vocab_size: int | None = None,
    ) -> None:
        """`ledger`: where finished rollouts are kept and looked for; none: each is sampled anew."""
        self._environments, self._engine, self._renderer = environments, engine, renderer
        self._seed, self._ledger, self._vocab_size = seed, ledger, vocab_size

    async def __call__(self, request: RolloutRequest) -> Rollout:
        name = (request.group, request.member, request.attempt)
        recalled = self.load_finished(*name)
        if recalled is not None and recalled.task_id == request.task_id:
            return recalled
        arena = self._environments[request.environment]
        seed = self._seed if arena.sampling.seed is None else arena.sampling.seed
        sampling = arena.sampling.model_copy(update={"seed": derive_seed(seed, *name)})
        client = PolicyClient(
            self._engine, self._renderer, sampling, arena.limits, group=request.group, vocab_size=self._vocab_size
        )
        rollout = await run_episode(arena.environment, request.task, client, arena.limits, attempt=request.attempt)
        if self._ledger is not None and rollout.error_kind is None:
            self._ledger.store_finished(*name, rollout)
        return rollout

    def load_finished(self, group: str, member: int, attempt: int) -> Rollout | None:
        """A rollout that ended well under this name in an earlier life of the run."""
        return None if self._ledger is None else self._ledger.load_finished(group, member, attempt)
