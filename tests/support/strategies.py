"""Random steps and the objectives to test them with.

`random_step` draws continuous values, for comparison with a reference. The hypothesis strategies draw log-probs and
advantages from coarse dyadic grids: their sums are exact in any order, and no statistic of a grid value equals a
default bound by rounding, so decisions can be compared exactly between two layouts of the same step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import keel
from keel.objectives import PRESETS
from keel.objectives.statistics import STATISTICS, gate_statistic, statistic_names
from keel.signal.metrics import DerivedMetric, Histogram, Metric, Metrics

FLOATS = (
    "logprobs",
    "sampler_logprobs",
    "advantages",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "entropy",
)
IDS = ("sequence", "group", "version", "token_ids", "role")
BAND = {"statistic": "ratio", "low": 0.4, "high": 2.5}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "icepop, rollout_min_ratio": ("icepop", {"rollout_min_ratio": 0.15}),
    "icepop, kept": ("icepop", {"denominator": "kept"}),
    "icepop, sequences": ("icepop", {"reduction": "sequences"}),
    "icepop, sequences, kept": ("icepop", {"reduction": "sequences", "denominator": "kept"}),
    "icepop, constant": ("icepop", {"reduction": "constant", "length": 7}),
    "icepop, constant, kept": ("icepop", {"reduction": "constant", "length": 7, "denominator": "kept"}),
    "icepop, kl_penalty": ("icepop", {"kl_penalty_coef": 0.1}),
    "dapo, kl_penalty sampled": ("dapo", {"kl_penalty_coef": 0.3, "kl_penalty_source": "sampled"}),
    "ipo_kl, teacher": ("ipo_kl", {"teacher_tau": 0.3, "adv_tau": 0.7}),
    "dapo, roles": ("dapo", {"roles": [0, 2]}),
    "opsm, proximal": ("opsm", {"anchor": "proximal", "eps_high": 0.3}),
    "grpo, k1 corrected": (
        "grpo",
        {"reference_kl_coef": 0.05, "reference_kl_estimator": "k1", "reference_kl_correction": True},
    ),
    "grpo, k2": ("grpo", {"reference_kl_coef": 0.05, "reference_kl_estimator": "k2"}),
    "grpo, k2 corrected": (
        "grpo",
        {"reference_kl_coef": 0.05, "reference_kl_estimator": "k2", "reference_kl_correction": True},
    ),
    "grpo, k3": ("grpo", {"reference_kl_coef": 0.05}),
    "icepop, k3 corrected": ("icepop", {"reference_kl_coef": 0.05, "reference_kl_correction": True}),
    "gspo, wide": ("gspo", {"eps": 0.2, "eps_high": 0.3, "anchor": "proximal"}),
    "gspo, gated, kept": ("gspo", {"eps": 0.2, "eps_high": 0.3, "denominator": "kept", "gates": [BAND]}),
    "gmpo, gated": ("gmpo", {"gates": [BAND]}),
    "luspo, wide": ("luspo", {"eps": 0.2, "eps_high": 0.3}),
    "cispo, both caps": ("cispo", {"ratio_low": 0.5, "ratio_high": 1.5}),
    "tis, sequence": ("tis", {"level": "sequence"}),
    "tis, geometric": ("tis", {"level": "geometric", "cap": 1.1}),
    "mis, sequence": ("mis", {"level": "sequence"}),
    "mis, geometric": ("mis", {"level": "geometric", "ratio_low": 0.8, "ratio_high": 1.2}),
    "veto, often": ("veto", {"rollout_min_ratio": 0.3}),
    "m2po, kept": ("m2po", {"denominator": "kept"}),
    "dppo_kl, capped": ("dppo_kl", {"ratio_cap": 1.2}),
    "dppo_binary_kl, capped": ("dppo_binary_kl", {"ratio_cap": 1.2, "mask_high": 0.5}),
    "cross_entropy, roles": ("cross_entropy", {"roles": [1]}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in PRESETS} | VARIANTS
"""Every preset with its defaults, and variants that cover the remaining parts: preset and parameters by case."""


def case_objective(case: str, **changes: Any) -> keel.Objective:
    """Return the objective of a case, with some parameters changed."""
    name, parameters = CASES[case]
    return keel.objective(name, **(parameters | changes))


def batch(
    logprobs: Sequence[float] | Tensor, sampler: Sequence[float] | Tensor | None, **fields: Any
) -> keel.TokenBatch:
    """Return a float64 batch from lists; by default one sequence, all trainable, with advantage 1."""
    size = len(logprobs)
    values: dict[str, Any] = {
        "logprobs": logprobs,
        "sampler_logprobs": sampler,
        "advantages": [1.0] * size,
        "trainable": [True] * size,
        "sequence": [0] * size,
    } | fields
    for name in (*FLOATS, *IDS):
        if values.get(name) is not None and not isinstance(values[name], Tensor):
            values[name] = torch.tensor(values[name], dtype=torch.float64 if name in FLOATS else torch.int64)
    if not isinstance(values["trainable"], Tensor):
        values["trainable"] = torch.tensor(values["trainable"], dtype=torch.bool)
    return keel.TokenBatch(**values)


def run(
    objective: keel.Objective, step: keel.TokenBatch, totals: keel.StepTotals | None = None
) -> tuple[Tensor, Tensor, keel.ObjectiveResult]:
    """Return the loss, its gradient by autograd, and the result."""
    leaf = step.logprobs.detach().clone().requires_grad_()
    result = objective(step.replace(logprobs=leaf), totals)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result.loss.detach(), gradient, result


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def pairs(metrics: Metrics) -> dict[str, list[float]]:
    """Return the summands of all metrics as plain numbers by name; for a histogram, the non-empty bins."""
    flat: dict[str, list[float]] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Metric):
            flat[name] = [metric.sum, metric.count]
        elif isinstance(metric, DerivedMetric):
            flat[name] = [number for part in metric.parts for number in (part.sum, part.count)]
        else:
            assert isinstance(metric, Histogram)
            used = metric.counts.nonzero().squeeze(1)
            flat[name] = [*used.tolist(), *metric.counts[used].tolist()]
    for token, times in metrics.dropped_tokens.items():
        flat[f"dropped token {token}"] = [times]
    return flat


def assert_same_pairs(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        # approx is slow, and most values are bitwise equal
        assert actual[name] == values or actual[name] == pytest.approx(values, rel=1e-6, abs=1e-7), name


def random_step(seed: int, lengths: Sequence[int] = (6, 1, 9, 4, 7, 3, 5, 8), spread: float = 0.9) -> keel.TokenBatch:
    """Return a step with unsorted ids and interleaved sequences; a quarter of its tokens and one sequence are
    untrainable.

    Untrainable tokens have NaN in every float field.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64)

    ids = torch.randperm(1000, generator=generator)[: len(lengths)] - 500
    size = sum(lengths)
    order = torch.randperm(size, generator=generator)
    sequence = ids.repeat_interleave(torch.tensor(lengths))[order]
    sampler = -2.5 * uniform(0, 1).square() - 0.02

    def near(width: float) -> Tensor:
        return (sampler + width * torch.randn(size, generator=generator, dtype=torch.float64)).clamp(max=-0.001)

    trainable = (uniform(0, 1) > 0.25) & (sequence != ids[2])
    floats = {
        "sampler_logprobs": sampler,
        "logprobs": near(spread),
        "proximal_logprobs": near(spread / 2),
        "reference_logprobs": near(spread),
        "teacher_logprobs": near(spread),
        "advantages": uniform(-1.5, 1.5),
        "entropy": uniform(0, 3),
    }
    return keel.TokenBatch(
        **{name: value.masked_fill(~trainable, torch.nan) for name, value in floats.items()},
        trainable=trainable,
        sequence=sequence,
        group=sequence % 3,
        version=torch.randint(3, 8, (size,), generator=generator),
        token_ids=torch.randint(0, 5, (size,), generator=generator),
        role=torch.randint(0, 3, (size,), generator=generator),
        trainer_version=8,
    )


