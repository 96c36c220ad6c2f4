"""Which statistics a run's trust region is about, as duckdb computes them, and the bands of its objective on them.

Read off the composition of the run's own settings. Every histogram has the same bins: equal steps of asinh(value /
scale), linear inside of the band, relative far outside, without end: a bound of 1e-4 and one of 5 look equally well.
What the recorded files cannot say (a ratio against the proximal policy inside of a step) is listed and not drawn.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from keel.objectives.composition import Composition, Gate
from keel.objectives.statistics import STATISTICS, GateStatistic, gate_statistic

BINS_PER_UNIT = 30
"""Bins to each unit of asinh(value / scale)."""


@dataclass
class Statistic:
    """What a histogram counts."""

    name: str
    title: str
    scope: Literal["token", "sample"]
    expression: str
    """DuckDB expression, `LensHistogram.sql`."""
    axis: Literal["ratio", "plain"]
    """ratio: the value is the logarithm of one."""
    scale: float
    bands: list["Band"] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {name: value for name, value in asdict(self).items() if name != "expression"}


@dataclass
class Band:
    """What the objective lets through of a statistic, in its own unit."""

    kind: Literal["gate", "clip", "weight"]
    """gate: outside of it tokens are dropped; clip: the loss is flat there; weight: the importance weight is."""
    low: float | None
    high: float | None
    when: str
    label: str


def _from_table(statistic: GateStatistic) -> Statistic:
    histogram = statistic.histogram
    return Statistic(
        histogram.name,
        histogram.title,
        "token" if statistic.sequence is None else "sample",
        histogram.sql,
        "ratio" if statistic.in_log_space else "plain",
        histogram.scale,
    )


def statistics_of(composition: Composition | None) -> tuple[list[Statistic], list[str]]:
    """Return the statistics to draw and, as sentences, the bands that cannot be drawn.

    Drawn are those that are always shown and those on which the objective has a band.
    """
    notes = []
    drawable = {entry.histogram.name: _from_table(entry) for entry in STATISTICS.values()}
    if composition is not None:
        for name, band, note in _bands(composition):
            if note:
                notes.append(note)
            else:
                drawable[name].bands.append(band)
    always_shown = {entry.histogram.name for entry in STATISTICS.values() if entry.histogram.always_shown}
    shown = [one for one in drawable.values() if one.bands or one.name in always_shown]
    for one in shown:
        sizes = [abs(bound) for band in one.bands for bound in (band.low, band.high) if bound]
        if sizes:
            # half of the nearest bound: the inside of the band is nearly to scale
            one.scale = max(min(sizes) / 2, 1e-6)
    return shown, notes


def _bands(composition: Composition) -> Iterator[tuple[str, Band, str]]:
    for place, gate in enumerate(composition.gates):
        yield _gate(place, gate)
    for place, weight in enumerate(composition.weights):
        if weight.kernel == "ratio" and (weight.low is not None or weight.high is not None):
            band = Band("weight", _log(weight.low), _log(weight.high), "always", f"weight {place}")
            yield _ratio_histogram(weight.level), band, _drawable(weight.between, f"weight {place}")
    policy = composition.policy
    if policy.surrogate == "clip" and policy.eps is not None:
        above = policy.eps if policy.eps_high is None else policy.eps_high
        band = Band("clip", _log(1 - policy.eps), math.log1p(above), "always", "clip")
        name = _ratio_histogram("geometric" if policy.level == "sequence" else "token")
        yield name, band, _drawable(f"policy/{policy.anchor}", "the clip")


def _gate(place: int, gate: Gate) -> tuple[str, Band, str]:
    label, statistic = f"gate {place}", gate.spec
    band = Band("gate", *statistic.comparable_bounds(gate.low, gate.high), gate.when, label)
    if gate.scope == "step":
        note = f"{label} ({statistic.label}) has no fixed band: its bound follows from the tokens of each step"
    else:
        note = _drawable(gate.between, label)
    return statistic.histogram.name, band, note


def _ratio_histogram(level: str) -> str:
    return gate_statistic("ratio", level).histogram.name


def _log(ratio: float | None) -> float | None:
    """A bound of 0 on a ratio is none."""
    return math.log(ratio) if ratio is not None and ratio > 0 else None


def _drawable(pair: str, what: str) -> str:
    """Why a band cannot be drawn. Recorded is the policy at the start of the step, which is the proximal one."""
    if pair.endswith("/sampler"):
        return ""
    return (
        f"{what} compares {pair}, which are equal where the step starts; what happens inside of a step is not recorded"
    )
