"""Reduce a batch on which a check fails: fewer sequences, fewer tokens, rounder numbers."""

from collections.abc import Callable, Iterator

import torch

from keel.signal import TokenBatch

LIMIT = 300
"""The number of candidates after which the smallest batch so far is returned."""


def shrink(batch: TokenBatch, fails: Callable[[TokenBatch], bool]) -> TokenBatch:
    """Greedily simplify a batch while the check still fails on it."""
    tried = 0
    while tried < LIMIT:
        for candidate in _simpler(batch):
            tried += 1
            if fails(candidate):
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
    for index in range(len(batch)):
        rest = (torch.arange(len(batch)) != index).nonzero().squeeze(1)
        if bool(batch.trainable[rest].any()):
            yield batch.take(rest)
    for name in ("advantages", "sampler_logprobs", "logprobs"):
        value = batch.tensors().get(name)
        if value is None:
            continue
        for rounded in (value.round(), value.round(decimals=1), value.round(decimals=2)):
            if not torch.equal(rounded.nan_to_num(), value.nan_to_num()):
                yield batch.replace(**{name: rounded})
                break
