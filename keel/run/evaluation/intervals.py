"""Means, proportions and pass@k with 95 % intervals, in closed form.

The task is the unit of variation: completions for one task resemble each other, so every interval is over tasks, and
more completions for the same tasks narrow it only as far as they really differ. Nothing is random: equal rewards give
equal intervals. Intervals for differences between two policies are left out.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

_Z = NormalDist().inv_cdf(0.975)
_QUANTILE = 0.975


class Estimate(NamedTuple):
    """A mean and its 95 % interval; the bounds are NaN if the data do not determine them."""

    mean: float
    low: float
    high: float


def wilson_interval(passed: float, count: float) -> Estimate:
    """Return the proportion of `passed` among `count` independent draws, with Wilson's score interval.

    Unlike the mean plus and minus two standard errors, it stays between 0 and 1 and is not empty when all draws agree.
    Both arguments may be fractional: see `proportion_interval`.
    """
    mean = passed / count
    squared = _Z * _Z
    centre = (mean + squared / (2 * count)) / (1 + squared / count)
    half = _Z / (1 + squared / count) * math.sqrt(mean * (1 - mean) / count + squared / (4 * count * count))
    return Estimate(mean, min(max(0.0, centre - half), mean), max(min(1.0, centre + half), mean))


def proportion_interval(values: Sequence[float], draws: int = 1) -> Estimate:
    """Return the mean of values between 0 and 1, one per task, each estimated from `draws` draws.

    Uses Wilson's interval for the number of independent draws that would vary like these values: at least one per task,
    at most all of them. With one draw per task it is Wilson's interval itself.
    """
    tasks = len(values)
    mean = math.fsum(values) / tasks
    spread = mean * (1 - mean)
    independent = float(tasks)
    if tasks > 1 and spread > 0:
        error = _variance(values, mean) / tasks
        independent = min(max(independent, spread / error if error > 0 else math.inf), float(tasks * draws))
    return wilson_interval(mean * independent, independent)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of any values, one per task, with Student's interval; a single value has no interval."""
    tasks = len(values)
    mean = math.fsum(values) / tasks
    if tasks == 1:
        return Estimate(mean, math.nan, math.nan)
    half = t_quantile(tasks - 1) * math.sqrt(_variance(values, mean) / tasks)
    return Estimate(mean, mean - half, mean + half)


def mean_reward_interval(rewards: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean reward from the rewards of each task: a proportion if all are 0 or 1, else Student's interval."""
    means = [math.fsum(task) / len(task) for task in rewards]
    if all(reward in (0, 1) for task in rewards for reward in task):
        return proportion_interval(means, min(map(len, rewards)))
    return mean_interval(means)


def pass_at_k_interval(k: int, passed: Sequence[int], draws: int) -> Estimate:
    """Return the probability that one of k completions of a task passes, averaged over tasks.

    `passed` counts the passes among the `draws` of each task. Unbiased: the fraction of all sets of k draws that
    contain a pass, not 1 - (1 - rate)^k, which is too low.
    """
    if not 1 <= k <= draws:
        raise ValueError(f"pass@{k} cannot be estimated from {draws} completions per task")
    return proportion_interval([_unbiased_pass_at_k(k, count, draws) for count in passed], draws)


def pass_k_values(draws: int) -> list[int]:
    """Return the k to report pass@k for: 1, 2, 4 and so on, and all draws."""
    return sorted({draws, *(2**power for power in range(draws.bit_length()) if 2**power <= draws)})


@lru_cache(maxsize=1024)
def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    low, high = _Z, 13.0  # the normal quantile, and just above the one for one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees_of_freedom) < _QUANTILE else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees_of_freedom: int) -> float:
    """Return P(T < t) for t > 0, by the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees_of_freedom % 2:
        total, term = 0.0, cosine
        for i in range(1, degrees_of_freedom - 1, 2):
            total += term
            term *= cosine * cosine * (i + 1) / (i + 2)
        inside = (angle + sine * total) * 2 / math.pi
    else:
        total, term = 0.0, 1.0
        for i in range(0, degrees_of_freedom, 2):
            total += term
            term *= cosine * cosine * (i + 1) / (i + 2)
        inside = sine * total
    return (1 + inside) / 2


def _unbiased_pass_at_k(k: int, passed: int, draws: int) -> float:
    """Return 1 - C(draws - passed, k) / C(draws, k), as a product because the binomials would overflow."""
    all_fail = 1.0
    for i in range(k):
        all_fail *= max(draws - passed - i, 0) / (draws - i)
    return 1 - all_fail


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
