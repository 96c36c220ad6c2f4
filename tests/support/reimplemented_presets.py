"""Presets written again in plain torch, as a user would write them: correct ones, and wrong ones with one mistake each.

`REIMPLEMENTED` maps each correct loss to its preset and parameters. `MISTAKEN` does so for losses that differ from the
preset; most of them have every property that the audit checks without a preset.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keel import TokenBatch

Loss = Callable[[TokenBatch], Tensor]


def valid_tokens(batch: TokenBatch) -> TokenBatch:
    return batch.take((batch.trainable & batch.sampler_logprobs.isfinite()).nonzero().squeeze(1))


def trainable_count(batch: TokenBatch) -> Tensor:
    return batch.trainable.sum().clamp(min=1)


def ratios(tokens: TokenBatch) -> Tensor:
    return torch.exp((tokens.logprobs - tokens.sampler_logprobs).clamp(-30.0, 30.0))


def sequence_mean(batch: TokenBatch, tokens: TokenBatch, values: Tensor) -> Tensor:
    """Average over the trainable tokens of each sequence, then over the sequences."""
    ids, counts = torch.unique(batch.sequence[batch.trainable], return_counts=True)
    lengths = counts[torch.searchsorted(ids, tokens.sequence)]
    return (values / lengths).sum() / max(len(ids), 1)


def per_sequence(tokens: TokenBatch, values: Tensor) -> Tensor:
    """Return the mean of each token's own sequence."""
    size = int(tokens.sequence.max()) + 1 if len(tokens) else 1
    sums = values.new_zeros(size).index_add(0, tokens.sequence, values)
    counts = torch.bincount(tokens.sequence, minlength=size).clamp(min=1)
    return (sums / counts)[tokens.sequence]


# Correct


def dapo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    surrogate = torch.min(ratio * tokens.advantages, ratio.clamp(0.8, 1.28) * tokens.advantages)
    return -surrogate.sum() / trainable_count(batch)


