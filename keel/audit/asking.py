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


def same(target: Target, first: Evaluation, second: Evaluation) -> bool:
    return close(target, torch.tensor(first.loss), torch.tensor(second.loss)) and close(
        target, first.gradient, second.gradient
    )


def close(target: Target, first: Tensor, second: Tensor) -> bool:
    """Equal up to the rounding of the precision that the target computes in."""
    rtol, atol = (1e-7, 1e-10) if target.exact else (1e-4, 1e-6)
    return torch.allclose(first.double(), second.double(), rtol=rtol, atol=atol)


def difference(target: Target, first: Evaluation, second: Evaluation) -> str:
    """Where two evaluations of the same step part, in words."""
    if not close(target, torch.tensor(first.loss), torch.tensor(second.loss)):
        return f"the loss goes from {first.loss:.6g} to {second.loss:.6g}"
    place = int((first.gradient - second.gradient).abs().nan_to_num(torch.inf).argmax())
    before, after = float(first.gradient[place]), float(second.gradient[place])
    return f"the gradient of token {place} goes from {before:.6g} to {after:.6g}"


def active(target: Target, batch: TokenBatch) -> Tensor:
    """Which tokens' gradients follow the signal: its size or, where no token follows its size, its sign."""
    gradient = target.evaluate(batch).gradient
    if target.declaration.signal == "none":
        return gradient.abs() > 1e-11
    follows = torch.zeros_like(batch.trainable)
    for factor in (1.5, 0.3):  # a rule may bound the advantage on one side
        if not bool(follows[batch.trainable].all()):
            follows |= (_with_signal(target, batch, factor).gradient - gradient).abs() > 1e-11
    if not bool(follows.any()):
        follows = gradient * _with_signal(target, batch, -1.0).gradient < 0
    return follows


def vanished(target: Target, batch: TokenBatch, where: Tensor) -> bool:
    """Whether the loss does not even respond to these tokens' advantages: they were dropped, not merely clipped."""
    before = torch.tensor(target.evaluate(batch).loss)
    return all(close(target, before, torch.tensor(_with_signal(target, batch, f, where).loss)) for f in (1.5, 0.3))


def _with_signal(target: Target, batch: TokenBatch, factor: float, where: Tensor | None = None) -> Evaluation:
    scaled = batch.advantages * factor
    advantages = scaled if where is None else torch.where(where, scaled, batch.advantages)
    return target.evaluate(with_advantages(target.declaration, batch, advantages))


def factor(target: Target, before: Tensor, after: Tensor) -> float | None:
    """The common factor between two gradients, if there is one."""
    big = before.abs() > 1e-9
    if not bool(big.any()) or not close(target, before[~big], after[~big]):
        return None
    ratios = after[big] / before[big]
    return float(ratios[0]) if close(target, ratios, ratios[0].expand_as(ratios)) else None


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
    """Short sequences of which the rule drops every token.

    A clipped row is not one of them. Alone, the loss of a clipped row still follows its advantage. A rule that centres
    advantages within the group shows nothing on a row alone; there a row counts that is silent beside others for both
    signs of its advantage, which a clip never makes it.
    """
    centres = not bool(active(target, build(target.declaration, [[Token(0.0)]])).any())
    rows = []
    for drift in (8.0, -8.0, 2.0, -2.0):
        pair = [_row(target, drift, advantage) for advantage in (1.0, -1.0)]
        silent = [_silent(target, row) for row in pair]
        for row, quiet in zip(pair, silent, strict=True):
            if quiet and (all(silent) if centres else vanished(target, row, row.trainable)):
                rows.append(row)
    return rows


def _row(target: Target, drift: float, advantage: float) -> TokenBatch:
    row = build(target.declaration, [[Token(drift, advantage), Token(drift, advantage)]])
    # at the reference already, so that a drift penalty's centre does not move when the row joins others
    sampled = target.objective is not None and target.objective.composition.kl_penalty_source == "sampled"
    return row.replace(reference_logprobs=row.sampler_logprobs if sampled else row.logprobs)


def _silent(target: Target, row: TokenBatch) -> bool:
    """Whether no token of the row is active beside ordinary siblings."""
    siblings = build(target.declaration, [[Token(0.0, 1.0)], [Token(0.0, -0.6)], [Token(0.0, 1.7)]], (0, 0, 0))
    joined = TokenBatch.cat([siblings, row.replace(sequence=row.sequence + 500)])
    return not bool(active(target, joined)[len(siblings) :].any())
