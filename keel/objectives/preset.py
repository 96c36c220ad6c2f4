"""Objective presets: named parameters with defaults, and a template of parts that refers to them.

In the template "$name" stands for a parameter and "-$name" for its negative. `ObjectivePreset.resolve` fills them in
and validates the result. An error names the parameter that the user wrote, not the field of the part that it was filled
into.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, create_model, model_validator

from keel.common.settings import KeyPath, Settings, dotted_name, setting_error, to_config_error
from keel.objectives.composition import AdvantageTransforms, Composition, NonNegative, Positive
from keel.objectives.statistics import Level

PRESET_PARAMETERS: dict[str, tuple[Any, str]] = {
    "ratio_low": (NonNegative | None, "smallest ratio kept (cispo: smallest weight)"),
    "ratio_high": (Positive | None, "largest ratio kept (cispo: largest weight)"),
    "rollout_min_ratio": (NonNegative | None, "drop the whole sequence if any of its ratios is below this"),
    "kl_tau": (NonNegative, "factor on d^2, the squared log-ratio against the sampler"),
    "diff_low": (NonNegative, "largest decrease of the token's probability that is kept"),
    "diff_high": (NonNegative, "largest increase of the token's probability that is kept"),
    "mask_low": (NonNegative, "largest decrease of the probability that is kept where A < 0"),
    "mask_high": (NonNegative, "largest increase of the probability that is kept where A > 0"),
    "threshold": (NonNegative, "largest distance that is kept"),
    "opsm_delta": (float, "largest sequence KL, mean(b - l), at which a sequence of negative advantage is kept"),
    "eps": (NonNegative, "the ratio is clipped below 1 - eps"),
    "eps_high": (NonNegative | None, "the ratio is clipped above 1 + eps_high; defaults to eps"),
    "dual_clip": (Annotated[float, Field(gt=1)] | None, "where A < 0 the loss is at most dual_clip * |A|"),
    "ratio_cap": (Positive | None, "largest ratio in the gradient; a capped token still trains"),
    "anchor": (Literal["sampler", "proximal"], "the policy that the ratio is measured against"),
    "level": (Level, "ratio of the token, or product or geometric mean over its sequence"),
    "cap": (Positive, "largest importance weight"),
    "phi": (NonNegative, "largest binary KL, in either direction, that is kept"),
    "tau": (NonNegative, "the mean of d^2 over the kept tokens is at most this"),
    "tau_positive": (Positive, "temperature where A > 0"),
    "tau_negative": (Positive, "temperature where A <= 0"),
    "token_clip": (Positive, "largest log-ratio of a token, in the direction its advantage pushes it"),
    "k_positive": (Positive, "power of the sequence weight where A > 0"),
    "rate_positive": (NonNegative, "decay of the sequence weight where A > 0"),
    "k_negative": (Positive, "power of the sequence weight where A <= 0"),
    "rate_negative": (NonNegative, "decay of the sequence weight where A <= 0"),
}
"""Type and meaning of each parameter. A name means the same in every preset that has it."""


class CommonParameters(AdvantageTransforms):
    """The parameters of every preset."""

    reduction: Literal["tokens", "sequences", "constant"] = "tokens"
    """tokens: mean over the step's tokens; sequences: mean of the sequences' token means; constant: sum / (sequences *
    length)."""
    denominator: Literal["trainable", "kept"] = "trainable"
    """Tokens that count in the divisor: all trainable tokens, or only those that no gate dropped."""
    length: Positive | None = None
    """The constant length of reduction "constant"."""
    reference_kl_coef: NonNegative = 0.0
    """Factor on a KL estimate between the policy and the reference, added to the loss of kept tokens."""
    reference_kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1, with x = l - f."""
    reference_kl_correction: bool = False
    """Multiply the estimator by the ratio r, which k1 requires."""

    @model_validator(mode="after")
    def _check_common_parameters(self) -> Self:
        for name, off in (("reference_kl_estimator", "k3"), ("reference_kl_correction", False)):
            if getattr(self, name) != off and self.reference_kl_coef == 0:
                raise setting_error(
                    f"{{{name}}} has no effect with reference_kl_coef = 0", **{name: getattr(self, name)}
                )
        if "length" in self.model_fields_set and self.length is not None and self.reduction != "constant":
            raise setting_error('{length} has no effect: it belongs to reduction = "constant"', length=self.length)
        return self


