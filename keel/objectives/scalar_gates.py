"""Decide whether gates drop a single token, from plain probabilities.

The values come from the scalar functions of `keel.objectives.statistics`, which share no arithmetic with the tensors of
`keel.signal.gates`: plots and the audit compare training against an independent statement of the same rule. Covers a
sequence of one token. A gate over the step does not decide about a single token and is not covered.
"""

from collections.abc import Sequence
from typing import Literal

from keel.objectives.composition import Gate

Side = Literal["low", "high"]
"""Dropped because the policy is too far below the sampler, or too far above it."""


def dropped_side(gate: Gate, p: float, q: float, advantage: float) -> Side | None:
    """Return the side on which a gate drops the only token of a sequence, or None if the token is kept.

    `p` and `q` are the probabilities of the drawn token under the two policies of `gate.between`: policy and sampler
    for "policy/sampler". Both are in (0, 1]. `advantage` is the advantage after the transforms. A value equal to a
    bound is kept. In a sequence of one token every mean, product and geometric mean is the token's own value, so gates
    at sequence scope are covered too. A gate over the step always returns None.
    """
    for name, value in (("p", p), ("q", q)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} = {value} is not a probability in (0, 1]")
    if gate.scope == "step":
        return None
    if gate.when == "positive_advantage" and not advantage > 0:
        return None
    if gate.when == "negative_advantage" and not advantage < 0:
        return None
    statistic = gate.spec
    crossed = _crossed_bound(statistic.scalar(p, q), gate.low, gate.high)
    if crossed is None or statistic.direction == "rising":
        return crossed
    if statistic.direction == "falling":
        return "low" if crossed == "high" else "high"
    return "low" if p < q else "high"


def first_dropped_side(gates: Sequence[Gate], p: float, q: float, advantage: float) -> Side | None:
    """Return the side of the first gate that drops the token, or None if all gates keep it."""
    for gate in gates:
        side = dropped_side(gate, p, q, advantage)
        if side is not None:
            return side
    return None


def _crossed_bound(value: float, low: float | None, high: float | None) -> Side | None:
    if low is not None and value < low:
        return "low"
    if high is not None and value > high:
        return "high"
    return None