SEQUENCES = (7, -3, 0, 10**12, 2)


def _random_bytes(size: int) -> st.SearchStrategy[list[int]]:
    """Draw `size` numbers below 256 as one byte string, which is many times faster than one by one."""
    return st.binary(min_size=size, max_size=size).map(list)


@st.composite
def steps(draw: st.DrawFn, min_size: int = 1, max_size: int = 20, all_trainable: bool = False) -> keel.TokenBatch:
    """Draw a step on the grid with every field, interleaved sequences and untrainable tokens."""
    size = draw(st.integers(min_size, max_size))
    fields = iter(torch.tensor(draw(_random_bytes(13 * size)), dtype=torch.int64).reshape(13, size))

    def grid(low: int, high: int) -> Tensor:
        return low + next(fields) % (high - low + 1)

    logprobs = {name: grid(0, 24).double() / -8 for name in FLOATS if name not in ("advantages", "entropy")}
    return keel.TokenBatch(
        **logprobs,
        advantages=grid(-6, 6).double() / 4,
        entropy=grid(0, 16).double() / 8,
        trainable=(grid(0, 4) > 0) | all_trainable,
        sequence=torch.tensor(SEQUENCES)[grid(0, len(SEQUENCES) - 1)],
        group=grid(0, 2),
        version=grid(0, 3),
        token_ids=grid(0, 5),
        role=grid(0, 2),
        trainer_version=draw(st.sampled_from([3, 4])),
    )


