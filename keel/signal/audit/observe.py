"""Compare evaluations of a target, and find out from its loss and gradient which tokens it trains on.

A token is *active* when its gradient changes with the advantage. An inactive token was dropped or clipped; it was
dropped when the loss does not change with its advantage either.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from keel.signal import TokenBatch
from keel.signal.audit.probe_batches import Token, append, append_to_first_group, build, with_advantages
from keel.signal.audit.target import Evaluation, Target

Check = Callable[[Target, TokenBatch], str | None]
"""Check one property on one batch. Returns None when the property holds, or a message that describes the failure."""


def same(target: Target, first: Evaluation, second: Evaluation) -> bool:
    """Return whether two evaluations have the same loss and gradient."""
    return close(target, torch.tensor(first.loss), torch.tensor(second.loss)) and close(
        target, first.gradient, second.gradient
    )


def close(target: Target, first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of the precision that the target computes in."""
    rtol, atol = (1e-7, 1e-10) if target.exact else (1e-4, 1e-6)
    return torch.allclose(first.double(), second.double(), rtol=rtol, atol=atol)


def difference(target: Target, first: Evaluation, second: Evaluation) -> str:
    """Describe the difference between two evaluations: in the loss, or else in the gradient that differs most."""
    if not close(target, torch.tensor(first.loss), torch.tensor(second.loss)):
        return f"the loss changes from {first.loss:.6g} to {second.loss:.6g}"
    index = int((first.gradient - second.gradient).abs().nan_to_num(torch.inf).argmax())
    before, after = float(first.gradient[index]), float(second.gradient[index])
    return f"the gradient of token {index} changes from {before:.6g} to {after:.6g}"


def active(target: Target, batch: TokenBatch) -> Tensor:
    """Return a mask of the tokens whose gradient changes with the advantages.

    If no gradient changes with the size of the advantages, the loss may read their signs only. Then the tokens whose
    gradient has the opposite sign under the opposite advantages count.
    """
    gradient = target.evaluate(batch).gradient
    if target.declaration.signal == "none":
        return gradient.abs() > 1e-11
    follows = torch.zeros_like(batch.trainable)
    for factor in (1.5, 0.3):  # a loss may bound the advantage on one side
        if not bool(follows[batch.trainable].all()):
            follows |= (_with_scaled_signal(target, batch, factor).gradient - gradient).abs() > 1e-11
    if not bool(follows.any()):
        opposite, larger, none = (_with_scaled_signal(target, batch, factor).gradient for factor in (-1.0, -1.5, 0.0))
        # a token that is dropped for its sign, and keeps a penalty, also has another gradient under the opposite
        # advantage; but that one changes with the size, and its own is the one without any advantage
        reads_sign = ((larger - opposite).abs() <= 1e-11) | ((gradient - none).abs() > 1e-11)
        follows = (gradient * opposite < 0) & reads_sign
    return follows


def loss_ignores(target: Target, batch: TokenBatch, tokens: Tensor) -> bool:
    """Return whether the loss does not change with these tokens' advantages: they were dropped, not only clipped."""
    before = torch.tensor(target.evaluate(batch).loss)
    return all(
        close(target, before, torch.tensor(_with_scaled_signal(target, batch, factor, tokens).loss))
        for factor in (1.5, 0.3)
    )


def _with_scaled_signal(target: Target, batch: TokenBatch, factor: float, tokens: Tensor | None = None) -> Evaluation:
    scaled = batch.advantages * factor
    advantages = scaled if tokens is None else torch.where(tokens, scaled, batch.advantages)
    return target.evaluate(with_advantages(target.declaration, batch, advantages))


def common_factor(target: Target, before: Tensor, after: Tensor) -> float | None:
    """Return the factor between two gradients if it is the same for every token, else None."""
    nonzero = before.abs() > 1e-9
    if not bool(nonzero.any()) or not close(target, before[~nonzero], after[~nonzero]):
        return None
    ratios = after[nonzero] / before[nonzero]
    return float(ratios[0]) if close(target, ratios, ratios[0].expand_as(ratios)) else None


def enlarge(target: Target, batch: TokenBatch, tokens: int) -> TokenBatch:
    """Append many ordinary tokens, so that one damaged token is a small fraction of the batch."""
    return append(batch, build(target.declaration, [[Token(0.0)] * 4] * (tokens // 4)))


def with_failed_rollout(target: Target, batch: TokenBatch) -> TokenBatch:
    """Append a sequence without a trainable token to the group of the first token."""
    rollout = build(target.declaration, [[Token(0.2, 100.0, False), Token(-0.2, 100.0, False)]])
    return append_to_first_group(batch, rollout)


@lru_cache(maxsize=4)
def dropped_sequences(target: Target) -> list[TokenBatch]:
    """Return short sequences of which the target drops every token.

    Clipped sequences are not included: evaluated alone, the loss of a clipped sequence still changes with its
    advantage. If the target centres advantages within a group, nothing can be seen from a sequence alone. It then
    counts as dropped when it is inactive among others for both signs of its advantage, which clipping never causes.
    """
    centres = not bool(active(target, build(target.declaration, [[Token(0.0)]])).any())
    dropped = []
    for drift in (8.0, -8.0, 2.0, -2.0):
        pair = [_sequence(target, drift, advantage) for advantage in (1.0, -1.0)]
        inactive = [_inactive_in_group(target, sequence) for sequence in pair]
        for sequence, is_inactive in zip(pair, inactive, strict=True):
            if is_inactive and (all(inactive) if centres else loss_ignores(target, sequence, sequence.trainable)):
                dropped.append(sequence)
    return dropped


def _sequence(target: Target, drift: float, advantage: float) -> TokenBatch:
    sequence = build(target.declaration, [[Token(drift, advantage), Token(drift, advantage)]])
    # equal to the reference, so that the mean of a centred KL penalty does not move when the sequence joins others
    sampled = target.objective is not None and target.objective.composition.kl_penalty_source == "sampled"
    return sequence.replace(reference_logprobs=sequence.sampler_logprobs if sampled else sequence.logprobs)


def _inactive_in_group(target: Target, sequence: TokenBatch) -> bool:
    """Return whether no token of the sequence is active when it is in a group with ordinary sequences."""
    others = build(target.declaration, [[Token(0.0, 1.0)], [Token(0.0, -0.6)], [Token(0.0, 1.7)]], (0, 0, 0))
    joined = append_to_first_group(others, sequence)
    return not bool(active(target, joined)[len(others) :].any())
