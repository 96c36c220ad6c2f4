"""Declare the intended properties of a loss: its anchor, decision scopes, the terms tokens are dropped from, its
divisor.

The declaration of a preset follows from its composition. A function is declared with the decorator `keel.declare`.
Without it, the function is audited against the strict default: anchored on the sampler; a token is dropped because of
its own values only, or with its whole sequence; a dropped token is dropped from every term; the divisor is the number
of trainable tokens of the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from keel.common.settings import suggest_name
from keel.errors import ConfigError
from keel.objectives import Composition

Anchor = Literal["sampler", "proximal", "none"]
Scope = Literal["token", "sequence", "step"]
DroppedFrom = Literal["every term", "policy term"]
Divisor = Literal["tokens", "kept tokens", "sequences", "kept sequences", "constant", "kept constant"]
Signal = Literal["advantage", "teacher", "none"]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The intended properties of a loss, which the audit checks."""

    anchor: Anchor = "sampler"
    """The policy in the denominator of the ratio or of the importance weight."""
    decisions: tuple[Scope, ...] = ("token", "sequence")
    """The scopes at which tokens are dropped together."""
    dropped_from: DroppedFrom = "every term"
    """The terms of the loss that a dropped token does not contribute to."""
    divisor: Divisor = "tokens"
    """"tokens": the trainable tokens of the step; "sequences": the number of sequences times the length of the
    token's sequence; "constant": the number of sequences times a constant. With "kept", dropped tokens do not count."""
    signal: Signal = "advantage"
    """The weights of the log-probs in the policy term: the batch's advantages, teacher minus policy, or none."""
    drops: bool | None = None
    """Whether the loss must drop tokens on some batch; None if not declared."""

    def __post_init__(self) -> None:
        for name, kind in (("anchor", Anchor), ("dropped_from", DroppedFrom), ("divisor", Divisor), ("signal", Signal)):
            _check(name, getattr(self, name), get_args(kind))
        for scope in self.decisions:
            _check("decisions", scope, get_args(Scope))


def _check(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f'declaration.{name} = "{value}" is not known; {suggest_name(str(value), known)}')


def declare(**declared: Any) -> Callable[[Function], Function]:
    """Attach a declaration to a loss: `@keel.declare(anchor="proximal", divisor="sequences")`."""
    declaration = revise(Declaration(), declared)

    def attach(function: Function) -> Function:
        function.keel_declaration = declaration  # type: ignore[attr-defined]
        return function

    return attach


def revise(declaration: Declaration, declared: Mapping[str, Any]) -> Declaration:
    """Return a declaration with some of its fields changed."""
    known = [field.name for field in fields(Declaration)]
    for name in declared:
        if name not in known:
            raise ConfigError(f"declaration.{name} is not known; {suggest_name(name, known)}")
    changes = dict(declared)
    if "decisions" in changes:
        decisions = changes["decisions"]
        changes["decisions"] = (decisions,) if isinstance(decisions, str) else tuple(decisions)
        changes.setdefault("drops", bool(changes["decisions"]))
    return replace(declaration, **changes)


def declaration_of(composition: Composition) -> Declaration:
    """Return the declaration that follows from a composition."""
    policy, reduction = composition.policy, composition.reduction
    anchor: Anchor = policy.anchor
    if anchor == "none" and composition.weights:
        anchor = "proximal" if composition.weights[0].between == "policy/proximal" else "sampler"
    if composition.proximal == "interpolated":
        anchor = "sampler"  # the proximal log-probs are computed from the sampler's
    signal: Signal = "advantage"
    if policy.surrogate == "cross_entropy":
        signal = "none"
    elif composition.adv_tau == 0 and composition.teacher_tau > 0:
        signal = "teacher"
    kept = "kept " if reduction.denominator == "kept" and composition.gates else ""
    divisor: Any = f"{kept}{reduction.over}"
    return Declaration(
        anchor=anchor,
        decisions=tuple(sorted({gate.scope for gate in composition.gates})),
        dropped_from="policy term"
        if any(penalty.scope == "all" for penalty in composition.penalties)
        else "every term",
        divisor=divisor,
        signal=signal,
        drops=bool(composition.gates),
    )
