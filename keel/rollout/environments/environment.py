"""The environment protocol, and `run_episode`, which turns one episode into a `Rollout`.

An environment has tasks and an `async` episode that talks to the policy through a `PolicyClient` and returns an
`EpisodeResult`. Failures inside an episode are data: `run_episode` always returns a `Rollout`, with the kind of its
error; only cancellation of the run itself and a `FatalEnvironmentError` propagate. A synchronous computation cannot be
interrupted: an environment that computes for long should do so in a thread.
"""

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from keel.config.rollout import EpisodeLimits
from keel.errors import FatalEnvironmentError
from keel.inference.protocol import EngineError
from keel.rollout.policy_client import EpisodeLimitReached, PolicyClient, PromptTooLong
from keel.rollout.rollout import ErrorKind, Rollout
from keel.rollout.trajectory import TrajectorySamples

Split = Literal["train", "eval"]
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of an environment."""

    id: str
    """Unique within the environment and the same in every run."""
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The reward of one episode, and what to record with it."""

    reward: float | None
    """None if the reward depends on the whole group, which is scored when it is complete; see `group_rewards`."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward: recorded per rollout, and averaged as `reward_components/ENVIRONMENT/NAME`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other values: recorded per rollout, and averaged as `environment_metrics/ENVIRONMENT/NAME`."""
    group_inputs: Mapping[str, Any] | None = None
    """What `score_group` of the environment needs of this episode, as JSON. Required if `reward` is None."""


@runtime_checkable
class Environment(Protocol):
    """A set of tasks and the episode that plays one. Many `episode` calls may run concurrently on one object."""

    name: str

    def tasks(self, split: Split) -> Iterable[Task]:
        """Return the tasks of a split, in the same order each time; no task of "eval" may be in "train"."""

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        """Play one task."""


async def close_environments(environments: Iterable[Environment]) -> None:
    """Release what environments hold, such as worker processes. An environment may define `async def close()`."""
    for environment in environments:
        close = getattr(environment, "close", None)
        if close is not None and inspect.iscoroutinefunction(close):
            await close()


async def run_episode(
    environment: Environment, task: Task, client: PolicyClient, limits: EpisodeLimits | None = None, *, attempt: int = 0
) -> Rollout:
    """Play one episode and return its rollout, also when it fails. `limits` default to the client's."""
    limits = limits or client.limits
    start = time.monotonic()
    result: EpisodeResult | None = None
    error: tuple[ErrorKind, str] | None = None
    scope = asyncio.timeout(limits.timeout)
    try:
        async with scope:
            result = validate_result(await environment.episode(task, client))
    except asyncio.CancelledError as cancelled:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        # the episode was not cancelled from outside: a task inside it cancelled itself
        error = "exception", format_exception(cancelled)
    except FatalEnvironmentError:
        raise
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - every failure of an environment is data
        error = _classify_error(raised, timed_out=scope.expired(), seconds=limits.timeout)
    if error is None and scope.expired():
        # the environment suppressed the cancellation and returned late
        error = "timeout", f"limits.timeout = {limits.timeout:g} ran out"
    if error is None and client.engine_error is not None:
        # the environment swallowed the error: its reward is for a completion that never arrived
        error = "engine", _truncate_message(str(client.engine_error))
    built = client.trajectory.build_samples(limits)
    error = error or _find_missing_tokens(client, built, limits)
    return Rollout(
        environment=environment.name,
        task_id=task.id,
        group=client.group,
        attempt=attempt,
        samples=built.samples,
        reward=result.reward if result else None,
        reward_components=dict(result.reward_components) if result else {},
        metrics=dict(result.metrics) if result else {},
        group_inputs=result.group_inputs if result else None,
        counts=built.counts,
        error=error[1] if error else None,
        error_kind=error[0] if error else None,
        turns=len(client.trajectory.turns),
        seconds=time.monotonic() - start,
        ended_at=time.time(),
    )


def _find_missing_tokens(
    client: PolicyClient, built: TrajectorySamples, limits: EpisodeLimits
) -> tuple[ErrorKind, str] | None:
    """Return the error of an episode that sampled nothing, or nothing that can train although its tokens are known."""
    if not client.trajectory.turns or (client.records_tokens and not built.counts["sampled_tokens"]):
        return "empty", "nothing was sampled"
    if client.records_tokens and not built.samples:
        return "over_length", f"every sample is longer than limits.max_sequence_tokens = {limits.max_sequence_tokens}"
    return None


def validate_result(result: Any) -> EpisodeResult:
    """Return the result with plain floats; raise if it is not a result or a value is not finite."""
    if isinstance(result, int | float):
        result = EpisodeResult(result)
    if not isinstance(result, EpisodeResult):
        raise TypeError(f"an episode returns an EpisodeResult or a number, not {type(result).__name__}")
    if result.reward is None and result.group_inputs is None:
        raise TypeError("an episode without a reward needs group_inputs, by which its group is scored")
    values = {"reward": result.reward or 0.0, **result.reward_components, **result.metrics}
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} = {value} is not finite")
    components, metrics = (
        {str(name): float(value) for name, value in part.items()} for part in (result.reward_components, result.metrics)
    )
    return EpisodeResult(
        None if result.reward is None else float(result.reward), components, metrics, result.group_inputs
    )


def _classify_error(error: BaseException, *, timed_out: bool, seconds: float) -> tuple[ErrorKind, str]:
    causes = list(_flatten_exception_group(error))
    if timed_out:
        return "timeout", f"limits.timeout = {seconds:g} ran out"
    for cause in causes:
        if isinstance(cause, EngineError):
            return "engine", _truncate_message(str(cause))
    for cause in causes:
        if isinstance(cause, EpisodeLimitReached):
            kind: ErrorKind = "prompt_too_long" if isinstance(cause, PromptTooLong) else "over_length"
            return kind, _truncate_message(str(cause))
    return "exception", format_exception(causes[0])


def _flatten_exception_group(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, or every member of an exception group: a TaskGroup wraps what its tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _flatten_exception_group(inner)
    else:
        yield error


def format_exception(error: BaseException) -> str:
    """Return the type, message and source location of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return _truncate_message(f"{type(error).__name__}: {error}") + location


def _truncate_message(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 3] + "..."


__all__ = ["Environment", "EpisodeResult", "Split", "Task", "run_episode"]
