"""Collect metrics of micro-batches and hand them to a host's logger as one number per name.

Metrics are sums and counts until they are logged, so that a number logged every ten steps on four ranks is the mean
over all of their tokens, not a mean of means.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from keel.signal import Metrics

PREFIX = "keel/"
BY_STALENESS = "/staleness="

Gather = Callable[[Any], list[Any]]


class MetricLog:
    """Metrics since the last time they were logged, separately for each mode of the host (train, eval)."""

    def __init__(self, aliases: Mapping[str, str] | None = None) -> None:
        """`aliases` are the host's names of metrics that it defines in the same way."""
        self._aliases = dict(aliases or {})
        self._metrics: dict[str, Metrics] = {}

    def add(self, mode: str, metrics: Metrics) -> None:
        """Add the metrics of a micro-batch."""
        self._metrics[mode] = self._metrics.get(mode, Metrics()) + metrics

    def flush(self, mode: str, gather: Gather | None = None) -> dict[str, float]:
        """Return all finite metrics by the name to log them under, and start anew.

        Metrics by staleness are included if tokens of several versions were trained.

        `gather` returns the metrics of all ranks; every rank must call it.
        """
        metrics = self._metrics.pop(mode, Metrics())
        if gather is not None:
            metrics = sum(gather(metrics), Metrics())
        values = {name: value for name, value in metrics.means().items() if math.isfinite(value)}
        stalenesses = {name.partition(BY_STALENESS)[2] for name in values if BY_STALENESS in name}
        if len(stalenesses) == 1:  # they would repeat every metric
            values = {name: value for name, value in values.items() if BY_STALENESS not in name}
        named = {f"{PREFIX}{name}": value for name, value in values.items()}
        return named | {alias: values[name] for name, alias in self._aliases.items() if name in values}
