"""Describe a composition as text: its anchor, the dropped tokens, the divisor, and the loss as a formula.

Every text is derived from the composition, and a test evaluates every formula and sentence and compares it with
`keel.signal`, so a description cannot differ from what the code computes. A parameter of a preset is shown by name,
any other value as a number. No arithmetic on tokens happens here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keel.common.settings import KeyPath
from keel.objectives.composition import Composition, Gate, ImportanceWeight, Penalty
from keel.objectives.loss_function import FunctionComposition
from keel.objectives.notation import COMMON_SYMBOLS, RATIO_NOTATIONS, SIGNS, Symbol, symbols_used_in
from keel.objectives.preset import ObjectivePreset
from keel.objectives.resolve import resolve_objective
from keel.objectives.statistics import gate_statistic

ParameterLookup = Callable[[KeyPath], str | None]
"""Maps a path in a composition to the parameter there ("-diff_low" for a negated one), or to None."""


@dataclass(frozen=True)
class Description:
    """The properties of a composition as text."""

    anchor: str
    dropped: tuple[str, ...]
    """Which tokens are dropped: one sentence per gate."""
    optional: tuple[str, ...]
    """The same for a preset's gates that are off until their parameter is set."""
    divisor: str
    dropped_from: str
    """The terms that a dropped token does not contribute to."""
    formula: str
    legend: tuple[Symbol, ...]


def describe(composition: Composition, names: ParameterLookup = lambda _path: None) -> Description:
    """Describe a composition. Of a loss function only its name is known."""
    if isinstance(composition, FunctionComposition):
        return Description(
            "as written", (), (), "as written", "as written", f"loss = {composition.function}(batch)", ()
        )
    loss = formula(composition, names)
    sentences = dropped(composition, names)
    return Description(
        anchor=anchor(composition),
        dropped=sentences,
        optional=(),
        divisor=divisor(composition, names),
        dropped_from=dropped_from(composition, names),
        formula=loss,
        legend=legend(composition, " ; ".join((loss, *sentences)), names),
    )


def describe_preset(preset: ObjectivePreset, overrides: Mapping[str, Any] | None = None) -> Description:
    """Describe a preset, with its parameters by name.

    `overrides` are the parameters as in an `[objective]` table; they determine which gates and penalties are on.
    """
    _, values, composition = resolve_objective({"name": preset.name, **(overrides or {})})
    template = preset.template(values)
    names = parameter_lookup(template)
    description = describe(composition, names)
    optional = []
    for gate in preset.parts.get("gates", []):
        if gate in template["gates"]:
            continue
        bounds = [bound for bound in ("low", "high") if bound in gate]
        parameters = [str(gate[bound]).lstrip("-$") for bound in bounds]
        enabled = Gate.model_validate(gate | dict.fromkeys(bounds, 0.0))
        sentence = _gate_sentence(enabled, parameter_lookup({"gates": [gate]}), ("gates", 0))
        optional.append(f"{sentence} (off unless {' or '.join(parameters)} is set)")
    text = " ; ".join((description.formula, *description.dropped, *optional))
    return replace(description, optional=tuple(optional), legend=legend(composition, text, names))


def parameter_lookup(template: Any) -> ParameterLookup:
    """Return a lookup for a template in which "$name" stands for a parameter."""

    def name_at(path: KeyPath) -> str | None:
        value = template
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value.replace("$", "") if isinstance(value, str) and "$" in value else None

    return name_at


def format_number(value: float) -> str:
    """Return the shortest text of a number: 0.0001, 1e-5, 3."""
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", f"{value:g}")


def anchor(composition: Composition) -> str:
    """Return the policy that the ratio is measured against: sampler, proximal, interpolated or none.

    A surrogate without a ratio has the anchor of its importance weights.
    """
    if composition.proximal == "interpolated":
        return "interpolated"  # a proximal policy between the sampler and the policy
    if composition.policy.anchor != "none":
        return composition.policy.anchor
    against = dict.fromkeys(weight.between.split("/")[1] for weight in composition.weights)
    return " and ".join(against) or "none"


def dropped(composition: Composition, names: ParameterLookup = lambda _path: None) -> tuple[str, ...]:
    """Return which tokens are dropped: one sentence per gate, or "none"."""
    gates = enumerate(composition.gates)
    return tuple(_gate_sentence(gate, names, ("gates", index)) for index, gate in gates) or ("none",)


