"""Who is dropped, stated a second time: one token, plain probabilities, the math module.

Written from the mathematics of docs/objectives.md and sharing nothing with `keel.signal.gates`, so that the plot of a
rule and the audit have a statement of their own to hold the tensors against. It covers a sequence of one token; what a
gate over the step does cannot be said about one token and is left out.
"""

import math
from collections.abc import Sequence
from typing import Literal

from keel.config.composition import Gate

Side = Literal["low", "high"]
"""Dropped because the policy is too far below the sampler, or too far above it."""


def refuses(gate: Gate, p: float, q: float, advantage: float) -> Side | None:
    """Whether a gate drops the only token of a sequence, and on which side; None when it is kept.

    `p` and `q` are the probabilities of the drawn token under the two policies of `gate.of`: policy and sampler for
    "policy/sampler". Both are in (0, 1]. `advantage` is the one the gate looks at, after the transforms. A value equal
    to a bound is kept. In a sequence of one token every mean, product and geometric mean is the token's own value, so
    gates at sequence scope are covered too. A gate over the step is always None.
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
    if gate.on == "ratio":
        return _outside(p / q, gate.low, gate.high)
    if gate.on == "probability_difference":
        return _outside(p - q, gate.low, gate.high)
    if gate.on == "signed_binary_kl":
        return _outside(math.copysign(bernoulli_kl(q, p), p - q), gate.low, gate.high)
    if gate.on == "sequence_kl":
        # mean(b - l) = log(q / p) grows as the policy falls: above the high bound the policy is too low
        side = _outside(math.log(q / p), gate.low, gate.high)
        return None if side is None else "low" if side == "high" else "high"
    distance = bernoulli_kl(q, p)
    if gate.on == "symmetric_binary_kl":
        distance = max(distance, bernoulli_kl(p, q))
    if gate.high is None or distance <= gate.high:
        return None
    return "low" if p < q else "high"


def first_refusal(gates: Sequence[Gate], p: float, q: float, advantage: float) -> Side | None:
    """The side on which the first gate that refuses the token does so; None when all keep it."""
    for gate in gates:
        side = refuses(gate, p, q, advantage)
        if side is not None:
            return side
    return None


def bernoulli_kl(start: float, end: float) -> float:
    """KL(start || end) between (drawn token, any other token): s*log(s/e) + (1-s)*log((1-s)/(1-e)), 0*log(0) = 0."""
    divergence = start * math.log(start / end)
    if start < 1:
        divergence += math.inf if end == 1 else (1 - start) * math.log((1 - start) / (1 - end))
    return max(divergence, 0.0)


def _outside(value: float, low: float | None, high: float | None) -> Side | None:
    if low is not None and value < low:
        return "low"
    if high is not None and value > high:
        return "high"
    return None
