"""Small batches to question a target with, from sequences written as lists of tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.audit.declaration import Declaration
from keel.signal import TokenBatch

DRIFTS = (0.0, 1e-5, -1e-5, 0.05, -0.05, 0.3, -0.3, 1.0, -1.0, 3.0, -3.0)
SIZES = ((1,), (2, 1), (2, 2), (1, 2, 3), (2, 2, 2, 2), (2, 3, 1, 2, 4, 1), (4, 4, 4, 4))


@dataclass(frozen=True)
class Token:
    """One token of a probe: its drift l minus the anchor's log-prob, advantage, mask, and the anchor's log-prob."""

    drift: float
    advantage: float = 1.0
    trainable: bool = True
    sampler: float = -0.7


def build(word: Declaration, sequences: Sequence[Sequence[Token]], groups: Sequence[int] | None = None) -> TokenBatch:
    """A batch with every optional field present, so that whatever a function reads is there."""
    tokens = [token for sequence in sequences for token in sequence]
    groups = list(range(len(sequences))) if groups is None else groups
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    place = torch.arange(len(tokens), dtype=torch.float64)
    anchor = _float([token.sampler - max(token.drift, 0.0) for token in tokens])
    # sampler and proximal policy lie beside each other, the reference and the teacher somewhere else
    beside = anchor + 0.01 * torch.cos(3 * place)
    advantages = _float([token.advantage for token in tokens])
    batch = TokenBatch(
        logprobs=anchor + _float([token.drift for token in tokens]),
        sampler_logprobs=beside if word.anchor == "proximal" else anchor,
        advantages=advantages,
        trainable=torch.tensor([token.trainable for token in tokens], dtype=torch.bool),
        sequence=torch.arange(len(sequences)).repeat_interleave(lengths) * 3 + 5,
        group=torch.tensor(list(groups)).repeat_interleave(lengths),
        version=torch.arange(len(sequences)).repeat_interleave(lengths) % 3,
        proximal_logprobs=anchor if word.anchor == "proximal" else beside,
        reference_logprobs=anchor + 0.1 * torch.sin(5 * place + 1),
        teacher_logprobs=anchor + 0.2 * torch.sin(7 * place + 1),
        token_ids=torch.arange(len(tokens)) % 7,
        role=torch.arange(len(tokens)) % 2,
    )
    return with_advantages(word, batch, advantages)


def _float(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_advantages(word: Declaration, batch: TokenBatch, advantages: Tensor) -> TokenBatch:
    """The batch with another signal; for a rule that follows a teacher, the teacher that gives this signal."""
    if word.signal == "teacher":
        return batch.replace(advantages=advantages, teacher_logprobs=batch.logprobs.detach() + advantages)
    return batch.replace(advantages=advantages)


def random_sequences(generator: torch.Generator, sizes: Sequence[int], drifts: Sequence[float]) -> list[list[Token]]:
    """Sequences with drifts from a list, both signs of advantage and about a quarter of untrainable tokens."""

    def pick(count: int) -> list[float]:
        return torch.rand(count, generator=generator, dtype=torch.float64).tolist()

    sequences = []
    for size in sizes:
        rows = []
        for choice, jitter, sign, amount, mask, level in zip(*(pick(size) for _ in range(6)), strict=True):
            drift = drifts[int(choice * len(drifts))] * (1 + 0.1 * jitter)
            advantage = (0.5 + amount) * (1 if sign < 0.5 else -1)
            rows.append(Token(drift, advantage, mask < 0.75, -0.05 - 2.5 * level))
        if not any(row.trainable for row in rows):
            rows[0] = Token(rows[0].drift, rows[0].advantage, True, rows[0].sampler)
        sequences.append(rows)
    return sequences


def random_batches(word: Declaration, seed: int) -> Iterator[TokenBatch]:
    """Batches from small to large, from on-policy to far off it."""
    generator = torch.Generator().manual_seed(seed)
    for drifts in (DRIFTS[:5], DRIFTS):
        for sizes in SIZES:
            groups = [number // 2 for number in range(len(sizes))]
            yield build(word, random_sequences(generator, sizes, drifts), groups)
