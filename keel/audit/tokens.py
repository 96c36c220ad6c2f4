"""Questions about single tokens and whole sequences: who is read, who votes, who leaves, and with whom."""

import math

import torch

from keel.audit.asking import (
    active,
    close,
    difference,
    enlarge,
    factor,
    rejected_rows,
    same,
    shift_ids,
    vanished,
    with_empty_row,
)
from keel.audit.probes import Token, build, with_advantages
from keel.audit.target import Target, TargetError
from keel.signal import TokenBatch

# a. masking by multiplication


def junk_is_never_read(target: Target, batch: TokenBatch) -> str | None:
    """What lies in untrainable slots changes nothing, whatever it is."""
    clean = target.evaluate(batch)
    hidden = ~batch.trainable
    floats = {name: value.detach() for name, value in batch.tensors().items() if value.is_floating_point()}
    for name in ("logprobs", "sampler_logprobs", "advantages"):
        for junk in (9.0, -9.0):  # a moderate number passes where a guard against NaN stands
            alone = target.evaluate(batch.replace(**{name: floats[name].masked_fill(hidden, junk)}))
            if not same(target, clean, alone):
                return f"with {name} = {junk} on untrainable tokens {difference(target, clean, alone)}"
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {name: value.masked_fill(hidden, junk) for name, value in floats.items()}
        found = target.evaluate(batch.replace(**dirty))
        if same(target, clean, found):
            continue
        for name, value in dirty.items():
            alone = target.evaluate(batch.replace(**{name: value}))
            if not same(target, clean, alone):
                return f"with {name} = {junk} on untrainable tokens {difference(target, clean, alone)}"
        return f"with {junk} in every field of untrainable tokens {difference(target, clean, found)}"
    return None


def extremes_are_finite(target: Target, batch: TokenBatch) -> str | None:
    """A log-ratio of +-1000 on one token makes no NaN anywhere, in the loss or in a gradient."""
    anchor = "proximal_logprobs" if target.declaration.anchor == "proximal" else "sampler_logprobs"
    for place in batch.trainable.nonzero().squeeze(1).tolist():
        for policy, other in ((-0.1, -1000.1), (-1000.1, -0.1)):
            changes = {"logprobs": policy, anchor: other}
            extreme = batch
            for name, value in changes.items():
                filled = batch.tensors()[name].detach().index_fill(0, torch.tensor(place), value)
                extreme = extreme.replace(**{name: filled})
            found = target.evaluate(with_advantages(target.declaration, extreme, extreme.advantages))
            if math.isnan(found.loss) or bool(found.gradient.isnan().any()):
                size = f"{policy - other:+.0f}"
                return f"token {place} with a log-ratio of {size} makes the loss {found.loss} or a gradient NaN"
    return None


def unusable_is_dropped(target: Target, batch: TokenBatch) -> str | None:
    """A trainable token whose sampler log-prob is NaN or infinite is dropped, or the step is refused."""
    if target.declaration.signal == "none":
        return None
    batch = enlarge(target, batch, 128)
    place = int(batch.trainable.nonzero()[0])
    assert batch.sampler_logprobs is not None
    for junk in (math.nan, math.inf, -math.inf):
        broken = batch.replace(sampler_logprobs=batch.sampler_logprobs.index_fill(0, torch.tensor(place), junk))
        try:
            found = target.evaluate(broken)
        except TargetError:
            raise
        except Exception:  # noqa: BLE001 - refusing the step, however it is done, is an answer
            continue
        if not math.isfinite(found.loss) or not bool(found.gradient.isfinite().all()):
            return f"sampler_logprobs[{place}] = {junk}, trainable: the loss is {found.loss}, or a gradient not finite"
        here = torch.arange(len(batch)) == place
        trains = bool(found.gradient[place] != 0)
        if target.declaration.leaves == "policy term":
            trains = bool(active(target, broken)[place])  # it may still pay what it is declared to
        if trains or not vanished(target, broken, here):
            return f"sampler_logprobs[{place}] = {junk} and the token still counts, as if it were on policy"
    return None


