"""Fit the cost of a decode step to the start and end times of rollouts, by non-negative least squares.

The model: a rollout that samples n tokens while c requests run on its engine, and while the trainer computes for a
share s of that time, lasts environment + n (base + per_request c) (1 + s (trainer_slowdown - 1)) seconds. A rollout
that had to wait for a slot in the engine's batch is assumed to start when a slot became free, in order of arrival.
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
"""Candidate values: how many times slower an engine is while a trainer computes on the same machine."""
MIN_STEP_SECONDS = 1e-7
"""Lower bound on the seconds of a decode step."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RolloutTimings:
    """Start and end of each rollout in Unix time, and the tokens it sampled."""

    started_at: Array
    ended_at: Array
    tokens: Array
    training_spans: Array
    """Start and end of each span in which the trainer computed, one per row."""
    capacity: int
    """Requests that all engines together decode concurrently; further requests wait."""


class DecodeCosts(NamedTuple):
    """The components of a rollout's duration."""

    environment_seconds: float
    base_seconds: float
    seconds_per_request: float
    """Seconds added to a decode step by each request on the engine, including the rollout's own."""
    trainer_slowdown: float


def fit_decode_costs(rollouts: RolloutTimings, engines: int) -> DecodeCosts:
    """Return the costs with the least squared error."""
    sampled = rollouts.tokens > 0
    if sampled.sum() < 8:
        raise KeelError(f"only {int(sampled.sum())} rollouts of the run sampled any tokens; at least 8 are needed")
    start = admission_times(rollouts)
    seconds, tokens = (rollouts.ended_at - start)[sampled], rollouts.tokens[sampled]
    concurrency = (mean_concurrency(start, rollouts.ended_at) / engines)[sampled]
    overlap = overlap_share(start, rollouts.ended_at, rollouts.training_spans)[sampled]
    best: tuple[float, DecodeCosts] | None = None
    for trainer_slowdown in TRAINER_SLOWDOWNS:
        slowdown = 1 + overlap * (trainer_slowdown - 1)
        terms = np.stack([np.ones_like(tokens), tokens * slowdown, tokens * concurrency * slowdown], axis=1)
        coefficients, error = nonnegative_least_squares(terms, seconds)
        if best is None or error < best[0] * (1 - 1e-6):
            environment, base, per_request = (float(value) for value in coefficients)
            best = error, DecodeCosts(environment, max(base, MIN_STEP_SECONDS), per_request, float(trainer_slowdown))
    assert best is not None
    return best[1]


def admission_times(rollouts: RolloutTimings) -> Array:
    """Return when each rollout got a slot: immediately, or when an earlier rollout ended."""
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
    """Return the average number of rollouts in flight during each rollout, itself included."""
    times = np.unique(np.concatenate([started_at, ended_at]))
    change = np.zeros(len(times))
    np.add.at(change, np.searchsorted(times, started_at), 1.0)
    np.add.at(change, np.searchsorted(times, ended_at), -1.0)
    count = np.cumsum(change)
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    inside = area[np.searchsorted(times, ended_at)] - area[np.searchsorted(times, started_at)]
    duration = ended_at - started_at
    return np.where(duration > 0, inside / np.where(duration > 0, duration, 1.0), 1.0)


def overlap_share(started_at: Array, ended_at: Array, spans: Array) -> Array:
    """Return the share of each rollout's duration that lies in one of the spans, which must not overlap each other."""
    common = np.zeros_like(started_at)
    for first, last in spans:
        common += np.clip(np.minimum(ended_at, last) - np.maximum(started_at, first), 0.0, None)
    duration = ended_at - started_at
    return np.where(duration > 0, common / np.where(duration > 0, duration, 1.0), 0.0)


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the best-fitting constant and slope, both non-negative."""
    terms = np.stack([np.ones(len(x)), np.asarray(x, float)], axis=1)
    (fixed, slope), _ = nonnegative_least_squares(terms, np.asarray(y, float))
    return float(fixed), float(slope)


def nonnegative_least_squares(terms: Array, targets: Array) -> tuple[Array, float]:
    """Return non-negative coefficients and their squared error, by trying every subset of the (few) terms."""
    count = terms.shape[1]
    best, best_error = np.zeros(count), float((targets**2).sum())
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            coefficients, *_ = np.linalg.lstsq(terms[:, chosen], targets, rcond=None)
            error = float(((terms[:, chosen] @ coefficients - targets) ** 2).sum())
            if (coefficients >= 0).all() and error < best_error:
                best, best_error = np.zeros(count), error
                best[list(chosen)] = coefficients
    return best, best_error
