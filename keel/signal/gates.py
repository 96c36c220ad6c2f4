"""Apply gates: each gate compares a statistic with its band and drops the tokens outside.

Statistics are computed from log-probs or probabilities, before any ratio is formed. A decision about a sequence is made
once, from its active tokens, in a table with one row per sequence, and then expanded to its tokens. A decision about
the step is a single threshold. A value equal to a bound is kept.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from keel.objectives import Gate
from keel.objectives.statistics import GateStatistic, log_ratio_of_token
from keel.signal.active_tokens import ActiveTokens, apply_bitmask_, keep_bitmask
from keel.signal.cpu_ops import count_true, greater_than, less_than
from keel.signal.segments import SequenceTable

TRAINED, NOT_TRAINABLE, OTHER_ROLE, INVALID_LOGPROB, FIRST_GATE = range(5)
"""The first reason codes. Gate i has two: FIRST_GATE + 2*i if the policy's probability is too low, then too high."""

LowHigh = tuple[Tensor | None, Tensor | None]
"""Masks of what is dropped because the policy's probability is too low, and because it is too high."""


def reason_names(gates: Sequence[Gate]) -> tuple[str, ...]:
    """Return the name of each reason code."""
    names = ["trained", "not trainable", "other role", "invalid sampler log-prob"]
    for index, gate in enumerate(gates):
        label = gate.spec.label
        scope = "" if gate.scope == "token" else f", {gate.scope}"
        names += [f"gate {index} ({label}{scope}) low", f"gate {index} ({label}{scope}) high"]
    return tuple(names)


def token_values(gate: Gate, active: ActiveTokens) -> Float[Tensor, "n"]:
    """Return the gate's statistic of each token, or the summands of a statistic of sequences. Must not be modified."""
    over, under = (active.logprob(source) for source in gate.between.split("/"))
    return gate.spec.tensor(active.log_ratio(gate.between), over, under)


def token_violations(gate: Gate, active: ActiveTokens, threshold: float | None = None) -> LowHigh:
    """Return which tokens are outside the band of a gate on a token statistic, independent of their advantage.

    `threshold` replaces the high bound of a gate over the step.
    """
    low, high = gate.low, gate.high
    if gate.scope == "step":
        assert threshold is not None
        high = threshold
    return _sides(gate.spec, token_values(gate, active), active.log_ratio(gate.between), low, high)


def sequence_columns(gate: Gate) -> set[str]:
    """Name the per-sequence sums that a gate on a statistic of sequences reads."""
    columns = {_sum_column(gate)}
    if gate.spec.direction == "distance":
        columns.add(f"sum {gate.between}")  # its sign gives the side
    return columns


def sum_sequences(gate: Gate, active: ActiveTokens) -> dict[str, Tensor]:
    """Sum the gate's token values over each sequence. Empty for log-ratios, whose sums are shared with other parts."""
    if gate.spec.tensor is log_ratio_of_token:
        return {}
    return {_sum_column(gate): active.segments.sum(token_values(gate, active))}


def _sum_column(gate: Gate) -> str:
    statistic = gate.spec
    return f"sum {gate.between}" if statistic.tensor is log_ratio_of_token else f"sum {statistic.label} {gate.between}"


def sequence_violations(gate: Gate, gate_index: int, table: SequenceTable) -> LowHigh:
    """Return which sequences a gate at sequence scope drops."""
    statistic = gate.spec
    if statistic.sequence is None:
        low, high = table[f"low {gate_index}"] > 0, table[f"high {gate_index}"] > 0
        return _restrict_to_advantage_sign(gate, table["sum advantage"], low, high)
    values = statistic.sequence(table[_sum_column(gate)], table["valid"].clamp(min=1))
    log_ratio = table[f"sum {gate.between}"] if statistic.direction == "distance" else values
    return _restrict_to_advantage_sign(
        gate, table["sum advantage"], *_sides(statistic, values, log_ratio, gate.low, gate.high)
    )