def _gate_sentence(gate: Gate, names: ParameterLookup, path: KeyPath) -> str:
    low, high = (_parameter_or_number(names, (*path, bound), getattr(gate, bound)) for bound in ("low", "high"))
    statistic, pair = gate.spec, RATIO_NOTATIONS[gate.between]._asdict()
    value = statistic.formula.format(**pair)
    if gate.scope == "step":
        return f"the tokens of the step with the largest {value}, until the mean of the rest is at most {high}"
    each = "any " if gate.scope == "sequence" and statistic.sequence is None else ""
    if low is not None and low == f"-{high}" and statistic.magnitude_formula is not None:
        outside = [f"{each}{statistic.magnitude_formula.format(**pair)} > {high}"]
    else:
        outside = [f"{each}{value} {sign} {bound}" for sign, bound in (("<", low), (">", high)) if bound is not None]
    subject = "token" if gate.scope == "token" else "whole sequence"
    if gate.when == "always":
        return f"{subject} when {' or '.join(outside)}"
    advantage = "A" if gate.scope == "token" else "mean(A)"
    sign = ">" if gate.when == "positive_advantage" else "<"
    condition = outside[0] if len(outside) == 1 else f"({' or '.join(outside)})"
    comma = "," if gate.scope == "token" else ""
    return f"{subject}{comma} when {advantage} {sign} 0 and {condition}"


def divisor(composition: Composition, names: ParameterLookup = lambda _path: None) -> str:
    """Return the divisor of the sum over the step's tokens."""
    reduction = composition.reduction
    kept = reduction.denominator == "kept"
    roles = "" if composition.roles is None else f" of role {' or '.join(map(str, composition.roles))}"
    if reduction.over == "tokens":
        return f"kept tokens{roles}" if kept else f"N, the step's trainable tokens{roles}"
    sequences = "sequences with a kept token" if kept else "sequences"
    if reduction.over == "sequences":
        return f"{sequences} x own {'kept' if kept else 'trainable'} tokens{roles}"
    return f"{sequences} x {_parameter_or_number(names, ('reduction', 'length'), reduction.length)}"


def dropped_from(composition: Composition, names: ParameterLookup = lambda _path: None) -> str:
    """Return the terms that a dropped token does not contribute to."""
    penalties = enumerate(composition.penalties)
    remaining = [_penalty_formula(penalty, names, index) for index, penalty in penalties if penalty.scope == "all"]
    if not remaining or not composition.gates:
        return "every term"
    return f"the policy term, but not from {_join_terms(remaining)}"


def formula(composition: Composition, names: ParameterLookup = lambda _path: None) -> str:
    """Return the loss of a step in symbols."""
    kept = [_weighted_policy_term(composition, names)]
    always: list[str] = []
    for index, penalty in enumerate(composition.penalties):
        terms = always if penalty.scope == "all" and composition.gates else kept
        terms.append(_penalty_formula(penalty, names, index))
    terms = kept
    if composition.gates:
        terms = [_multiply("keep", kept[0] if len(kept) == 1 else f"({_join_terms(kept)})"), *always]
    denominator = _denominator_formula(composition, names)
    if len(terms) > 1:
        return f"sum ({_join_terms(terms)}) / {denominator}"
    sign, term = ("-", terms[0][1:]) if terms[0].startswith("-") else ("", terms[0])
    return f"{sign}sum {term} / {denominator}"


def _weighted_policy_term(composition: Composition, names: ParameterLookup) -> str:
    policy, A = composition.policy, _advantage_symbol(composition, names)
    if policy.level == "sequence":
        ratio, A = "g", "M"
    else:
        ratio = "" if policy.anchor == "none" else RATIO_NOTATIONS[f"policy/{policy.anchor}"].ratio
    if policy.surrogate == "cross_entropy":
        term = "-l"
    elif policy.surrogate == "log_prob":
        term = f"-{A} * l"
    elif policy.surrogate == "linear":
        term = f"-{A} * {ratio if policy.ratio_cap is None else 'r_cap'}"
    elif policy.surrogate == "soft":
        term = f"-{A} * (4 / tau_A) * sigmoid(tau_A * ({ratio} - 1))"
    else:
        term = _clipped_surrogate(composition, names, ratio, A)
    for index, weight in reversed(list(enumerate(composition.weights))):
        term = _multiply(f"sg({_weight_formula(weight, names, index)})", term)
    return term


