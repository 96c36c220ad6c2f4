"""g. An option that is accepted acts, or is refused; it is never ignored."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from keel.audit.asking import enlarge, same
from keel.audit.probes import build, random_sequences
from keel.audit.target import UNKNOWN, Evaluation, Target
from keel.signal import TokenBatch

EXTRAS = ("reference_logprobs", "teacher_logprobs", "proximal_logprobs")


def dead_option(target: Target) -> str | None:
    """An option whose every value gives the same loss, or that is silently ignored where it cannot act."""
    batches = list(_batches(target))
    base = {number: _answer(target, batch) for number, batch in enumerate(batches)}
    for name, (now, values) in target.options.items():
        others = [value for value in values if value != now]
        if not any(
            not _alike(target, base[number], _answer(target, batch, **{name: value}))
            for value in others
            for number, batch in enumerate(batches)
        ):
            if name == UNKNOWN:
                return "options that do not exist are accepted and swallowed"
            return f"{name} is accepted and changes nothing, whatever its value"
        problem = _ignored_without(target, name, values, batches[0])
        if problem is not None:
            return problem
    return None


def _batches(target: Target) -> Iterator[TokenBatch]:
    generator = torch.Generator().manual_seed(3)
    for drifts in ((1e-5, -1e-5, 1e-4), (0.05, -0.05, 0.3, -0.3), (1.0, -1.0, 3.0, -3.0, 8.0, -8.0)):
        batch = build(target.declaration, random_sequences(generator, (3, 1, 4, 2, 6), drifts), (0, 0, 1, 1, 1))
        yield batch
        assert batch.sampler_logprobs is not None
        # a difference between sampler and proximal policy on some sequences
        yield batch.replace(sampler_logprobs=batch.sampler_logprobs + 1.3 * (batch.sequence % 2))
        for company in (0, 200):  # a sequence without sampler log-probs: a large share of the step, or a small one
            joined = enlarge(target, batch, company) if company else batch
            assert joined.sampler_logprobs is not None
            lost = (joined.trainable & (joined.sequence == batch.sequence[3])).nonzero().squeeze(1)
            yield joined.replace(sampler_logprobs=joined.sampler_logprobs.index_fill(0, lost, math.nan))


def _answer(target: Target, batch: TokenBatch, **options: Any) -> Evaluation | str:
    try:
        return target.evaluate(batch, **options)
    except Exception:  # noqa: BLE001 - however a target refuses, it has not ignored the option
        return "refused"


def _alike(target: Target, first: Evaluation | str, second: Evaluation | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second if isinstance(first, str) and isinstance(second, str) else False
    if first.loss != first.loss or second.loss != second.loss:
        return True  # a NaN says nothing about the option
    return same(target, first, second)


def _ignored_without(target: Target, name: str, values: tuple[Any, ...], batch: TokenBatch) -> str | None:
    """Whether the option acts through a field of the batch and says nothing when that field is missing."""
    for field in EXTRAS:
        bare = batch.replace(**{field: None})
        with_field = [_answer(target, batch, **{name: value}) for value in values]
        without = [_answer(target, bare, **{name: value}) for value in values]
        if "refused" in without or all(_alike(target, with_field[0], answer) for answer in with_field):
            continue
        if all(_alike(target, without[0], answer) for answer in without):
            return f"{name} acts through {field}, and without {field} it is silently ignored"
    return None
