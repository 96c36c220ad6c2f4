"""Checks of masking: which tokens and sequences a loss reads and drops, and whether dropped ones have an effect."""

import math

import torch

from keel.signal import TokenBatch
from keel.signal.audit.observe import (
    active,
    close,
    common_factor,
    difference,
    dropped_sequences,
    enlarge,
    loss_ignores,
    same,
    with_failed_rollout,
)
from keel.signal.audit.probe_batches import Token, append_to_first_group, build, with_advantages
from keel.signal.audit.target import LossError, Target

# a. masked values reach the loss


def check_untrainable_ignored(target: Target, batch: TokenBatch) -> str | None:
    """Check that the values of untrainable tokens change nothing, including NaN and infinities."""
    original = target.evaluate(batch)
    untrainable = ~batch.trainable
    floats = {name: value.detach() for name, value in batch.tensors().items() if value.is_floating_point()}
    for name in ("logprobs", "sampler_logprobs", "advantages"):
        for value in (9.0, -9.0):  # finite values get past a guard against NaN
            changed = target.evaluate(batch.replace(**{name: floats[name].masked_fill(untrainable, value)}))
            if not same(target, original, changed):
                return f"with {name} = {value} on untrainable tokens {difference(target, original, changed)}"
    for value in (math.nan, math.inf, -math.inf, 1e30):
        filled = {name: field.masked_fill(untrainable, value) for name, field in floats.items()}
        all_changed = target.evaluate(batch.replace(**filled))
        if same(target, original, all_changed):
            continue
        for name, field in filled.items():
            changed = target.evaluate(batch.replace(**{name: field}))
            if not same(target, original, changed):
                return f"with {name} = {value} on untrainable tokens {difference(target, original, changed)}"
        return f"with {value} in every field of untrainable tokens {difference(target, original, all_changed)}"
    return None


def check_extreme_ratios(target: Target, batch: TokenBatch) -> str | None:
    """Check that a log-ratio of +-1000 on one token causes no NaN in the loss or a gradient."""
    anchor = "proximal_logprobs" if target.declaration.anchor == "proximal" else "sampler_logprobs"
    for index in batch.trainable.nonzero().squeeze(1).tolist():
        for policy_logprob, anchor_logprob in ((-0.1, -1000.1), (-1000.1, -0.1)):
            extreme = batch
            for name, value in (("logprobs", policy_logprob), (anchor, anchor_logprob)):
                filled = batch.tensors()[name].detach().index_fill(0, torch.tensor(index), value)
                extreme = extreme.replace(**{name: filled})
            evaluation = target.evaluate(with_advantages(target.declaration, extreme, extreme.advantages))
            if math.isnan(evaluation.loss) or bool(evaluation.gradient.isnan().any()):
                log_ratio = f"{policy_logprob - anchor_logprob:+.0f}"
                return (
                    f"with a log-ratio of {log_ratio} on token {index} the loss is {evaluation.loss}, or a gradient NaN"
                )
    return None


def check_invalid_logprobs_dropped(target: Target, batch: TokenBatch) -> str | None:
    """Check that a trainable token whose sampler log-prob is not finite is dropped, or that the loss raises."""
    if target.declaration.signal == "none":
        return None
    batch = enlarge(target, batch, 128)
    target.evaluate_finite(batch)  # a loss that raises or is NaN without the damaged token is not so because of it
    index = int(batch.trainable.nonzero()[0])
    assert batch.sampler_logprobs is not None
    for value in (math.nan, math.inf, -math.inf):
        damaged = batch.replace(sampler_logprobs=batch.sampler_logprobs.index_fill(0, torch.tensor(index), value))
        try:
            evaluation = target.evaluate(damaged)
        except LossError:  # any exception stops the step, which is as good as dropping the token
            continue
        if not math.isfinite(evaluation.loss) or not bool(evaluation.gradient.isfinite().all()):
            return (
                f"with sampler_logprobs[{index}] = {value} on a trainable token the loss is {evaluation.loss},"
                " or a gradient is not finite"
            )
        trains = bool(evaluation.gradient[index] != 0)
        if target.declaration.dropped_from == "policy term":
            trains = bool(active(target, damaged)[index])  # declared to keep its penalties
        if trains or not loss_ignores(target, damaged, torch.arange(len(batch)) == index):
            return f"with sampler_logprobs[{index}] = {value} the token still trains, as if it were on-policy"
    return None