# c. rejected rows still vote


def empty_rows_have_no_vote(target: Target, batch: TokenBatch) -> str | None:
    """A failed rollout, without a trainable token, moves nothing but perhaps a divisor (which is another question)."""
    clean, found = target.evaluate(batch), target.evaluate(with_empty_row(target, batch))
    before, after = clean.gradient, found.gradient[: len(batch)]
    if close(target, before, after) or factor(target, before, after) is not None:
        return None
    return "a rollout without a trainable token, added to a group, changes the gradients of its siblings"


def rejected_rows_have_no_vote(target: Target, batch: TokenBatch) -> str | None:
    """A sequence whose every token was refused moves no baseline of its siblings."""
    assert batch.group is not None
    for row in rejected_rows(target):
        row = shift_ids(row, 30_000).replace(group=torch.full((len(row),), int(batch.group[0])))
        joined = TokenBatch.cat([batch, row])
        louder = joined.advantages.clone()
        louder[len(batch) :] *= 9.0
        clean = target.evaluate(joined).gradient[: len(batch)]
        found = target.evaluate(with_advantages(target.declaration, joined, louder)).gradient[: len(batch)]
        if not close(target, clean, found):
            return "the advantage of a sequence that the rule refused changes the gradients of its siblings"
    return None


def dropped_tokens_leave(target: Target, batch: TokenBatch) -> str | None:
    """A dropped token has exactly zero gradient in every term that the rule says it leaves."""
    if target.declaration.leaves != "every term" or target.declaration.signal == "none":
        return None
    gradient = target.evaluate(batch).gradient
    paying = ~active(target, batch) & batch.trainable & (gradient.abs() > 1e-12)
    for place in paying.nonzero().squeeze(1).tolist():
        if vanished(target, batch, torch.arange(len(batch)) == place):
            return f"token {place} was dropped and still has a gradient of {float(gradient[place]):.6g}"
    return None


def dropped_tokens_still_pay(target: Target, batch: TokenBatch) -> str | None:
    """Where the rule says that a dropped token still pays a penalty, it does."""
    if target.declaration.leaves != "policy term":
        return None
    assert batch.sampler_logprobs is not None
    silent = ~active(target, batch) & batch.trainable & (target.evaluate(batch).gradient == 0)
    far = silent & ((batch.logprobs - batch.sampler_logprobs).abs() > 1e-3)
    return (
        f"token {int(far.nonzero()[0])} was dropped and pays nothing, though it is declared to"
        if bool(far.any())
        else None
    )


# d. a sequence decision at token scope


def sequences_share_one_fate(target: Target, batch: TokenBatch) -> str | None:
    """The tokens of a sequence that are not dropped for their own sake are dropped together or not at all."""
    if "step" in target.declaration.decisions or target.declaration.signal == "none":
        return None
    alive = active(target, batch)
    for sequence in torch.unique(batch.sequence):
        places = ((batch.sequence == sequence) & batch.trainable).nonzero().squeeze(1).tolist()
        if len(places) < 2 or len({bool(alive[place]) for place in places}) == 1:
            continue
        own = [place for place in places if bool(alive[place]) or not _dropped_alone(target, batch, place)]
        if len({bool(alive[place]) for place in own}) > 1:
            kept = next(place for place in own if bool(alive[place]))
            gone = next(place for place in own if not bool(alive[place]))
            return (
                f"token {gone} is dropped for what its sequence is, and token {kept} of the same sequence still trains"
            )
    return None


def _dropped_alone(target: Target, batch: TokenBatch, place: int) -> bool:
    """Whether the token is dropped in whatever company it is put."""
    one = torch.tensor([place])
    for advantage in (5.0, -5.0):
        for drift in (0.0, 0.05, -0.05):
            company = build(target.declaration, [[Token(drift, advantage)] * 60])
            joined = TokenBatch.cat([batch.take(one), company.replace(sequence=batch.sequence[one].expand(60))])
            if bool(active(target, joined)[0]):
                return False
    return True
