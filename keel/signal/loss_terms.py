"""The terms of a loss: each computes, per token, its value and its gradient d value / d l.

The gradient is written next to the value in closed form. It is exact for any composition, needs no autograd graph, and
is available to a fused output head in the same pass. Tests compare every pair with autograd and with finite differences
in float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.objectives import Penalty, PolicyTerm
from keel.signal.active_tokens import ActiveTokens, apply_bitmask_, keep_bitmask, ratio
from keel.signal.cpu_ops import less_than
from keel.signal.gates import GateResult


@dataclass(frozen=True)
class LossTerm:
    """Value and gradient, which may share storage. `clipped` marks where a clip has set the gradient to zero."""

    value: Tensor
    grad: Tensor
    clipped: Tensor | None = None
    sign: float = 1.0
    """Factor that callers must apply to value and gradient. They scale both anyway, so this saves two passes."""

    def scaled(self, factor: Tensor) -> "LossTerm":
        """Return the term times a factor without gradient."""
        grad = self.grad * factor
        return LossTerm(grad if self.value is self.grad else self.value * factor, grad, self.clipped, self.sign)


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a batch: its part of the loss, and the inputs of the metrics."""

    loss: Tensor
    gradient: Tensor
    decision: GateResult
    advantage: Tensor
    clipped: Tensor | None
    """Tokens, or sequences, whose gradient a clip has set to zero."""
    clipped_by_sequence: bool
    """Whether `clipped` has one entry per sequence."""
    term_losses: dict[str, Tensor]
    """The loss by term."""


def where_positive(advantage: Tensor, value: float, otherwise: float) -> Tensor:
    """Return one constant where A > 0 and another elsewhere, in the dtype of A."""
    return torch.where(advantage > 0, advantage.new_tensor(value), advantage.new_tensor(otherwise))


def policy_term(policy: PolicyTerm, log_ratio: Tensor | None, logprob: Tensor, advantage: Tensor) -> LossTerm:
    """Compute the term that carries the advantage. `log_ratio` is measured against the anchor."""
    if policy.surrogate == "cross_entropy":
        return LossTerm(-logprob, torch.full_like(logprob, -1.0))
    if policy.surrogate == "log_prob":
        grad = -advantage
        return LossTerm(grad * logprob, grad)
    assert log_ratio is not None
    r = ratio(log_ratio)
    if policy.surrogate == "soft":
        return _sigmoid_surrogate(policy, r, advantage)
    if policy.surrogate == "clip":
        return _clipped_surrogate(policy, r, advantage)
    if policy.ratio_cap is not None:
        return _capped_surrogate(policy.ratio_cap, r, log_ratio, advantage)
    linear = r.mul_(advantage).neg_()
    return LossTerm(linear, linear)


def _capped_surrogate(cap: float, r: Tensor, log_ratio: Tensor, advantage: Tensor) -> LossTerm:
    """Compute -A * r up to the cap, and its tangent in l above it, so that the gradient is -A * min(r, cap)."""
    grad = r.clamp_(max=cap).mul_(advantage).neg_()
    beyond = (log_ratio - math.log(cap)).clamp_(min=0)
    return LossTerm(torch.addcmul(grad, grad, beyond), grad)


def _clipped_surrogate(policy: PolicyTerm, r: Tensor, advantage: Tensor) -> LossTerm:
    """Compute -min(r*A, clip(r)*A), overwriting r. Inside the band both are equal, and nothing is clipped."""
    eps = policy.eps or 0.0
    bound = r.clamp(1 - eps, 1 + (eps if policy.eps_high is None else policy.eps_high)).mul_(advantage)
    linear = r.mul_(advantage)
    clipped = less_than(bound, linear)
    value = torch.minimum(linear, bound, out=bound)
    if policy.dual_clip is not None:
        floor = (advantage * policy.dual_clip).masked_fill_(advantage >= 0, -torch.inf)
        clipped |= value < floor
        value = torch.maximum(value, floor, out=value)
    return LossTerm(value, apply_bitmask_(linear, keep_bitmask(clipped, linear.dtype)), clipped, sign=-1.0)


def _sigmoid_surrogate(policy: PolicyTerm, r: Tensor, advantage: Tensor) -> LossTerm:
    """Compute -A * (4 / tau) * sigmoid(tau * (r - 1)), whose gradient is -A on policy."""
    assert policy.tau_positive is not None and policy.tau_negative is not None
    tau = where_positive(advantage, policy.tau_positive, policy.tau_negative)
    gate = torch.sigmoid(tau * (r - 1))
    return LossTerm(-advantage * gate * (4 / tau), -advantage * 4 * gate * (1 - gate) * r)


def penalty_term(penalty: Penalty, active: ActiveTokens) -> LossTerm:
    """Compute coef times the estimate of a penalty, for all active tokens."""
    x = active.log_ratio(penalty.between)
    if penalty.estimator == "log_ratio_squared":
        return LossTerm(x.square().mul_(penalty.coef), x * (2 * penalty.coef))
    if penalty.estimator == "k1":
        value, grad = x, torch.ones_like(x)
    elif penalty.estimator == "k2":
        value, grad = x.square() / 2, x
    else:
        inverse = ratio(-x)
        value, grad = inverse + x - 1, 1 - inverse
    if penalty.ratio_correction:
        r = ratio(active.log_ratio("policy/sampler"))
        value, grad = r * value, r * (value + grad)
    return LossTerm(value * penalty.coef, grad * penalty.coef)
