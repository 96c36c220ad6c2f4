"""Questions about size: the policy a ratio is measured against, and what divides."""

import torch
from torch import Tensor

from keel.audit.asking import (
    active,
    close,
    factor,
    rejected_rows,
    same,
    shift_ids,
    with_empty_row,
)
from keel.audit.probes import build, random_sequences, with_advantages
from keel.audit.target import Target
from keel.signal import TokenBatch

# e. the wrong old policy


def anchor_is_as_declared(target: Target, batch: TokenBatch) -> str | None:
    """The gradient follows the policy it is anchored on, and no other."""
    word = target.declaration
    if word.anchor != "sampler" and word.anchor != "none":
        return None
    clean = target.evaluate(batch)
    assert batch.proximal_logprobs is not None
    for shift in (-0.37, 0.37, -1.0, 1.0, -3.0, 3.0, -10.0, 10.0):
        found = target.evaluate(batch.replace(proximal_logprobs=batch.proximal_logprobs + shift))
        if not same(target, clean, found):
            return f"the declared anchor is {word.anchor}, and other proximal log-probs change the loss or a gradient"
    return None


def follows_its_anchor(target: Target) -> str | None:
    """Somewhere near on-policy, moving the anchor moves the gradient.

    Against the sampler it must move the gradient of a token that trains before and after: a gate alone is no anchor.
    The proximal policy may cancel inside its clip (decoupled PPO), so there a move that clips a token is enough.
    """
    word = target.declaration
    field = "proximal_logprobs" if word.anchor == "proximal" else "sampler_logprobs"
    steps = (1e-5, 1e-3, 0.05, 0.5) if word.anchor == "proximal" else (1e-5, 1e-3, 0.05)
    generator = torch.Generator().manual_seed(7)
    moved = False
    for sizes in ((1,), (2, 1), (3, 2), (1, 1, 2, 1)):
        batch = build(word, random_sequences(generator, sizes, (1e-5, -1e-5)), [0] * len(sizes))
        before = target.evaluate(batch).gradient
        uphill = float((before * batch.advantages)[batch.trainable].sum()) > 1e-9
        if uphill and target.objective is None and word.signal == "advantage":
            return "near on-policy the gradient runs against the advantage: a ratio or a sign is upside down"
        for step in (*steps, *(-step for step in steps)):
            after = target.evaluate(batch.replace(**{field: batch.tensors()[field] + step})).gradient
            changed = (before - after).abs() > 1e-9 * before.abs().max()
            if word.anchor != "proximal":
                changed &= (before.abs() > 1e-12) & (after.abs() > 1e-12)
            moved |= bool(changed.any())
    if word.anchor == "none":
        return "the gradient follows the sampler's log-probs, though no anchor is declared" if moved else None
    if moved:
        return None
    return f"the {word.anchor}'s log-probs never move the gradient: the ratio is measured against something else"


def somebody_is_dropped(target: Target) -> str | None:
    """A rule that declares a decision takes it somewhere."""
    if not target.declaration.drops:
        return None
    generator = torch.Generator().manual_seed(11)
    for drift in (0.05, 0.3, 1.0, 3.0, 8.0):
        for sign in (1, -1):
            batch = build(target.declaration, random_sequences(generator, (4, 3, 5), (sign * drift,)))
            assert batch.sampler_logprobs is not None
            for shift in (0.0, 2.0, -2.0):  # a gate may watch the sampler although the anchor is another policy
                moved = batch.replace(sampler_logprobs=batch.sampler_logprobs + shift)
                if not bool(active(target, moved)[moved.trainable].all()):
                    return None
    scopes = " and ".join(target.declaration.decisions)
    return f"a decision at {scopes} scope is declared, and no token was ever dropped, at drifts of up to 8"


# f. numerator and denominator


def divisor_is_as_declared(target: Target, batch: TokenBatch) -> str | None:
    """On policy, with every advantage 1, each trainable token's gradient is the same constant over the divisor.

    A token whose advantage is 0 has no gradient and counts all the same.
    """
    batch = _on_policy(target, batch)
    silenced = batch.advantages.clone()
    silenced[batch.trainable.nonzero().squeeze(1)[1::3]] = 0.0
    some = with_advantages(target.declaration, batch, silenced)
    values = []
    for probe in (batch, with_empty_row(target, batch), _twice(batch), some):
        gradient = target.evaluate(probe).gradient
        if bool((gradient[~probe.trainable] != 0).any()):
            return "a token that is not trainable has a gradient"
        mine = gradient[probe.trainable]
        speaks = probe.advantages[probe.trainable] != 0
        if target.declaration.signal == "none":
            speaks = torch.ones_like(speaks)
        if bool((mine[speaks] == 0).any()):
            if _centres(target, probe):
                return None  # equal advantages were centred away: nothing to see
            place = int((probe.trainable & (gradient == 0)).nonzero()[0])
            return f"token {place} is trainable and on policy and has no gradient: it counts in one place only"
        if probe is some and bool((mine[~speaks] != 0).any()):
            continue  # the advantage is not all that this rule follows
        values.append((-mine * _divisor(target, probe, probe.trainable))[speaks])
    return _one_constant(target, torch.cat(values))