REFERENCE_KL_PENALTY = {
    "estimator": "$reference_kl_estimator",
    "coef": "$reference_kl_coef",
    "ratio_correction": "$reference_kl_correction",
}

TRANSFORM_NAMES = tuple(AdvantageTransforms.model_fields)
COMMON_NAMES = tuple(CommonParameters.model_fields)


@dataclass(frozen=True, kw_only=True)
class ObjectivePreset:
    """A named objective. `parts` is a template with any of gates, weights, policy and penalties."""

    name: str
    title: str
    source: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @cached_property
    def parameters_class(self) -> type[Settings]:
        """A settings class of the preset's own parameters, followed by the common ones."""
        fields: dict[str, Any] = {}
        for name, default in self.parameters.items():
            if name in PRESET_PARAMETERS:
                fields[name] = (PRESET_PARAMETERS[name][0], default)
            else:
                fields[name] = (CommonParameters.model_fields[name].annotation, default)
        return create_model(f"{self.name} parameters", __base__=CommonParameters, **fields)

    @property
    def own_parameters(self) -> list[str]:
        """The names of the parameters that are not common to all presets."""
        return [name for name in self.parameters if name in PRESET_PARAMETERS]

    def resolve(
        self, overrides: Mapping[str, Any], prefix: KeyPath = (), extra_parts: Mapping[str, list[Any]] | None = None
    ) -> tuple[dict[str, Any], Composition]:
        """Return the values of all parameters, and the resulting composition, extended by `extra_parts`."""
        try:
            values = self.parameters_class.model_validate(dict(overrides)).model_dump()
        except ValidationError as error:
            raise to_config_error(error, prefix, of_run=True) from None
        if values["reduction"] != "constant":
            values["length"] = None  # a default that the chosen reduction does not use
        template = self.template(values)
        parts = _substitute(template, values)
        for key, extra in (extra_parts or {}).items():
            parts[key] = [*parts.get(key, []), *extra]
        try:
            return values, Composition.model_validate(parts)
        except ValidationError as error:
            raise to_config_error(error, prefix, lambda path: _user_name_at(template, path)) from None

    def template(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template including what the common parameters add. Parameters are still names.

        Gates without a bound and penalties with a coefficient of 0 are left out.
        """
        template: dict[str, Any] = {**self.parts}
        template["gates"] = [
            gate
            for gate in template.get("gates", [])
            if any(_substitute(gate.get(bound), values) is not None for bound in ("low", "high"))
        ]
        penalties = [penalty for penalty in template.get("penalties", []) if _substitute(penalty["coef"], values) != 0]
        if values["reference_kl_coef"]:
            penalties.append(REFERENCE_KL_PENALTY)
        template["penalties"] = penalties
        template["reduction"] = {"over": "$reduction", "denominator": "$denominator"}
        if values["reduction"] == "constant":
            template["reduction"]["length"] = "$length"
        return template | {name: f"${name}" for name in TRANSFORM_NAMES}


def _substitute(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, Mapping):
        return {key: _substitute(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [_substitute(value, values) for value in template]
    if isinstance(template, str) and template.startswith("$"):
        return values[template[1:]]
    if isinstance(template, str) and template.startswith("-$"):
        value = values[template[2:]]
        return None if value is None else -value
    return template


def _user_name_at(template: Any, path: KeyPath) -> str | None:
    """Return the name under which the user wrote the value at `path`: a parameter, or a path in the extra parts."""
    if len(path) > 1 and isinstance(path[1], int):
        own_count = len(template.get(path[0], []))
        if path[1] >= own_count:
            return dotted_name((path[0], path[1] - own_count, *path[2:]))
    for part in path:
        try:
            template = template[part]
        except (KeyError, IndexError, TypeError):
            return None
    return template.lstrip("-$") if isinstance(template, str) and "$" in template else None
