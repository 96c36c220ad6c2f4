"""Sums for one objective and for pairs of objectives, which add up over steps.

Means, shares and cosines are computed from the sums when they are shown; no mean of means is taken.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class ObjectiveCounts:
    """One objective over one step, or over several."""

    steps: int = 0
    tokens: int = 0
    """Trainable tokens: kept + dropped + invalid_logprobs + other_role."""
    kept: int = 0
    dropped: int = 0
    """Tokens dropped by a gate."""
    invalid_logprobs: int = 0
    """Tokens without a valid sampler log-prob."""
    other_role: int = 0
    clipped: float = 0.0
    """Kept tokens whose gradient is clipped to zero."""
    sequences: int = 0
    sequences_dropped: int = 0
    """Sequences without a token that trains."""
    sequences_hit: int = 0
    """Sequences with a dropped token, including those in `sequences_dropped`."""
    loss: float = 0.0
    """Sum over steps, like `terms` and `gradient_norm`."""
    gradient_norm: float = 0.0
    gradient_sum: float = 0.0
    """Sum of absolute values over tokens."""
    gradient_square: float = 0.0
    ratio_sum: float = 0.0
    """Sum over kept tokens."""
    ratio_square: float = 0.0
    advantage_sum: float = 0.0
    """Sum of absolute values over all tokens that may train."""
    advantage_dropped: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    gates: Counter[str] = field(default_factory=Counter)
    """Dropped tokens by reason."""
    gate_sequences: Counter[str] = field(default_factory=Counter)
    """Sequences with a token dropped for each reason."""
    dropped_by: dict[str, Counter[str]] = field(default_factory=dict)
    """Dropped tokens by position, staleness, advantage and text."""
    dropped_positive: Counter[str] = field(default_factory=Counter)
    """Dropped tokens with a positive advantage, by text."""

    def add(self, other: "ObjectiveCounts") -> None:
        """Add the counts of another step, or of several."""
        for item in fields(self):
            value, increment = getattr(self, item.name), getattr(other, item.name)
            if isinstance(value, dict):
                _merge(value, increment)
            else:
                setattr(self, item.name, value + increment)

    @property
    def dropped_share(self) -> float:
        return _fraction(self.dropped, self.tokens)

    @property
    def dropped_advantage(self) -> float:
        """Share of the sum of absolute advantages on dropped tokens."""
        return _fraction(self.advantage_dropped, self.advantage_sum)

    @property
    def effective_sample_size(self) -> float:
        """(sum r)^2 / (N * sum r^2), a share of all N tokens; r = 0 for tokens that do not train."""
        return _fraction(self.ratio_sum**2, self.tokens * self.ratio_square)

    @property
    def effective_gradient_tokens(self) -> float:
        """(sum |g|)^2 / (N * sum g^2), the effective share of tokens behind the gradient."""
        return _fraction(self.gradient_sum**2, self.tokens * self.gradient_square)


def _merge(target: dict[str, Any], increment: dict[str, Any]) -> None:
    for name, value in increment.items():
        if isinstance(value, Counter):
            target.setdefault(name, Counter()).update(value)
        else:
            target[name] = target.get(name, 0) + value


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@dataclass
class ObjectivePairs:
    """Every pair of objectives over one step, or over several."""

    gram: Array
    """Inner products of the gradients."""
    both_dropped: Array
    """Number of tokens that both dropped."""

    @classmethod
    def zeros(cls, size: int) -> "ObjectivePairs":
        return cls(np.zeros((size, size)), np.zeros((size, size), np.int64))

    def add(self, other: "ObjectivePairs") -> None:
        self.gram += other.gram
        self.both_dropped += other.both_dropped

    @property
    def cosine(self) -> Array:
        """Cosine of the gradients, concatenated over steps; NaN if one of them is zero."""
        return cosine_of(self.gram)

    @property
    def overlap(self) -> Array:
        """Of the tokens that the row's objective drops, the share that the column's also drops."""
        dropped = self.both_dropped.diagonal()[:, None]
        return _divide_or_nan(self.both_dropped, dropped)

    @property
    def jaccard(self) -> Array:
        """Of the tokens that either drops, the share that both drop."""
        dropped = self.both_dropped.diagonal()
        either = dropped[:, None] + dropped[None, :] - self.both_dropped
        return _divide_or_nan(self.both_dropped, either)


def cosine_of(gram: Array) -> Array:
    """Return the cosines of a matrix of inner products."""
    norm = np.sqrt(gram.diagonal())
    return _divide_or_nan(gram, norm[:, None] * norm[None, :]).clip(-1, 1)


def _divide_or_nan(numerator: Array, denominator: Array) -> Array:
    """Divide, with NaN where the denominator is not positive."""
    quotient: Array = np.full(numerator.shape, np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator > 0)
    return quotient