def _clipped_surrogate(composition: Composition, names: ParameterLookup, ratio: str, A: str) -> str:
    policy = composition.policy
    eps = names(("policy", "eps"))
    eps_high = names(("policy", "eps_high")) or (eps if policy.eps_high is None else None)
    low = f"1 - {eps}" if eps else format_number(1 - (policy.eps or 0))
    upper = policy.eps if policy.eps_high is None else policy.eps_high
    high = f"1 + {eps_high}" if eps_high else format_number(1 + (upper or 0))
    term = f"max(-{ratio} * {A}, -clip({ratio}, {low}, {high}) * {A})"
    return term if policy.dual_clip is None else f"min({term}, ceiling)"


def _weight_formula(weight: ImportanceWeight, names: ParameterLookup, index: int) -> str:
    base = gate_statistic("ratio", weight.level).formula.format(**RATIO_NOTATIONS[weight.between]._asdict())
    if weight.kernel == "gamma":
        suffix = _weight_suffix(index)
        base = f"{base}^k_A{suffix} * exp(rate_A{suffix} * (1 - {base}))"
    low, high = (
        _parameter_or_number(names, ("weights", index, bound), getattr(weight, bound)) for bound in ("low", "high")
    )
    if low is not None and high is not None:
        return f"clip({base}, {low}, {high})"
    if low is not None:
        return f"max({base}, {low})"
    return base if high is None else f"min({base}, {high})"


def _weight_suffix(index: int) -> str:
    """Return a suffix that distinguishes the constants of further gamma weights from those of the first."""
    return str(index + 1) if index else ""


def _penalty_formula(penalty: Penalty, names: ParameterLookup, index: int) -> str:
    coef = _parameter_or_number(names, ("penalties", index, "coef"), penalty.coef)
    x = RATIO_NOTATIONS[penalty.between].log_ratio
    estimate = {"log_ratio_squared": f"{x}^2", "k1": x, "k2": f"{x}^2 / 2", "k3": f"(exp(-{x}) + {x} - 1)"}[
        penalty.estimator
    ]
    return f"{coef} * r * {estimate}" if penalty.ratio_correction else f"{coef} * {estimate}"


def _denominator_formula(composition: Composition, names: ParameterLookup) -> str:
    reduction = composition.reduction
    suffix = "_k" if reduction.denominator == "kept" else ""
    if reduction.over == "tokens":
        return f"N{suffix}"
    length = (
        f"n{suffix}"
        if reduction.over == "sequences"
        else _parameter_or_number(names, ("reduction", "length"), reduction.length)
    )
    return f"(S{suffix} * {length})"


def _advantage_symbol(composition: Composition, names: ParameterLookup) -> str:
    """Return A' if the transforms may change the advantage, and A if they cannot."""
    return "A" if _advantage_formula(composition, names) == "A" else "A'"


def _advantage_formula(composition: Composition, names: ParameterLookup) -> str:
    """Return the definition of A'."""
    text = "A"
    coef = _parameter_or_number(names, ("kl_penalty_coef",), composition.kl_penalty_coef or None)
    if coef is not None:
        text += f" + {coef} * (mean_step(k) - k)"
    tau = _parameter_or_number(names, ("adv_tau",), None if composition.adv_tau == 1 else composition.adv_tau)
    if tau is not None:
        text = f"{tau} * {text}" if text == "A" else f"{tau} * ({text})"
    teacher = _parameter_or_number(names, ("teacher_tau",), composition.teacher_tau or None)
    return text if teacher is None else f"{text} + {teacher} * sg(h - l)"


def legend(composition: Composition, text: str, names: ParameterLookup = lambda _path: None) -> tuple[Symbol, ...]:
    """Return the symbols that a text uses, and those that their definitions use."""
    return symbols_used_in(
        text, {symbol.name: symbol for symbol in (*COMMON_SYMBOLS, *_composition_symbols(composition, names))}
    )


