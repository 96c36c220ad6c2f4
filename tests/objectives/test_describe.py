"""Descriptions are correct: printed formulas and sentences are evaluated and compared with the objective."""

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
    {"policy": {"surrogate": "linear", "ratio_cap": 1.1}},
    {"policy": {"surrogate": "linear", "anchor": "proximal", "level": "sequence", "ratio_cap": 0.98}},
    {
        "gates": [{"statistic": "ratio", "high": 1.3, "scope": "sequence"}],
        "policy": {"surrogate": "cross_entropy", "anchor": "none"},
    },
]


def random_step(seed: int = 0) -> keel.TokenBatch:
    """Return six interleaved sequences of 1 to 6 tokens, some untrainable, with log-ratios of up to about 0.5."""
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([s for s in range(6) for _ in range(s + 1)])
    sequence = sequence[torch.randperm(len(sequence), generator=generator)]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(sequence), generator=generator, dtype=torch.float64)

    sampler = -0.2 - noise(1.0).abs()
    return keel.TokenBatch(
        logprobs=(sampler + noise(0.4)).clamp(max=-0.01).requires_grad_(),
        sampler_logprobs=sampler,
        advantages=noise(1.0),
        trainable=torch.rand(len(sequence), generator=generator) < 0.9,
        sequence=sequence,
        version=torch.randint(0, 4, (len(sequence),), generator=generator),
        proximal_logprobs=(sampler + noise(0.3)).clamp(max=-0.01),
        reference_logprobs=sampler + noise(0.3),
        teacher_logprobs=sampler + noise(0.3),
    )


def to_python(text: str) -> str:
    """Convert a printed expression to Python."""
    choice = re.fullmatch(r"(.+) where (.+), else (.+)", text)
    if choice:
        text = f"where({choice[2]}, {choice[1]}, {choice[3]})"
    return text.replace("A'", "A_t").replace("^", "**")


class Evaluation:
    """Evaluates a printed formula, using only the definitions of its legend."""

    def __init__(
        self, batch: keel.TokenBatch, description: Description, parameters: dict[str, Any], keep: Tensor
    ) -> None:
        mask = batch.trainable
        self.sequence, self.kept = batch.sequence[mask], keep[mask]
        self.l = batch.logprobs.detach()[mask].requires_grad_()
        ones = torch.ones_like(self.l)
        version = batch.version
        assert version is not None
        known = {name: value for name, value in parameters.items() if value is not None}
        if "eps" in known:
            known = {"eps_high": known["eps"]} | known
        self.known: dict[str, Any] = known | {
            "l": self.l,
            "b": _not_none(batch.sampler_logprobs)[mask],
            "o": _not_none(batch.proximal_logprobs)[mask],
            "f": _not_none(batch.reference_logprobs)[mask],
            "h": _not_none(batch.teacher_logprobs)[mask],
            "A": batch.advantages[mask],
            "staleness": (version.max() - version)[mask].clamp(min=1),
            "keep": self.kept.double(),
            "N": len(self.l),
            "N_k": int(self.kept.sum()),
            "S": len(self.sequence.unique()),
            "S_k": len(self.sequence[self.kept].unique()),
            "n": self.total(ones),
            "n_k": self.total(ones * self.kept).clamp(min=1),
            "inf": math.inf,
            "exp": torch.exp,
            "log": lambda x: torch.as_tensor(x, dtype=torch.float64).log(),
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
        undefined = {symbol.name: symbol.definition for symbol in description.legend if symbol.definition}
        while undefined:
            name = next(name for name, text in undefined.items() if not _symbols(text) & (undefined.keys() - {name}))
            self.known[to_python(name)] = eval(to_python(undefined.pop(name)), {}, self.known)

    def total(self, values: Tensor) -> Tensor:
        same_sequence = (self.sequence[:, None] == self.sequence[None, :]).to(values.dtype)
        return same_sequence @ values

    def loss(self, formula: str) -> Tensor:
        match = re.fullmatch(r"(-?)sum (.+) / (N|N_k|\(S(?:_k)? \* [\w.]+\))", formula)
        assert match is not None, formula
        value = eval(f"({to_python(match[2])}) / {to_python(match[3])}", {}, self.known)
        assert isinstance(value, Tensor)
        return -value.sum() if match[1] else value.sum()


def _not_none(field: Tensor | None) -> Tensor:
    assert field is not None
    return field


def _symbols(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]\w*'?", text))


def assert_formula_equals_loss(description: Description, objective: keel.Objective) -> None:
    batch = random_step()
    result = objective(batch)
    evaluation = Evaluation(batch, description, objective.parameters, result.keep)
    loss = evaluation.loss(description.formula)
    torch.testing.assert_close(loss.detach(), result.loss.detach())
    (gradient,) = torch.autograd.grad(loss, evaluation.l)
    torch.testing.assert_close(gradient, result.gradient[batch.trainable])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "defaults")
def test_the_printed_formula_equals_the_loss_and_its_gradient(name: str, variant: dict[str, Any]) -> None:
    if name == "cross_entropy":
        variant = {key: value for key, value in variant.items() if key in ("reduction", "length")}
    if PRESETS[name].resolve({})[1].policy.level == "sequence":  # transforms of single tokens are an error there
        variant = {key: value for key, value in variant.items() if "kl_penalty" not in key and key != "teacher_tau"}
    variant = dict(variant)
    assert_formula_equals_loss(describe_preset(PRESETS[name], variant), keel.objective(name, **variant))