def _sides(
    statistic: GateStatistic, values: Tensor, log_ratio: Tensor, lowest: float | None, highest: float | None
) -> LowHigh:
    """Compare values with their bounds. `log_ratio` is read only for a distance, whose values have no direction."""
    lowest, highest = statistic.comparable_bounds(lowest, highest)
    under = None if lowest is None else less_than(values, lowest)
    over = None if highest is None else greater_than(values, highest)
    if statistic.direction == "rising":
        return under, over
    if statistic.direction == "falling":
        return over, under
    assert over is not None
    negative = less_than(log_ratio, 0.0)
    return over & negative, over & ~negative


def _restrict_to_advantage_sign(gate: Gate, advantage: Tensor, low: Tensor | None, high: Tensor | None) -> LowHigh:
    """Restrict a decision to one sign of the advantage."""
    if gate.when == "always":
        return low, high
    applies = greater_than(advantage, 0.0) if gate.when == "positive_advantage" else less_than(advantage, 0.0)
    return None if low is None else low & applies, None if high is None else high & applies


class GateResult:
    """The decision of all gates about the active tokens of a batch."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.reasons: UInt8[Tensor, "n"] = torch.zeros(size, dtype=torch.uint8, device=device)
        self.counts: dict[int, int] = {}
        """Number of dropped tokens by reason code. A token counts for the first gate that dropped it."""
        self.dropped: Bool[Tensor, "n"] | None = None
        """The dropped tokens, or None if there are none."""
        self.dropped_sequences: Bool[Tensor, "rows"] | None = None
        """The sequences that gates at sequence scope dropped."""
        self._keep_bitmask: Tensor | None = None

    @property
    def num_dropped(self) -> int:
        """The number of tokens that any gate dropped."""
        return sum(self.counts.values())

    def drop(self, violating: Bool[Tensor, "n"], code: int) -> None:
        """Drop these tokens, except those already dropped. `violating` is modified and must not be used afterwards."""
        if self.dropped is not None:
            violating.logical_and_(~self.dropped)
        count = count_true(violating)
        if count:
            self.counts[code] = count
            self.reasons.add_(violating.view(torch.uint8), alpha=code)
            self.dropped = violating if self.dropped is None else self.dropped.logical_or_(violating)
            self._keep_bitmask = None

    def zero_dropped_(self, values: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Set the values of dropped tokens to zero, in place, even if they are NaN."""
        if self.dropped is None:
            return values
        if self._keep_bitmask is None:
            self._keep_bitmask = keep_bitmask(self.dropped, values.dtype)
        return apply_bitmask_(values, self._keep_bitmask)


def apply_gates(
    gates: Sequence[Gate],
    active: ActiveTokens,
    advantage: Float[Tensor, "n"],
    table: SequenceTable | None,
    thresholds: dict[int, float],
) -> GateResult:
    """Apply the gates in order.

    `table` has one row per sequence of the active tokens, and `thresholds` the bounds of the gates over the step.
    """
    decision = GateResult(len(active), advantage.device)
    for index, gate in enumerate(gates):
        if gate.scope == "sequence":
            assert table is not None
            sides = sequence_violations(gate, index, table)
            for side in sides:
                if side is not None:
                    decision.dropped_sequences = (
                        side if decision.dropped_sequences is None else decision.dropped_sequences | side
                    )
            sides = _expand_rows(active, sides[0]), _expand_rows(active, sides[1])
        else:
            sides = _restrict_to_advantage_sign(gate, advantage, *token_violations(gate, active, thresholds.get(index)))
        for code, side in enumerate(sides, start=FIRST_GATE + 2 * index):
            if side is not None:
                decision.drop(side, code)
    return decision


def _expand_rows(active: ActiveTokens, rows: Tensor | None) -> Tensor | None:
    return None if rows is None or not bool(rows.any()) else active.segments.expand(rows)


def step_threshold(values: Float[Tensor, "n"], highest_mean: float) -> float:
    """Return the largest value to keep so that the mean of the kept values is at most `highest_mean`.

    Equal values are dropped together, so that the choice never depends on their order.
    """
    ordered = values.sort().values.double()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    num_kept = int(torch.searchsorted(means, highest_mean, right=True))
    if num_kept == len(ordered):
        return math.inf
    smallest_dropped = float(ordered[num_kept])
    num_kept = int(torch.searchsorted(ordered, smallest_dropped))
    return -1.0 if num_kept == 0 else float(ordered[num_kept - 1])
