"""Scoring of completions: several weighted rewards.

A reward of scope "completion" is computed as soon as a completion is there; one of scope "group" when the whole group
is, in one call. The scorer watches the rewards: one that fails too often stops the run with its first traceback, and
one that gave the same value to every completion so far is reported, because that is how a broken verifier looks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.common.tasks import gather_or_cancel
from keel.config.dataset import RewardScope, RewardSettings, RewardTotal
from keel.errors import FatalEnvironmentError
from keel.rollout.environments.environment import EpisodeResult
from keel.rollout.environments.rewards.reward_sources import make_sources
from keel.rollout.environments.rewards.workers import RewardError, RewardScore

MIN_CALLS = 20
"""Calls of a function before its failures can stop the run."""
CONSTANT_CALLS = 128
"""Completions after which a reward that never varied is reported."""

logger = logging.getLogger("keel")


@dataclass
class _Record:
    """What one reward has done so far."""

    calls: int = 0
    failures: int = 0
    first_failure: RewardError | None = None
    last_failure: RewardError | None = None
    values: set[float] = field(default_factory=set)
    """Up to two different values."""
    scored: int = 0


class RewardScorer:
    """Computes the reward of a completion as the weighted sum or mean of rewards."""

    def __init__(self, rewards: Sequence[RewardSettings], total: RewardTotal, max_failure_fraction: float) -> None:
        self._rewards, self._total, self._max_failure_fraction = list(rewards), total, max_failure_fraction
        self._labels = _labels(rewards)
        self._sources = make_sources(rewards)
        self.timeouts = [source.timeout for source in self._sources]
        """Seconds that a call of each reward may take."""
        self._records = [_Record() for _ in rewards]

    @property
    def needs_group(self) -> bool:
        """Whether a reward is computed when the whole group is there."""
        return any(source.scope == "group" for source in self._sources)

    async def score(self, arguments: Mapping[str, Any]) -> EpisodeResult:
        """Return the reward of a single completion and its components; raise RewardError if a reward fails."""
        (result,) = await self.score_group([arguments], [await self.score_completion(arguments)])
        if isinstance(result, RewardError):
            raise result
        return result

    async def score_completion(self, arguments: Mapping[str, Any]) -> EpisodeResult:
        """Compute the rewards of scope "completion"; the result has no total if others need the group."""
        (result,) = await self._add_scores([arguments], [EpisodeResult(None)], "completion")
        return result if self.needs_group else self._add_total(result)

    async def score_group(
        self, items: Sequence[Mapping[str, Any]], results: Sequence[EpisodeResult]
    ) -> list[EpisodeResult | RewardError]:
        """Compute the rewards of scope "group" for all completions of a group, and the totals.

        `results` are those of `score_completion`, or of an earlier `score_group`, whose rewards are computed again.
        """
        final: list[EpisodeResult | RewardError] = []
        for result in await self._add_scores(items, results, "group"):
            try:
                final.append(self._add_total(result))
            except RewardError as error:
                final.append(error)
        return final

    async def close(self) -> None:
        """Stop the workers."""
        for source in self._sources:
            await source.close()

    async def _add_scores(
        self, items: Sequence[Mapping[str, Any]], results: Sequence[EpisodeResult], scope: RewardScope
    ) -> list[EpisodeResult]:
        """Return the results with the components and metrics of the rewards of a scope."""
        numbers = [number for number, source in enumerate(self._sources) if source.scope == scope]
        columns = await gather_or_cancel([self._call(number, items) for number in numbers])
        scored = []
        for index, result in enumerate(results):
            components, metrics = dict(result.reward_components), dict(result.metrics)
            for number, scores in zip(numbers, columns, strict=True):
                label, score = self._labels[number], scores[index]
                components.pop(label, None)
                if score.value is not None:
                    components[label] = score.value
                metrics |= {f"{label}/{name}": value for name, value in score.metrics.items()}
            scored.append(EpisodeResult(None, components, metrics, result.group_inputs))
        return scored

    def _add_total(self, result: EpisodeResult) -> EpisodeResult:
        """Return the result with the weighted sum or mean of its components."""
        scored = [
            (settings.weight, result.reward_components[label])
            for label, settings in zip(self._labels, self._rewards, strict=True)
            if label in result.reward_components
        ]
        if not scored:
            last = next((record.last_failure for record in self._records if record.last_failure is not None), None)
            reason = "" if last is None else f"; the last failure: {last}"
            raise RewardError("exception", f"every reward function abstained: {', '.join(self._labels)}{reason}")
        total = sum(weight * value for weight, value in scored)
        if self._total == "mean":
            total /= sum(abs(weight) for weight, _ in scored) or 1.0
        return EpisodeResult(total, result.reward_components, result.metrics, result.group_inputs)

    async def _call(self, number: int, items: Sequence[Mapping[str, Any]]) -> list[RewardScore]:
        record, apply = self._records[number], self._rewards[number].apply
        record.calls += 1
        try:
            scores = await self._sources[number].score(items)
        except RewardError as error:
            self._count_failure(number, error)
            raise
        if failure := next((score.failure for score in scores if score.failure is not None), None):
            self._count_failure(number, failure)
        scores = [score if score.value is None else score._replace(value=apply(score.value)) for score in scores]
        for score in scores:
            self._note_value(number, score.value)
        return scores

    def _note_value(self, number: int, value: float | None) -> None:
        """Report a reward that never varied."""
        record = self._records[number]
        if value is None:
            return
        record.scored += 1
        if len(record.values) >= 2:
            return
        record.values.add(value)
        if record.scored == CONSTANT_CALLS and len(record.values) == 1:
            logger.warning(
                "reward %s gave %g to each of the first %d completions, so nothing can be learned; try it on"
                " completions whose reward you know",
                self._labels[number],
                value,
                CONSTANT_CALLS,
            )

    def _count_failure(self, number: int, error: RewardError) -> None:
        """Count a failed call; raise if the reward failed too often."""
        record = self._records[number]
        record.failures += 1
        record.first_failure, record.last_failure = record.first_failure or error, error
        if record.calls < MIN_CALLS or record.failures <= self._max_failure_fraction * record.calls:
            return
        raise FatalEnvironmentError(
            f"reward {self._labels[number]} failed in {record.failures} of {record.calls} calls, more than"
            f" max_reward_failure_fraction = {self._max_failure_fraction:g}; the first failure:"
            f" {record.first_failure}\n{record.first_failure.traceback}".rstrip()
        )


def _labels(rewards: Sequence[RewardSettings]) -> list[str]:
    """Return the name of each component: the function's name, numbered if it is repeated."""
    names = [settings.name.rpartition(":")[2] for settings in rewards]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
