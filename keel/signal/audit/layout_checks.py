"""Checks of layout: token order, id values, padding and micro-batching must not change the loss or a gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from keel.signal import TokenBatch
from keel.signal.audit.observe import active, close, difference, same
from keel.signal.audit.probe_batches import Token, build, with_advantages, with_next_ids
from keel.signal.audit.target import Evaluation, Target

# b. depends on order or ids


def check_order_invariance(target: Target, batch: TokenBatch) -> str | None:
    """Check that sequences may come in any order and that their tokens may be interleaved."""
    original = target.evaluate(batch)
    generator = torch.Generator().manual_seed(len(batch))
    ids = torch.unique(batch.sequence)
    shuffled_ids = ids[torch.randperm(len(ids), generator=generator)]
    shuffled = torch.cat([(batch.sequence == sequence).nonzero().squeeze(1) for sequence in shuffled_ids])
    reverse = torch.cat([(batch.sequence == sequence).nonzero().squeeze(1) for sequence in ids.flip(0)])
    interleaved = torch.randperm(len(batch), generator=generator)
    orders = {
        "sequences in reverse order": reverse,
        "sequences in another order": shuffled,
        "tokens interleaved": interleaved,
    }
    for description, order in orders.items():
        expected, actual = Evaluation(original.loss, original.gradient[order]), target.evaluate(batch.take(order))
        if not same(target, expected, actual):
            return f"with {description} {difference(target, expected, actual)}"
    return None


def check_relabelling(target: Target, batch: TokenBatch) -> str | None:
    """Check that other sequence and group ids give the same result.

    A function is given a permutation of its ids, without and with gaps. It may use ids as indices, so they stay small
    and non-negative. Built-in objectives accept any distinct integers and are checked with large and negative ones too.
    """
    original = target.evaluate(batch)
    assert batch.group is not None
    for description, sequence, group in _relabellings(batch.sequence, batch.group, target.objective is not None):
        relabelled = target.evaluate(batch.replace(sequence=sequence, group=group))
        if not same(target, original, relabelled):
            return f"with {description} {difference(target, original, relabelled)}"
    return None


def _relabellings(sequence: Tensor, group: Tensor, any_integer: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a description, sequence ids and group ids."""
    yield "sequence and group ids in reverse", _dense(sequence, -1), _dense(group, -1)
    yield "sequence and group ids with gaps", 2 * _dense(sequence) + 1, 2 * _dense(group) + 1
    yield "sequence and group ids permuted, with gaps", _permuted_with_gaps(sequence), _permuted_with_gaps(group)
    if any_integer:
        yield "large sequence and group ids", (sequence * 7919 + 13) % 10007, 100 - group
        # these collide in every hash table whose size is a power of two
        yield "sequence and group ids that are multiples of 64", sequence * 64, group * 64
        yield "negative sequence and group ids", -sequence, -group


def _dense(ids: Tensor, direction: int = 1) -> Tensor:
    """Renumber ids as 0..n-1, in ascending order or, with direction -1, in descending order."""
    ordered = torch.unique(ids * direction)
    return torch.searchsorted(ordered, ids * direction)


def _permuted_with_gaps(ids: Tensor) -> Tensor:
    dense = _dense(ids)
    count = int(dense.max()) + 1
    return torch.randperm(count + 2, generator=torch.Generator().manual_seed(count))[dense]


def check_group_isolation(target: Target, batch: TokenBatch) -> str | None:
    """Check that the advantages of one group do not change the gradients of another."""
    assert batch.group is not None
    original = target.evaluate(batch)
    for group in torch.unique(batch.group):
        inside = batch.group == group
        scaled = with_advantages(
            target.declaration, batch, torch.where(inside, batch.advantages * 1.7, batch.advantages)
        )
        if not close(target, original.gradient[~inside], target.evaluate(scaled).gradient[~inside]):
            return f"changing the advantages of group {int(group)} changes the gradients of other groups"
    return None


# j. depends on padding or micro-batches


