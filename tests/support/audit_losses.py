"""Losses for tests of the audit: correct ones, and wrong ones that each reproduce a failure seen in a real codebase.

They are written as a user would write them, in plain torch over a TokenBatch, in the simplest form that shows the
failure. `WRONG` maps each wrong loss to the class that it must fail.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import keel
from keel import TokenBatch

Loss = Callable[[TokenBatch], Tensor]


def kept_mask(batch: TokenBatch, low: float = 0.2, high: float = 5.0) -> Tensor:
    ratio = torch.exp((batch.logprobs - batch.sampler_logprobs).detach())
    return batch.trainable & (ratio >= low) & (ratio <= high)


def linear(batch: TokenBatch, keep: Tensor, advantages: Tensor | None = None) -> Tensor:
    """Return -A * r of the kept tokens; dropped tokens are never read."""
    d = batch.logprobs[keep] - batch.sampler_logprobs[keep]
    return -(batch.advantages if advantages is None else advantages)[keep] * torch.exp(d)


def tokens_of(batch: TokenBatch) -> Tensor:
    return batch.trainable.sum().clamp(min=1)


def sequence_masks(batch: TokenBatch) -> list[Tensor]:
    return [(batch.sequence == sequence) & batch.trainable for sequence in torch.unique(batch.sequence)]


# Correct losses


def right_icepop(batch: TokenBatch) -> Tensor:
    return linear(batch, kept_mask(batch)).sum() / tokens_of(batch)


def right_clip(batch: TokenBatch) -> Tensor:
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    ratio = torch.exp((batch.logprobs[valid] - batch.sampler_logprobs[valid]).clamp(-30, 30))
    advantage = batch.advantages[valid]
    return torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage).sum() / tokens_of(batch)


def right_sequence_mask(batch: TokenBatch) -> Tensor:
    keep = batch.trainable & batch.sampler_logprobs.isfinite()
    total = batch.logprobs[batch.trainable].sum() * 0
    for selected in sequence_masks(batch):
        selected = selected & keep
        if selected.any():
            kl = (batch.sampler_logprobs[selected] - batch.logprobs[selected]).mean().detach()
            if not (kl > 0.05 and batch.advantages[selected].mean() < 0):
                total = total + linear(batch, selected).sum()
    return total / tokens_of(batch)


def right_mask_and_penalty(batch: TokenBatch, kl_tau: float = 1e-3) -> Tensor:
    keep = kept_mask(batch)
    d = batch.logprobs[keep] - batch.sampler_logprobs[keep]
    return (linear(batch, keep) + kl_tau * d.square()).sum() / tokens_of(batch)


def right_group_baseline(batch: TokenBatch) -> Tensor:
    keep = kept_mask(batch)
    centred = batch.advantages.clone()
    for group in torch.unique(batch.group[keep]):
        selected = keep & (batch.group == group)
        centred[selected] -= batch.advantages[selected].mean()
    return linear(batch, keep, centred).sum() / tokens_of(batch)


@keel.declare(divisor="sequences")
def right_sequence_mean(batch: TokenBatch) -> Tensor:
    keep = kept_mask(batch)
    sums = [
        linear(batch, selected & keep).sum() / selected.sum() for selected in sequence_masks(batch) if selected.any()
    ]
    return torch.stack(sums).mean()


@keel.declare(dropped_from="policy term")
def right_penalty_on_all(batch: TokenBatch) -> Tensor:
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    d = batch.logprobs[valid] - batch.sampler_logprobs[valid]
    return (linear(batch, kept_mask(batch)).sum() + 1e-3 * d.square().sum()) / tokens_of(batch)


@keel.declare(anchor="proximal")
def right_proximal(batch: TokenBatch) -> Tensor:
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    d = batch.logprobs[valid] - batch.proximal_logprobs[valid]
    inside = d.abs() < 1
    return -(batch.advantages[valid][inside] * torch.exp(d[inside])).sum() / tokens_of(batch)


@keel.declare(divisor="kept tokens")
def right_kept_divisor(batch: TokenBatch) -> Tensor:
    keep = kept_mask(batch)
    return linear(batch, keep).sum() / keep.sum().clamp(min=1)


@keel.declare(divisor="kept tokens", dropped_from="policy term")
def right_kept_divisor_and_penalty_on_all(batch: TokenBatch) -> Tensor:
    """A step without a kept token has nothing to be divided by, and no loss."""
    keep = kept_mask(batch, 0.5, 2.0)
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    d = batch.logprobs[valid] - batch.sampler_logprobs[valid]
    if not keep.any():
        return d.sum() * 0
    return (linear(batch, keep).sum() + 1e-3 * d.square().sum()) / keep.sum()


def right_sign_of_advantage(batch: TokenBatch) -> Tensor:
    """The size of the advantage has no effect."""
    return linear(batch, kept_mask(batch), batch.advantages.sign()).sum() / tokens_of(batch)


RIGHT: list[Loss] = [
    right_icepop,
    right_clip,
    right_sequence_mask,
    right_mask_and_penalty,
    right_group_baseline,
    right_sequence_mean,
    right_penalty_on_all,
    right_proximal,
    right_kept_divisor,
    right_kept_divisor_and_penalty_on_all,
    right_sign_of_advantage,
]


# Correct losses in other styles, with different ways to reduce over sequences


def token_mean(batch: TokenBatch) -> Tensor:
    """REINFORCE with a truncated importance weight, averaged over tokens with torch.where."""
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    log_ratio = torch.where(valid, batch.logprobs - batch.sampler_logprobs, 0.0)
    log_ratio = torch.where(valid, log_ratio, 0.0).clamp(-20.0, 20.0)
    policy_loss = -torch.where(valid, batch.advantages, 0.0) * torch.exp(log_ratio).clamp(max=2.0)
    return policy_loss.sum() / batch.trainable.sum().clamp(min=1)


def valid_tokens(batch: TokenBatch) -> TokenBatch:
    return batch.take((batch.trainable & batch.sampler_logprobs.isfinite()).nonzero().squeeze(1))


def sequence_mask_index_add(batch: TokenBatch) -> Tensor:
    """Drop sequences by their mean log-ratio: index_add into a table of max + 1 rows."""
    tokens = valid_tokens(batch)
    if len(tokens) == 0:
        return batch.logprobs.sum() * 0.0
    log_ratio = tokens.logprobs - tokens.sampler_logprobs
    table = torch.zeros(int(batch.sequence.max()) + 1, dtype=log_ratio.dtype)
    sums = table.index_add(0, tokens.sequence, log_ratio.detach())
    counts = table.index_add(0, tokens.sequence, torch.ones_like(log_ratio))
    keep = ((sums / counts.clamp(min=1)).abs() < 0.5)[tokens.sequence]
    return -(tokens.advantages[keep] * torch.exp(log_ratio[keep].clamp(max=20.0))).sum() / tokens_of(batch)


def sequence_ratio_scatter_add(batch: TokenBatch) -> Tensor:
    """GSPO with a token-level mean: one clipped ratio per sequence, computed with scatter_add."""
    tokens = valid_tokens(batch)
    if len(tokens) == 0:
        return batch.logprobs.sum() * 0.0
    size = int(tokens.sequence.max()) + 1
    log_ratio = tokens.logprobs - tokens.sampler_logprobs
    zeros = torch.zeros(size, dtype=log_ratio.dtype)
    lengths = zeros.scatter_add(0, tokens.sequence, torch.ones_like(log_ratio))
    mean_log_ratio = zeros.scatter_add(0, tokens.sequence, log_ratio) / lengths.clamp(min=1)
    advantage = zeros.scatter_add(0, tokens.sequence, tokens.advantages) / lengths.clamp(min=1)
    ratio = torch.exp(mean_log_ratio.clamp(-20.0, 20.0))
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(lengths * surrogate).sum() / tokens_of(batch)


@keel.declare(divisor="sequences")
def sequence_mean_unique_inverse(batch: TokenBatch) -> Tensor:
    """GRPO: clipped ratios, averaged per sequence and then over sequences, with torch.unique."""
    _, inverse = torch.unique(batch.sequence[batch.trainable], return_inverse=True)
    valid = batch.sampler_logprobs[batch.trainable].isfinite()
    lengths = torch.bincount(inverse).to(batch.logprobs.dtype)
    tokens = valid_tokens(batch)
    ratio = torch.exp((tokens.logprobs - tokens.sampler_logprobs).clamp(-20.0, 20.0))
    surrogate = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    return -(surrogate / lengths[inverse[valid]]).sum() / max(len(lengths), 1)


def sequence_mask_loop(batch: TokenBatch) -> Tensor:
    """Drop sequences by the geometric mean of their ratios, in a Python loop over `unique().tolist()`."""
    losses = [batch.logprobs.new_zeros(())]
    for sequence in batch.sequence.unique().tolist():
        rows = (batch.sequence == sequence) & batch.trainable & batch.sampler_logprobs.isfinite()
        log_ratio = batch.logprobs[rows] - batch.sampler_logprobs[rows]
        if rows.any() and 0.5 < log_ratio.detach().mean().exp() < 2.0:
            losses.append(-(batch.advantages[rows] * log_ratio.clamp(-20.0, 20.0).exp()).sum())
    return torch.stack(losses).sum() / tokens_of(batch)


@keel.declare(divisor="sequences")
def sequence_ratio_padded(batch: TokenBatch) -> Tensor:
    """GSPO on padded [B, T] tensors with a mask, averaged over sequences."""
    rows = int(batch.sequence.max()) + 1
    one_hot = torch.nn.functional.one_hot(batch.sequence, rows)
    column = (one_hot.cumsum(0) - 1).gather(1, batch.sequence[:, None]).squeeze(1)
    shape = (rows, int(column.max()) + 1)

    def pad(values: Tensor, fill: float | bool) -> Tensor:
        return torch.full(shape, fill, dtype=values.dtype).index_put((batch.sequence, column), values)

    trainable = pad(batch.trainable, False)
    mask = trainable & pad(batch.sampler_logprobs, 0.0).isfinite()
    log_ratio = (pad(batch.logprobs, 0.0) - pad(batch.sampler_logprobs, 0.0)).masked_fill(~mask, 0.0)
    advantages = pad(batch.advantages, 0.0).masked_fill(~mask, 0.0)
    lengths = mask.sum(1).clamp(min=1)
    ratio = torch.exp((log_ratio.sum(1) / lengths).clamp(-20.0, 20.0))
    advantage = advantages.sum(1) / lengths
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    return -surrogate.sum() / trainable.any(1).sum().clamp(min=1)


@keel.declare(divisor="constant")
def constant_length(batch: TokenBatch) -> Tensor:
    """Dr. GRPO: clipped ratios, summed and divided by sequences times a maximum length; sequences from bincount."""
    sequences = (torch.bincount(batch.sequence[batch.trainable]) > 0).sum().clamp(min=1)
    tokens = valid_tokens(batch)
    ratio = torch.exp((tokens.logprobs - tokens.sampler_logprobs).clamp(-20.0, 20.0))
    surrogate = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.28) * tokens.advantages)
    return -surrogate.sum() / (sequences * 1024)


@keel.declare(anchor="proximal")
def ppo_clip_proximal(batch: TokenBatch) -> Tensor:
    """PPO with the proximal policy as old policy and a dual clip."""
    tokens = batch.take((batch.trainable & batch.sampler_logprobs.isfinite()).nonzero().squeeze(1))
    ratio = torch.exp((tokens.logprobs - tokens.proximal_logprobs).clamp(-20.0, 20.0))
    clipped = torch.maximum(-tokens.advantages * ratio, -tokens.advantages * ratio.clamp(0.8, 1.2))
    dual = torch.minimum(clipped, -3.0 * tokens.advantages)
    return torch.where(tokens.advantages < 0, dual, clipped).sum() / batch.trainable.sum().clamp(min=1)


def sequence_mask_segment_reduce(batch: TokenBatch) -> Tensor:
    """Drop sequences by their largest ratio: sort by id, then torch.segment_reduce over lengths from bincount."""
    tokens = valid_tokens(batch)
    if len(tokens) == 0:
        return batch.logprobs.sum() * 0.0
    tokens = tokens.take(torch.argsort(tokens.sequence, stable=True))
    log_ratio = tokens.logprobs - tokens.sampler_logprobs
    lengths = torch.bincount(tokens.sequence)
    largest = torch.segment_reduce(log_ratio.detach().abs(), "max", lengths=lengths, initial=0.0)
    keep = torch.repeat_interleave(largest, lengths) < 2.0
    return -(tokens.advantages[keep] * log_ratio[keep].exp()).sum() / tokens_of(batch)


def sequence_mask_one_hot(batch: TokenBatch) -> Tensor:
    """Drop sequences of negative advantage with a large KL: membership as a one-hot matrix."""
    tokens = valid_tokens(batch)
    if len(tokens) == 0:
        return batch.logprobs.sum() * 0.0
    membership = torch.nn.functional.one_hot(tokens.sequence).to(tokens.logprobs.dtype)
    lengths = membership.sum(0).clamp(min=1)
    log_ratio = tokens.logprobs - tokens.sampler_logprobs
    kl = (membership.T @ -log_ratio.detach()) / lengths
    advantage = (membership.T @ tokens.advantages) / lengths
    dropped = (membership @ ((kl > 0.05) & (advantage < 0)).to(lengths.dtype)).bool()
    keep = ~dropped
    return -(tokens.advantages[keep] * log_ratio[keep].clamp(max=20.0).exp()).sum() / tokens_of(batch)


def group_baseline_table(batch: TokenBatch) -> Tensor:
    """Subtract the group's mean over kept tokens, looked up by group id in a table of max + 1 rows."""
    keep = kept_mask(batch)
    size = int(batch.group.max()) + 1
    counts = torch.bincount(batch.group[keep], minlength=size).clamp(min=1)
    means = torch.bincount(batch.group[keep], weights=batch.advantages[keep], minlength=size) / counts
    return linear(batch, keep, batch.advantages - means[batch.group]).sum() / tokens_of(batch)


