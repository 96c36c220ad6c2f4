"""What is counted for one objective, and for pairs of them: sums only, so that steps add up to a run.

Means, shares and cosines are formed from the sums when they are shown; no mean of means is taken.
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
    """Trainable ones: kept + dropped + unusable + other_role."""
    kept: int = 0
    dropped: int = 0
    """Refused by a gate."""
    invalid_logprobs: int = 0
    """Without a usable sampler log-prob."""
    other_role: int = 0
    clipped: float = 0.0
    """Kept tokens whose gradient a clip has stopped."""
    sequences: int = 0
    sequences_dropped: int = 0
    """Those of which no token trains."""
    sequences_hit: int = 0
    """Those with a token that a gate refused, the dropped ones included."""
    loss: float = 0.0
    """Sum over steps, as are the terms and the norm."""
    gradient_norm: float = 0.0
    gradient_sum: float = 0.0
    """Of absolute values over tokens."""
    gradient_square: float = 0.0
    ratio_sum: float = 0.0
    """Over kept tokens."""
    ratio_square: float = 0.0
    advantage_sum: float = 0.0
    """Of absolute values, over all tokens that may train."""
    advantage_dropped: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    gates: Counter[str] = field(default_factory=Counter)
    """Tokens by the reason they were refused for."""
    gate_sequences: Counter[str] = field(default_factory=Counter)
    """Sequences with such a token."""
    dropped_by: dict[str, Counter[str]] = field(default_factory=dict)
    """Dropped tokens by position, staleness, advantage and text."""
    dropped_positive: Counter[str] = field(default_factory=Counter)
    """Dropped tokens with a positive advantage, by text."""

    def add(self, other: "ObjectiveCounts") -> None:
        """Take another step, or other steps, in."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, dict):
                _merge(mine, theirs)
            else:
                setattr(self, item.name, mine + theirs)

    @property
    def dropped_share(self) -> float:
        return _fraction(self.dropped, self.tokens)

    @property
    def dropped_advantage(self) -> float:
        """The share of the advantage, in size, that the dropped tokens carry."""
        return _fraction(self.advantage_dropped, self.advantage_sum)

    @property
    def effective_sample_size(self) -> float:
        """(sum r)^2 / (N * sum r^2) with r = 0 at tokens that do not train: a share of all N."""
        return _fraction(self.ratio_sum**2, self.tokens * self.ratio_square)

    @property
    def effective_gradient_tokens(self) -> float:
        """(sum |g|)^2 / (N * sum g^2): the share of the tokens that the gradient in effect rests on."""
        return _fraction(self.gradient_sum**2, self.tokens * self.gradient_square)


def _merge(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, value in theirs.items():
        if isinstance(value, Counter):
            mine.setdefault(name, Counter()).update(value)
        else:
            mine[name] = mine.get(name, 0) + value


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@dataclass
class ObjectivePairs:
    """Every two objectives over one step, or over several."""

    gram: Array
    """Sums of the products of their gradients."""
    both_dropped: Array
    """How many tokens both dropped."""

    @classmethod
    def zeros(cls, size: int) -> "ObjectivePairs":
        return cls(np.zeros((size, size)), np.zeros((size, size), np.int64))

    def add(self, other: "ObjectivePairs") -> None:
        self.gram += other.gram
        self.both_dropped += other.both_dropped

    @property
    def cosine(self) -> Array:
        """Of the gradients over all steps, one after another as one long vector; NaN where one of them is zero."""
        return cosine_of(self.gram)

    @property
    def overlap(self) -> Array:
        """Of the tokens that the row's objective drops, the share that the column's drops too."""
        dropped = self.both_dropped.diagonal()[:, None]
        return _divide_or_nan(self.both_dropped, dropped)

    @property
    def jaccard(self) -> Array:
        """Of the tokens that either drops, the share that both drop."""
        dropped = self.both_dropped.diagonal()
        either = dropped[:, None] + dropped[None, :] - self.both_dropped
        return _divide_or_nan(self.both_dropped, either)


def cosine_of(gram: Array) -> Array:
    """Cosines from a matrix of inner products."""
    size = np.sqrt(gram.diagonal())
    scale = size[:, None] * size[None, :]
    return _divide_or_nan(gram, scale).clip(-1, 1)


def _divide_or_nan(part: Array, whole: Array) -> Array:
    """NaN where there is nothing to divide by."""
    found: Array = np.full(part.shape, np.nan)
    np.divide(part, whole, out=found, where=whole > 0)
    return found