# c. dropped samples affect others


def check_failed_rollouts_ignored(target: Target, batch: TokenBatch) -> str | None:
    """Check that a rollout without a trainable token changes no gradient, except by a common factor.

    A common factor means that the rollout counts in the divisor, which class f checks.
    """
    before = target.evaluate(batch).gradient
    after = target.evaluate(with_failed_rollout(target, batch)).gradient[: len(batch)]
    if close(target, before, after) or common_factor(target, before, after) is not None:
        return None
    return "a rollout without a trainable token, added to a group, changes the gradients of the group"


def check_dropped_sequences_ignored(target: Target, batch: TokenBatch) -> str | None:
    """Check that the advantage of a dropped sequence does not change the gradients of its group."""
    for sequence in dropped_sequences(target):
        joined = append_to_first_group(batch, sequence)
        scaled = joined.advantages.clone()
        scaled[len(batch) :] *= 9.0
        before = target.evaluate(joined).gradient[: len(batch)]
        after = target.evaluate(with_advantages(target.declaration, joined, scaled)).gradient[: len(batch)]
        if not close(target, before, after):
            return "the advantage of a dropped sequence changes the gradients of its group"
    return None


def check_dropped_tokens_have_no_gradient(target: Target, batch: TokenBatch) -> str | None:
    """Check that a dropped token has zero gradient, unless it is declared to keep its penalties."""
    if target.declaration.dropped_from != "every term" or target.declaration.signal == "none":
        return None
    gradient = target.evaluate(batch).gradient
    suspects = ~active(target, batch) & batch.trainable & (gradient.abs() > 1e-12)
    for index in suspects.nonzero().squeeze(1).tolist():
        if loss_ignores(target, batch, torch.arange(len(batch)) == index):
            return f"token {index} is dropped but has a gradient of {float(gradient[index]):.6g}"
    return None


def check_dropped_tokens_keep_penalty(target: Target, batch: TokenBatch) -> str | None:
    """Check that a dropped token still has a penalty if that is declared.

    With a divisor of kept tokens, a step without an active token has no divisor and may have no penalty. The same holds
    for a sequence whose own kept tokens divide it.
    """
    if target.declaration.dropped_from != "policy term":
        return None
    assert batch.sampler_logprobs is not None
    is_active = active(target, batch)
    without_gradient = ~is_active & batch.trainable & (target.evaluate(batch).gradient == 0)
    if target.declaration.divisor == "kept sequences":
        without_gradient &= torch.isin(batch.sequence, batch.sequence[is_active])
    elif "kept" in target.declaration.divisor and not bool(is_active.any()):
        return None
    off_policy = without_gradient & ((batch.logprobs - batch.sampler_logprobs).abs() > 1e-3)
    if not bool(off_policy.any()):
        return None
    return f'token {int(off_policy.nonzero()[0])} is dropped and has no penalty, although dropped_from = "policy term"'


# d. sequence mask applied per token


def check_sequence_decision(target: Target, batch: TokenBatch) -> str | None:
    """Check that the tokens of a sequence that are not dropped individually are dropped or kept together."""
    if "step" in target.declaration.decisions or target.declaration.signal == "none":
        return None
    is_active = active(target, batch).tolist()
    for sequence in torch.unique(batch.sequence):
        indices = ((batch.sequence == sequence) & batch.trainable).nonzero().squeeze(1).tolist()
        if len({is_active[index] for index in indices}) < 2:
            continue
        kept = [index for index in indices if is_active[index]]
        dropped = [index for index in indices if not is_active[index] and not _dropped_alone(target, batch, index)]
        if dropped:
            return (
                f"token {dropped[0]} is dropped because of its sequence, but token {kept[0]} of the same sequence"
                " still trains"
            )
    return None


def _dropped_alone(target: Target, batch: TokenBatch, index: int) -> bool:
    """Return whether the token is dropped independent of the other tokens of its sequence."""
    token = batch.take(torch.tensor([index]))
    assert token.group is not None
    for advantage in (5.0, -5.0):
        for drift in (0.0, 0.05, -0.05):
            others = build(target.declaration, [[Token(drift, advantage)] * 60])
            same_sequence = others.replace(sequence=token.sequence.expand(60), group=token.group.expand(60))
            joined = TokenBatch.cat([token, same_sequence])
            if bool(active(target, joined)[0]):
                return False
    return True
