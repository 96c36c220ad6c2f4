"""Metrics of a set of rollouts: completion length, truncation, samples, splits, and what the environments reported.

Used for the batches of a run and for evaluations, so that a metric has the same name and meaning in both.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from keel.rollout.rollout import Rollout

REWARD_COMPONENTS = "reward_components"
"""Prefix of the means of `EpisodeResult.reward_components`."""
ENVIRONMENT_METRICS = "environment_metrics"
"""Prefix of the means of `EpisodeResult.metrics`."""
_SPLIT = "split_"


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return completion length and the share of truncated rollouts; empty without rollouts."""
    if not rollouts:
        return {}
    lengths = [rollout.completion_tokens for rollout in rollouts]
    return {
        "completion_tokens": sum(lengths) / len(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }


def sample_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean number of samples per rollout, and how many samples were started for each split reason."""
    if not rollouts:
        return {}
    splits: Counter[str] = Counter()
    for rollout in rollouts:
        splits.update({name: count for name, count in rollout.counts.items() if name.startswith(_SPLIT)})
    return {
        "samples_per_rollout": sum(len(rollout.samples) for rollout in rollouts) / len(rollouts),
        **{f"split/{name.removeprefix(_SPLIT)}": float(count) for name, count in splits.items()},
    }


def environment_means(rollouts: Sequence[Rollout], environment: str | None = None) -> dict[str, float]:
    """Return the means of reward components and environment metrics, as `reward_components/ENVIRONMENT/NAME`.

    A mean is over the rollouts that reported the name. Without `environment` that part of the name is omitted.
    """
    part = "" if environment is None else f"{environment}/"
    components = mean_by_name(rollout.reward_components for rollout in rollouts)
    reported = mean_by_name(rollout.metrics for rollout in rollouts)
    return {
        **{f"{REWARD_COMPONENTS}/{part}{name}": value for name, value in components.items()},
        **{f"{ENVIRONMENT_METRICS}/{part}{name}": value for name, value in reported.items()},
    }


def mean_by_name(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the mappings that have it, in order of first appearance."""
    by_name: dict[str, list[float]] = {}
    for mapping in values:
        for name, value in mapping.items():
            by_name.setdefault(name, []).append(value)
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in by_name.items()}