def group_loop_range(batch: TokenBatch) -> Tensor:
    """Loop over range(group.max() + 1) and skip absent groups; sequences have equal weight in the group's mean."""
    keep = kept_mask(batch)
    centred = batch.advantages.clone()
    for group in range(int(batch.group.max()) + 1):
        masks = [keep & (batch.sequence == sequence) for sequence in batch.sequence[batch.group == group].unique()]
        means = [batch.advantages[mask].mean() for mask in masks if mask.any()]
        if means:
            centred[batch.group == group] -= torch.stack(means).mean()
    return linear(batch, keep, centred).sum() / tokens_of(batch)


CORRECT_STYLES: list[Loss] = [
    token_mean,
    sequence_mask_index_add,
    sequence_ratio_scatter_add,
    sequence_mean_unique_inverse,
    sequence_mask_loop,
    sequence_ratio_padded,
    constant_length,
    ppo_clip_proximal,
    sequence_mask_segment_reduce,
    sequence_mask_one_hot,
    group_baseline_table,
    group_loop_range,
]


# Wrong losses


def mask_times_exp(batch: TokenBatch) -> Tensor:
    """The mask multiplies a ratio that has already overflowed: 0 * inf."""
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    ratio = torch.exp(batch.logprobs[valid] - batch.sampler_logprobs[valid])
    keep = ((ratio >= 0.2) & (ratio <= 5.0)).double().detach()
    return -(keep * ratio * batch.advantages[valid]).sum() / tokens_of(batch)


