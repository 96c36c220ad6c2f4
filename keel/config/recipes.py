"""Every published rule that Keel knows by name, each a few lines of composition.

A recipe is data: parameters with their defaults, and parts in which "$name" stands for a parameter ("-$name" for its
negative). It has no code of its own, so two rules that differ in one line differ in one line here. docs/objectives.md
and `keel objectives` are printed from these tables, and `keel audit` checks numerically that they tell the truth.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, create_model, model_validator

from keel.config.composition import Composition, Level, NonNegative, Positive, Transforms
from keel.config.settings import Path, Settings, dotted, explain, refuse

PARAMETERS: dict[str, tuple[Any, str]] = {
    "ratio_low": (NonNegative | None, "smallest ratio kept (cispo: smallest weight)"),
    "ratio_high": (Positive | None, "largest ratio kept (cispo: largest weight)"),
    "rollout_min_ratio": (NonNegative | None, "refuse the whole sequence when any of its ratios is below this"),
    "kl_tau": (NonNegative, "factor on d^2, the squared log-ratio against the sampler"),
    "diff_low": (NonNegative, "largest fall of the token's probability that is kept"),
    "diff_high": (NonNegative, "largest rise of the token's probability that is kept"),
    "mask_low": (NonNegative, "largest fall of the probability that is kept where A < 0"),
    "mask_high": (NonNegative, "largest rise of the probability that is kept where A > 0"),
    "threshold": (NonNegative, "largest distance that is kept"),
    "opsm_delta": (float, "largest sequence KL, mean(b - l), at which a sequence of negative advantage is kept"),
    "eps": (NonNegative, "the ratio is clipped below 1 - eps"),
    "eps_high": (NonNegative | None, "the ratio is clipped above 1 + eps_high; not given: eps"),
    "dual_clip": (Annotated[float, Field(gt=1)] | None, "where A < 0 the loss is at most dual_clip * |A|"),
    "anchor": (Literal["sampler", "proximal"], "the policy that the ratio is measured against"),
    "level": (Level, "ratio of the token, product or geometric mean over the sequence"),
    "cap": (Positive, "largest importance weight"),
    "phi": (NonNegative, "largest binary KL, in either direction, that is kept"),
    "tau": (NonNegative, "the mean of d^2 over the kept tokens is at most this"),
    "tau_positive": (Positive, "temperature where A > 0"),
    "tau_negative": (Positive, "temperature where A <= 0"),
    "token_clip": (Positive, "largest log-ratio of a token, on the side its advantage pushes to"),
    "k_positive": (Positive, "power of the sequence weight where A > 0"),
    "rate_positive": (NonNegative, "decay of the sequence weight where A > 0"),
    "k_negative": (Positive, "power of the sequence weight where A <= 0"),
    "rate_negative": (NonNegative, "decay of the sequence weight where A <= 0"),
}
"""Type and meaning of each parameter: one name, one idea, in every recipe that has it."""


class Common(Transforms):
    """The parameters that every recipe takes."""

    reduction: Literal["tokens", "sequences", "constant"] = "tokens"
    """Mean over the step's tokens; mean of the sequences' token means; or sum / (sequences * length)."""
    denominator: Literal["members", "kept"] = "members"
    """Whether the tokens that a gate refused still count in what divides."""
    length: Positive | None = None
    """The constant length of reduction "constant"."""
    reference_kl_coef: NonNegative = 0.0
    """Factor on a KL estimate between the policy and the reference, added to the loss of kept tokens."""
    reference_kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1, with x = l - f."""
    reference_kl_correction: bool = False
    """Multiply the estimator by the ratio r; k1 needs it."""

    @model_validator(mode="after")
    def _common_can_act(self) -> Self:
        for name, off in (("reference_kl_estimator", "k3"), ("reference_kl_correction", False)):
            if getattr(self, name) != off and self.reference_kl_coef == 0:
                raise refuse(f"{{{name}}} cannot act while reference_kl_coef = 0", **{name: getattr(self, name)})
        if "length" in self.model_fields_set and self.length is not None and self.reduction != "constant":
            raise refuse('{length} cannot act: it belongs to reduction = "constant"', length=self.length)
        return self


