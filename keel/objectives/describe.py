"""A composition in words and symbols: its anchor, who is dropped, what divides, and its loss as a formula.

Everything is read off the composition, so it cannot say what the code no longer does; a test evaluates every formula
and sentence printed here and compares with `keel.signal`. Where a parameter of a recipe stands, its name is shown,
elsewhere the number. It describes and never decides: no arithmetic on tokens happens here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.common.settings import KeyPath
from keel.objectives.composition import Composition, Gate, ImportanceWeight, Penalty
from keel.objectives.notation import COMMON_SYMBOLS, RATIO_NOTATIONS, SIGNS, Symbol, symbols_used_in
from keel.objectives.preset import ObjectivePreset
from keel.objectives.resolve import resolve_objective
from keel.objectives.statistics import gate_statistic

ParameterLookup = Callable[[KeyPath], str | None]
"""The parameter that stands at a place of a composition ("-diff_low" for a negative one), if one does."""


@dataclass(frozen=True)
class Description:
    """What a composition declares, as text."""

    anchor: str
    dropped: tuple[str, ...]
    """One sentence for each gate."""
    optional: tuple[str, ...]
    """A recipe's gates that are off until their parameter is given."""
    divisor: str
    dropped_from: str
    formula: str
    legend: tuple[Symbol, ...]


def describe(composition: Composition, names: ParameterLookup = lambda _path: None) -> Description:
    """A composition in words."""
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
    """A recipe with its parameters by name. `given` decides what is switched on, as in an `[objective]` table."""
    _, values, composition = resolve_objective({"name": preset.name, **(overrides or {})})
    names = parameter_lookup(preset.template(values))
    words = describe(composition, names)
    sleeping = [gate for gate in preset.parts.get("gates", []) if gate not in preset.template(values)["gates"]]
    optional = []
    for gate in sleeping:
        waking = [str(gate[bound]).lstrip("-$") for bound in ("low", "high") if bound in gate]
        awake = Gate.model_validate(gate | {bound: 0.0 for bound in ("low", "high") if bound in gate})
        sentence = _sentence(awake, parameter_lookup({"gates": [gate]}), ("gates", 0))
        optional.append(f"{sentence} (off until {' or '.join(waking)} is given)")
    text = " ; ".join((words.formula, *words.dropped, *optional))
    return Description(**(vars(words) | {"optional": tuple(optional), "legend": legend(composition, text, names)}))


def parameter_lookup(template: Any) -> ParameterLookup:
    """Names from a template in which "$name" stands for a parameter."""

    def name_at(path: KeyPath) -> str | None:
        place = template
        for part in path:
            try:
                place = place[part]
            except (KeyError, IndexError, TypeError):
                return None
        return place.replace("$", "") if isinstance(place, str) and "$" in place else None

    return name_at


def format_number(value: float) -> str:
    """A number as short as it can be written: 0.0001, 1e-5, 3."""
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", f"{value:g}")


def anchor(composition: Composition) -> str:
    """The policy that the ratio is measured against: sampler, proximal or none.

    A surrogate without a ratio takes the anchor of its importance weights.
    """
    if composition.proximal == "interpolated":
        return "interpolated"  # a proximal policy made from the sampler and the policy
    if composition.policy.anchor != "none":
        return composition.policy.anchor
    against = dict.fromkeys(weight.between.split("/")[1] for weight in composition.weights)
    return " and ".join(against) or "none"


def dropped(composition: Composition, names: ParameterLookup = lambda _path: None) -> tuple[str, ...]:
    """Who is dropped, one sentence for each gate."""
    gates = enumerate(composition.gates)
    return tuple(_sentence(gate, names, ("gates", place)) for place, gate in gates) or ("nobody",)


