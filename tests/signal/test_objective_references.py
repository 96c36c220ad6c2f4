"""Every preset equals a reference implementation of its mathematics.

Each reference is a plain loop over sequences and tokens in float64, differentiated by autograd, with `detach` where the
objective stops the gradient. The references use no code of Keel. If the gradient of an objective is the derivative of
its loss, it is also compared with finite differences.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import keel
from keel.objectives import PRESETS
from tests.support.strategies import CASES, case_objective, close, random_step, run


class Naive:
    """The trainable tokens of a step as scalars by position, and the positions of each sequence."""

    def __init__(self, batch: keel.TokenBatch, roles: tuple[int, ...] | None = None) -> None:
        self.leaf = batch.logprobs.detach().clone().requires_grad_()
        self.tokens = [
            t for t in range(len(batch)) if bool(batch.trainable[t]) and (roles is None or int(batch.role[t]) in roles)
        ]
        self.l = {t: self.leaf[t] for t in self.tokens}
        self.b = {t: batch.sampler_logprobs[t] for t in self.tokens}
        self.o = {t: batch.proximal_logprobs[t] for t in self.tokens}
        self.f = {t: batch.reference_logprobs[t] for t in self.tokens}
        self.h = {t: batch.teacher_logprobs[t] for t in self.tokens}
        self.adv = {t: batch.advantages[t] for t in self.tokens}
        self.staleness = {t: batch.trainer_version - int(batch.version[t]) for t in self.tokens}
        self.sequences: dict[int, list[int]] = {}
        for t in self.tokens:
            self.sequences.setdefault(int(batch.sequence[t]), []).append(t)
        self.dropped: set[int] = set()

    @property
    def kept(self) -> list[int]:
        return [t for t in self.tokens if t not in self.dropped]

    def ratio(self, t: int) -> Tensor:
        return (self.l[t] - self.b[t]).exp()

    def p(self, t: int) -> float:
        return math.exp(self.l[t].item())

    def q(self, t: int) -> float:
        return math.exp(self.b[t].item())


Terms = dict[int, Tensor]
"""The loss terms of the tokens that have one."""


def total(values: list[Tensor]) -> Tensor:
    result = torch.zeros((), dtype=torch.float64)
    for value in values:
        result = result + value
    return result


def token_mean(n: Naive, terms: Terms) -> Tensor:
    return total(list(terms.values())) / len(n.tokens)


def sequence_mean(n: Naive, terms: Terms) -> Tensor:
    means = [total([terms[t] for t in ts if t in terms]) / len(ts) for ts in n.sequences.values()]
    return total(means) / len(n.sequences)


def clipped(r: Tensor, adv: Tensor, eps: float, eps_high: float | None = None, dual: float | None = None) -> Tensor:
    """Return -min(r*A, clip(r)*A); with dual clip, the minimum is at least dual*A where A < 0."""
    gain = torch.min(r * adv, r.clamp(1 - eps, 1 + (eps if eps_high is None else eps_high)) * adv)
    if dual is not None and adv < 0:
        gain = torch.max(gain, dual * adv)
    return -gain


def drop_outside_ratio_band(n: Naive, low: float, high: float) -> None:
    n.dropped |= {t for t in n.tokens if not low <= n.ratio(t).item() <= high}


def linear(n: Naive) -> Terms:
    return {t: -n.adv[t] * n.ratio(t) for t in n.kept}


def capped_linear(n: Naive, cap: float) -> Terms:
    """Return -A * r up to the cap and its tangent in l above it, where the gradient is the authors' -A * cap."""
    above = {t: cap * (1 + n.l[t] - n.b[t] - math.log(cap)) for t in n.kept}
    return {t: -n.adv[t] * (above[t] if n.ratio(t) > cap else n.ratio(t)) for t in n.kept}


def clip_terms(n: Naive, anchor: dict[int, Tensor], eps: float = 0.2, eps_high: float | None = None) -> Terms:
    return {t: clipped((n.l[t] - anchor[t]).exp(), n.adv[t], eps, eps_high) for t in n.kept}


