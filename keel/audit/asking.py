"""What every question of the audit uses: comparing losses, and seeing which tokens train, from outside.

A token counts as *active* when its gradient follows the advantage. One that does not was dropped or clipped; it was
dropped when not even the loss follows its advantage.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from keel.audit.probes import Token, build, with_advantages
from keel.audit.target import Evaluation, Target
from keel.signal import TokenBatch

Question = Callable[[Target, TokenBatch], str | None]
"""None when the rule holds on the batch, or a sentence that says what broke."""


def same(first: Evaluation, second: Evaluation) -> bool:
    return close(torch.tensor(first.loss), torch.tensor(second.loss)) and close(first.gradient, second.gradient)


def close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.double(), second.double(), rtol=1e-7, atol=1e-10)


def difference(first: Evaluation, second: Evaluation) -> str:
    """Where two evaluations of the same step part, in words."""
    if not close(torch.tensor(first.loss), torch.tensor(second.loss)):
        return f"the loss goes from {first.loss:.6g} to {second.loss:.6g}"
    place = int((first.gradient - second.gradient).abs().nan_to_num(torch.inf).argmax())
    before, after = float(first.gradient[place]), float(second.gradient[place])
    return f"the gradient of token {place} goes from {before:.6g} to {after:.6g}"


def active(target: Target, batch: TokenBatch) -> Tensor:
    """Which tokens' gradients follow the signal."""
    gradient = target.evaluate(batch).gradient
    if target.declaration.signal != "none":
        gradient = (
            target.evaluate(with_advantages(target.declaration, batch, batch.advantages * 1.5)).gradient - gradient
        )
    return gradient.abs() > 1e-11


def vanished(target: Target, batch: TokenBatch, where: Tensor) -> bool:
    """Whether the loss does not even respond to these tokens' advantages: they were dropped, not merely clipped."""
    louder = torch.where(where, batch.advantages * 1.5, batch.advantages)
    before, after = (
        target.evaluate(batch).loss,
        target.evaluate(with_advantages(target.declaration, batch, louder)).loss,
    )
    return close(torch.tensor(before), torch.tensor(after))


def enlarge(target: Target, batch: TokenBatch, tokens: int) -> TokenBatch:
    """The batch among many ordinary tokens, so that one damaged token is a small share."""
    return TokenBatch.cat([batch, shift_ids(build(target.declaration, [[Token(0.0)] * 4] * (tokens // 4)), 10_000)])


def shift_ids(batch: TokenBatch, by: int) -> TokenBatch:
    assert batch.group is not None
    return batch.replace(sequence=batch.sequence + by, group=batch.group + by)


def with_empty_row(target: Target, batch: TokenBatch) -> TokenBatch:
    row = build(target.declaration, [[Token(0.2, 100.0, False), Token(-0.2, 100.0, False)]])
    assert row.group is not None and batch.group is not None
    row = shift_ids(row, 20_000).replace(group=torch.full_like(row.group, int(batch.group[0])))
    return TokenBatch.cat([batch, row])


@lru_cache(maxsize=4)
def rejected_rows(target: Target) -> list[TokenBatch]:
    """Short sequences of which the rule drops every token."""
    rows = []
    for drift in (8.0, -8.0, 2.0, -2.0):
        for advantage in (1.0, -1.0):
            row = build(target.declaration, [[Token(drift, advantage), Token(drift, advantage)]])
            if not bool(active(target, row).any()) and vanished(target, row, row.trainable):
                rows.append(row)
    return rows
