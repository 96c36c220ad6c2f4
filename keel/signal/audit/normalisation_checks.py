"""Checks of scale: the policy that the ratio is measured against, and the divisor of the loss."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from keel.signal import TokenBatch
from keel.signal.audit.declaration import Divisor
from keel.signal.audit.observe import active, close, common_factor, dropped_sequences, same, with_failed_rollout
from keel.signal.audit.probe_batches import append, build, random_sequences, with_advantages
from keel.signal.audit.target import Target

# e. ratio against the wrong policy


def check_proximal_unused(target: Target, batch: TokenBatch) -> str | None:
    """Check that the proximal log-probs change nothing unless they are the declared anchor."""
    anchor = target.declaration.anchor
    if anchor == "proximal":
        return None
    original = target.evaluate(batch)
    assert batch.proximal_logprobs is not None
    for shift in (-0.37, 0.37, -1.0, 1.0, -3.0, 3.0, -10.0, 10.0):
        shifted = target.evaluate(batch.replace(proximal_logprobs=batch.proximal_logprobs + shift))
        if not same(target, original, shifted):
            return (
                f'the proximal log-probs change the loss or a gradient, but anchor = "{anchor}" is declared;'
                ' if the ratio is meant to use them, declare anchor = "proximal"'
            )
    return None


def check_anchor_used(target: Target) -> str | None:
    """Check that near on-policy, the anchor's log-probs change a gradient.

    With the sampler as anchor, the gradient of a token that is active before and after must change: a gate alone does
    not make an anchor. The proximal policy may cancel inside the clip range (decoupled PPO), so there it is enough
    that a change clips a token.
    """
    declaration = target.declaration
    field = "proximal_logprobs" if declaration.anchor == "proximal" else "sampler_logprobs"
    steps = (1e-5, 1e-3, 0.05, 0.5) if declaration.anchor == "proximal" else (1e-5, 1e-3, 0.05)
    generator = torch.Generator().manual_seed(7)
    anchor_used = False
    for sizes in ((1,), (2, 1), (3, 2), (1, 1, 2, 1)):
        batch = build(declaration, random_sequences(generator, sizes, (1e-5, -1e-5)), [0] * len(sizes))
        before = target.evaluate(batch).gradient
        wrong_direction = float((before * batch.advantages)[batch.trainable].sum()) > 1e-9
        if wrong_direction and target.objective is None and declaration.signal == "advantage":
            return "near on-policy, a step lowers the advantage: a sign or a ratio is inverted"
        for step in (*steps, *(-step for step in steps)):
            after = target.evaluate(batch.replace(**{field: batch.tensors()[field] + step})).gradient
            changed = (before - after).abs() > 1e-9 * before.abs().max()
            if declaration.anchor != "proximal":
                changed &= (before.abs() > 1e-12) & (after.abs() > 1e-12)
            anchor_used |= bool(changed.any())
    if declaration.anchor == "none":
        return 'the sampler\'s log-probs change the gradient, but anchor = "none" is declared' if anchor_used else None
    if anchor_used:
        return None
    return f"the {declaration.anchor} log-probs never change the gradient: the ratio is measured against another policy"


def check_declared_decision_taken(target: Target) -> str | None:
    """Check that a target which declares decisions drops some token."""
    if not target.declaration.drops:
        return None
    generator = torch.Generator().manual_seed(11)
    for drift in (0.05, 0.3, 1.0, 3.0, 8.0):
        for sign in (1, -1):
            batch = build(target.declaration, random_sequences(generator, (4, 3, 5), (sign * drift,)))
            assert batch.sampler_logprobs is not None
            for shift in (0.0, 2.0, -2.0):  # a gate may read the sampler's log-probs although the anchor is proximal
                shifted = batch.replace(sampler_logprobs=batch.sampler_logprobs + shift)
                if not bool(active(target, shifted)[shifted.trainable].all()):
                    return None
    scopes = " and ".join(target.declaration.decisions)
    return f"a decision per {scopes} is declared, but no token was dropped at log-ratios of up to 8"


# f. wrong normalisation


def check_divisor(target: Target, batch: TokenBatch) -> str | None:
    """Check that on-policy with all advantages 1, gradient times divisor is one constant for all trainable tokens.

    Failed rollouts, a doubled step and tokens with advantage 0 must not change the constant.
    """
    batch = _on_policy(target, batch)
    some_zero = batch.advantages.clone()
    some_zero[batch.trainable.nonzero().squeeze(1)[1::3]] = 0.0
    with_zeros = with_advantages(target.declaration, batch, some_zero)
    gradients: list[tuple[TokenBatch, Tensor, Tensor]] = []
    for probe in (batch, with_failed_rollout(target, batch), append(batch, batch), with_zeros):
        gradient = target.evaluate(probe).gradient
        if bool((gradient[~probe.trainable] != 0).any()):
            return "an untrainable token has a gradient"
        trainable = gradient[probe.trainable]
        has_signal = probe.advantages[probe.trainable] != 0
        if target.declaration.signal == "none":
            has_signal = torch.ones_like(has_signal)
        if bool((trainable[has_signal] == 0).any()):
            if _centres(target, probe):
                return None  # equal advantages are centred to zero, so the divisor cannot be seen
            index = int((probe.trainable & (gradient == 0)).nonzero()[0])
            return f"token {index} is trainable and on-policy but has no gradient, although it counts in the divisor"
        if probe is with_zeros and bool((trainable[~has_signal] != 0).any()):
            continue  # the gradient does not follow the advantage alone
        gradients.append((probe, trainable, has_signal))

    def products(candidate: Target) -> Tensor:
        return torch.cat([(-own * _divisor(candidate, probe, probe.trainable))[mask] for probe, own, mask in gradients])

    message = _not_constant(target, products(target))
    return message and message + _suggest_divisor(target, products)


def _suggest_divisor(target: Target, products: Callable[[Target], Tensor]) -> str:
    """Name the divisor that a function seems to use, in case it is intended and was not declared."""
    divisors: tuple[Divisor, ...] = ("tokens", "sequences", "constant")
    for divisor in divisors if target.objective is None else ():
        candidate = replace(target, declaration=replace(target.declaration, divisor=divisor))
        if _not_constant(candidate, products(candidate)) is None:
            return f'; it is constant for divisor = "{divisor}": declare that if it is intended'
    return ""


def _centres(target: Target, batch: TokenBatch) -> bool:
    """Return whether tokens without a gradient under equal advantages have one under different advantages."""
    varied = batch.advantages * (1 + 0.4 * torch.cos(2.0 * torch.arange(len(batch), dtype=torch.float64)))
    gradient = target.evaluate(with_advantages(target.declaration, batch, varied)).gradient
    return bool((gradient[batch.trainable] != 0).all()) or not bool(target.evaluate(batch).gradient.any())


def check_same_divisor_in_every_term(target: Target, batch: TokenBatch) -> str | None:
    """Check off-policy that doubling the step halves each gradient and that a dropped sequence scales all alike."""
    if "step" in target.declaration.decisions:
        return None
    before = target.evaluate(batch).gradient
    after = target.evaluate(append(batch, batch)).gradient[: len(batch)]
    if not close(target, before, 2 * after):
        return "appending a copy of the step does not halve each gradient: some term has another divisor or none"
    if target.objective is not None or not bool((before.abs() > 1e-9).any()):
        return None  # a composition has one divisor for all terms, and may centre over the step
    for sequence in dropped_sequences(target):
        after = target.evaluate(append(batch, sequence)).gradient[: len(batch)]
        if common_factor(target, before, after) is None:
            return "a dropped sequence scales the other gradients by different factors: terms have different divisors"
    return None


def check_dropped_tokens_in_divisor(target: Target, batch: TokenBatch) -> str | None:
    """Check that dropped tokens count in the divisor, or do not count, as declared."""
    batch = _on_policy(target, batch)
    products = []
    for sequence in (None, *dropped_sequences(target)):
        probe = batch if sequence is None else append(batch, sequence)
        gradient = target.evaluate(probe).gradient
        if bool((gradient[: len(batch)][batch.trainable] == 0).any()):
            return None  # a step-wide decision dropped the batch too, so the divisor cannot be seen
        counted = probe.trainable.clone()
        if "kept" in target.declaration.divisor:
            counted[len(batch) :] = False
        divisor = torch.zeros(len(probe), dtype=torch.float64)
        divisor.masked_scatter_(probe.trainable, _divisor(target, probe, counted))
        products.append(-(gradient * divisor)[: len(batch)][batch.trainable])
    return _not_constant(target, torch.cat(products))


def _on_policy(target: Target, batch: TokenBatch) -> TokenBatch:
    """Return the batch on-policy with all advantages 1. Raises if the loss or a gradient is not finite there."""
    names = ("sampler_logprobs", "proximal_logprobs", "reference_logprobs", "teacher_logprobs")
    fields = {name: batch.logprobs.detach() for name in names}
    on_policy = with_advantages(target.declaration, batch.replace(**fields), torch.ones_like(batch.advantages))
    target.evaluate_finite(on_policy)
    return on_policy


def _divisor(target: Target, batch: TokenBatch, counted: Tensor) -> Tensor:
    """Return the declared divisor of each trainable token, from the tokens that count."""
    ids = batch.sequence[counted]
    kind = target.declaration.divisor.removeprefix("kept ")
    if kind == "tokens":
        return torch.full((int(batch.trainable.sum()),), float(counted.sum()), dtype=torch.float64)
    sequences = float(len(torch.unique(ids)))
    lengths = torch.tensor(
        [float((ids == sequence).sum()) for sequence in batch.sequence[batch.trainable]], dtype=torch.float64
    )
    return sequences * (lengths.clamp(min=1) if kind == "sequences" else torch.ones_like(lengths))


def _not_constant(target: Target, products: Tensor) -> str | None:
    """Return a message unless gradient times divisor is the same for every token."""
    if close(target, products, products[0].expand_as(products)):
        return None
    low, high = float(products.min()), float(products.max())
    divisor = target.declaration.divisor
    return f'with divisor = "{divisor}", gradient times divisor should be constant but is {low:.6g} to {high:.6g}'