# The main objectives


def icepop_terms(n: Naive, low: float = 0.2, high: float = 5.0) -> Terms:
    drop_outside_ratio_band(n, low, high)
    return linear(n)


def icepop(n: Naive) -> Tensor:
    return token_mean(n, icepop_terms(n))


def icepop_min_ratio(n: Naive) -> Tensor:
    for ts in n.sequences.values():
        if any(n.ratio(t) < 0.15 for t in ts):
            n.dropped |= set(ts)
    return icepop(n)


def ipo_kl(n: Naive, kl_tau: float = 1e-3) -> Tensor:
    terms = icepop_terms(n)
    return token_mean(n, {t: term + kl_tau * (n.l[t] - n.b[t]) ** 2 for t, term in terms.items()})


def dppo_tv(n: Naive) -> Tensor:
    n.dropped |= {t for t in n.tokens if n.p(t) - n.q(t) < -0.2 or n.p(t) - n.q(t) > 0.2}
    return token_mean(n, linear(n))


def with_penalty_on_all(n: Naive, kl_tau: float = 1e-3, cap: float = math.inf) -> Tensor:
    penalties = {t: kl_tau * (n.l[t] - n.b[t]) ** 2 for t in n.tokens}
    return token_mean(n, capped_linear(n, cap) if cap < math.inf else linear(n)) + token_mean(n, penalties)


def dppo_kl(n: Naive, cap: float = math.inf) -> Tensor:
    for t in n.tokens:
        difference = n.p(t) - n.q(t)
        if (n.adv[t] > 0 and difference > 0.2) or (n.adv[t] < 0 and difference < -0.2):
            n.dropped.add(t)
    return with_penalty_on_all(n, cap=cap)


def opsm_gate(n: Naive, delta: float = 1e-4) -> None:
    for ts in n.sequences.values():
        advantage = sum(n.adv[t].item() for t in ts) / len(ts)
        kl = sum(n.b[t].item() - n.l[t].item() for t in ts) / len(ts)
        if advantage < 0 and kl > delta:
            n.dropped |= set(ts)


def opsm(n: Naive) -> Tensor:
    opsm_gate(n)
    return token_mean(n, clip_terms(n, n.b))


def opsm_proximal(n: Naive) -> Tensor:
    opsm_gate(n)
    return token_mean(n, clip_terms(n, n.o, 0.2, 0.3))


# The other presets


def ipo(n: Naive) -> Tensor:
    n.dropped |= {t for t in n.tokens if abs(n.p(t) - n.q(t)) > 0.1}
    return with_penalty_on_all(n)


def reinforce(n: Naive) -> Tensor:
    return token_mean(n, {t: -n.adv[t] * n.l[t] for t in n.tokens})


def grpo(n: Naive) -> Tensor:
    return sequence_mean(n, clip_terms(n, n.b))


def dapo(n: Naive) -> Tensor:
    return token_mean(n, clip_terms(n, n.b, 0.2, 0.28))


def dr_grpo(n: Naive) -> Tensor:
    return total(list(clip_terms(n, n.b).values())) / (len(n.sequences) * 1024)


def ppo(n: Naive) -> Tensor:
    return token_mean(n, {t: clipped(n.ratio(t), n.adv[t], 0.2, dual=3.0) for t in n.tokens})


def sequence_clip(n: Naive, anchor: dict[int, Tensor], eps: float, eps_high: float) -> dict[int, Tensor]:
    """Return GSPO's loss of each sequence: the clipped geometric mean ratio times the advantage."""
    losses = {}
    for name, ts in n.sequences.items():
        ratio = (total([n.l[t] - anchor[t] for t in ts]) / len(ts)).exp()
        losses[name] = clipped(ratio, total([n.adv[t] for t in ts]) / len(ts), eps, eps_high)
    return losses


