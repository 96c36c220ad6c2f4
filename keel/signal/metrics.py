"""Metrics that add: pairs of sum and count, histograms, and what is derived from them only when printed.

Adding the metrics of two micro-batches, ranks or steps adds the pairs, so no mean of means is ever taken.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A sum and the number of things summed."""

    sum: float
    count: float

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True)
class DerivedMetric:
    """A number computed from the means of several pairs; adding adds the pairs."""

    parts: tuple[Metric, ...]
    formula: Callable[..., float]

    @property
    def mean(self) -> float:
        return (
            math.nan
            if any(part.count == 0 for part in self.parts)
            else self.formula(*(part.mean for part in self.parts))
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)), self.formula)


IGNORED_BITS = 20
"""Bits of a float32 that a histogram bin ignores: eight bins for each factor of two."""
NUM_BINS = 1 << (32 - IGNORED_BITS)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of float32 values by their leading bits: fine near zero, relative elsewhere, exact to add."""

    counts: Tensor
    """[BINS], indexed by the sign and leading bits of the value."""
    values_are_logs: bool = False
    """The values counted are logarithms, and quantiles are of what they are logarithms of."""

    @staticmethod
    def bin_indices(values: Tensor) -> Tensor:
        """The bin of each value."""
        return (values.float().view(torch.int32) >> IGNORED_BITS) + NUM_BINS // 2

    @property
    def count(self) -> float:
        return float(self.counts.sum())

    @property
    def median(self) -> float:
        """The value that half of the entries lie below, to within a bin. There is no mean: no sum is kept."""
        return self.quantile(0.5)

    def quantile(self, fraction: float) -> float:
        """The value below which this share of the entries lies, to within a bin (9 % of its size)."""
        return self.quantiles(fraction)[0]

    def quantiles(self, *fractions: float) -> list[float]:
        """The quantile of each share."""
        edges, counts = (part.numpy() for part in self.bins())
        used = counts.nonzero()[0]
        if len(used) == 0:
            return [math.nan] * len(fractions)
        reached = counts[used].cumsum()
        places = used[np.searchsorted(reached, np.multiply(fractions, reached[-1])).clip(max=len(used) - 1)]
        low, high = edges[places], edges[places + 1]
        # the bins at zero end below the smallest number that float32 keeps precise
        middles = np.where((low == 0) | (high == 0), 0.0, (low + high) / 2).tolist()
        return [math.exp(min(middle, 700.0)) for middle in middles] if self.values_are_logs else middles

    def bins(self) -> tuple[Tensor, Tensor]:
        """Increasing edges [n + 1] and the counts [n] between them."""
        edges, order = _bin_edges_and_order()
        return edges, self.counts.index_select(0, order)

    def __add__(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts, self.values_are_logs)


MetricValue = Metric | DerivedMetric | Histogram
"""A metric: the first two have a `mean`, a histogram has a `median` and quantiles."""


@cache
def _bin_edges_and_order() -> tuple[Tensor, Tensor]:
    """The edges of all bins up to infinity, and the bin between each two, in increasing order of value."""
    half = NUM_BINS // 2
    magnitudes = (torch.arange(half + 1, dtype=torch.int64) << IGNORED_BITS).to(torch.int32).view(torch.float32)
    magnitudes = magnitudes[: (0x7F800000 >> IGNORED_BITS) + 1]  # the bins from infinity on stay empty
    place = torch.arange(len(magnitudes) - 1)
    # the integer of a negative float grows with its size, so its bins run away from zero
    return torch.cat([-magnitudes.flip(0), magnitudes[1:]]), torch.cat([place.flip(0), half + place])


@dataclass(frozen=True)
class Metrics(Mapping[str, MetricValue]):
    """A step's metrics by name. A name ending in `/staleness=s` is about the tokens that are s versions old."""

    values_by_name: dict[str, MetricValue] = field(default_factory=dict)
    dropped_tokens: Counter[int] = field(default_factory=Counter)
    """How often each token id was refused by a gate."""

    def __getitem__(self, name: str) -> MetricValue:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __add__(self, other: "Metrics") -> "Metrics":
        names = dict.fromkeys([*self, *other])
        joined: dict[str, Any] = {}
        for name in names:
            # a name has the same kind of metric in both
            mine, theirs = cast(Any, self.values_by_name.get(name)), other.values_by_name.get(name)
            joined[name] = mine + theirs if mine is not None and theirs is not None else mine or theirs
        return Metrics(joined, self.dropped_tokens + other.dropped_tokens)

    def means(self) -> dict[str, float]:
        """Every metric as one number; a histogram as its quantiles."""
        flat: dict[str, float] = {}
        for name, metric in self.items():
            if isinstance(metric, Histogram):
                stem, slash, staleness = name.partition("/")
                for end, value in zip(("p01", "p50", "p99"), metric.quantiles(0.01, 0.5, 0.99), strict=True):
                    flat[f"{stem}_{end}{slash}{staleness}"] = value
            else:
                flat[name] = metric.mean
        return flat

    def most_dropped(self, count: int = 10, decode: Callable[[int], str] = str) -> list[tuple[str, int]]:
        """The token texts that gates refused most often. Model text is untrusted: escape it where it is shown."""
        return [(decode(token), times) for token, times in self.dropped_tokens.most_common(count)]