def _sentence(gate: Gate, names: ParameterLookup, place: KeyPath) -> str:
    low, high = (_parameter_or_number(names, (*place, bound), getattr(gate, bound)) for bound in ("low", "high"))
    statistic, pair = gate.spec, RATIO_NOTATIONS[gate.between]._asdict()
    value = statistic.formula.format(**pair)
    if gate.scope == "step":
        return f"the tokens of the step with the largest {value}, until the mean of the rest is at most {high}"
    each = "any " if gate.scope == "sequence" and statistic.sequence is None else ""
    if low is not None and low == f"-{high}" and statistic.magnitude_formula is not None:
        outside = [f"{each}{statistic.magnitude_formula.format(**pair)} > {high}"]
    else:
        outside = [f"{each}{value} {sign} {bound}" for sign, bound in (("<", low), (">", high)) if bound is not None]
    who = "token" if gate.scope == "token" else "whole sequence"
    if gate.when == "always":
        return f"{who} when {' or '.join(outside)}"
    advantage = "A" if gate.scope == "token" else "mean(A)"
    sign = ">" if gate.when == "positive_advantage" else "<"
    rest = outside[0] if len(outside) == 1 else f"({' or '.join(outside)})"
    comma = "," if gate.scope == "token" else ""
    return f"{who}{comma} when {advantage} {sign} 0 and {rest}"


def divisor(composition: Composition, names: ParameterLookup = lambda _path: None) -> str:
    """What divides the sum over the step's tokens."""
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
    """Which terms a dropped token leaves."""
    penalties = enumerate(composition.penalties)
    paid = [_penalty_formula(penalty, names, place) for place, penalty in penalties if penalty.scope == "all"]
    if not paid or not composition.gates:
        return "every term"
    return f"the policy term, it still pays {_join_terms(paid)}"


def formula(composition: Composition, names: ParameterLookup = lambda _path: None) -> str:
    """The loss of a step in symbols."""
    kept = [_weighted_policy_term(composition, names)]
    always: list[str] = []
    for place, penalty in enumerate(composition.penalties):
        terms = always if penalty.scope == "all" and composition.gates else kept
        terms.append(_penalty_formula(penalty, names, place))
    terms = kept
    if composition.gates:
        terms = [_multiply("keep", kept[0] if len(kept) == 1 else f"({_join_terms(kept)})"), *always]
    divide = _denominator_formula(composition, names)
    if len(terms) > 1:
        return f"sum ({_join_terms(terms)}) / {divide}"
    sign, term = ("-", terms[0][1:]) if terms[0].startswith("-") else ("", terms[0])
    return f"{sign}sum {term} / {divide}"


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
        term = f"-{A} * {ratio}"
    elif policy.surrogate == "soft":
        term = f"-{A} * (4 / tau_A) * sigmoid(tau_A * ({ratio} - 1))"
    else:
        term = _clipped_surrogate(composition, names, ratio, A)
    for place, weight in reversed(list(enumerate(composition.weights))):
        term = _multiply(f"sg({_weight_formula(weight, names, place)})", term)
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
        mark = _weight_suffix(index)
        base = f"{base}^k_A{mark} * exp(rate_A{mark} * (1 - {base}))"
    low, high = (
        _parameter_or_number(names, ("weights", index, bound), getattr(weight, bound)) for bound in ("low", "high")
    )
    if low is not None and high is not None:
        return f"clip({base}, {low}, {high})"
    if low is not None:
        return f"max({base}, {low})"
    return base if high is None else f"min({base}, {high})"


def _weight_suffix(index: int) -> str:
    """Tells the constants of a second gamma weight from those of the first."""
    return str(index + 1) if index else ""


def _penalty_formula(penalty: Penalty, names: ParameterLookup, index: int) -> str:
    coef = _parameter_or_number(names, ("penalties", index, "coef"), penalty.coef)
    x = RATIO_NOTATIONS[penalty.between].log_ratio
    measure = {"log_ratio_squared": f"{x}^2", "k1": x, "k2": f"{x}^2 / 2", "k3": f"(exp(-{x}) + {x} - 1)"}[
        penalty.estimator
    ]
    return f"{coef} * r * {measure}" if penalty.ratio_correction else f"{coef} * {measure}"