def check_padding_invariance(target: Target, batch: TokenBatch) -> str | None:
    """Check that untrainable tokens before, between and after the others change nothing."""
    original = target.evaluate(batch)
    assert batch.group is not None
    outside = with_next_ids(build(target.declaration, [[Token(0.4, 2.0, False)] * 3]), batch)
    inside = outside.replace(
        sequence=torch.full((3,), int(batch.sequence[0])), group=torch.full((3,), int(batch.group[0]))
    )
    half = len(batch) // 2
    first, second = batch.take(torch.arange(half)), batch.take(torch.arange(half, len(batch)))
    parts = [(outside, False), (first, True), (inside, False), (second, True), (outside, False)]
    is_original = torch.cat([torch.full((len(part),), original_part) for part, original_part in parts])
    padded = target.evaluate(TokenBatch.cat([part for part, _ in parts]))
    unpadded = Evaluation(padded.loss, padded.gradient[is_original])
    if same(target, original, unpadded):
        return None
    return f"with untrainable tokens inserted {difference(target, original, unpadded)}"


def check_micro_batch_sum(target: Target, batch: TokenBatch) -> str | None:
    """Check that the micro-batches of a step add up to its loss and gradient."""
    whole = target.evaluate(batch)
    loss, gradient = 0.0, torch.zeros_like(whole.gradient)
    micro_batches = _split_by_group(target, batch) if target.objective is None else _split_anywhere(target, batch)
    for tokens, evaluation, weight in micro_batches:
        loss += weight * evaluation.loss
        gradient[tokens] += weight * evaluation.gradient
    total = Evaluation(loss, gradient)
    if same(target, whole, total):
        return None
    return f"between the whole step and its micro-batches {difference(target, whole, total)}"


def _split_anywhere(target: Target, batch: TokenBatch) -> Iterator[tuple[Tensor, Evaluation, float]]:
    """Split a step at random, also within sequences. An objective supports this because it is given the step's totals.

    Yields the tokens of a micro-batch, its evaluation and its weight in the sum.
    """
    objective = target.objective
    assert objective is not None
    parts = torch.randperm(len(batch), generator=torch.Generator().manual_seed(len(batch))).tensor_split(2)
    totals = objective.totals([batch.take(part) for part in parts])
    with_totals = Target(target.name, lambda micro_batch: objective(micro_batch, totals), target.declaration)
    for part in parts:
        yield part, with_totals.evaluate(batch.take(part)), 1.0


def _split_by_group(target: Target, batch: TokenBatch) -> Iterator[tuple[Tensor, Evaluation, float]]:
    """Split a step between groups, and weight each half by its part of the divisor.

    Groups stay whole because a function may compute a group baseline. A step-wide decision cannot be split, and neither
    can a step of which one half has no kept token, and therefore no divisor.
    """
    assert batch.group is not None
    first = batch.group <= batch.group.median()
    parts = [mask.nonzero().squeeze(1) for mask in (first, ~first) if bool((mask & batch.trainable).any())]
    if "step" in target.declaration.decisions:
        parts = [torch.arange(len(batch))]
    micro_batches = [batch.take(part) for part in parts]
    weights = [_weight(target, micro_batch) for micro_batch in micro_batches]
    if 0.0 in weights and target.declaration.dropped_from == "policy term":
        parts, micro_batches, weights = [torch.arange(len(batch))], [batch], [1.0]
    for part, micro_batch, weight in zip(parts, micro_batches, weights, strict=True):
        fraction = weight / max(sum(weights), 1e-300) if len(parts) > 1 else 1.0
        yield part, target.evaluate(micro_batch), fraction


def _weight(target: Target, batch: TokenBatch) -> float:
    """Return the part of a micro-batch in the declared divisor."""
    counted = batch.trainable
    if "kept" in target.declaration.divisor:
        counted = counted & active(target, batch)
    if target.declaration.divisor.endswith("tokens"):
        return float(counted.sum())
    return float(len(torch.unique(batch.sequence[counted])))
