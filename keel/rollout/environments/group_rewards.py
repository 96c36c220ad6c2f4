"""Rewards that depend on the whole group, such as a judge that compares completions.

The episode of an environment with such a reward returns an `EpisodeResult` without a reward and with `group_inputs`.
When all rollouts of the group have ended, those without an error are scored together by one call of the environment's
`score_group`. Training, through the scheduler, and evaluation score through `score_group` of this module. Scoring again
is safe: it computes every reward of the group from `group_inputs`, whether it was scored before or not.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from keel.errors import FatalEnvironmentError
from keel.rollout.environments.environment import Environment, EpisodeResult, Task, format_exception, validate_result
from keel.rollout.rollout import Rollout


@runtime_checkable
class GroupEnvironment(Protocol):
    """An environment whose rewards may depend on the whole group."""

    async def score_group(self, task: Task, results: Sequence[EpisodeResult]) -> Sequence[EpisodeResult | Exception]:
        """Return each result with its final reward, or the error of its reward. The results have `group_inputs`."""


def awaits_group(rollouts: Sequence[Rollout]) -> bool:
    """Return whether some rollout has no reward until its group is scored."""
    return any(_is_open(rollout) for rollout in rollouts)


async def score_group(
    environment: Environment, task: Task, rollouts: Sequence[Rollout], timeout: float
) -> list[Rollout]:
    """Return the rollouts of a complete group with their final rewards, in their order.

    Rollouts with an error are absent from the call and returned unchanged. A rollout whose scoring fails is returned
    with an error, as if its episode had failed; only cancellation and a `FatalEnvironmentError` propagate. `timeout`
    is the limit in seconds.
    """
    scored = [
        index for index, rollout in enumerate(rollouts) if rollout.error is None and rollout.group_inputs is not None
    ]
    results = [_to_result(rollouts[index]) for index in scored]
    outcomes: Sequence[EpisodeResult | Exception | Rollout]
    try:
        if not isinstance(environment, GroupEnvironment):
            raise TypeError(f"{type(environment).__name__} returned group_inputs, but has no method score_group")
        async with asyncio.timeout(timeout) as scope:
            outcomes = await environment.score_group(task, results)
        if len(outcomes) != len(results):
            raise ValueError(f"score_group returned {len(outcomes)} results for {len(results)} rollouts")
    except FatalEnvironmentError:
        raise
    except Exception as error:  # noqa: BLE001 - every failure of an environment is data
        if isinstance(error, TimeoutError) and scope.expired():
            return _fail_all(rollouts, scored, "timeout", f"limits.timeout = {timeout:g} ran out in score_group")
        return _fail_all(rollouts, scored, "exception", format_exception(error))
    final = list(rollouts)
    for index, outcome in zip(scored, outcomes, strict=True):
        final[index] = _finish(rollouts[index], outcome)
    return final


def _is_open(rollout: Rollout) -> bool:
    return rollout.error is None and rollout.reward is None and rollout.group_inputs is not None


def _to_result(rollout: Rollout) -> EpisodeResult:
    return EpisodeResult(rollout.reward, rollout.reward_components, rollout.metrics, rollout.group_inputs)


def _finish(rollout: Rollout, outcome: EpisodeResult | Exception) -> Rollout:
    """Return the rollout with its final reward, or with the error of its reward."""
    try:
        if isinstance(outcome, Exception):
            raise outcome
        result = validate_result(outcome)
        if result.reward is None:
            raise TypeError("score_group returned a result without a reward")
    except Exception as error:  # noqa: BLE001 - the failure of one reward is data
        return replace(rollout, reward=None, error=format_exception(error), error_kind="exception")
    return replace(rollout, reward=result.reward, reward_components=result.reward_components, metrics=result.metrics)


def _fail_all(rollouts: Sequence[Rollout], failed: Sequence[int], kind: str, error: str) -> list[Rollout]:
    final = list(rollouts)
    for index in failed:
        final[index] = replace(final[index], reward=None, error=error, error_kind=kind)  # type: ignore[arg-type]
    return final