@pytest.mark.parametrize("table", COMPOSITIONS)
def test_the_printed_formula_of_a_composition_equals_its_loss(table: dict[str, Any]) -> None:
    composition = Composition.model_validate(table)
    assert_formula_equals_loss(describe(composition), keel.objective(composition))


def condition_of(sentence: str) -> str:
    """Convert the condition in a sentence, for a sequence of one token, to Python."""
    condition = re.split(r"(?:token|whole sequence),? when ", sentence)[1].replace("any ", "")
    return re.sub(r"\|(.+?)\|", r"abs(\1)", condition).replace("^", "**")


def grid() -> list[tuple[float, float, float]]:
    steps = [(i + 0.37) / 12.3 for i in range(12)] + [1e-6, 3e-3]
    return [(p, q, a) for p in steps for q in steps for a in (-1.0, 0.0, 1.0)]


@pytest.mark.parametrize("name", [name for name in NAMES if PRESETS[name].parts.get("gates") and name != "m2po"])
def test_sentences_scalar_gates_and_tensor_gates_drop_the_same_tokens(name: str) -> None:
    overrides = {"rollout_min_ratio": 0.3} if name == "icepop" else {}
    objective, description = keel.objective(name, **overrides), describe_preset(PRESETS[name], overrides)
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
        described = any(eval(condition_of(sentence), {}, known) for sentence in description.dropped)
        side = first_dropped_side(objective.composition.gates, p_, q_, a_)
        assert (not keep) == described == (side is not None), (p_, q_, a_)
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
def test_the_description_of_a_preset_is_its_definition(name: str) -> None:
    description = describe_preset(PRESETS[name])
    assert (description.formula, description.dropped, description.dropped_from) == GOLDEN[name]
    assert (description.anchor, description.divisor) == ("sampler", "N, the step's trainable tokens")
    transformed = next(symbol for symbol in description.legend if symbol.name == "A'")
    expected = "adv_tau * (A + kl_penalty_coef * (mean_step(k) - k)) + teacher_tau * sg(h - l)"
    assert transformed.definition == expected


def test_the_sequence_gate_of_icepop_is_optional() -> None:
    sentence = "whole sequence when any r < rollout_min_ratio"
    assert describe_preset(PRESETS["icepop"]).optional == (f"{sentence} (off unless rollout_min_ratio is set)",)
    enabled = describe_preset(PRESETS["icepop"], {"rollout_min_ratio": 1e-5})
    assert enabled.optional == ()
    assert sentence in enabled.dropped


@pytest.mark.parametrize(
    ("name", "anchor"),
    [
        *(("reinforce", "none"), ("cross_entropy", "none"), ("cispo", "sampler"), ("vespo", "sampler")),
        *(("tis", "proximal"), ("decoupled_ppo", "proximal"), ("grpo", "sampler")),
    ],
)
def test_the_anchor_is_that_of_the_ratio_or_of_the_weights(name: str, anchor: str) -> None:
    assert describe_preset(PRESETS[name]).anchor == anchor


@pytest.mark.parametrize(
    ("overrides", "divisor"),
    [
        ({}, "N, the step's trainable tokens"),
        ({"denominator": "kept"}, "kept tokens"),
        ({"reduction": "sequences"}, "sequences x own trainable tokens"),
        ({"reduction": "sequences", "denominator": "kept"}, "sequences with a kept token x own kept tokens"),
        ({"reduction": "constant", "length": 9}, "sequences x length"),
        ({"roles": [1, 2]}, "N, the step's trainable tokens of role 1 or 2"),
    ],
)
def test_divisor_follows_reduction_and_denominator(overrides: dict[str, Any], divisor: str) -> None:
    assert describe_preset(PRESETS["icepop"], overrides).divisor == divisor


def test_parameters_are_shown_by_name_and_other_values_as_numbers() -> None:
    description = describe_preset(
        PRESETS["icepop"], {"gates": [{"statistic": "probability_difference", "low": -0.1, "high": 0.1}]}
    )
    assert description.dropped == ("token when r < ratio_low or r > ratio_high", "token when |p - q| > 0.1")
    _, _, composition = resolve_objective({"gates": [{"statistic": "ratio", "high": 5.0}]})
    plain = describe(composition)
    assert plain.dropped == ("token when r > 5",)
    assert plain.formula == "-sum keep * A * r / N"


@pytest.mark.parametrize("name", NAMES)
def test_the_legend_defines_every_symbol_of_the_formula(name: str) -> None:
    description = describe_preset(PRESETS[name])
    _, parameters, _ = resolve_objective({"name": name})
    functions = {"sum", "max", "min", "clip", "sigmoid", "exp"}
    used = _symbols(description.formula)
    assert used <= {symbol.name for symbol in description.legend} | parameters.keys() | functions


def test_no_token_is_dropped_without_gates() -> None:
    assert describe(Composition()).dropped == ("none",)


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1e-5"), (0.2, "0.2"), (5.0, "5"), (2.5e10, "2.5e10"), (-3e-7, "-3e-7")]
)
def test_a_formatted_number_is_short_and_exact(value: float, text: str) -> None:
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
    ("checked_gate", "p", "q", "advantage", "side"),
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
def test_scalar_gates_at_points_known_in_closed_form(
    checked_gate: Gate, p: float, q: float, advantage: float, side: str | None
) -> None:
    assert dropped_side(checked_gate, p, q, advantage) == side


@pytest.mark.parametrize(("p", "q"), [(0.0, 0.5), (0.5, 1.1), (math.nan, 0.5)])
def test_scalar_gates_accept_only_probabilities(p: float, q: float) -> None:
    with pytest.raises(ValueError, match="is not a probability"):
        dropped_side(BAND, p, q, 1.0)
