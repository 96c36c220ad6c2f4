"""Build the small batches that checks call a target with.

Sequence and group ids are small, non-negative integers, so that a loss may use them as indices
(`torch.zeros(sequence.max() + 1).index_add(0, sequence, ...)`). They may have gaps, as in a micro-batch of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.signal import TokenBatch
from keel.signal.audit.declaration import Declaration

DRIFTS = (0.0, 1e-5, -1e-5, 0.05, -0.05, 0.3, -0.3, 1.0, -1.0, 3.0, -3.0)
SIZES = ((1,), (2, 1), (2, 2), (1, 2, 3), (2, 2, 2, 2), (2, 3, 1, 2, 4, 1), (4, 4, 4, 4))


@dataclass(frozen=True)
class Token:
    """One token of a probe batch.

    `drift` is the policy's log-prob minus the anchor's; `sampler` sets the level of the anchor's log-prob.
    """

    drift: float
    advantage: float = 1.0
    trainable: bool = True
    sampler: float = -0.7


def build(
    declaration: Declaration, sequences: Sequence[Sequence[Token]], groups: Sequence[int] | None = None
) -> TokenBatch:
    """Build a batch with all the optional fields that a loss may read. Without `groups`, each sequence is a group."""
    tokens = [token for sequence in sequences for token in sequence]
    groups = list(range(len(sequences))) if groups is None else groups
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    index = torch.arange(len(tokens), dtype=torch.float64)
    anchor = _float([token.sampler - max(token.drift, 0.0) for token in tokens])
    # sampler and proximal policy are close to each other; the reference and the teacher are further away
    near_anchor = anchor + 0.01 * torch.cos(3 * index)
    advantages = _float([token.advantage for token in tokens])
    batch = TokenBatch(
        logprobs=anchor + _float([token.drift for token in tokens]),
        sampler_logprobs=near_anchor if declaration.anchor == "proximal" else anchor,
        advantages=advantages,
        trainable=torch.tensor([token.trainable for token in tokens], dtype=torch.bool),
        sequence=torch.arange(len(sequences)).repeat_interleave(lengths),
        group=torch.tensor(list(groups)).repeat_interleave(lengths),
        version=torch.arange(len(sequences)).repeat_interleave(lengths) % 3,
        proximal_logprobs=anchor if declaration.anchor == "proximal" else near_anchor,
        reference_logprobs=anchor + 0.1 * torch.sin(5 * index + 1),
        teacher_logprobs=anchor + 0.2 * torch.sin(7 * index + 1),
        token_ids=torch.arange(len(tokens)) % 7,
        role=torch.arange(len(tokens)) % 2,
    )
    return with_advantages(declaration, batch, advantages)


def _float(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_advantages(declaration: Declaration, batch: TokenBatch, advantages: Tensor) -> TokenBatch:
    """Return the batch with other advantages, and for a loss that follows a teacher, with the matching teacher."""
    if declaration.signal == "teacher":
        return batch.replace(advantages=advantages, teacher_logprobs=batch.logprobs.detach() + advantages)
    return batch.replace(advantages=advantages)


def append(batch: TokenBatch, *others: TokenBatch) -> TokenBatch:
    """Concatenate batches; the others get the next free sequence and group ids."""
    for other in others:
        batch = TokenBatch.cat([batch, with_next_ids(other, batch)])
    return batch


def append_to_first_group(batch: TokenBatch, other: TokenBatch) -> TokenBatch:
    """Concatenate two batches; the other gets the next free sequence ids and joins the group of the first token."""
    assert batch.group is not None
    return TokenBatch.cat(
        [batch, with_next_ids(other, batch).replace(group=torch.full((len(other),), int(batch.group[0])))]
    )


def with_next_ids(other: TokenBatch, batch: TokenBatch) -> TokenBatch:
    """Return `other` with sequence and group ids that follow those of `batch` without a gap."""
    assert batch.group is not None and other.group is not None
    return other.replace(
        sequence=other.sequence - other.sequence.min() + batch.sequence.max() + 1,
        group=other.group - other.group.min() + batch.group.max() + 1,
    )


def random_sequences(generator: torch.Generator, sizes: Sequence[int], drifts: Sequence[float]) -> list[list[Token]]:
    """Draw sequences with drifts from a list, advantages of both signs and about a quarter of untrainable tokens."""

    def pick(count: int) -> list[float]:
        return torch.rand(count, generator=generator, dtype=torch.float64).tolist()

    sequences = []
    for size in sizes:
        tokens = []
        for choice, jitter, sign, amount, mask, level in zip(*(pick(size) for _ in range(6)), strict=True):
            drift = drifts[int(choice * len(drifts))] * (1 + 0.1 * jitter)
            advantage = (0.5 + amount) * (1 if sign < 0.5 else -1)
            tokens.append(Token(drift, advantage, mask < 0.75, -0.05 - 2.5 * level))
        if not any(token.trainable for token in tokens):
            tokens[0] = Token(tokens[0].drift, tokens[0].advantage, True, tokens[0].sampler)
        sequences.append(tokens)
    return sequences


def random_batches(declaration: Declaration, seed: int) -> Iterator[TokenBatch]:
    """Yield batches from small to large, first near on-policy and then far off-policy."""
    generator = torch.Generator().manual_seed(seed)
    for drifts in (DRIFTS[:5], DRIFTS):
        for sizes in SIZES:
            groups = [number // 2 for number in range(len(sizes))]
            yield build(declaration, random_sequences(generator, sizes, drifts), groups)