def _composition_symbols(composition: Composition, names: ParameterLookup) -> list[Symbol]:
    """Return the symbols whose definition depends on the composition."""
    policy, A = composition.policy, _advantage_symbol(composition, names)
    symbols = []
    if A == "A'":
        symbols.append(
            Symbol("A'", _advantage_formula(composition, names), "the transformed advantage, whose sign the gates use")
        )
    source = "b" if composition.kl_penalty_source == "sampled" else "l"
    symbols.append(Symbol("k", f"sg({source} - f)", "log-ratio against the reference"))
    if composition.proximal == "interpolated":
        interpolated = "b + (1 - 1 / staleness) * sg(l - b)"
        symbols.append(
            Symbol("o", interpolated, "log-prob under the interpolated proximal policy; staleness is at least 1")
        )
    mean_A = "M" if policy.level == "sequence" else A
    if policy.level == "sequence":
        log_ratio = RATIO_NOTATIONS[f"policy/{policy.anchor}"].log_ratio
        if policy.token_clip is not None:
            bound = _parameter_or_number(names, ("policy", "token_clip"), policy.token_clip)
            clipped = f"min({log_ratio}, {bound}) where {A} > 0, else max({log_ratio}, -{bound})"
            symbols.append(Symbol("e", clipped, "clipped log-ratio of the token"))
            log_ratio = "e"
        symbols.append(Symbol("g", f"exp(mean_kept({log_ratio}))", "ratio of the sequence, a geometric mean"))
        symbols.append(Symbol("M", f"mean_kept({A})", "advantage of the sequence"))
    if policy.surrogate == "soft":
        taus = (
            _parameter_or_number(names, ("policy", f"tau_{sign}"), getattr(policy, f"tau_{sign}")) for sign in SIGNS
        )
        symbols.append(Symbol("tau_A", _where_positive(mean_A, *taus), "temperature"))
    if policy.ratio_cap is not None:
        cap = _parameter_or_number(names, ("policy", "ratio_cap"), policy.ratio_cap)
        pair = RATIO_NOTATIONS[f"policy/{policy.anchor}"]
        value, log_value = ("g", "log(g)") if policy.level == "sequence" else (pair.ratio, pair.log_ratio)
        capped = f"{value} where {value} <= {cap}, else {cap} * (1 + {log_value} - log({cap}))"
        symbols.append(Symbol("r_cap", capped, "the ratio, and its tangent in l above the cap"))
    if policy.dual_clip is not None:
        bound = _parameter_or_number(names, ("policy", "dual_clip"), policy.dual_clip)
        symbols.append(Symbol("ceiling", f"-{bound} * {mean_A} where {mean_A} < 0, else inf", "the dual clip"))
    for index, weight in enumerate(composition.weights):
        if weight.kernel == "gamma":
            symbols += _gamma_symbols(weight, names, index, A)
    return symbols


def _gamma_symbols(weight: ImportanceWeight, names: ParameterLookup, index: int, A: str) -> list[Symbol]:
    """Return the constants of a gamma-shaped weight."""
    advantage = A if weight.level == "token" else f"mean({A})"
    symbols = []
    for constant, meaning in (("k", "power of the weight"), ("rate", "decay of the weight")):
        fields = [f"{constant}_{sign}" for sign in SIGNS]
        values = (_parameter_or_number(names, ("weights", index, field), getattr(weight, field)) for field in fields)
        symbols.append(Symbol(f"{constant}_A{_weight_suffix(index)}", _where_positive(advantage, *values), meaning))
    return symbols


def _where_positive(advantage: str, value: str | None, otherwise: str | None) -> str:
    return f"{value} where {advantage} > 0, else {otherwise}"


def _parameter_or_number(names: ParameterLookup, path: KeyPath, value: float | None) -> str | None:
    """Return the parameter at a path, else the number there, else None."""
    name = names(path)
    transform = len(path) == 1
    if name is not None and (value is not None or transform):
        return name
    return None if value is None else format_number(value)


def _multiply(factor: str, term: str) -> str:
    return f"-{factor} * {term[1:]}" if term.startswith("-") else f"{factor} * {term}"


def _join_terms(terms: list[str]) -> str:
    return " + ".join(terms).replace("+ -", "- ")