TRANSFORM_NAMES = tuple(Transforms.model_fields)
COMMON_NAMES = tuple(Common.model_fields)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One named rule. `parts` holds any of gates, weights, policy, penalties."""

    name: str
    title: str
    source: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @cached_property
    def settings(self) -> type[Settings]:
        """The recipe's parameters as a settings class, its own first, then those of every recipe."""
        fields: dict[str, Any] = {}
        for name, default in self.parameters.items():
            if name in PARAMETERS:
                fields[name] = (PARAMETERS[name][0], default)
            else:
                fields[name] = (Common.model_fields[name].annotation, default)
        return create_model(f"{self.name} parameters", __base__=Common, **fields)

    @property
    def own_parameters(self) -> list[str]:
        return [name for name in self.parameters if name in PARAMETERS]

    def resolve(
        self, given: Mapping[str, Any], prefix: Path = (), added: Mapping[str, list[Any]] | None = None
    ) -> tuple[dict[str, Any], Composition]:
        """All parameters with their values, and the composition they make with the parts that are `added`."""
        try:
            values = self.settings.model_validate(dict(given)).model_dump()
        except ValidationError as error:
            raise explain(error, prefix) from None
        if values["reduction"] != "constant":
            values["length"] = None  # a default that the chosen reduction does not read
        template = self.template(values)
        parts = _fill(template, values)
        for key, more in (added or {}).items():
            parts[key] = [*parts.get(key, []), *more]
        try:
            return values, Composition.model_validate(parts)
        except ValidationError as error:
            raise explain(error, prefix, lambda path: _name_at(template, path)) from None

    def template(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The parts, with what the common parameters add, parameters still by name."""
        template: dict[str, Any] = {**self.parts}
        template["gates"] = [
            gate
            for gate in template.get("gates", [])
            if any(_fill(gate.get(bound), values) is not None for bound in ("low", "high"))
        ]
        penalties = [penalty for penalty in template.get("penalties", []) if _fill(penalty["coef"], values) != 0]
        if values["reference_kl_coef"]:
            penalties.append(REFERENCE_KL)
        template["penalties"] = penalties
        template["reduction"] = {"over": "$reduction", "divide_by": "$denominator"}
        if values["reduction"] == "constant":
            template["reduction"]["length"] = "$length"
        return template | {name: f"${name}" for name in TRANSFORM_NAMES}


def _fill(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, Mapping):
        return {key: _fill(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [_fill(value, values) for value in template]
    if isinstance(template, str) and template.startswith("$"):
        return values[template[1:]]
    if isinstance(template, str) and template.startswith("-$"):
        value = values[template[2:]]
        return None if value is None else -value
    return template


def _name_at(template: Any, path: Path) -> str | None:
    """The name under which the user knows a place in the parts: a parameter's, or one in the parts that were added."""
    if len(path) > 1 and isinstance(path[1], int):
        own = len(template.get(path[0], []))
        if path[1] >= own:
            return dotted((path[0], path[1] - own, *path[2:]))
    for part in path:
        try:
            template = template[part]
        except (KeyError, IndexError, TypeError):
            return None
    return template.lstrip("-$") if isinstance(template, str) and "$" in template else None


RATIO_BAND = {"on": "ratio", "low": "$ratio_low", "high": "$ratio_high"}
CLIP = {"surrogate": "clip", "anchor": "$anchor", "eps": "$eps", "eps_high": "$eps_high"}
CLIP_ON_PROXIMAL = CLIP | {"anchor": "proximal"}
SEQUENCE_CLIP = CLIP | {"level": "sequence"}
REFERENCE_KL = {
    "on": "$reference_kl_estimator",
    "coef": "$reference_kl_coef",
    "ratio_correction": "$reference_kl_correction",
}
DRIFT = {"on": "log_ratio_squared", "coef": "$kl_tau"}

_RECIPES = [
    Recipe(
        name="icepop",
        title="two-sided ratio mask",
        source="INTELLECT-3, arXiv 2512.16144, eq. 1",
        parameters={"ratio_low": 0.2, "ratio_high": 5.0, "rollout_min_ratio": None},
        parts={"gates": [RATIO_BAND, {"on": "ratio", "low": "$rollout_min_ratio", "scope": "sequence"}]},
    ),
    Recipe(
        name="ipo_kl",
        title="two-sided ratio mask with a drift penalty on kept tokens",
        source="the mask of INTELLECT-3 and the KL of Kimi K2.5",
        parameters={"ratio_low": 0.2, "ratio_high": 5.0, "kl_tau": 1e-3},
        parts={"gates": [RATIO_BAND], "penalties": [DRIFT]},
    ),
    Recipe(
        name="dppo_tv",
        title="probability-difference mask, whatever the advantage",
        source="symmetric DPPO-Binary-TV, arXiv 2602.04879",
        parameters={"diff_low": 0.2, "diff_high": 0.2},
        parts={"gates": [{"on": "probability_difference", "low": "-$diff_low", "high": "$diff_high"}]},
    ),
    Recipe(
        name="dppo_kl",
        title="probability-difference mask by the sign of the advantage, with a drift penalty on all tokens",
        source="DPPO-Binary-TV, arXiv 2602.04879, with a KL term",
        parameters={"mask_low": 0.2, "mask_high": 0.2, "kl_tau": 1e-3},
        parts={
            "gates": [
                {"on": "probability_difference", "high": "$mask_high", "when": "positive_advantage"},
                {"on": "probability_difference", "low": "-$mask_low", "when": "negative_advantage"},
            ],
            "penalties": [DRIFT | {"scope": "all"}],
        },
    ),
    Recipe(
        name="opsm",
        title="off-policy sequence mask over a clipped surrogate",
        source="DeepSeek-V3.2, arXiv 2512.02556",
        parameters={"opsm_delta": 1e-4, "eps": 0.2, "eps_high": None, "anchor": "sampler"},
        parts={
            "gates": [{"on": "sequence_kl", "high": "$opsm_delta", "when": "negative_advantage"}],
            "policy": CLIP,
        },
    ),
    Recipe(
        name="ipo",
        title="absolute probability-difference mask with a drift penalty on all tokens",
        source="prime-rl",
        parameters={"threshold": 0.1, "kl_tau": 1e-3},
        parts={
            "gates": [{"on": "probability_difference", "low": "-$threshold", "high": "$threshold"}],
            "penalties": [DRIFT | {"scope": "all"}],
        },
    ),
    Recipe(
        name="reinforce",
        title="the plain policy gradient, no ratio",
        source="Williams 1992",
        parts={"policy": {"surrogate": "log_prob", "anchor": "none"}},
    ),
    Recipe(
        name="grpo",
        title="clipped surrogate, mean of sequence means",
        source="DeepSeekMath, arXiv 2402.03300",
        parameters={"eps": 0.2, "eps_high": None, "anchor": "sampler", "reduction": "sequences"},
        parts={"policy": CLIP},
        note="With reduction = tokens and eps_high = eps it is dapo. The paper's KL term is reference_kl_coef.",
    ),
    Recipe(
        name="dapo",
        title="clipped surrogate with a higher upper bound, token mean",
        source="DAPO, arXiv 2503.14476",
        parameters={"eps": 0.2, "eps_high": 0.28, "anchor": "sampler"},
        parts={"policy": CLIP},
    ),
    Recipe(
        name="dr_grpo",
        title="clipped surrogate, constant denominator",
        source="Dr. GRPO, arXiv 2503.20783",
        parameters={"eps": 0.2, "eps_high": None, "anchor": "sampler", "reduction": "constant", "length": 1024},
        parts={"policy": CLIP},
        note="Set length to the longest completion you sample.",
    ),
    Recipe(
        name="ppo",
        title="clipped surrogate with dual clip",
        source="PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729",
        parameters={"eps": 0.2, "eps_high": None, "dual_clip": 3.0, "anchor": "sampler"},
        parts={"policy": CLIP | {"dual_clip": "$dual_clip"}},
    ),
    Recipe(
        name="gspo",
        title="clipped sequence ratio",
        source="GSPO, arXiv 2507.18071",
        parameters={"eps": 3e-4, "eps_high": 4e-4, "anchor": "sampler", "reduction": "sequences"},
        parts={"policy": SEQUENCE_CLIP},
    ),
    Recipe(
        name="cispo",
        title="clamped ratio as a weight without gradient, times the log-prob",
        source="MiniMax-M1, arXiv 2506.13585",
        parameters={"ratio_low": None, "ratio_high": 5.0},
        parts={
            "weights": [{"low": "$ratio_low", "high": "$ratio_high"}],
            "policy": {"surrogate": "log_prob", "anchor": "none"},
        },
        note="The caps are ratios, not distances from one. A capped token still trains.",
    ),
    Recipe(
        name="tis",
        title="truncated importance sampling between sampler and proximal policy",
        source="Yao et al. 2025, truncated importance sampling for rollout-training mismatch",
        parameters={"level": "token", "cap": 2.0, "eps": 0.2, "eps_high": None},
        parts={
            "weights": [{"of": "proximal/sampler", "level": "$level", "high": "$cap"}],
            "policy": CLIP_ON_PROXIMAL,
        },
    ),
    Recipe(
        name="mis",
        title="masked importance sampling between sampler and proximal policy",
        source="Liu et al. 2025, masked importance sampling for rollout-training mismatch",
        parameters={"level": "token", "ratio_low": 0.5, "ratio_high": 2.0, "eps": 0.2, "eps_high": None},
        parts={
            "gates": [
                {"on": "ratio", "level": "$level", "of": "proximal/sampler", "low": "$ratio_low", "high": "$ratio_high"}
            ],
            "weights": [{"of": "proximal/sampler", "level": "$level"}],
            "policy": CLIP_ON_PROXIMAL,
        },
        note="A token or sequence inside the band keeps its full importance weight.",
    ),
    Recipe(
        name="veto",
        title="a sequence leaves when one of its tokens became all but impossible",
        source="verl, rollout correction",
        parameters={"rollout_min_ratio": 1e-4, "eps": 0.2, "eps_high": None, "anchor": "sampler"},
        parts={"gates": [{"on": "ratio", "low": "$rollout_min_ratio", "scope": "sequence"}], "policy": CLIP},
    ),
    Recipe(
        name="kpop",
        title="symmetric binary-KL mask",
        source="KPop",
        parameters={"phi": 0.5},
        parts={"gates": [{"on": "symmetric_binary_kl", "high": "$phi"}]},
    ),
    Recipe(
        name="dppo_binary_kl",
        title="binary-KL mask by the sign of the advantage",
        source="DPPO-Binary-KL, arXiv 2602.04879",
        parameters={"mask_low": 0.05, "mask_high": 0.05},
        parts={
            "gates": [
                {"on": "signed_binary_kl", "high": "$mask_high", "when": "positive_advantage"},
                {"on": "signed_binary_kl", "low": "-$mask_low", "when": "negative_advantage"},
            ]
        },
    ),
    Recipe(
        name="m2po",
        title="the largest squared log-ratios leave until the mean of the rest is small",
        source="M2PO, arXiv 2510.01161",
        parameters={"tau": 0.04},
        parts={"gates": [{"on": "second_moment", "high": "$tau"}]},
        note="Decided over the step; tokens with the same d^2 leave together.",
    ),
    Recipe(
        name="sapo",
        title="soft sigmoid gate in place of a clip",
        source="SAPO, arXiv 2511.20347",
        parameters={"tau_positive": 1.0, "tau_negative": 1.05, "anchor": "sampler", "reduction": "sequences"},
        parts={
            "policy": {
                "surrogate": "soft",
                "anchor": "$anchor",
                "tau_positive": "$tau_positive",
                "tau_negative": "$tau_negative",
            }
        },
    ),
    Recipe(
        name="gmpo",
        title="geometric mean of clipped token ratios",
        source="GMPO, arXiv 2507.20673",
        parameters={"token_clip": 0.4, "anchor": "sampler", "reduction": "sequences"},
        parts={
            "policy": {"surrogate": "linear", "anchor": "$anchor", "level": "sequence", "token_clip": "$token_clip"}
        },
    ),
    Recipe(
        name="luspo",
        title="clipped sequence ratio, each sequence times its length",
        source="LUSPO, arXiv 2602.05261",
        parameters={"eps": 3e-4, "eps_high": 4e-4, "anchor": "sampler", "reduction": "constant", "length": 1},
        parts={"policy": SEQUENCE_CLIP},
    ),
    Recipe(
        name="vespo",
        title="gamma-shaped sequence weight without gradient, times the log-prob",
        source="VESPO, arXiv 2602.10693",
        parameters={
            "k_positive": 2.0,
            "rate_positive": 3.0,
            "k_negative": 3.0,
            "rate_negative": 2.0,
        },
        parts={
            "weights": [
                {
                    "level": "sequence",
                    "kernel": "gamma",
                    "k_positive": "$k_positive",
                    "rate_positive": "$rate_positive",
                    "k_negative": "$k_negative",
                    "rate_negative": "$rate_negative",
                }
            ],
            "policy": {"surrogate": "log_prob", "anchor": "none"},
        },
    ),
    Recipe(
        name="decoupled_ppo",
        title="clip around the proximal policy, importance weight from the sampler",
        source="Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298",
        parameters={"eps": 0.2, "eps_high": None, "cap": 5.0},
        parts={"weights": [{"of": "proximal/sampler", "high": "$cap"}], "policy": CLIP_ON_PROXIMAL},
    ),
    Recipe(
        name="decoupled_ppo_loglinear",
        title="decoupled PPO with the proximal policy interpolated by staleness",
        source="A-3PO, arXiv 2512.06547",
        parameters={"eps": 0.2, "eps_high": None, "cap": 5.0, "proximal": "interpolated"},
        parts={"weights": [{"of": "proximal/sampler", "high": "$cap"}], "policy": CLIP_ON_PROXIMAL},
    ),
    Recipe(
        name="on_policy_distillation",
        title="on-policy distillation: the teacher's log-prob minus the policy's as the signal",
        source="Agarwal et al., arXiv 2306.13649",
        parameters={"adv_tau": 0.0, "teacher_tau": 1.0},
    ),
    Recipe(
        name="cross_entropy",
        title="maximum likelihood of the trainable tokens, or of those with the given roles",
        source="supervised fine-tuning",
        parts={"policy": {"surrogate": "cross_entropy", "anchor": "none"}},
    ),
]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