def _denominator_formula(composition: Composition, names: ParameterLookup) -> str:
    reduction = composition.reduction
    end = "_k" if reduction.denominator == "kept" else ""
    if reduction.over == "tokens":
        return f"N{end}"
    own = (
        f"n{end}"
        if reduction.over == "sequences"
        else _parameter_or_number(names, ("reduction", "length"), reduction.length)
    )
    return f"(S{end} * {own})"


def _advantage_symbol(composition: Composition, names: ParameterLookup) -> str:
    """A' where something may change the advantage, and A where nothing can."""
    return "A" if _advantage_formula(composition, names) == "A" else "A'"


def _advantage_formula(composition: Composition, names: ParameterLookup) -> str:
    """What A' is."""
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
    """The symbols that a text uses, and those that their definitions use."""
    return symbols_used_in(
        text, {symbol.name: symbol for symbol in (*COMMON_SYMBOLS, *_composition_symbols(composition, names))}
    )


def _composition_symbols(composition: Composition, names: ParameterLookup) -> list[Symbol]:
    """The symbols whose meaning depends on the composition."""
    policy, A = composition.policy, _advantage_symbol(composition, names)
    own = []
    if A == "A'":
        own.append(
            Symbol("A'", _advantage_formula(composition, names), "the advantage that trains, and whose sign gates see")
        )
    source = "b" if composition.kl_penalty_source == "sampled" else "l"
    own.append(Symbol("k", f"sg({source} - f)", "drift from the reference"))
    if composition.proximal == "interpolated":
        between = "b + (1 - 1 / staleness) * sg(l - b)"
        own.append(Symbol("o", between, "log-prob under the proximal policy, interpolated; staleness counts from 1"))
    mean_A = "M" if policy.level == "sequence" else A
    if policy.level == "sequence":
        log_ratio = RATIO_NOTATIONS[f"policy/{policy.anchor}"].log_ratio
        if policy.token_clip is not None:
            bound = _parameter_or_number(names, ("policy", "token_clip"), policy.token_clip)
            own.append(
                Symbol("e", f"min({log_ratio}, {bound}) where {A} > 0, else max({log_ratio}, -{bound})", "clipped")
            )
            log_ratio = "e"
        own.append(Symbol("g", f"exp(mean_kept({log_ratio}))", "ratio of the sequence, a geometric mean"))
        own.append(Symbol("M", f"mean_kept({A})", "advantage of the sequence"))
    if policy.surrogate == "soft":
        taus = (
            _parameter_or_number(names, ("policy", f"tau_{sign}"), getattr(policy, f"tau_{sign}")) for sign in SIGNS
        )
        own.append(Symbol("tau_A", _where_positive(mean_A, *taus), "temperature"))
    if policy.dual_clip is not None:
        bound = _parameter_or_number(names, ("policy", "dual_clip"), policy.dual_clip)
        own.append(Symbol("ceiling", f"-{bound} * {mean_A} where {mean_A} < 0, else inf", "the dual clip"))
    for place, weight in enumerate(composition.weights):
        if weight.kernel == "gamma":
            of = A if weight.level == "token" else f"mean({A})"
            for what, meaning in (("k", "power of the weight"), ("rate", "decay of the weight")):
                fields = [f"{what}_{sign}" for sign in SIGNS]
                values = (
                    _parameter_or_number(names, ("weights", place, field), getattr(weight, field)) for field in fields
                )
                own.append(Symbol(f"{what}_A{_weight_suffix(place)}", _where_positive(of, *values), meaning))
    return own


def _where_positive(advantage: str, value: str | None, otherwise: str | None) -> str:
    return f"{value} where {advantage} > 0, else {otherwise}"


def _parameter_or_number(names: ParameterLookup, path: KeyPath, value: float | None) -> str | None:
    """The parameter at a place, or the number there, or None where there is neither."""
    name = names(path)
    transform = len(path) == 1
    if name is not None and (value is not None or transform):
        return name
    return None if value is None else format_number(value)


def _multiply(factor: str, term: str) -> str:
    return f"-{factor} * {term[1:]}" if term.startswith("-") else f"{factor} * {term}"


def _join_terms(terms: list[str]) -> str:
    return " + ".join(terms).replace("+ -", "- ")