def gspo(n: Naive) -> Tensor:
    return total(list(sequence_clip(n, n.b, 3e-4, 4e-4).values())) / len(n.sequences)


def gspo_wide(n: Naive) -> Tensor:
    return total(list(sequence_clip(n, n.o, 0.2, 0.3).values())) / len(n.sequences)


def gspo_gated_kept(n: Naive) -> Tensor:
    """Dropped tokens count in neither ratio, advantage nor length of a sequence, and empty sequences not in the
    mean."""
    drop_outside_ratio_band(n, 0.4, 2.5)
    n.sequences = {name: [t for t in ts if t not in n.dropped] for name, ts in n.sequences.items()}
    n.sequences = {name: ts for name, ts in n.sequences.items() if ts}
    return total(list(sequence_clip(n, n.b, 0.2, 0.3).values())) / len(n.sequences)


def luspo(n: Naive, eps: float = 3e-4, eps_high: float = 4e-4) -> Tensor:
    losses = sequence_clip(n, n.b, eps, eps_high)
    return total([len(n.sequences[name]) * loss for name, loss in losses.items()]) / len(n.sequences)


def cispo(n: Naive, low: float = 0.0, high: float = 5.0) -> Tensor:
    weight = {t: n.ratio(t).detach().clamp(low, high) for t in n.tokens}
    return token_mean(n, {t: -weight[t] * n.adv[t] * n.l[t] for t in n.tokens})


def importance(n: Naive, level: str) -> dict[int, Tensor]:
    """Return o/b of each token, or its product or geometric mean over the sequence."""
    if level == "token":
        return {t: (n.o[t] - n.b[t]).exp() for t in n.tokens}
    ratios = {}
    for ts in n.sequences.values():
        log_ratio = total([n.o[t] - n.b[t] for t in ts])
        ratios |= {t: (log_ratio / (len(ts) if level == "geometric" else 1)).exp() for t in ts}
    return ratios


def tis(level: str, cap: float) -> Callable[[Naive], Tensor]:
    def reference(n: Naive) -> Tensor:
        weight = importance(n, level)
        terms = clip_terms(n, n.o)
        return token_mean(n, {t: weight[t].clamp(max=cap) * term for t, term in terms.items()})

    return reference


def mis(level: str, low: float, high: float) -> Callable[[Naive], Tensor]:
    def reference(n: Naive) -> Tensor:
        weight = importance(n, level)
        n.dropped |= {t for t in n.tokens if not low <= weight[t].item() <= high}
        return token_mean(n, {t: weight[t] * term for t, term in clip_terms(n, n.o).items()})

    return reference


def veto(floor: float) -> Callable[[Naive], Tensor]:
    def reference(n: Naive) -> Tensor:
        for ts in n.sequences.values():
            if any(n.ratio(t) < floor for t in ts):
                n.dropped |= set(ts)
        return token_mean(n, clip_terms(n, n.b))

    return reference


def bernoulli_kl(a: float, b: float) -> float:
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


def kpop(n: Naive) -> Tensor:
    for t in n.tokens:
        if max(bernoulli_kl(n.p(t), n.q(t)), bernoulli_kl(n.q(t), n.p(t))) > 0.5:
            n.dropped.add(t)
    return token_mean(n, linear(n))


def dppo_binary_kl(n: Naive, mask_high: float = 0.05, cap: float = math.inf) -> Tensor:
    for t in n.tokens:
        too_large = bernoulli_kl(n.q(t), n.p(t)) > (mask_high if n.adv[t] > 0 else 0.05)
        in_direction = (n.adv[t] > 0 and n.p(t) > n.q(t)) or (n.adv[t] < 0 and n.p(t) < n.q(t))
        if too_large and in_direction:
            n.dropped.add(t)
    return token_mean(n, capped_linear(n, cap) if cap < math.inf else linear(n))


