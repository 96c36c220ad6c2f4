"""What an environment is, how one is found by name, and how one episode is run.

An environment has tasks and an `async` episode that talks to the policy through a `PolicyClient` and returns an
`Outcome`. Whatever goes wrong inside an episode is data: `run_episode` always returns a `Rollout`, with the kind of its
error, and only a cancellation of the run itself passes through. A synchronous computation cannot be interrupted: an
environment that computes for long should do so in a thread.
"""

import asyncio
import importlib
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import ValidationError

from keel.common.settings import suggest_name, to_config_error
from keel.config.rollout import EnvironmentSettings, EpisodeLimits
from keel.errors import ConfigError
from keel.inference.protocol import EngineError
from keel.rollout.policy_client import EpisodeLimitReached, PolicyClient
from keel.rollout.rollout import ErrorKind, Rollout

Split = Literal["train", "eval"]
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do."""

    id: str
    """The same in every run; unique within its environment."""
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What an episode came to."""

    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the record."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """Tasks and how they are played. `episode` may run many times at once on one object."""

    name: str

    def tasks(self, split: Split) -> Iterable[Task]:
        """The tasks of a split, in the same order each time; those of "eval" are never in "train"."""

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        """Play one task."""


async def run_episode(
    environment: Environment, task: Task, client: PolicyClient, limits: EpisodeLimits | None = None, *, attempt: int = 0
) -> Rollout:
    """One episode, whatever happens in it. `limits`: by default the client's."""
    limits = limits or client.limits
    began = time.monotonic()
    outcome: EpisodeResult | None = None
    error: tuple[ErrorKind, str] | None = None
    scope = asyncio.timeout(limits.timeout)
    try:
        async with scope:
            outcome = _validate_result(await environment.episode(task, client))
    except asyncio.CancelledError as cancelled:
        running = asyncio.current_task()
        if running is None or running.cancelling():
            raise
        # nobody cancelled the episode: something inside it cancelled itself
        error = "exception", _format_exception(cancelled)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  whatever an environment raises is data
        error = _classify_error(raised, timed_out=scope.expired(), seconds=limits.timeout)
    if error is None and scope.expired():
        # the environment went on after it was told to stop, and returned late
        error = "timeout", f"limits.timeout = {limits.timeout:g} ran out"
    if error is None and client.engine_error is not None:
        # the environment swallowed it: its reward is for an answer that never came
        error = "engine", _truncate_message(str(client.engine_error))
    made = client.trajectory.build_samples(limits)
    if error is None and not made.counts["sampled_tokens"]:
        error = "empty", "nothing was sampled"
    if error is None and not made.samples:
        error = "over_length", f"every sample is longer than limits.max_sequence_tokens = {limits.max_sequence_tokens}"
    return Rollout(
        environment=environment.name,
        task_id=task.id,
        group=client.group,
        attempt=attempt,
        samples=made.samples,
        reward=outcome.reward if outcome else None,
        reward_components=dict(outcome.reward_components) if outcome else {},
        metrics=dict(outcome.metrics) if outcome else {},
        counts=made.counts,
        error=error[1] if error else None,
        error_kind=error[0] if error else None,
        turns=len(client.trajectory.turns),
        seconds=time.monotonic() - began,
        ended_at=time.time(),
    )


def _validate_result(result: Any) -> EpisodeResult:
    """The outcome with plain finite floats."""
    if isinstance(result, int | float):
        result = EpisodeResult(result)
    if not isinstance(result, EpisodeResult):
        raise TypeError(f"an episode returns an Outcome or a number, not {type(result).__name__}")
    numbers = {"reward": result.reward, **result.reward_components, **result.metrics}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} = {value} is not finite")
    floats = [
        {name: float(value) for name, value in part.items()} for part in (result.reward_components, result.metrics)
    ]
    return EpisodeResult(float(result.reward), *floats)


def _classify_error(error: BaseException, *, timed_out: bool, seconds: float) -> tuple[ErrorKind, str]:
    causes = list(_flatten_exception_group(error))
    if timed_out:
        return "timeout", f"limits.timeout = {seconds:g} ran out"
    for cause in causes:
        if isinstance(cause, EngineError):
            return "engine", _truncate_message(str(cause))
    for cause in causes:
        if isinstance(cause, EpisodeLimitReached):
            return "over_length", _truncate_message(str(cause))
    return "exception", _format_exception(causes[0])


def _flatten_exception_group(error: BaseException) -> Iterator[BaseException]:
    """The exception, or those of a group: a task group wraps whatever its tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _flatten_exception_group(inner)
    else:
        yield error


def _format_exception(error: BaseException) -> str:
    """What was raised and where, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return _truncate_message(f"{type(error).__name__}: {error}") + where


def _truncate_message(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 3] + "..."


__all__ = ["Environment", "EpisodeResult", "Split", "Task", "load_environment", "run_episode"]
