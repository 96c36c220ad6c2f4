"""What is printed about a rule is true: formulas and sentences are evaluated and held against the objective."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from keel.objectives import PRESETS, Composition, Gate, resolve_objective
from keel.objectives.describe import Description, describe, describe_preset, format_number
from keel.objectives.scalar_gates import dropped_side, first_dropped_side
from keel.objectives.statistics import bernoulli_kl

NAMES = list(PRESETS)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"adv_tau": 0.7, "teacher_tau": 0.3, "kl_penalty_coef": 0.2},
    {"kl_penalty_coef": 0.2, "kl_penalty_source": "sampled", "denominator": "kept"},
    {"reduction": "sequences", "denominator": "kept"},
    {"reduction": "constant", "length": 7, "denominator": "kept"},
    {"reduction": "tokens", "reference_kl_coef": 0.1},
    {
        "reduction": "sequences",
        "reference_kl_coef": 0.1,
        "reference_kl_estimator": "k1",
        "reference_kl_correction": True,
    },
    {"reduction": "constant", "length": 3, "reference_kl_coef": 0.1, "reference_kl_estimator": "k2"},
]
COMPOSITIONS: list[dict[str, Any]] = [
    {"penalties": [{"estimator": "k3", "between": "policy/proximal", "coef": -0.3}]},
    {
        "gates": [{"statistic": "ratio", "level": "geometric", "low": 0.7, "high": 1.4}],
        "weights": [
            {"level": "sequence", "low": 0.5, "high": 2.0},
            {"level": "geometric", "low": 0.9, "between": "policy/proximal"},
        ],
        "policy": {"surrogate": "clip", "level": "sequence", "anchor": "proximal", "eps": 0.05, "dual_clip": 2.0},
        "penalties": [
            {"estimator": "log_ratio_squared", "coef": 0.01, "scope": "all"},
            {"estimator": "k2", "coef": 0.2},
        ],
        "reduction": {"over": "sequences", "denominator": "kept"},
    },
    {
        "gates": [
            {"statistic": "binary_kl", "between": "proximal/sampler", "high": 0.05, "when": "positive_advantage"}
        ],
        "weights": [{"kernel": "gamma", "k_positive": 1, "rate_positive": 2, "k_negative": 3, "rate_negative": 0.5}]
        * 2,
        "policy": {"surrogate": "soft", "tau_positive": 1.0, "tau_negative": 2.0},
        "penalties": [{"estimator": "k1", "coef": 0.1, "ratio_correction": True, "scope": "all"}],
        "adv_tau": 2.0,
        "proximal": "interpolated",
    },
    {
        "gates": [{"statistic": "ratio", "high": 1.3, "scope": "sequence"}],
        "policy": {"surrogate": "cross_entropy", "anchor": "none"},
    },
]


def a_step(seed: int = 0) -> keel.TokenBatch:
    """Six sequences of 1 to 6 tokens in mixed order, a few tokens untrainable, log-ratios around 0.5."""
    random = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([s for s in range(6) for _ in range(s + 1)])
    sequence = sequence[torch.randperm(len(sequence), generator=random)]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(sequence), generator=random, dtype=torch.float64)

    sampler = -0.2 - noise(1.0).abs()
    return keel.TokenBatch(
        logprobs=(sampler + noise(0.4)).clamp(max=-0.01).requires_grad_(),
        sampler_logprobs=sampler,
        advantages=noise(1.0),
        trainable=torch.rand(len(sequence), generator=random) < 0.9,
        sequence=sequence,
        version=torch.randint(0, 4, (len(sequence),), generator=random),
        proximal_logprobs=(sampler + noise(0.3)).clamp(max=-0.01),
        reference_logprobs=sampler + noise(0.3),
        teacher_logprobs=sampler + noise(0.3),
    )


def python(text: str) -> str:
    """A printed expression as Python."""
    choice = re.fullmatch(r"(.+) where (.+), else (.+)", text)
    if choice:
        text = f"where({choice[2]}, {choice[1]}, {choice[3]})"
    return text.replace("A'", "A_t").replace("^", "**")


class Evaluation:
    """Reads a formula as it is printed, with only the meanings of the legend."""

    def __init__(self, batch: keel.TokenBatch, words: Description, parameters: dict[str, Any], keep: Tensor) -> None:
        at = batch.trainable
        self.sequence, self.kept = batch.sequence[at], keep[at]
        self.l = batch.logprobs.detach()[at].requires_grad_()
        ones = torch.ones_like(self.l)
        version = batch.version
        assert version is not None
        known = {name: value for name, value in parameters.items() if value is not None}
        if "eps" in known:
            known = {"eps_high": known["eps"]} | known
        self.known: dict[str, Any] = known | {
            "l": self.l,
            "b": _given(batch.sampler_logprobs)[at],
            "o": _given(batch.proximal_logprobs)[at],
            "f": _given(batch.reference_logprobs)[at],
            "h": _given(batch.teacher_logprobs)[at],
            "A": batch.advantages[at],
            "staleness": (version.max() - version)[at].clamp(min=1),
            "keep": self.kept.double(),
            "N": len(self.l),
            "N_k": int(self.kept.sum()),
            "S": len(self.sequence.unique()),
            "S_k": len(self.sequence[self.kept].unique()),
            "n": self.total(ones),
            "n_k": self.total(ones * self.kept).clamp(min=1),
            "inf": math.inf,
            "exp": torch.exp,
            "sigmoid": torch.sigmoid,
            "sg": torch.detach,
            "where": lambda condition, yes, no: torch.where(condition, yes + 0 * ones, no + 0 * ones),
            "min": lambda x, y: torch.minimum(x, y + 0 * ones),
            "max": lambda x, y: torch.maximum(x, y + 0 * ones),
            "clip": torch.clamp,
            "mean": lambda x: self.total(x) / self.total(ones),
            "mean_kept": lambda x: self.total(x * self.kept) / self.total(ones * self.kept).clamp(min=1),
            "mean_step": torch.mean,
            "prod": lambda x: self.total(x.log()).exp(),
            "gmean": lambda x: (self.total(x.log()) / self.total(ones)).exp(),
        }
        waiting = {symbol.name: symbol.definition for symbol in words.legend if symbol.definition}
        while waiting:
            name = next(name for name, text in waiting.items() if not _words_in(text) & (waiting.keys() - {name}))
            self.known[python(name)] = eval(python(waiting.pop(name)), {}, self.known)

    def total(self, values: Tensor) -> Tensor:
        same = (self.sequence[:, None] == self.sequence[None, :]).to(values.dtype)
        return same @ values

    def loss(self, formula: str) -> Tensor:
        match = re.fullmatch(r"(-?)sum (.+) / (N|N_k|\(S(?:_k)? \* [\w.]+\))", formula)
        assert match is not None, formula
        value = eval(f"({python(match[2])}) / {python(match[3])}", {}, self.known)
        assert isinstance(value, Tensor)
        return -value.sum() if match[1] else value.sum()


def _given(field: Tensor | None) -> Tensor:
    assert field is not None
    return field


def _words_in(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]\w*'?", text))


def assert_formula_is_the_loss(words: Description, objective: keel.Objective) -> None:
    batch = a_step()
    result = objective(batch)
    evaluation = Evaluation(batch, words, objective.parameters, result.keep)
    loss = evaluation.loss(words.formula)
    torch.testing.assert_close(loss.detach(), result.loss.detach())
    (gradient,) = torch.autograd.grad(loss, evaluation.l)
    torch.testing.assert_close(gradient, result.gradient[batch.trainable])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "defaults")
def test_printed_formula_evaluates_to_the_loss_and_its_gradient(name: str, variant: dict[str, Any]) -> None:
    if name == "cross_entropy":
        variant = {key: value for key, value in variant.items() if key in ("reduction", "length")}
    variant = dict(variant)
    assert_formula_is_the_loss(describe_preset(PRESETS[name], variant), keel.objective(name, **variant))


@pytest.mark.parametrize("table", COMPOSITIONS)
def test_printed_formula_of_a_composition_evaluates_to_its_loss(table: dict[str, Any]) -> None:
    composition = Composition.model_validate(table)
    assert_formula_is_the_loss(describe(composition), keel.objective(composition))


def scalar(sentence: str) -> str:
    """The condition in a sentence about the only token of a sequence, as Python."""
    condition = re.split(r"(?:token|whole sequence),? when ", sentence)[1].replace("any ", "")
    return re.sub(r"\|(.+?)\|", r"abs(\1)", condition).replace("^", "**")


def grid() -> list[tuple[float, float, float]]:
    steps = [(i + 0.37) / 12.3 for i in range(12)] + [1e-6, 3e-3]
    return [(p, q, a) for p in steps for q in steps for a in (-1.0, 0.0, 1.0)]


@pytest.mark.parametrize("name", [name for name in NAMES if PRESETS[name].parts.get("gates") and name != "m2po"])
def test_sentences_the_scalar_rule_and_the_tensors_drop_the_same_tokens(name: str) -> None:
    given = {"rollout_min_ratio": 0.3} if name == "icepop" else {}
    objective, words = keel.objective(name, **given), describe_preset(PRESETS[name], given)
    points = grid()
    p, q, a = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    over_sampler = objective.composition.gates[0].between == "proximal/sampler"
    batch = keel.TokenBatch(
        logprobs=p.log(),
        sampler_logprobs=q.log(),
        advantages=a,
        trainable=torch.ones(len(points), dtype=torch.bool),
        sequence=torch.arange(len(points)),
        proximal_logprobs=p.log() if over_sampler else None,
    )
    result = objective(batch)
    identity = {"mean": lambda x: x, "prod": lambda x: x, "gmean": lambda x: x}
    drops = []
    for (p_, q_, a_), keep, code in zip(points, result.keep.tolist(), result.reasons.tolist(), strict=True):
        known = objective.parameters | identity | {"p": p_, "q": q_, "u": p_, "A": a_, "r": p_ / q_, "w": p_ / q_}
        known |= {"l": math.log(p_), "b": math.log(q_), "d": math.log(p_ / q_), "KLb": bernoulli_kl, "max": max}
        known |= {"sign": lambda x: math.copysign(1, x), "abs": abs}
        said = any(eval(scalar(sentence), {}, known) for sentence in words.dropped)
        side = first_dropped_side(objective.composition.gates, p_, q_, a_)
        assert (not keep) == said == (side is not None), (p_, q_, a_)
        if not keep:
            assert objective.reasons[code].endswith(f" {side}")
        drops.append(not keep)
    assert any(drops)
    assert not all(drops)


GOLDEN = {
    "icepop": (
        "-sum keep * A' * r / N",
        ("token when r < ratio_low or r > ratio_high",),
        "every term",
    ),
    "ipo_kl": (
        "sum keep * (-A' * r + kl_tau * d^2) / N",
        ("token when r < ratio_low or r > ratio_high",),
        "every term",
    ),
    "dppo_tv": (
        "-sum keep * A' * r / N",
        ("token when p - q < -diff_low or p - q > diff_high",),
        "every term",
    ),
    "dppo_kl": (
        "sum (-keep * A' * r + kl_tau * d^2) / N",
        ("token, when A > 0 and p - q > mask_high", "token, when A < 0 and p - q < -mask_low"),
        "the policy term, but not from kl_tau * d^2",
    ),
    "opsm": (
        "sum keep * max(-r * A', -clip(r, 1 - eps, 1 + eps_high) * A') / N",
        ("whole sequence when mean(A) < 0 and mean(b - l) > opsm_delta",),
        "every term",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_named_objectives_read_as_they_are_defined(name: str) -> None:
    words = describe_preset(PRESETS[name])
    assert (words.formula, words.dropped, words.dropped_from) == GOLDEN[name]
    assert (words.anchor, words.divisor) == ("sampler", "N, the step's trainable tokens")
    transformed = next(symbol for symbol in words.legend if symbol.name == "A'")
    expected = "adv_tau * (A + kl_penalty_coef * (mean_step(k) - k)) + teacher_tau * sg(h - l)"
    assert transformed.definition == expected


def test_icepop_names_its_sequence_rule_as_off_until_it_is_given() -> None:
    sentence = "whole sequence when any r < rollout_min_ratio"
    assert describe_preset(PRESETS["icepop"]).optional == (f"{sentence} (off unless rollout_min_ratio is set)",)
    given = describe_preset(PRESETS["icepop"], {"rollout_min_ratio": 1e-5})
    assert given.optional == ()
    assert sentence in given.dropped


@pytest.mark.parametrize(
    ("name", "anchor"),
    [
        *(("reinforce", "none"), ("cross_entropy", "none"), ("cispo", "sampler"), ("vespo", "sampler")),
        *(("tis", "proximal"), ("decoupled_ppo", "proximal"), ("grpo", "sampler")),
    ],
)
def test_anchor_is_that_of_the_ratio_or_else_of_the_weight(name: str, anchor: str) -> None:
    assert describe_preset(PRESETS[name]).anchor == anchor


@pytest.mark.parametrize(
    ("given", "divisor"),
    [
        ({}, "N, the step's trainable tokens"),
        ({"denominator": "kept"}, "kept tokens"),
        ({"reduction": "sequences"}, "sequences x own trainable tokens"),
        ({"reduction": "sequences", "denominator": "kept"}, "sequences with a kept token x own kept tokens"),
        ({"reduction": "constant", "length": 9}, "sequences x length"),
        ({"roles": [1, 2]}, "N, the step's trainable tokens of role 1 or 2"),
    ],
)
def test_divisor_follows_reduction_and_denominator(given: dict[str, Any], divisor: str) -> None:
    assert describe_preset(PRESETS["icepop"], given).divisor == divisor


def test_parameters_show_as_names_and_plain_numbers_as_numbers() -> None:
    words = describe_preset(
        PRESETS["icepop"], {"gates": [{"statistic": "probability_difference", "low": -0.1, "high": 0.1}]}
    )
    assert words.dropped == ("token when r < ratio_low or r > ratio_high", "token when |p - q| > 0.1")
    _, _, composition = resolve_objective({"gates": [{"statistic": "ratio", "high": 5.0}]})
    plain = describe(composition)
    assert plain.dropped == ("token when r > 5",)
    assert plain.formula == "-sum keep * A * r / N"


@pytest.mark.parametrize("name", NAMES)
def test_legend_explains_every_symbol_of_the_formula(name: str) -> None:
    words = describe_preset(PRESETS[name])
    _, parameters, _ = resolve_objective({"name": name})
    plain = {"sum", "max", "min", "clip", "sigmoid", "exp"}
    used = _words_in(words.formula)
    assert used <= {symbol.name for symbol in words.legend} | parameters.keys() | plain


def test_no_token_is_dropped_without_gates() -> None:
    assert describe(Composition()).dropped == ("none",)


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1e-5"), (0.2, "0.2"), (5.0, "5"), (2.5e10, "2.5e10"), (-3e-7, "-3e-7")]
)
def test_numbers_are_short_and_exact(value: float, text: str) -> None:
    assert format_number(value) == text
    assert float(text) == value


def gate(**fields: Any) -> Gate:
    return Gate.model_validate(fields)


BAND = gate(statistic="ratio", low=0.2, high=5.0)
DIFFERENCE = gate(statistic="probability_difference", low=-0.25, high=0.25)
OPSM = gate(statistic="sequence_kl", high=1e-4, when="negative_advantage")
HALF_TO_QUARTER = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
"""KLb(1/2, 1/4)."""
QUARTER_TO_HALF = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
"""KLb(1/4, 1/2)."""


@pytest.mark.parametrize(
    ("rule", "p", "q", "advantage", "side"),
    [
        (BAND, 0.1, 0.5, 1, None),  # r = 0.2, on the bound
        (BAND, 0.09, 0.5, 1, "low"),
        (BAND, 0.5, 0.1, -1, None),  # r = 5, on the bound
        (BAND, 0.51, 0.1, -1, "high"),
        (gate(statistic="ratio", low=0.5, scope="sequence"), 0.2, 0.5, 0, "low"),
        (gate(statistic="ratio", level="geometric", high=2.0), 0.9, 0.4, 0, "high"),
        (DIFFERENCE, 0.25, 0.5, 1, None),
        (DIFFERENCE, 0.24, 0.5, 1, "low"),
        (DIFFERENCE, 0.75, 0.5, -1, None),
        (DIFFERENCE, 0.76, 0.5, -1, "high"),
        (gate(statistic="probability_difference", high=0.2, when="positive_advantage"), 0.9, 0.1, 1, "high"),
        (gate(statistic="probability_difference", high=0.2, when="positive_advantage"), 0.9, 0.1, 0, None),
        (gate(statistic="probability_difference", high=0.2, when="positive_advantage"), 0.9, 0.1, -1, None),
        (gate(statistic="probability_difference", low=-0.2, when="negative_advantage"), 0.1, 0.9, -1, "low"),
        (gate(statistic="probability_difference", low=-0.2, when="negative_advantage"), 0.1, 0.9, 0, None),
        (OPSM, math.exp(-1), 1.0, -1, "low"),  # b = 0, l = -1: sequence KL 1
        (OPSM, math.exp(-1), 1.0, 1, None),
        (OPSM, 0.9, 0.5, -1, None),
        (gate(statistic="sequence_kl", low=-0.1), 0.9, 0.5, 1, "high"),
        (gate(statistic="binary_kl", high=HALF_TO_QUARTER - 1e-9), 0.25, 0.5, 1, "low"),
        (gate(statistic="binary_kl", high=HALF_TO_QUARTER + 1e-9), 0.25, 0.5, 1, None),
        (gate(statistic="binary_kl", high=QUARTER_TO_HALF - 1e-9), 0.5, 0.25, 1, "high"),
        (gate(statistic="symmetric_binary_kl", high=HALF_TO_QUARTER - 1e-9), 0.5, 0.25, 1, "high"),
        (gate(statistic="symmetric_binary_kl", high=HALF_TO_QUARTER + 1e-9), 0.5, 0.25, 1, None),
        (gate(statistic="signed_binary_kl", high=QUARTER_TO_HALF - 1e-9), 0.5, 0.25, 1, "high"),
        (gate(statistic="signed_binary_kl", high=0.01), 0.25, 0.5, 1, None),
        (gate(statistic="signed_binary_kl", low=-0.01), 0.25, 0.5, 1, "low"),
        (gate(statistic="binary_kl", high=100.0), 1.0, 0.5, 1, "high"),  # certain under the policy only: infinite
        (gate(statistic="second_moment", high=0.0), 0.01, 0.9, 1, None),
    ],
)
def test_scalar_rule_at_points_known_in_closed_form(
    rule: Gate, p: float, q: float, advantage: float, side: str | None
) -> None:
    assert dropped_side(rule, p, q, advantage) == side


@pytest.mark.parametrize(("p", "q"), [(0.0, 0.5), (0.5, 1.1), (math.nan, 0.5)])
def test_scalar_rule_takes_probabilities_only(p: float, q: float) -> None:
    with pytest.raises(ValueError, match="is not a probability"):
        dropped_side(BAND, p, q, 1.0)
