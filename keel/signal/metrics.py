"""Metrics that can be merged: pairs of sum and count, histograms, and numbers derived from pairs when printed.

Merging the metrics of two micro-batches, ranks or steps adds the pairs, so a mean of means is never computed.
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
    """A sum and the number of values summed."""

    sum: float
    count: float

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def __add__(self, other: Self) -> Self:
        return type(self)(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True)
class DerivedMetric:
    """A number computed from the means of several pairs. Merging adds the pairs."""

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
"""Trailing bits of a float32 that a histogram bin ignores, which leaves eight bins per factor of two."""
NUM_BINS = 1 << (32 - IGNORED_BITS)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of float32 values by their leading bits. Bins have a constant relative width, and merging is exact."""

    counts: Tensor
    """[NUM_BINS], indexed by the sign and leading bits of the value."""
    values_are_logs: bool = False
    """Whether the counted values are logarithms; quantiles are then exponentiated."""

    @staticmethod
    def bin_indices(values: Tensor) -> Tensor:
        """Return the bin of each value."""
        return (values.float().view(torch.int32) >> IGNORED_BITS) + NUM_BINS // 2

    @property
    def count(self) -> float:
        return float(self.counts.sum())

    @property
    def median(self) -> float:
        """The median, to within a bin. There is no mean, because no sum is stored."""
        return self.quantile(0.5)

    def quantile(self, fraction: float) -> float:
        """Return the value below which this fraction of the entries lies, to within a bin (9 % of its value)."""
        return self.quantiles(fraction)[0]

    def quantiles(self, *fractions: float) -> list[float]:
        """Return the quantile of each fraction."""
        edges, counts = (part.numpy() for part in self.bins())
        used = counts.nonzero()[0]
        if len(used) == 0:
            return [math.nan] * len(fractions)
        cumulative = counts[used].cumsum()
        indices = used[np.searchsorted(cumulative, np.multiply(fractions, cumulative[-1])).clip(max=len(used) - 1)]
        low, high = edges[indices], edges[indices + 1]
        # the two bins at zero hold only subnormal numbers and zero
        middles = np.where((low == 0) | (high == 0), 0.0, (low + high) / 2).tolist()
        return [math.exp(min(middle, 700.0)) for middle in middles] if self.values_are_logs else middles

    def bins(self) -> tuple[Tensor, Tensor]:
        """Return increasing edges [n + 1] and the counts [n] between them."""
        edges, order = _bin_edges_and_order()
        return edges, self.counts.index_select(0, order)

    def __add__(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts, self.values_are_logs)


MetricValue = Metric | DerivedMetric | Histogram
"""A metric. The first two have a `mean`; a histogram has a `median` and quantiles."""


@cache
def _bin_edges_and_order() -> tuple[Tensor, Tensor]:
    """Return the edges of all finite bins and the bin between each two edges, in increasing order of value."""
    half = NUM_BINS // 2
    magnitudes = (torch.arange(half + 1, dtype=torch.int64) << IGNORED_BITS).to(torch.int32).view(torch.float32)
    magnitudes = magnitudes[: (0x7F800000 >> IGNORED_BITS) + 1]  # the bins of infinity and NaN stay empty
    index = torch.arange(len(magnitudes) - 1)
    # the bits of a negative float increase with its magnitude, so its bins are in descending order of value
    return torch.cat([-magnitudes.flip(0), magnitudes[1:]]), torch.cat([index.flip(0), half + index])


@dataclass(frozen=True)
class Metrics(Mapping[str, MetricValue]):
    """Metrics by name. A name that ends in `/staleness=s` covers only the tokens with that staleness."""

    values_by_name: dict[str, MetricValue] = field(default_factory=dict)
    dropped_tokens: Counter[int] = field(default_factory=Counter)
    """How often gates dropped each token id."""

    def __getitem__(self, name: str) -> MetricValue:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __add__(self, other: "Metrics") -> "Metrics":
        names = dict.fromkeys([*self, *other])
        merged: dict[str, Any] = {}
        for name in names:
            # a name has the same type of metric on both sides
            left, right = cast(Any, self.values_by_name.get(name)), other.values_by_name.get(name)
            merged[name] = left + right if left is not None and right is not None else left or right
        return Metrics(merged, self.dropped_tokens + other.dropped_tokens)

    def means(self) -> dict[str, float]:
        """Return every metric as one number, and a histogram as its 1st, 50th and 99th percentiles."""
        flat: dict[str, float] = {}
        for name, metric in self.items():
            if isinstance(metric, Histogram):
                stem, slash, staleness = name.partition("/")
                for percentile, value in zip(("p01", "p50", "p99"), metric.quantiles(0.01, 0.5, 0.99), strict=True):
                    flat[f"{stem}_{percentile}{slash}{staleness}"] = value
            else:
                flat[name] = metric.mean
        return flat

    def most_dropped(self, count: int = 10, decode: Callable[[int], str] = str) -> list[tuple[str, int]]:
        """Return the texts of the tokens that gates dropped most often, with their counts.

        Model output is untrusted: escape it before display.
        """
        return [(decode(token), times) for token, times in self.dropped_tokens.most_common(count)]
