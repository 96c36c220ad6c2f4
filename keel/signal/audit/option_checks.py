"""g. Check that every option of a target has an effect, or raises where it cannot have one."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from keel.signal import TokenBatch
from keel.signal.audit.observe import enlarge, same
from keel.signal.audit.probe_batches import build, random_sequences
from keel.signal.audit.target import UNKNOWN_OPTION, Evaluation, LossError, Target, TargetError

OPTIONAL_FIELDS = ("reference_logprobs", "teacher_logprobs", "proximal_logprobs")

Outcome = Evaluation | None
"""An evaluation, or None when the target raised."""


def check_options(target: Target) -> str | None:
    """Find an option that never changes the result, or that is silently ignored when a field it needs is missing."""
    batches = list(_batches(target))
    defaults = [_evaluate(target, batch) for batch in batches]
    for name, (default, values) in target.options.items():
        has_effect = any(
            not _equal(target, outcome, _evaluate(target, batch, **{name: value}))
            for value in values
            if value != default
            for batch, outcome in zip(batches, defaults, strict=True)
        )
        if not has_effect:
            if name == UNKNOWN_OPTION:
                return "options that do not exist are accepted and ignored"
            return f"{name} is accepted but changes nothing, for any value"
        message = _ignored_without_field(target, name, values, batches[0])
        if message is not None:
            return message
    return None


def _batches(target: Target) -> Iterator[TokenBatch]:
    generator = torch.Generator().manual_seed(3)
    for drifts in ((1e-5, -1e-5, 1e-4), (0.05, -0.05, 0.3, -0.3), (1.0, -1.0, 3.0, -3.0, 8.0, -8.0)):
        batch = build(target.declaration, random_sequences(generator, (3, 1, 4, 2, 6), drifts), (0, 0, 1, 1, 1))
        yield batch
        assert batch.sampler_logprobs is not None
        # sampler and proximal policy differ on some sequences
        yield batch.replace(sampler_logprobs=batch.sampler_logprobs + 1.3 * (1 - batch.sequence % 2))
        for extra_tokens in (0, 200):  # one sequence without sampler log-probs: a large or a small fraction of the step
            enlarged = enlarge(target, batch, extra_tokens) if extra_tokens else batch
            assert enlarged.sampler_logprobs is not None
            missing = (enlarged.trainable & (enlarged.sequence == batch.sequence[3])).nonzero().squeeze(1)
            yield enlarged.replace(sampler_logprobs=enlarged.sampler_logprobs.index_fill(0, missing, math.nan))


def _evaluate(target: Target, batch: TokenBatch, **options: Any) -> Outcome:
    try:
        return target.evaluate(batch, **options)
    except (LossError, TargetError):  # a target that raises has not ignored the option
        return None


def _equal(target: Target, first: Outcome, second: Outcome) -> bool:
    if first is None or second is None:
        return first is second
    if math.isnan(first.loss) or math.isnan(second.loss):
        return True  # NaN tells nothing about the option
    return same(target, first, second)


def _ignored_without_field(target: Target, name: str, values: tuple[Any, ...], batch: TokenBatch) -> str | None:
    """Find a field through which the option has an effect and without which it is silently ignored."""
    for field in OPTIONAL_FIELDS:
        with_field = [_evaluate(target, batch, **{name: value}) for value in values]
        without = [_evaluate(target, batch.replace(**{field: None}), **{name: value}) for value in values]
        if None in without or all(_equal(target, with_field[0], outcome) for outcome in with_field):
            continue
        if all(_equal(target, without[0], outcome) for outcome in without):
            return f"{name} has an effect through {field}, and is silently ignored when {field} is missing"
    return None
