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

CONTENTIONS = np.linspace(1.0, 4.0, 31)
"""What is tried: an engine beside a trainer is up to so many times slower."""
FASTEST = 1e-7
"""Seconds of a decode step that no engine is below."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rollouts:
    """What was under way, in Unix time, and what it sampled."""

    began: Array
    ended: Array
    tokens: Array
    computing: Array
    """Begin and end of each span in which the trainer computed, one a row."""
    places: int
    """Of all engines together: who is beyond them waits."""


class Decode(NamedTuple):
    """What a rollout's time is made of."""

    outside: float
    base: float
    each: float
    """For each request beside it on its engine, itself included."""
    contention: float


def decode_speed(rollouts: Rollouts, engines: int) -> Decode:
    """The costs that fit best."""
    sampled = rollouts.tokens > 0
    if sampled.sum() < 8:
        raise KeelError(f"only {int(sampled.sum())} rollouts of the run sampled anything, too few to measure by")
    start = admitted(rollouts)
    seconds, tokens = (rollouts.ended - start)[sampled], rollouts.tokens[sampled]
    beside = (concurrency(start, rollouts.ended) / engines)[sampled]
    shared = overlap(start, rollouts.ended, rollouts.computing)[sampled]
    best: tuple[float, Decode] | None = None
    for contention in CONTENTIONS:
        slow = 1 + shared * (contention - 1)
        terms = np.stack([np.ones_like(tokens), tokens * slow, tokens * beside * slow], axis=1)
        found, error = positive_least_squares(terms, seconds)
        if best is None or error < best[0] * (1 - 1e-6):
            outside, base, each = (float(one) for one in found)
            best = error, Decode(outside, max(base, FASTEST), each, float(contention))
    assert best is not None
    return best[1]


def admitted(rollouts: Rollouts) -> Array:
    """When each was given a place: at once, or when one of those before it had ended."""
    start = rollouts.began.copy()
    busy: list[float] = []
    for number in np.argsort(rollouts.began, kind="stable"):
        while busy and busy[0] <= start[number]:
            heapq.heappop(busy)
        if len(busy) >= rollouts.places:
            start[number] = min(max(heapq.heappop(busy), start[number]), rollouts.ended[number])
        heapq.heappush(busy, float(rollouts.ended[number]))
    return start


def concurrency(began: Array, ended: Array) -> Array:
    """How many were under way in the mean over the time of each, itself included."""
    times = np.unique(np.concatenate([began, ended]))
    change = np.zeros(len(times))
    np.add.at(change, np.searchsorted(times, began), 1.0)
    np.add.at(change, np.searchsorted(times, ended), -1.0)
    count = np.cumsum(change)
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    inside = area[np.searchsorted(times, ended)] - area[np.searchsorted(times, began)]
    lasted = ended - began
    return np.where(lasted > 0, inside / np.where(lasted > 0, lasted, 1.0), 1.0)


def overlap(began: Array, ended: Array, spans: Array) -> Array:
    """The share of each rollout's time that lies in one of the spans, which do not overlap each other."""
    common = np.zeros_like(began)
    for first, last in spans:
        common += np.clip(np.minimum(ended, last) - np.maximum(began, first), 0.0, None)
    lasted = ended - began
    return np.where(lasted > 0, common / np.where(lasted > 0, lasted, 1.0), 0.0)


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The constant and the slope that fit best, none of them negative."""
    terms = np.stack([np.ones(len(x)), np.asarray(x, float)], axis=1)
    (fixed, slope), _ = positive_least_squares(terms, np.asarray(y, float))
    return float(fixed), float(slope)


def positive_least_squares(terms: Array, wanted: Array) -> tuple[Array, float]:
    """Coefficients of at least 0, and the sum of squares that they leave: the best of all sets of terms, which are
    few."""
    count = terms.shape[1]
    best, left = np.zeros(count), float((wanted**2).sum())
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found, *_ = np.linalg.lstsq(terms[:, chosen], wanted, rcond=None)
            error = float(((terms[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < left:
                best, left = np.zeros(count), error
                best[list(chosen)] = found
    return best, left
