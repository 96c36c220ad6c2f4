"""What a rule says of itself: its anchor, the scope of its decisions, what a dropped token leaves, what divides.

A recipe's declaration is read off its composition. A function declares with the decorator `keel.declare`, or is held to
the strict default: anchored on the sampler; each decision about one token from that token alone, or about a whole
sequence; a dropped token leaves every term; the step's trainable tokens divide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from keel.config import Composition
from keel.config.settings import nearest
from keel.errors import ConfigError

Anchor = Literal["sampler", "proximal", "none"]
Scope = Literal["token", "sequence", "step"]
Leaves = Literal["every term", "policy term"]
Divisor = Literal["tokens", "kept tokens", "sequences", "kept sequences", "constant", "kept constant"]
Signal = Literal["advantage", "teacher", "none"]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One rule's word about itself, which the audit holds it to."""

    anchor: Anchor = "sampler"
    """The policy that the ratio, or the weight, is measured against."""
    decisions: tuple[Scope, ...] = ("token", "sequence")
    """Who is dropped together."""
    leaves: Leaves = "every term"
    """What a dropped token no longer pays."""
    divisor: Divisor = "tokens"
    """"tokens": trainable tokens of the step; "sequences": sequences times own length; "constant": times one length."""
    signal: Signal = "advantage"
    """What the policy term follows: the batch's advantages, teacher minus policy, or nothing."""
    drops: bool | None = None
    """Whether some token must be dropped somewhere; None: not said."""

    def __post_init__(self) -> None:
        for name, kind in (("anchor", Anchor), ("leaves", Leaves), ("divisor", Divisor), ("signal", Signal)):
            _check(name, getattr(self, name), get_args(kind))
        for scope in self.decisions:
            _check("decisions", scope, get_args(Scope))


def _check(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f'declaration.{name} = "{value}" is not known; {nearest(str(value), known)}')


def declare(**word: Any) -> Callable[[Function], Function]:
    """Attach a declaration to a loss: `@keel.declare(anchor="proximal", divisor="sequences")`."""
    declaration = revise(Declaration(), word)

    def attach(function: Function) -> Function:
        function.keel_declaration = declaration  # type: ignore[attr-defined]
        return function

    return attach


def revise(declaration: Declaration, word: Mapping[str, Any]) -> Declaration:
    """A declaration with some of its fields said otherwise."""
    known = [each.name for each in fields(Declaration)]
    for name in word:
        if name not in known:
            raise ConfigError(f"declaration.{name} is not known; {nearest(name, known)}")
    word = dict(word)
    if "decisions" in word:
        said = word["decisions"]
        word["decisions"] = (said,) if isinstance(said, str) else tuple(said)
        word.setdefault("drops", bool(word["decisions"]))
    return replace(declaration, **word)


def declaration_of(composition: Composition) -> Declaration:
    """What a composition says of itself."""
    policy, reduction = composition.policy, composition.reduction
    anchor: Anchor = policy.anchor
    if anchor == "none" and composition.weights:
        anchor = "proximal" if composition.weights[0].of == "policy/proximal" else "sampler"
    if composition.proximal == "interpolated":
        anchor = "sampler"  # the proximal policy is made from it
    signal: Signal = "advantage"
    if policy.surrogate == "cross_entropy":
        signal = "none"
    elif composition.adv_tau == 0 and composition.teacher_tau > 0:
        signal = "teacher"
    kept = "kept " if reduction.divide_by == "kept" and composition.gates else ""
    divisor: Any = f"{kept}{reduction.over}"
    return Declaration(
        anchor=anchor,
        decisions=tuple(sorted({gate.scope for gate in composition.gates})),
        leaves="policy term" if any(penalty.scope == "all" for penalty in composition.penalties) else "every term",
        divisor=divisor,
        signal=signal,
        drops=bool(composition.gates),
    )
