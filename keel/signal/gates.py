"""Who may train: each gate compares a statistic with its band and names what it refused.

Statistics are taken in log space or as probabilities, before any ratio is formed. A decision about a sequence is taken
once, from its usable trainable tokens, in a table with one row per sequence, and then spread; a decision about the step
is one threshold. Bounds are inclusive: a token on the bound is kept.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from keel.objectives import Gate
from keel.objectives.statistics import GateStatistic, log_ratio_of_token
from keel.signal.active_tokens import View, apply_bits_, staying_bits
from keel.signal.cpu_ops import above, below, count
from keel.signal.segments import Table

TRAINED, NOT_TRAINABLE, OTHER_ROLE, UNUSABLE, FIRST_GATE = range(5)
"""The first reason codes. Gate i has two: FIRST_GATE + 2*i where the policy went too low, then too high."""

Sides = tuple[Tensor | None, Tensor | None]
"""Refused because the policy is too far below the other one, or too far above it."""


def reason_names(gates: Sequence[Gate]) -> tuple[str, ...]:
    """What each reason code means."""
    names = ["trained", "not trainable", "other role", "unusable sampler log-prob"]
    for position, gate in enumerate(gates):
        label = gate.statistic.label
        scope = "" if gate.scope == "token" else f", {gate.scope}"
        names += [f"gate {position} ({label}{scope}) low", f"gate {position} ({label}{scope}) high"]
    return tuple(names)


def token_values(gate: Gate, view: View) -> Float[Tensor, "n"]:
    """Return the gate's statistic for each token, or what a statistic of sequences sums. Not to be modified."""
    over, under = (view.logprob(who) for who in gate.of.split("/"))
    return gate.statistic.tensor(view.log_ratio(gate.of), over, under)


def token_sides(gate: Gate, view: View, threshold: float | None = None) -> Sides:
    """Return which tokens are outside the band of a gate on a token statistic, whatever their advantage.

    `threshold` replaces the high bound of a gate over the step.
    """
    low, high = gate.low, gate.high
    if gate.scope == "step":
        assert threshold is not None
        high = threshold
    return _sides(gate.statistic, token_values(gate, view), view.log_ratio(gate.of), low, high)


def sequence_columns(gate: Gate) -> set[str]:
    """Name the per-sequence sums that a gate on a statistic of sequences reads."""
    columns = {_sum_column(gate)}
    if gate.statistic.direction == "distance":
        columns.add(f"sum {gate.of}")  # its sign gives the side
    return columns


def sum_sequences(gate: Gate, view: View) -> dict[str, Tensor]:
    """Sum the gate's token values over each sequence; nothing where they are log-ratios, which others sum too."""
    if gate.statistic.tensor is log_ratio_of_token:
        return {}
    return {_sum_column(gate): view.segments.sum(token_values(gate, view))}


def _sum_column(gate: Gate) -> str:
    statistic = gate.statistic
    return f"sum {gate.of}" if statistic.tensor is log_ratio_of_token else f"sum {statistic.label} {gate.of}"


def row_sides(gate: Gate, position: int, table: Table) -> Sides:
    """Return which sequences a gate at sequence scope drops."""
    statistic = gate.statistic
    if statistic.sequence is None:
        low, high = table[f"low {position}"] > 0, table[f"high {position}"] > 0
        return _when(gate, table["sum advantage"], low, high)
    values = statistic.sequence(table[_sum_column(gate)], table["usable"].clamp(min=1))
    log_ratio = table[f"sum {gate.of}"] if statistic.direction == "distance" else values
    return _when(gate, table["sum advantage"], *_sides(statistic, values, log_ratio, gate.low, gate.high))


def _sides(
    statistic: GateStatistic, values: Tensor, log_ratio: Tensor, lowest: float | None, highest: float | None
) -> Sides:
    """Compare values with their bounds. `log_ratio` is read only for a distance, whose values have no direction."""
    lowest, highest = statistic.comparable_bounds(lowest, highest)
    under = None if lowest is None else below(values, lowest)
    over = None if highest is None else above(values, highest)
    if statistic.direction == "rising":
        return under, over
    if statistic.direction == "falling":
        return over, under
    assert over is not None
    negative = below(log_ratio, 0.0)
    return over & negative, over & ~negative


def _when(gate: Gate, advantage: Tensor, low: Tensor | None, high: Tensor | None) -> Sides:
    """Restrict a decision to one sign of the advantage."""
    if gate.when == "always":
        return low, high
    applies = above(advantage, 0.0) if gate.when == "positive_advantage" else below(advantage, 0.0)
    return None if low is None else low & applies, None if high is None else high & applies


class Decision:
    """What the gates decided about the tokens of a view."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.reasons: UInt8[Tensor, "n"] = torch.zeros(size, dtype=torch.uint8, device=device)
        self.counts: dict[int, int] = {}
        """How many tokens each gate refused, by reason code; a token is counted for the first gate that refused it."""
        self.dropped: Bool[Tensor, "n"] | None = None
        """The refused tokens, or None when there are none."""
        self.rejected: Bool[Tensor, "rows"] | None = None
        """The sequences that gates at sequence scope refused."""
        self._bits: Tensor | None = None

    @property
    def refused(self) -> int:
        """How many tokens some gate refused."""
        return sum(self.counts.values())

    def refuse(self, side: Bool[Tensor, "n"], code: int) -> None:
        """Refuse these tokens, except those that an earlier gate refused. Takes `side` over."""
        if self.dropped is not None:
            side.logical_and_(~self.dropped)
        number = count(side)
        if number:
            self.counts[code] = number
            self.reasons.add_(side.view(torch.uint8), alpha=code)
            self.dropped = side if self.dropped is None else self.dropped.logical_or_(side)
            self._bits = None

    def clear_(self, values: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Zero, in place, at the refused tokens, whatever stood there."""
        if self.dropped is None:
            return values
        if self._bits is None:
            self._bits = staying_bits(self.dropped, values.dtype)
        return apply_bits_(values, self._bits)


def decide(
    gates: Sequence[Gate],
    view: View,
    advantage: Float[Tensor, "n"],
    table: Table | None,
    thresholds: dict[int, float],
) -> Decision:
    """Ask the gates in order. `table` has the rows of the view's sequences, `thresholds` the step gates' bounds."""
    decision = Decision(len(view), advantage.device)
    for position, gate in enumerate(gates):
        if gate.scope == "sequence":
            assert table is not None
            sides = row_sides(gate, position, table)
            for side in sides:
                if side is not None:
                    decision.rejected = side if decision.rejected is None else decision.rejected | side
            sides = _spread(view, sides[0]), _spread(view, sides[1])
        else:
            sides = _when(gate, advantage, *token_sides(gate, view, thresholds.get(position)))
        for code, side in enumerate(sides, start=FIRST_GATE + 2 * position):
            if side is not None:
                decision.refuse(side, code)
    return decision


def _spread(view: View, rows: Tensor | None) -> Tensor | None:
    return None if rows is None or not bool(rows.any()) else view.segments.spread(rows)


def step_threshold(values: Float[Tensor, "n"], highest_mean: float) -> float:
    """Return the largest value to keep so that the mean of the kept values is at most `highest_mean`.

    Equal values are dropped together, so that the choice never depends on their order.
    """
    ordered = values.sort().values.double()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    staying = int(torch.searchsorted(means, highest_mean, right=True))
    if staying == len(ordered):
        return math.inf
    first_out = float(ordered[staying])
    staying = int(torch.searchsorted(ordered, first_out))
    return -1.0 if staying == 0 else float(ordered[staying - 1])
