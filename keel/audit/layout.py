"""Questions about layout: order, ids, filler and micro-batches must not change a number."""

from collections.abc import Iterator

import torch
from torch import Tensor

from keel.audit.asking import (
    active,
    close,
    difference,
    same,
    shift_ids,
)
from keel.audit.probes import Token, build, with_advantages
from keel.audit.target import Evaluation, Target
from keel.signal import TokenBatch

# b. grouping by position


def order_means_nothing(target: Target, batch: TokenBatch) -> str | None:
    """Sequences may stand in any order, and their tokens may be interleaved."""
    clean = target.evaluate(batch)
    generator = torch.Generator().manual_seed(len(batch))
    ids = torch.unique(batch.sequence)
    shuffled = ids[torch.randperm(len(ids), generator=generator)]
    blocks = torch.cat([(batch.sequence == each).nonzero().squeeze(1) for each in shuffled])
    backwards = torch.cat([(batch.sequence == each).nonzero().squeeze(1) for each in ids.flip(0)])
    mixed = torch.randperm(len(batch), generator=generator)
    orders = {"sequences in reverse": backwards, "sequences in another order": blocks, "tokens interleaved": mixed}
    for what, order in orders.items():
        found, moved = target.evaluate(batch.take(order)), Evaluation(clean.loss, clean.gradient[order])
        if not same(target, moved, found):
            return f"with {what} {difference(target, moved, found)}"
    return None


def labels_mean_nothing(target: Target, batch: TokenBatch) -> str | None:
    """Ids are names: any other distinct integers do as well."""
    clean = target.evaluate(batch)
    assert batch.group is not None
    for sequence, group in (
        ((batch.sequence * 7919 + 13) % 10007, 100 - batch.group),
        (batch.sequence * 64, batch.group * 64),  # equal in every table of a power of two
        (-batch.sequence, -batch.group),
    ):
        found = target.evaluate(batch.replace(sequence=sequence, group=group))
        if not same(target, clean, found):
            return f"with other sequence and group ids {difference(target, clean, found)}"
    return None


def groups_keep_to_themselves(target: Target, batch: TokenBatch) -> str | None:
    """The advantages of one group never move the gradients of another."""
    assert batch.group is not None
    clean = target.evaluate(batch)
    for group in torch.unique(batch.group):
        inside = batch.group == group
        changed = with_advantages(
            target.declaration, batch, torch.where(inside, batch.advantages * 1.7, batch.advantages)
        )
        if not close(target, clean.gradient[~inside], target.evaluate(changed).gradient[~inside]):
            return f"changing the advantages of group {int(group)} changes gradients of other groups"
    return None


# j. layout


def filler_changes_nothing(target: Target, batch: TokenBatch) -> str | None:
    """Untrainable tokens before, between and after the others are invisible."""
    clean = target.evaluate(batch)
    assert batch.group is not None
    filler = shift_ids(build(target.declaration, [[Token(0.4, 2.0, False)] * 3]), 40_000)
    half = len(batch) // 2
    inside = filler.replace(
        sequence=torch.full((3,), int(batch.sequence[0])), group=torch.full((3,), int(batch.group[0]))
    )
    inside = inside.replace(token_ids=torch.full((3,), -1))
    parts = [filler, batch.take(torch.arange(half)), inside, batch.take(torch.arange(half, len(batch))), filler]
    joined = TokenBatch.cat([part for part in parts if len(part)])
    found = target.evaluate(joined)
    assert joined.token_ids is not None
    real = (joined.sequence < 40_000) & (joined.token_ids >= 0)
    seen = Evaluation(found.loss, found.gradient[real])
    return (
        None
        if same(target, clean, seen)
        else f"with filler tokens between the others {difference(target, clean, seen)}"
    )


def micro_batches_add_up(target: Target, batch: TokenBatch) -> str | None:
    """The step cut into micro-batches has the same loss and gradient."""
    whole = target.evaluate(batch)
    loss, gradient = 0.0, torch.zeros_like(whole.gradient)
    for part, found, share in _cut(target, batch) if target.objective is None else _cut_with_totals(target, batch):
        loss += share * found.loss
        gradient[part] += share * found.gradient
    joined = Evaluation(loss, gradient)
    return (
        None
        if same(target, whole, joined)
        else f"from the whole step to its micro-batches {difference(target, whole, joined)}"
    )


def _cut_with_totals(target: Target, batch: TokenBatch) -> Iterator[tuple[Tensor, Evaluation, float]]:
    """An objective takes any cut, through the middle of a sequence too: its totals make the step whole."""
    rule = target.objective
    assert rule is not None
    parts = torch.randperm(len(batch), generator=torch.Generator().manual_seed(len(batch))).tensor_split(2)
    totals = rule.totals([batch.take(part) for part in parts])
    part_of_step = Target(target.name, lambda piece: rule(piece, totals), target.declaration)
    for part in parts:
        yield part, part_of_step.evaluate(batch.take(part)), 1.0


def _cut(target: Target, batch: TokenBatch) -> Iterator[tuple[Tensor, Evaluation, float]]:
    """A function is called on each half and weighed by its share of the divisor.

    A group stays whole, since its baseline may be made inside the loss; a rule over the step cannot be cut.
    """
    assert batch.group is not None
    first = batch.group <= batch.group.median()
    parts = [mask.nonzero().squeeze(1) for mask in (first, ~first) if bool((mask & batch.trainable).any())]
    if "step" in target.declaration.decisions:
        parts = [torch.arange(len(batch))]
    pieces = [batch.take(part) for part in parts]
    weights = [_weight(target, piece) for piece in pieces]
    for part, piece, weight in zip(parts, pieces, weights, strict=True):
        yield part, target.evaluate(piece), weight / max(sum(weights), 1e-300) if len(parts) > 1 else 1.0


def _weight(target: Target, batch: TokenBatch) -> float:
    """How much of the step a micro-batch is, by what divides."""
    counted = batch.trainable
    if "kept" in target.declaration.divisor:
        counted = counted & active(target, batch)
    if target.declaration.divisor.endswith("tokens"):
        return float(counted.sum())
    return float(len(torch.unique(batch.sequence[counted])))