def m2po_gate(n: Naive, tau: float = 0.04) -> None:
    squares = {t: (n.l[t].item() - n.b[t].item()) ** 2 for t in n.tokens}
    while n.kept and sum(squares[t] for t in n.kept) / len(n.kept) > tau:
        n.dropped.add(max(n.kept, key=squares.__getitem__))


def m2po(n: Naive) -> Tensor:
    m2po_gate(n)
    return token_mean(n, linear(n))


def m2po_kept(n: Naive) -> Tensor:
    m2po_gate(n)
    return total(list(linear(n).values())) / len(n.kept)


def sapo(n: Naive) -> Tensor:
    terms = {}
    for t in n.tokens:
        tau = 1.0 if n.adv[t] > 0 else 1.05
        terms[t] = -n.adv[t] * torch.sigmoid(tau * (n.ratio(t) - 1)) * 4 / tau
    return sequence_mean(n, terms)


def gmpo(n: Naive) -> Tensor:
    """Return the mean over sequences of A times gmean(min(r, e^0.4) where A > 0, max(r, e^-0.4) where A < 0)."""
    losses = []
    for ts in n.sequences.values():
        logs = []
        for t in (t for t in ts if t not in n.dropped):
            r, bound = n.ratio(t), torch.tensor(0.4, dtype=torch.float64)
            logs.append((torch.min(r, bound.exp()) if n.adv[t] > 0 else torch.max(r, (-bound).exp())).log())
        kept = [t for t in ts if t not in n.dropped]
        if kept:
            advantage = total([n.adv[t] for t in kept]) / len(kept)
            # a dropped token counts in the length of its sequence, so a sequence is weighted by its kept fraction
            losses.append(-advantage * (total(logs) / len(logs)).exp() * len(kept) / len(ts))
    return total(losses) / len(n.sequences)


def gmpo_gated(n: Naive) -> Tensor:
    drop_outside_ratio_band(n, 0.4, 2.5)
    return gmpo(n)


def vespo(n: Naive) -> Tensor:
    terms = {}
    for ts in n.sequences.values():
        weight = total([n.l[t] - n.b[t] for t in ts]).exp().detach()
        k, rate = (2.0, 3.0) if sum(n.adv[t].item() for t in ts) > 0 else (3.0, 2.0)
        for t in ts:
            terms[t] = -(weight**k) * (rate * (1 - weight)).exp() * n.adv[t] * n.l[t]
    return token_mean(n, terms)


def decoupled_ppo(n: Naive) -> Tensor:
    return tis("token", 5.0)(n)


def decoupled_ppo_loglinear(n: Naive) -> Tensor:
    for t in n.tokens:
        alpha = 1 / max(n.staleness[t], 1)
        n.o[t] = (alpha * n.b[t] + (1 - alpha) * n.l[t]).detach()
    return tis("token", 5.0)(n)


def on_policy_distillation(n: Naive) -> Tensor:
    return token_mean(n, {t: -(n.h[t] - n.l[t]).detach() * n.ratio(t) for t in n.tokens})


def cross_entropy(n: Naive) -> Tensor:
    return token_mean(n, {t: -n.l[t] for t in n.tokens})


# Reductions, transforms and the KL to a reference


def icepop_kept(n: Naive) -> Tensor:
    terms = icepop_terms(n)
    return total(list(terms.values())) / len(terms)


def icepop_sequences(n: Naive) -> Tensor:
    return sequence_mean(n, icepop_terms(n))


def icepop_sequences_kept(n: Naive) -> Tensor:
    terms = icepop_terms(n)
    kept_terms = [[terms[t] for t in ts if t in terms] for ts in n.sequences.values()]
    means = [total(values) / len(values) for values in kept_terms if values]
    return total(means) / len(means)


def icepop_constant(n: Naive) -> Tensor:
    return total(list(icepop_terms(n).values())) / (7 * len(n.sequences))


def icepop_constant_kept(n: Naive) -> Tensor:
    terms = icepop_terms(n)
    kept_sequences = [ts for ts in n.sequences.values() if any(t in terms for t in ts)]
    return total(list(terms.values())) / (7 * len(kept_sequences))


