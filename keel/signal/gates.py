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

from keel.config import Gate
from keel.config.composition import DISTANCES
from keel.signal.passes import above, below, count
from keel.signal.segments import Table
from keel.signal.view import View, apply_bits_, staying_bits

TRAINED, NOT_TRAINABLE, OTHER_ROLE, UNUSABLE, FIRST_GATE = range(5)
"""The first reason codes. Gate i has two: FIRST_GATE + 2*i where the policy went too low, then too high."""

Sides = tuple[Tensor | None, Tensor | None]
"""Refused because the policy is too far below the other one, or too far above it."""


def reason_names(gates: Sequence[Gate]) -> tuple[str, ...]:
    """What each reason code means."""
    names = ["trained", "not trainable", "other role", "unusable sampler log-prob"]
    for position, gate in enumerate(gates):
        what = gate.on if gate.level == "token" else f"{gate.level} {gate.on}"
        scope = "" if gate.scope == "token" else f", {gate.scope}"
        names += [f"gate {position} ({what}{scope}) low", f"gate {position} ({what}{scope}) high"]
    return tuple(names)


def binary_kl(start: Float[Tensor, "n"], end: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """KL of the two-outcome distributions (drawn token, any other), from log-probs: KL(start || end)."""
    other, other_end = -torch.expm1(start.clamp(max=0)), -torch.expm1(end.clamp(max=0))
    rest = (other * (other.log() - other_end.log())).masked_fill_(other == 0, 0.0)
    return start.exp().mul_(start - end).add_(rest)


def token_sides(gate: Gate, view: View, threshold: float | None = None) -> Sides:
    """Which tokens are outside the band of a gate on a token statistic, whatever their advantage."""
    x = view.log_ratio(gate.of)
    over, under = (view.logprob(who) for who in gate.of.split("/"))
    if gate.on == "ratio":
        low = None if gate.low is None or gate.low == 0 else below(x, math.log(gate.low))
        return low, None if gate.high is None else above(x, math.log(gate.high))
    if gate.on == "second_moment":
        assert threshold is not None
        distance, high = x.square(), threshold
    elif gate.on in DISTANCES:
        distance = binary_kl(under, over)
        if gate.on == "symmetric_binary_kl":
            distance = torch.maximum(distance, binary_kl(over, under))
        assert gate.high is not None
        high = gate.high
    else:
        if gate.on == "probability_difference":
            statistic = over.exp().sub_(under.exp())
        else:
            statistic = binary_kl(under, over).mul_(x.sign())
        return (
            None if gate.low is None else below(statistic, gate.low),
            None if gate.high is None else above(statistic, gate.high),
        )
    far, negative = above(distance, high), below(x, 0.0)
    return far & negative, far & ~negative


def row_sides(gate: Gate, position: int, table: Table) -> Sides:
    """Which sequences a gate at sequence scope refuses."""
    if gate.on == "sequence_kl":
        # mean(b - l) above its bound: the policy is too low, so the sides change places
        kl = -table[f"sum {gate.of}"] / table["usable"].clamp(min=1)
        low = None if gate.high is None else kl > gate.high
        high = None if gate.low is None else kl < gate.low
    elif gate.level != "token":
        log_ratio = table[f"sum {gate.of}"]
        if gate.level == "geometric":
            log_ratio = log_ratio / table["usable"].clamp(min=1)
        low = None if gate.low is None or gate.low == 0 else log_ratio < math.log(gate.low)
        high = None if gate.high is None else log_ratio > math.log(gate.high)
    else:
        low, high = table[f"low {position}"] > 0, table[f"high {position}"] > 0
    return _when(gate, table["sum advantage"], low, high)


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


def second_moment_threshold(squares: Float[Tensor, "n"], tau: float) -> float:
    """The largest d^2 that may stay so that the mean of what stays is at most tau.

    Equal values leave together, so that the choice never depends on their order.
    """
    ordered = squares.sort().values.double()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    staying = int(torch.searchsorted(means, tau, right=True))
    if staying == len(ordered):
        return math.inf
    first_out = float(ordered[staying])
    staying = int(torch.searchsorted(ordered, first_out))
    return -1.0 if staying == 0 else float(ordered[staying - 1])
