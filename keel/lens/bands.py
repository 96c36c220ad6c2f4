"""Which statistics a run's trust region is about, as duckdb computes them, and the bands of its objective on them.

Read off the composition of the run's own settings. Every histogram has the same bins: equal steps of asinh(value /
scale), linear inside of the band, relative far outside, without end: a bound of 1e-4 and one of 5 look equally well.
What the recorded files cannot say (a ratio against the proximal policy inside of a step) is listed and not drawn.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from keel.config.composition import Composition, Gate

BINS = 30
"""Bins to each unit of asinh(value / scale)."""

_REST = "greatest(1 - exp({}), 1e-300)"
_KL = "(exp({0}) * ({0} - {1}) + " + f"{_REST.format('{0}')} * (ln({_REST.format('{0}')}) - ln({_REST.format('{1}')})))"
_FORWARD = f"greatest({_KL.format('b', 'l')}, 0)"
_BACKWARD = f"greatest({_KL.format('l', 'b')}, 0)"


@dataclass
class Statistic:
    """What a histogram counts."""

    name: str
    title: str
    scope: Literal["token", "sample"]
    expression: str
    """In duckdb: of l and b for a token, of d (sum of l - b) and n for a sample."""
    axis: Literal["ratio", "plain"]
    """ratio: the value is the logarithm of one."""
    scale: float
    bands: list["Band"] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
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


def _known() -> dict[str, Statistic]:
    known = (
        Statistic("ratio", "ratio, policy / sampler", "token", "(l - b)", "ratio", 0.4),
        Statistic("difference", "probability, policy - sampler", "token", "(exp(l) - exp(b))", "plain", 0.2),
        Statistic("binary_kl", "binary KL, sampler to policy", "token", _FORWARD, "plain", 0.01),
        Statistic("signed_binary_kl", "binary KL, signed", "token", f"({_FORWARD} * sign(l - b))", "plain", 0.01),
        Statistic(
            "symmetric_binary_kl", "binary KL, larger way", "token", f"greatest({_FORWARD}, {_BACKWARD})", "plain", 0.01
        ),
        Statistic("sequence_kl", "mean log-ratio of a sample, sampler / policy", "sample", "(-d / n)", "plain", 0.01),
        Statistic("geometric_ratio", "geometric mean ratio of a sample", "sample", "(d / n)", "ratio", 0.02),
        Statistic("sequence_ratio", "product of ratios of a sample", "sample", "d", "ratio", 0.1),
    )
    return {one.name: one for one in known}


def statistics_of(composition: Composition | None) -> tuple[list[Statistic], list[str]]:
    """Ratio and probability difference, whatever else the objective looks at, and what cannot be drawn, in words."""
    known, notes = _known(), []
    if composition is not None:
        for name, band, note in _bands(composition):
            if note:
                notes.append(note)
            else:
                known[name].bands.append(band)
    shown = [one for one in known.values() if one.bands or one.name in ("ratio", "difference")]
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
            yield _level(weight.level), band, _drawable(weight.of, f"weight {place}")
    policy = composition.policy
    if policy.surrogate == "clip" and policy.eps is not None:
        above = policy.eps if policy.eps_high is None else policy.eps_high
        band = Band("clip", _log(1 - policy.eps), math.log1p(above), "always", "clip")
        name = "geometric_ratio" if policy.level == "sequence" else "ratio"
        yield name, band, _drawable(f"policy/{policy.anchor}", "the clip")


def _gate(place: int, gate: Gate) -> tuple[str, Band, str]:
    label = f"gate {place}"
    band = Band("gate", gate.low, gate.high, gate.when, label)
    if gate.on == "second_moment":
        return "", band, f"{label} (second_moment) has no fixed band: its bound follows from the tokens of each step"
    note = _drawable(gate.of, label)
    if gate.on == "ratio":
        band = Band("gate", _log(gate.low), _log(gate.high), gate.when, label)
        return _level(gate.level), band, note
    return ("difference" if gate.on == "probability_difference" else gate.on), band, note


def _level(level: str) -> str:
    return {"token": "ratio", "sequence": "sequence_ratio", "geometric": "geometric_ratio"}[level]


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