def dapo_wide(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio, advantage = ratios(tokens), tokens.advantages
    # the clip as two cases instead of a minimum
    bound = torch.where(advantage > 0, 1.4, 0.7)
    clipped = torch.where(advantage > 0, ratio > bound, ratio < bound)
    return -(advantage * torch.where(clipped, bound, ratio)).sum() / trainable_count(batch)


def grpo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    surrogate = torch.min(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    return -sequence_mean(batch, tokens, surrogate)


def dr_grpo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    surrogate = torch.min(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    return -surrogate.sum() / (max(len(torch.unique(batch.sequence[batch.trainable])), 1) * 1024)


def ppo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio, advantage = ratios(tokens), tokens.advantages
    clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.where(advantage < 0, torch.min(clipped, -3.0 * advantage), clipped).sum() / trainable_count(batch)


def gspo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = torch.exp(per_sequence(tokens, tokens.logprobs - tokens.sampler_logprobs).clamp(-30.0, 30.0))
    advantage = per_sequence(tokens, tokens.advantages)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    return -sequence_mean(batch, tokens, surrogate)


def cispo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    weight = ratios(tokens).clamp(max=5.0).detach()
    return -(weight * tokens.advantages * tokens.logprobs).sum() / trainable_count(batch)


def icepop(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    inside = (ratio >= 0.2) & (ratio <= 5.0)
    return -(tokens.advantages[inside] * ratio[inside]).sum() / trainable_count(batch)


def opsm(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    kl = per_sequence(tokens, (tokens.sampler_logprobs - tokens.logprobs).detach())
    keep = ~((kl > 1e-4) & (per_sequence(tokens, tokens.advantages) < 0))
    loss = torch.max(-ratio * tokens.advantages, -ratio.clamp(0.8, 1.2) * tokens.advantages)
    return loss[keep].sum() / trainable_count(batch)


def dppo_kl(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    log_ratio = tokens.logprobs - tokens.sampler_logprobs
    change = (tokens.logprobs.exp() - tokens.sampler_logprobs.exp()).detach()
    dropped = ((tokens.advantages > 0) & (change > 0.2)) | ((tokens.advantages < 0) & (change < -0.2))
    policy = -(tokens.advantages[~dropped] * ratios(tokens)[~dropped]).sum()
    return (policy + 1e-3 * log_ratio.square().sum()) / trainable_count(batch)


def proximal_dapo(batch: TokenBatch) -> Tensor:
    tokens = valid_tokens(batch)
    ratio = torch.exp((tokens.logprobs - tokens.proximal_logprobs).clamp(-30.0, 30.0))
    surrogate = torch.min(ratio * tokens.advantages, ratio.clamp(0.8, 1.28) * tokens.advantages)
    return -surrogate.sum() / trainable_count(batch)


def float32_dapo(batch: TokenBatch) -> Tensor:
    names = ("logprobs", "sampler_logprobs", "advantages")
    return dapo(batch.replace(**{name: batch.tensors()[name].float() for name in names}))


REIMPLEMENTED: dict[Loss, tuple[str, dict[str, Any]]] = {
    dapo: ("dapo", {}),
    dapo_wide: ("dapo", {"eps": 0.3, "eps_high": 0.4}),
    grpo: ("grpo", {}),
    dr_grpo: ("dr_grpo", {}),
    ppo: ("ppo", {}),
    gspo: ("gspo", {}),
    cispo: ("cispo", {}),
    icepop: ("icepop", {}),
    opsm: ("opsm", {}),
    dppo_kl: ("dppo_kl", {}),
    proximal_dapo: ("dapo", {"anchor": "proximal"}),
    float32_dapo: ("dapo", {}),
}


# Wrong


def dapo_min_max_swapped(batch: TokenBatch) -> Tensor:
    """The larger of the two surrogates instead of the smaller: nothing stops a token that has moved far."""
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    surrogate = torch.max(ratio * tokens.advantages, ratio.clamp(0.8, 1.28) * tokens.advantages)
    return -surrogate.sum() / trainable_count(batch)


def dapo_bounds_swapped(batch: TokenBatch) -> Tensor:
    """0.28 below and 0.2 above."""
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    surrogate = torch.min(ratio * tokens.advantages, ratio.clamp(0.72, 1.2) * tokens.advantages)
    return -surrogate.sum() / trainable_count(batch)


def dual_clip_for_every_sign(batch: TokenBatch) -> Tensor:
    """The dual clip is a maximum of the loss for positive advantages too."""
    tokens = valid_tokens(batch)
    ratio, advantage = ratios(tokens), tokens.advantages
    clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.min(clipped, -3.0 * advantage).sum() / trainable_count(batch)


def icepop_half_the_band(batch: TokenBatch) -> Tensor:
    """An upper bound of 4 instead of 5."""
    tokens = valid_tokens(batch)
    ratio = ratios(tokens)
    inside = (ratio >= 0.2) & (ratio <= 4.0)
    return -(tokens.advantages[inside] * ratio[inside]).sum() / trainable_count(batch)


def cispo_with_ratio_gradient(batch: TokenBatch) -> Tensor:
    """The weight carries a gradient."""
    tokens = valid_tokens(batch)
    weight = ratios(tokens).clamp(max=5.0)
    return -(weight * tokens.advantages * tokens.logprobs).sum() / trainable_count(batch)


def gspo_sum_of_log_ratios(batch: TokenBatch) -> Tensor:
    """The ratio of the sequence is a product, without the root of its length."""
    tokens = valid_tokens(batch)
    log_ratio = tokens.logprobs - tokens.sampler_logprobs
    lengths = torch.bincount(tokens.sequence)[tokens.sequence]
    ratio = torch.exp((per_sequence(tokens, log_ratio) * lengths).clamp(-30.0, 30.0))
    advantage = per_sequence(tokens, tokens.advantages)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    return -sequence_mean(batch, tokens, surrogate)


def dapo_with_an_offset(batch: TokenBatch) -> Tensor:
    """The gradients are those of the preset, the loss is not."""
    return dapo(batch) + 0.1


MISTAKEN: dict[Loss, tuple[str, dict[str, Any]]] = {
    dapo_min_max_swapped: ("dapo", {}),
    dapo_bounds_swapped: ("dapo", {}),
    dual_clip_for_every_sign: ("ppo", {}),
    icepop_half_the_band: ("icepop", {}),
    cispo_with_ratio_gradient: ("cispo", {}),
    gspo_sum_of_log_ratios: ("gspo", {}),
    dapo_with_an_offset: ("dapo", {}),
    dapo: ("dapo", {"eps_high": 0.3}),
}