def where_after_exp(batch: TokenBatch) -> Tensor:
    """The forward pass is finite, but the backward pass computes 0 * inf."""
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    ratio = torch.exp(batch.logprobs[valid] - batch.sampler_logprobs[valid])
    inside = (ratio >= 0.2) & (ratio <= 5.0)
    return -torch.where(inside, ratio * batch.advantages[valid], 0.0).sum() / tokens_of(batch)


def nan_times_zero(batch: TokenBatch) -> Tensor:
    """A NaN log-prob of a prompt token is masked by multiplication and reaches the loss."""
    ratio = torch.exp((batch.logprobs - batch.sampler_logprobs).clamp(-20, 20))
    return -(batch.trainable * ratio * batch.advantages).sum() / tokens_of(batch)


def missing_read_as_on_policy(batch: TokenBatch) -> Tensor:
    """A missing sampler log-prob becomes a ratio of one."""
    sampler = torch.where(batch.sampler_logprobs.isfinite(), batch.sampler_logprobs, batch.logprobs.detach())
    filled = batch.replace(sampler_logprobs=sampler)
    return linear(filled, kept_mask(filled)).sum() / tokens_of(batch)


def _baseline_by(batch: TokenBatch, label: Tensor) -> Tensor:
    keep = kept_mask(batch)
    centred = batch.advantages.clone()
    for group in torch.unique(label[keep]):
        selected = keep & (label == group)
        centred[selected] -= batch.advantages[selected].mean()
    return linear(batch, keep, centred).sum() / tokens_of(batch)


