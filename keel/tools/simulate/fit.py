"""From when rollouts began and ended to what a decode step costs: least squares with few unknowns, none negative.

A rollout that samples n tokens beside c others, on an engine that computes beside its trainer for a share s of that
time, is taken to last outside + n (base + each c) (1 + s (contention - 1)) seconds. What waited for a place in the
engine's batch is taken to have begun when a place was free, first come, first served.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keel.errors import KeelError

TRAINER_SLOWDOWNS = np.linspace(1.0, 4.0, 31)
"""What is tried: an engine beside a trainer is up to so many times slower."""
MIN_STEP_SECONDS = 1e-7
"""Seconds of a decode step that no engine is below."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RolloutTimings:
    """What was under way, in Unix time, and what it sampled."""

    started_at: Array
    ended_at: Array
    tokens: Array
    training_spans: Array
    """Begin and end of each span in which the trainer computed, one a row."""
    capacity: int
    """Of all engines together: who is beyond them waits."""


class DecodeCosts(NamedTuple):
    """What a rollout's time is made of."""

    environment_seconds: float
    base_seconds: float
    seconds_per_request: float
    """For each request beside it on its engine, itself included."""
    trainer_slowdown: float


def fit_decode_costs(rollouts: RolloutTimings, engines: int) -> DecodeCosts:
    """The costs that fit best."""
    sampled = rollouts.tokens > 0
    if sampled.sum() < 8:
        raise KeelError(f"only {int(sampled.sum())} rollouts of the run sampled anything, too few to measure by")
    start = admission_times(rollouts)
    seconds, tokens = (rollouts.ended_at - start)[sampled], rollouts.tokens[sampled]
    beside = (mean_concurrency(start, rollouts.ended_at) / engines)[sampled]
    shared = overlap_share(start, rollouts.ended_at, rollouts.training_spans)[sampled]
    best: tuple[float, DecodeCosts] | None = None
    for contention in TRAINER_SLOWDOWNS:
        slow = 1 + shared * (contention - 1)
        terms = np.stack([np.ones_like(tokens), tokens * slow, tokens * beside * slow], axis=1)
        found, error = nonnegative_least_squares(terms, seconds)
        if best is None or error < best[0] * (1 - 1e-6):
            outside, base, each = (float(one) for one in found)
            best = error, DecodeCosts(outside, max(base, MIN_STEP_SECONDS), each, float(contention))
    assert best is not None
    return best[1]


def admission_times(rollouts: RolloutTimings) -> Array:
    """When each was given a place: at once, or when one of those before it had ended."""
    start = rollouts.started_at.copy()
    busy: list[float] = []
    for number in np.argsort(rollouts.started_at, kind="stable"):
        while busy and busy[0] <= start[number]:
            heapq.heappop(busy)
        if len(busy) >= rollouts.capacity:
            start[number] = min(max(heapq.heappop(busy), start[number]), rollouts.ended_at[number])
        heapq.heappush(busy, float(rollouts.ended_at[number]))
    return start


def mean_concurrency(started_at: Array, ended_at: Array) -> Array:
    """How many were under way in the mean over the time of each, itself included."""
    times = np.unique(np.concatenate([started_at, ended_at]))
    change = np.zeros(len(times))
    np.add.at(change, np.searchsorted(times, started_at), 1.0)
    np.add.at(change, np.searchsorted(times, ended_at), -1.0)
    count = np.cumsum(change)
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    inside = area[np.searchsorted(times, ended_at)] - area[np.searchsorted(times, started_at)]
    lasted = ended_at - started_at
    return np.where(lasted > 0, inside / np.where(lasted > 0, lasted, 1.0), 1.0)


def overlap_share(started_at: Array, ended_at: Array, spans: Array) -> Array:
    """The share of each rollout's time that lies in one of the spans, which do not overlap each other."""
    common = np.zeros_like(started_at)
    for first, last in spans:
        common += np.clip(np.minimum(ended_at, last) - np.maximum(started_at, first), 0.0, None)
    lasted = ended_at - started_at
    return np.where(lasted > 0, common / np.where(lasted > 0, lasted, 1.0), 0.0)


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The constant and the slope that fit best, none of them negative."""
    terms = np.stack([np.ones(len(x)), np.asarray(x, float)], axis=1)
    (fixed, slope), _ = nonnegative_least_squares(terms, np.asarray(y, float))
    return float(fixed), float(slope)


def nonnegative_least_squares(terms: Array, targets: Array) -> tuple[Array, float]:
    """Coefficients of at least 0, and the sum of squares that they leave: the best of all sets of terms, which are
    few."""
    count = terms.shape[1]
    best, left = np.zeros(count), float((targets**2).sum())
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found, *_ = np.linalg.lstsq(terms[:, chosen], targets, rcond=None)
            error = float(((terms[:, chosen] @ found - targets) ** 2).sum())
            if (found >= 0).all() and error < left:
                best, left = np.zeros(count), error
                best[list(chosen)] = found
    return best, left