def _centres(target: Target, batch: TokenBatch) -> bool:
    """Whether the tokens that are silent under equal advantages speak under different ones."""
    varied = batch.advantages * (1 + 0.4 * torch.cos(2.0 * torch.arange(len(batch), dtype=torch.float64)))
    gradient = target.evaluate(with_advantages(target.declaration, batch, varied)).gradient
    return bool((gradient[batch.trainable] != 0).all()) or not bool(target.evaluate(batch).gradient.any())


def every_term_divides(target: Target, batch: TokenBatch) -> str | None:
    """Off policy too, doubling the step halves each gradient, and a refused sequence scales all of them alike."""
    if "step" in target.declaration.decisions:
        return None
    before = target.evaluate(batch).gradient
    after = target.evaluate(_twice(batch)).gradient[: len(batch)]
    if not close(target, before, 2 * after):
        return "the step twice over does not halve each gradient: some term has another divisor, or none"
    if target.objective is not None or not bool((before.abs() > 1e-9).any()):
        return None  # a composition has one divisor for all of its terms, and may centre over the step
    for row in rejected_rows(target):
        after = target.evaluate(TokenBatch.cat([batch, shift_ids(row, 30_000)])).gradient[: len(batch)]
        if factor(target, before, after) is None:
            return "a refused sequence changes the gradients of others by different factors: terms divide differently"
    return None


def dropped_tokens_count_as_declared(target: Target, batch: TokenBatch) -> str | None:
    """A dropped token still counts in the divisor, or not, as declared."""
    batch = _on_policy(target, batch)
    values = []
    for row in (None, *rejected_rows(target)):
        probe = batch if row is None else TokenBatch.cat([batch, shift_ids(row, 30_000)])
        gradient = target.evaluate(probe).gradient
        if bool((gradient[: len(batch)][batch.trainable] == 0).any()):
            return None  # the rule decides over the step: another question
        kept = probe.trainable.clone()
        kept[len(batch) :] = False
        divides = _divisor(target, probe, kept if "kept" in target.declaration.divisor else probe.trainable)
        values.append(-(gradient * _spread(probe, divides))[: len(batch)][batch.trainable])
    return _one_constant(target, torch.cat(values))


def _on_policy(target: Target, batch: TokenBatch) -> TokenBatch:
    names = ("sampler_logprobs", "proximal_logprobs", "reference_logprobs", "teacher_logprobs")
    fields = {name: batch.logprobs.detach() for name in names}
    return with_advantages(target.declaration, batch.replace(**fields), torch.ones_like(batch.advantages))


def _twice(batch: TokenBatch) -> TokenBatch:
    return TokenBatch.cat([batch, shift_ids(batch, 50_000)])


def _divisor(target: Target, batch: TokenBatch, counted: Tensor) -> Tensor:
    """What should divide each trainable token."""
    ids = batch.sequence[counted]
    kind = target.declaration.divisor.removeprefix("kept ")
    if kind == "tokens":
        return torch.full((int(batch.trainable.sum()),), float(counted.sum()), dtype=torch.float64)
    sequences = float(len(torch.unique(ids)))
    lengths = torch.tensor(
        [float((ids == each).sum()) for each in batch.sequence[batch.trainable]], dtype=torch.float64
    )
    return sequences * (lengths.clamp(min=1) if kind == "sequences" else torch.ones_like(lengths))


def _spread(batch: TokenBatch, values: Tensor) -> Tensor:
    return torch.zeros(len(batch), dtype=torch.float64).masked_scatter_(batch.trainable, values)


def _one_constant(target: Target, values: Tensor) -> str | None:
    if close(target, values, values[0].expand_as(values)):
        return None
    low, high = float(values.min()), float(values.max())
    what = target.declaration.divisor
    return f"gradient times {what} should be one constant and lies between {low:.6g} and {high:.6g}"