def permutations_of(step: keel.TokenBatch) -> st.SearchStrategy[Tensor]:
    return _random_bytes(len(step)).map(lambda keys: torch.tensor(keys, dtype=torch.int64).argsort(stable=True))


def masks_of(step: keel.TokenBatch) -> st.SearchStrategy[Tensor]:
    return _random_bytes(len(step)).map(lambda flips: torch.tensor(flips, dtype=torch.int64) % 2 == 1)


def parts_of(step: keel.TokenBatch, *, whole_sequences: bool = False) -> st.SearchStrategy[list[Tensor]]:
    """Draw a split of the step into four micro-batches, some of which may be empty. Sequences may be split anywhere."""

    def split(parts: list[int]) -> list[Tensor]:
        owner = torch.tensor(parts, dtype=torch.int64) % 4
        if whole_sequences:
            _, row = torch.unique(step.sequence, return_inverse=True)
            owner = owner[row]
        return [(owner == part).nonzero().squeeze(1) for part in range(4)]

    return _random_bytes(len(step)).map(split)


def chosen_from(choices: Sequence[float], size: int) -> st.SearchStrategy[list[float]]:
    return _random_bytes(size).map(lambda picks: [choices[pick % len(choices)] for pick in picks])


def without_trainer_version(step: keel.TokenBatch) -> keel.TokenBatch:
    return replace(step, trainer_version=None)


PAIRS = ("policy/sampler", "policy/proximal", "proximal/sampler")