def add_kl_penalty(n: Naive, k: dict[int, float], coef: float) -> None:
    mean = sum(k.values()) / len(k)
    n.adv = {t: n.adv[t] + coef * (mean - k[t]) for t in n.tokens}


def icepop_kl_penalty(n: Naive) -> Tensor:
    add_kl_penalty(n, {t: n.l[t].item() - n.f[t].item() for t in n.tokens}, 0.1)
    return icepop(n)


def dapo_kl_penalty_sampled(n: Naive) -> Tensor:
    add_kl_penalty(n, {t: n.b[t].item() - n.f[t].item() for t in n.tokens}, 0.3)
    return dapo(n)


def ipo_kl_teacher(n: Naive) -> Tensor:
    n.adv = {t: 0.7 * n.adv[t] + 0.3 * (n.h[t] - n.l[t]).detach() for t in n.tokens}
    return ipo_kl(n)


def reference_kl(n: Naive, t: int, estimator: str, corrected: bool) -> Tensor:
    x = n.l[t] - n.f[t]
    value = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() + x - 1}[estimator]
    return value * n.ratio(t) if corrected else value


def grpo_reference(estimator: str, corrected: bool) -> Callable[[Naive], Tensor]:
    def reference(n: Naive) -> Tensor:
        terms = clip_terms(n, n.b)
        return sequence_mean(
            n, {t: term + 0.05 * reference_kl(n, t, estimator, corrected) for t, term in terms.items()}
        )

    return reference


def icepop_k3_corrected(n: Naive) -> Tensor:
    terms = icepop_terms(n)
    return token_mean(n, {t: term + 0.05 * reference_kl(n, t, "k3", True) for t, term in terms.items()})


REFERENCES: dict[str, Callable[[Naive], Tensor]] = {
    "icepop": icepop,
    "ipo_kl": ipo_kl,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "opsm": opsm,
    "ipo": ipo,
    "reinforce": reinforce,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "tis": tis("token", 2.0),
    "mis": mis("token", 0.5, 2.0),
    "veto": veto(1e-4),
    "kpop": kpop,
    "dppo_binary_kl": dppo_binary_kl,
    "m2po": m2po,
    "sapo": sapo,
    "gmpo": gmpo,
    "luspo": luspo,
    "vespo": vespo,
    "decoupled_ppo": decoupled_ppo,
    "decoupled_ppo_loglinear": decoupled_ppo_loglinear,
    "on_policy_distillation": on_policy_distillation,
    "cross_entropy": cross_entropy,
    "icepop, rollout_min_ratio": icepop_min_ratio,
    "icepop, kept": icepop_kept,
    "icepop, sequences": icepop_sequences,
    "icepop, sequences, kept": icepop_sequences_kept,
    "icepop, constant": icepop_constant,
    "icepop, constant, kept": icepop_constant_kept,
    "icepop, kl_penalty": icepop_kl_penalty,
    "dapo, kl_penalty sampled": dapo_kl_penalty_sampled,
    "ipo_kl, teacher": ipo_kl_teacher,
    "dapo, roles": dapo,
    "opsm, proximal": opsm_proximal,
    "grpo, k1 corrected": grpo_reference("k1", True),
    "grpo, k2": grpo_reference("k2", False),
    "grpo, k2 corrected": grpo_reference("k2", True),
    "grpo, k3": grpo_reference("k3", False),
    "icepop, k3 corrected": icepop_k3_corrected,
    "gspo, wide": gspo_wide,
    "gspo, gated, kept": gspo_gated_kept,
    "gmpo, gated": gmpo_gated,
    "luspo, wide": lambda n: luspo(n, 0.2, 0.3),
    "cispo, both caps": lambda n: cispo(n, 0.5, 1.5),
    "tis, sequence": tis("sequence", 2.0),
    "tis, geometric": tis("geometric", 1.1),
    "mis, sequence": mis("sequence", 0.5, 2.0),
    "mis, geometric": mis("geometric", 0.8, 1.2),
    "veto, often": veto(0.3),
    "m2po, kept": m2po_kept,
    "dppo_kl, capped": lambda n: dppo_kl(n, cap=1.2),
    "dppo_binary_kl, capped": lambda n: dppo_binary_kl(n, mask_high=0.5, cap=1.2),
    "cross_entropy, roles": cross_entropy,
}

