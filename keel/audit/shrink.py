"""The smallest batch that still breaks a rule: fewer sequences, fewer tokens, rounder numbers."""

from collections.abc import Callable, Iterator

import torch

from keel.signal import TokenBatch

LIMIT = 300
"""Candidates tried before the current best is good enough."""


def shrink(batch: TokenBatch, breaks: Callable[[TokenBatch], bool]) -> TokenBatch:
    """Greedily simplify a batch as long as it still breaks."""
    tried = 0
    while tried < LIMIT:
        for candidate in _simpler(batch):
            tried += 1
            if breaks(candidate):
                batch = candidate
                break
            if tried >= LIMIT:
                return batch
        else:
            return batch
    return batch


def _simpler(batch: TokenBatch) -> Iterator[TokenBatch]:
    for sequence in torch.unique(batch.sequence):
        rest = (batch.sequence != sequence).nonzero().squeeze(1)
        if bool(batch.trainable[rest].any()):
            yield batch.take(rest)
    for place in range(len(batch)):
        rest = (torch.arange(len(batch)) != place).nonzero().squeeze(1)
        if bool(batch.trainable[rest].any()):
            yield batch.take(rest)
    for name in ("advantages", "sampler_logprobs", "logprobs"):
        value = batch.tensors()[name]
        for rounded in (value.round(), value.round(decimals=1), value.round(decimals=2)):
            # a teacher made from the log-probs must move with them, so rules that follow one keep their numbers
            if not torch.equal(rounded, value) and batch.teacher_logprobs is not None:
                yield batch.replace(**{name: rounded})
                break