@st.composite
def gates(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any valid gate, with bounds that are not on the grid."""
    name = draw(st.sampled_from(sorted(statistic_names())))
    gate: dict[str, Any] = {"statistic": name, "between": draw(st.sampled_from(PAIRS))}
    low, high = BOUNDS.get(name) or default_bounds(name)
    sides = draw(st.sampled_from(["low", "high", "both"])) if low is not None else "high"
    gate |= {"low": low} if sides in ("low", "both") else {}
    gate |= {"high": high} if sides in ("high", "both") else {}
    levels = [level for level in ("token", "sequence", "geometric") if (name, level) in STATISTICS]
    if len(levels) > 1:
        gate["level"] = draw(st.sampled_from(levels))
    scopes = gate_statistic(name, gate.get("level", "token")).scopes
    if len(scopes) > 1:
        gate["scope"] = draw(st.sampled_from(scopes))
    if gate.get("scope", scopes[0]) != "step":
        gate["when"] = draw(st.sampled_from(["always", "positive_advantage", "negative_advantage"]))
    return gate


BOUNDS: dict[str, tuple[float | None, float]] = {
    "ratio": (0.37, 2.3),
    "probability_difference": (-0.23, 0.19),
    "binary_kl": (None, 0.31),
    "signed_binary_kl": (-0.21, 0.17),
    "symmetric_binary_kl": (None, 0.41),
    "sequence_kl": (-0.57, 0.13),
    "second_moment": (None, 0.29),
}


def default_bounds(name: str) -> tuple[float | None, float]:
    """Return bounds for a statistic that is not in BOUNDS."""
    statistic = gate_statistic(name)
    if statistic.direction == "distance":
        return None, 0.29
    return (0.41, 2.1) if statistic.in_log_space else (-0.21, 0.23)


@st.composite
def compositions(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any valid composition, from all kinds of parts."""
    surrogate = draw(st.sampled_from(["linear", "clip", "soft", "log_prob"]))
    policy: dict[str, Any] = {"surrogate": surrogate, "anchor": "none"}
    if surrogate != "log_prob":
        policy["anchor"] = draw(st.sampled_from(["sampler", "proximal"]))
        policy["level"] = draw(st.sampled_from(["token", "sequence"]))
    if surrogate == "clip":
        policy |= {"eps": 0.21, "eps_high": draw(st.sampled_from([None, 0.33]))}
        policy |= {"dual_clip": draw(st.sampled_from([None, 1.7]))}
    if surrogate == "soft":
        policy |= {"tau_positive": 1.1, "tau_negative": 0.7}
    if surrogate == "linear" and policy["level"] == "sequence":
        policy["token_clip"] = draw(st.sampled_from([None, 0.43]))
    if surrogate == "linear":
        policy["ratio_cap"] = draw(st.sampled_from([None, 1.3]))
    levels = ["sequence", "geometric"] if policy.get("level") == "sequence" else ["token", "sequence", "geometric"]
    weight = st.fixed_dictionaries(
        {"between": st.sampled_from(PAIRS), "level": st.sampled_from(levels)},
        optional={"low": st.just(0.47), "high": st.just(1.9)},
    )
    gamma = {"kernel": "gamma", "k_positive": 1.5, "rate_positive": 2.5, "k_negative": 2.5, "rate_negative": 1.5}
    penalty = st.fixed_dictionaries(
        {
            "estimator": st.just("log_ratio_squared"),
            "between": st.sampled_from(["policy/sampler", "policy/proximal", "policy/reference"]),
            "coef": st.sampled_from([0.01, 0.3]),
            "scope": st.sampled_from(["kept", "all"]),
        }
    ) | st.fixed_dictionaries(
        {
            "estimator": st.sampled_from(["k1", "k2", "k3"]),
            "coef": st.sampled_from([0.01, 0.3]),
            "scope": st.sampled_from(["kept", "all"]),
            "ratio_correction": st.just(True),
        }
    )
    over = draw(st.sampled_from(["tokens", "sequences", "constant"]))
    reduction: dict[str, Any] = {"over": over, "denominator": draw(st.sampled_from(["trainable", "kept"]))}
    return {
        "gates": draw(st.lists(gates(), max_size=3)),
        "weights": draw(st.lists(weight | weight.map(lambda table: table | gamma), max_size=2)),
        "policy": policy,
        "penalties": draw(st.lists(penalty, max_size=2)),
        "reduction": reduction | ({"length": 3} if over == "constant" else {}),
        "adv_tau": draw(st.sampled_from([1.0, 0.5])),
        "teacher_tau": 0.0 if policy.get("level") == "sequence" else draw(st.sampled_from([0.0, 0.25])),
    }