STEPS = [(0, 0.9), (2, 1.8), (3, 3.0)]
"""Seed and spread of the log-ratios, from near to far off-policy."""


def test_every_preset_has_a_reference() -> None:
    assert PRESETS.keys() <= REFERENCES.keys()
    assert CASES.keys() == REFERENCES.keys()


@pytest.mark.parametrize(("seed", "spread"), STEPS)
@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_kept_tokens_equal_the_reference(case: str, seed: int, spread: float) -> None:
    step = random_step(seed, spread=spread)
    roles = CASES[case][1].get("roles")
    naive = Naive(step, roles)
    expected = REFERENCES[case](naive)
    (expected_gradient,) = torch.autograd.grad(expected, naive.leaf)
    loss, gradient, result = run(case_objective(case), step)
    assert result.keep.nonzero().squeeze(1).tolist() == naive.kept
    assert result.kept_tokens == len(naive.kept)
    close(loss, expected.detach())
    close(gradient, expected_gradient.nan_to_num(0.0))
    close(result.gradient, gradient)


# veto with its default of 1e-4 almost never drops a sequence; "veto, often" covers it
GATED = [case for case in CASES if case_objective(case).composition.gates and case != "veto"]


@pytest.mark.parametrize("case", GATED)
def test_every_gate_keeps_and_drops_tokens_on_the_reference_steps(case: str) -> None:
    """Otherwise the comparison with the references would not test the gates."""
    assert {kept for seed, spread in STEPS for kept in _kept_tokens(case, seed, spread)} == {True, False}


def _kept_tokens(case: str, seed: int, spread: float) -> list[bool]:
    step = random_step(seed, spread=spread)
    return case_objective(case)(step).keep[step.trainable].tolist()


DETACHED = ("cispo", "vespo", "decoupled_ppo_loglinear", "on_policy_distillation", "teacher", "icepop, kl_penalty")
"""Objectives whose gradient is not the derivative of their loss, because they detach a function of l."""


@pytest.mark.parametrize("case", [case for case in CASES if not any(name in case for name in DETACHED)])
def test_the_gradient_is_the_finite_difference_of_the_loss(case: str) -> None:
    step, objective, width = random_step(5, lengths=(4, 2, 3, 5, 1), spread=0.9), case_objective(case), 1e-6
    _, gradient, _ = run(objective, step)
    for t in step.trainable.nonzero().squeeze(1).tolist():
        losses = []
        for sign in (1, -1):
            shifted = step.logprobs.clone()
            shifted[t] += sign * width
            losses.append(float(objective(step.replace(logprobs=shifted)).loss))
        assert gradient[t].item() == pytest.approx((losses[0] - losses[1]) / (2 * width), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("case", ["cispo", "vespo", "on_policy_distillation", "icepop, kl_penalty"])
def test_the_gradient_with_detached_terms_differs_from_the_derivative_of_the_loss(case: str) -> None:
    """The complement of the test above: the listed objectives do detach a term."""
    step, objective, width = random_step(5, lengths=(4, 2, 3, 5, 1), spread=0.9), case_objective(case), 1e-6
    _, gradient, _ = run(objective, step)
    t = int(step.trainable.nonzero()[0])
    shifted = step.logprobs.clone()
    shifted[t] += width
    derivative = (objective(step.replace(logprobs=shifted)).loss - objective(step).loss).item() / width
    assert abs(gradient[t].item() - derivative) > 1e-4