def groups_by_stride(batch: TokenBatch) -> Tensor:
    """Every two consecutive sequences are taken as a group."""
    index = torch.unique_consecutive(batch.sequence, return_inverse=True)[1]
    return _baseline_by(batch, index // 2)


def groups_by_reshape(batch: TokenBatch) -> Tensor:
    """Every four consecutive tokens are taken as a group; raises if the number of tokens is not a multiple of 4."""
    rows = batch.advantages.view(-1, 4)
    centred = (rows - rows.mean(1, keepdim=True)).view(-1)
    return linear(batch, kept_mask(batch), centred).sum() / tokens_of(batch)


def uneven_groups_share_a_baseline(batch: TokenBatch) -> Tensor:
    """Groups of equal size have separate baselines; with unequal sizes, all share one."""
    sizes = {int((batch.group == group).sum()) for group in torch.unique(batch.group)}
    return _baseline_by(batch, batch.group if len(sizes) == 1 else torch.zeros_like(batch.group))


def baselines_crossed_by_order(batch: TokenBatch) -> Tensor:
    """Baselines are listed by group id but assigned in order of appearance."""
    keep = kept_mask(batch)
    ids = torch.unique(batch.group)
    masks = [keep & (batch.group == group) for group in ids]
    means = [batch.advantages[selected].mean() if selected.any() else torch.tensor(0.0) for selected in masks]
    seen = list(dict.fromkeys(batch.group.tolist()))
    centred = batch.advantages.clone()
    for index, group in enumerate(seen):
        centred[batch.group == group] -= means[index]
    return linear(batch, keep, centred).sum() / tokens_of(batch)


def runs_taken_for_sequences(batch: TokenBatch) -> Tensor:
    """Sequences are runs of equal ids, so interleaved tokens become separate sequences."""
    runs = torch.unique_consecutive(batch.sequence, return_inverse=True)[1]
    return right_sequence_mask(batch.replace(sequence=runs))


def dropped_sequences_in_baseline(batch: TokenBatch) -> Tensor:
    """The baseline includes sequences that the mask drops."""
    keep = kept_mask(batch)
    centred = batch.advantages.clone()
    for group in torch.unique(batch.group):
        selected = batch.trainable & (batch.group == group)
        centred[selected] -= batch.advantages[selected].mean()
    return linear(batch, keep, centred).sum() / tokens_of(batch)


def failed_rollouts_in_baseline(batch: TokenBatch) -> Tensor:
    """The baseline includes rollouts without a trainable token."""
    keep = kept_mask(batch)
    sequences = {int(sequence): batch.sequence == sequence for sequence in torch.unique(batch.sequence)}
    centred = batch.advantages.clone()
    for group in torch.unique(batch.group):
        selected = [mask for mask in sequences.values() if batch.group[mask][0] == group]
        scores = [batch.advantages[m & keep].mean() if (m & keep).any() else batch.advantages[m][0] for m in selected]
        if any(not (m & batch.trainable).any() for m in selected):
            centred[batch.group == group] -= torch.stack([s.nan_to_num(0, 0, 0) for s in scores]).mean()
    return linear(batch, keep, centred).sum() / tokens_of(batch)


def sequence_mask_leaks(batch: TokenBatch) -> Tensor:
    """The decision is made for the sequence, but only its tokens with negative advantage are dropped."""
    keep = kept_mask(batch, 0.0, 1e30)
    total = batch.logprobs[batch.trainable].sum() * 0
    for selected in sequence_masks(batch):
        selected = selected & keep
        if selected.any():
            kl = (batch.sampler_logprobs[selected] - batch.logprobs[selected]).mean().detach()
            total = total + linear(batch, selected & ~((kl > 1e-4) & (batch.advantages < 0))).sum()
    return total / tokens_of(batch)


def sequence_clip_by_token_sign(batch: TokenBatch) -> Tensor:
    """One ratio per sequence, but clipped by the sign of each token's advantage."""
    keep = kept_mask(batch, 1e-12, 1e12)
    total = batch.logprobs[batch.trainable].sum() * 0
    for selected in sequence_masks(batch):
        selected = selected & keep
        if selected.any():
            ratio = torch.exp((batch.logprobs[selected] - batch.sampler_logprobs[selected]).mean())
            advantage = batch.advantages[selected]
            token_ratio = ratio.detach() * torch.exp(batch.logprobs[selected] - batch.logprobs[selected].detach())
            total = total + torch.maximum(-token_ratio * advantage, -token_ratio.clamp(0.8, 1.2) * advantage).sum()
    return total / tokens_of(batch)


def ratio_with_its_own_detach(batch: TokenBatch) -> Tensor:
    """The ratio is always one."""
    keep = kept_mask(batch)
    ratio = torch.exp(batch.logprobs[keep] - batch.logprobs[keep].detach())
    return -(batch.advantages[keep] * ratio).sum() / tokens_of(batch)


def sequence_mask_on_recomputed(batch: TokenBatch) -> Tensor:
    """The mask compares with log-probs recomputed by the trainer instead of the sampler's."""
    keep = kept_mask(batch, 0.0, 1e30)
    total = batch.logprobs[batch.trainable].sum() * 0
    for selected in sequence_masks(batch):
        selected = selected & keep
        if selected.any():
            kl = (batch.proximal_logprobs[selected] - batch.logprobs[selected]).mean().detach()
            if not (kl > 1e-4 and batch.advantages[selected].mean() < 0):
                total = total + linear(batch, selected).sum()
    return total / tokens_of(batch)


@keel.declare(decisions=["sequence"])
def mask_without_effect(batch: TokenBatch) -> Tensor:
    """The declared sequence mask compares the policy with itself."""
    keep = kept_mask(batch, 0.0, 1e30)
    total = batch.logprobs[batch.trainable].sum() * 0
    for selected in sequence_masks(batch):
        selected = selected & keep
        kl = (batch.logprobs[selected].detach() - batch.logprobs[selected]).mean().detach()
        if selected.any() and not kl > 1e-4:
            total = total + linear(batch, selected).sum()
    return total / tokens_of(batch)


def untrainable_tokens_in_divisor(batch: TokenBatch) -> Tensor:
    """The mask is applied to the numerator but not to the denominator."""
    return linear(batch, kept_mask(batch)).sum() / len(batch)


def truncation_in_numerator_only(batch: TokenBatch) -> Tensor:
    """The last token of each sequence is masked but counts in the denominator."""
    keep = kept_mask(batch)
    for selected in sequence_masks(batch):
        if selected.sum() > 1:
            keep[selected.nonzero()[-1]] = False
    return linear(batch, keep).sum() / tokens_of(batch)


def sequence_mean_undeclared(batch: TokenBatch) -> Tensor:
    """A mean per sequence, not declared: tokens of short completions have more weight."""
    return right_sequence_mean(batch)


def kept_divisor_undeclared(batch: TokenBatch) -> Tensor:
    """Only kept tokens count in the divisor, not declared: the more tokens are dropped, the larger the step."""
    return right_kept_divisor(batch)


@keel.declare(divisor="kept tokens", dropped_from="policy term")
def penalty_divided_by_one(batch: TokenBatch) -> Tensor:
    """If no token is kept, the penalty of the whole step is divided by 1."""
    keep = kept_mask(batch, 0.5, 2.0)
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    d = batch.logprobs[valid] - batch.sampler_logprobs[valid]
    return (linear(batch, keep).sum() + 1e-3 * d.square().sum()) / keep.sum().clamp(min=1)


def kl_coefficient_ignored(batch: TokenBatch, kl_coef: float = 0.1) -> Tensor:
    """The coefficient is accepted and never used."""
    return right_icepop(batch)


def dual_clip_ignored(batch: TokenBatch, eps: float = 0.2, dual_clip: float = 3.0) -> Tensor:
    """The dual clip is accepted and never used."""
    valid = batch.trainable & batch.sampler_logprobs.isfinite()
    ratio = torch.exp((batch.logprobs[valid] - batch.sampler_logprobs[valid]).clamp(-30, 30))
    advantage = batch.advantages[valid]
    return torch.maximum(-ratio * advantage, -ratio.clamp(1 - eps, 1 + eps) * advantage).sum() / tokens_of(batch)


def kl_ignored_without_reference(batch: TokenBatch, kl_coef: float = 0.0) -> Tensor:
    """The coefficient is silently ignored when there are no reference log-probs."""
    keep = kept_mask(batch)
    loss = linear(batch, keep).sum()
    if batch.reference_logprobs is not None:
        loss = loss + kl_coef * (batch.logprobs[keep] - batch.reference_logprobs[keep]).square().sum()
    return loss / tokens_of(batch)


def kl_centred_per_row(batch: TokenBatch) -> Tensor:
    """A KL adjustment is centred within each packed row of four tokens."""
    keep = kept_mask(batch)
    log_ratio = (batch.logprobs - batch.reference_logprobs).detach()
    adjusted = batch.advantages.clone()
    for row in torch.arange(len(batch)).split(4):
        selected = row[keep[row]]
        adjusted[selected] += 0.1 * (log_ratio[selected].mean() - log_ratio[selected])
    return linear(batch, keep, adjusted).sum() / tokens_of(batch)


def whitened_per_call(batch: TokenBatch) -> Tensor:
    """Advantages are normalised over the tokens of the rank or micro-batch."""
    keep = kept_mask(batch)
    selected = batch.advantages[keep]
    deviation = selected.std() if len(selected) > 1 else torch.tensor(1.0)
    normalised = batch.advantages.clone()
    normalised[keep] = (selected - selected.mean()) / (deviation + 1e-4)
    return linear(batch, keep, normalised).sum() / tokens_of(batch)


def micro_batch_size_matters(batch: TokenBatch) -> Tensor:
    """Divided by the square root of the number of tokens in the call."""
    return linear(batch, kept_mask(batch)).sum() / tokens_of(batch).sqrt()


def penalty_on_dropped_undeclared(batch: TokenBatch) -> Tensor:
    """A dropped token keeps its penalty, not declared."""
    return right_penalty_on_all(batch)


def untrainable_tokens_in_sum(batch: TokenBatch) -> Tensor:
    """Untrainable tokens contribute to the loss."""
    valid = batch.sampler_logprobs.isfinite() & batch.logprobs.isfinite() & batch.advantages.isfinite()
    return linear(batch, valid & kept_mask(batch.replace(trainable=valid))).sum() / tokens_of(batch)


WRONG: dict[Loss, str] = {
    mask_times_exp: "a",
    where_after_exp: "a",
    nan_times_zero: "a",
    missing_read_as_on_policy: "a",
    groups_by_stride: "b",
    groups_by_reshape: "b",
    uneven_groups_share_a_baseline: "b",
    baselines_crossed_by_order: "b",
    runs_taken_for_sequences: "b",
    dropped_sequences_in_baseline: "c",
    failed_rollouts_in_baseline: "c",
    penalty_on_dropped_undeclared: "c",
    sequence_mask_leaks: "d",
    sequence_clip_by_token_sign: "d",
    ratio_with_its_own_detach: "e",
    sequence_mask_on_recomputed: "e",
    mask_without_effect: "e",
    untrainable_tokens_in_divisor: "f",
    truncation_in_numerator_only: "f",
    sequence_mean_undeclared: "f",
    kept_divisor_undeclared: "f",
    untrainable_tokens_in_sum: "f",
    penalty_divided_by_one: "f",
    kl_coefficient_ignored: "g",
    dual_clip_ignored: "g",
    kl_ignored_without_reference: "g",
    kl_centred_per_row: "j",
    whitened_per_call: "j",
    micro_batch_size_matters: "j",
}
