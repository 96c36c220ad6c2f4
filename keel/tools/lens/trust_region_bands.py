"""Choose the statistics that show a run's trust region, and compute the bands of its objective on them.

Both follow from the composition in the run's settings. Every histogram has bins of equal width in asinh(value / scale):
linear inside the band and logarithmic far outside it, so that bounds of 1e-4 and of 5 are equally readable. A band that
the recorded files cannot show, such as a ratio to the proximal policy within a step, is described and not drawn.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from keel.objectives.composition import Composition, Gate
from keel.objectives.statistics import STATISTICS, GateStatistic, gate_statistic

BINS_PER_UNIT = 30
"""Number of bins per unit of asinh(value / scale)."""


@dataclass
class Statistic:
    """The statistic that a histogram counts."""

    name: str
    title: str
    scope: Literal["token", "sample"]
    expression: str
    """DuckDB expression, `LensHistogram.sql`."""
    axis: Literal["ratio", "plain"]
    """ratio: values are logarithms of ratios, and the axis is labelled with ratios."""
    scale: float
    bands: list["Band"] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the fields that the page needs."""
        return {name: value for name, value in asdict(self).items() if name != "expression"}


@dataclass
class Band:
    """The range of a statistic inside which tokens train with their full gradient, in the unit of the statistic."""

    kind: Literal["gate", "clip", "weight"]
    """Effect outside the range. gate: tokens are dropped; clip: the loss is flat; weight: the importance weight is."""
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
    """Return the statistics to draw, and notes about the bands that cannot be drawn.

    Statistics are drawn if they are always shown or if the objective has a band on them.
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
    shown = [statistic for statistic in drawable.values() if statistic.bands or statistic.name in always_shown]
    for statistic in shown:
        bounds = [abs(bound) for band in statistic.bands for bound in (band.low, band.high) if bound]
        if bounds:
            # with half of the nearest bound the inside of the band is nearly linear
            statistic.scale = max(min(bounds) / 2, 1e-6)
    return shown, notes


def _bands(composition: Composition) -> Iterator[tuple[str, Band, str]]:
    for index, gate in enumerate(composition.gates):
        yield _gate(index, gate)
    for index, weight in enumerate(composition.weights):
        if weight.kernel == "ratio" and (weight.low is not None or weight.high is not None):
            band = Band("weight", _log(weight.low), _log(weight.high), "always", f"weight {index}")
            yield _ratio_histogram(weight.level), band, _undrawable_note(weight.between, f"weight {index}")
    policy = composition.policy
    if policy.surrogate == "clip" and policy.eps is not None:
        above = policy.eps if policy.eps_high is None else policy.eps_high
        band = Band("clip", _log(1 - policy.eps), math.log1p(above), "always", "clip")
        name = _ratio_histogram("geometric" if policy.level == "sequence" else "token")
        yield name, band, _undrawable_note(f"policy/{policy.anchor}", "the clip")


def _gate(index: int, gate: Gate) -> tuple[str, Band, str]:
    label, statistic = f"gate {index}", gate.spec
    band = Band("gate", *statistic.comparable_bounds(gate.low, gate.high), gate.when, label)
    if gate.scope == "step":
        note = f"{label} ({statistic.label}) has no fixed band: its bound depends on the tokens of each step"
    else:
        note = _undrawable_note(gate.between, label)
    return statistic.histogram.name, band, note


def _ratio_histogram(level: str) -> str:
    return gate_statistic("ratio", level).histogram.name


def _log(ratio: float | None) -> float | None:
    """Return the logarithm of a bound; a bound of 0 on a ratio has no effect."""
    return math.log(ratio) if ratio is not None and ratio > 0 else None


def _undrawable_note(pair: str, component: str) -> str:
    """Return why a band cannot be drawn, or "". The recorded policy is that at the start of the step, the proximal."""
    if pair.endswith("/sampler"):
        return ""
    return (
        f"{component} compares {pair}, which are equal at the start of the step; later updates of the same step are not"
        " recorded"
    )
