"""What is audited: a recipe, a composition, or any function from a TokenBatch to a loss.

The audit sees a target only through its loss and its gradient with respect to `batch.logprobs`, computed in float64.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from keel.audit.declaration import Declaration, declaration_of, revise
from keel.config import RECIPES, Composition, load
from keel.errors import KeelError
from keel.signal import Objective, TokenBatch, objective

NUMBERS = (0.0, 1e-6, 1e-3, 0.05, 0.5, 1.0, 2.0, 8.0, 1e3, 1e6)
"""Values tried for a numeric option, to see whether it acts."""


UNKNOWN = "an_option_that_does_not_exist"


class TargetError(KeelError):
    """The target cannot be loaded or called."""


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient."""

    loss: float
    gradient: Tensor


@dataclass(frozen=True, eq=False)
class Target:
    """Something that makes a loss from a batch."""

    name: str
    call: Callable[..., Any]
    declaration: Declaration
    objective: Objective | None = None
    options: dict[str, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)
    """Keyword options: their value now, and others to try."""
    dtype: torch.dtype = torch.float64
    """Of the batches it is given; float32 for a target that cannot take float64."""
    exact: bool = True
    """Whether it computes in float64, so that only its rounding is forgiven."""

    def precision(self, batch: TokenBatch) -> torch.dtype:
        """The dtype of the loss that it returns."""
        return self._loss(batch, batch.logprobs.detach().clone().requires_grad_()).dtype

    def evaluate(self, batch: TokenBatch, **options: Any) -> Evaluation:
        """Call the target on a copy of the batch whose log-probs are a leaf."""
        leaf = batch.logprobs.detach().clone().requires_grad_()
        loss = self._loss(batch, leaf, **options)
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
        return Evaluation(float(loss.detach()), torch.zeros_like(leaf) if gradient is None else gradient)

    def _loss(self, batch: TokenBatch, leaf: Tensor, **options: Any) -> Tensor:
        given = batch.replace(logprobs=leaf)
        if self.dtype != torch.float64:
            floats = {name: value for name, value in given.tensors().items() if value.is_floating_point()}
            given = given.replace(**{name: value.to(self.dtype) for name, value in floats.items()})
        loss = self.call(given, **options)
        loss = getattr(loss, "loss", loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TargetError(f"{self.name} returned {_short(loss)}; a loss must be a tensor with one element")
        return loss


def _short(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def find_target(
    what: str | Callable[..., Any] | Objective | Composition, parameters: dict[str, Any] | None = None, **word: Any
) -> Target:
    """A target from a recipe's name, a TOML file, `module:function`, a function, an objective or a composition.

    `word` overrides single fields of the declaration.
    """
    parameters = parameters or {}
    if isinstance(what, Composition):
        what = objective(what)
    if isinstance(what, str):
        what = _load(what, parameters)
    elif parameters:
        raise TargetError(f"parameters ({', '.join(parameters)}) go with a recipe's name")
    if isinstance(what, Objective):
        if what.composition.roles is not None:
            # who belongs is not what is asked about: the rule is audited as it treats those who do
            what = Objective(what.composition.model_copy(update={"roles": None}))
        target = Target(
            what.name or "composition", _configured(what), declaration_of(what.composition), what, _recipe_options(what)
        )
    else:
        declared = getattr(what, "keel_declaration", Declaration())
        target = Target(getattr(what, "__name__", type(what).__name__), what, declared, None, _function_options(what))
    return replace(target, declaration=revise(target.declaration, word)) if word else target


def _load(what: str, parameters: dict[str, Any]) -> Objective | Callable[..., Any]:
    if what.endswith(".toml"):
        if parameters:
            raise TargetError("parameters go with a recipe's name, not with a file")
        return objective(load(what).settings.objective)
    module_name, colon, name = what.partition(":")
    if not colon:
        return objective(what, **parameters)
    if parameters:
        raise TargetError("parameters go with a recipe's name, not with a function")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a user's module raises while it loads is the answer
        raise TargetError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise TargetError(f"{what} is a {type(found).__name__}; it must be a function from a TokenBatch to a loss")
    return found  # type: ignore[no-any-return]


def _configured(rule: Objective) -> Callable[..., Any]:
    """A recipe that can be called with some of its parameters changed."""

    def call(batch: TokenBatch, **options: Any) -> Any:
        return (objective(rule.name, **options) if options and rule.name else rule)(batch)

    return call


def _recipe_options(rule: Objective) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    if rule.name is None:
        return {}
    options = {}
    for name, setting in RECIPES[rule.name].settings.model_fields.items():
        if name != "metric_tokens":  # it bounds the cost of the metrics and never touches the loss
            options[name] = rule.parameters[name], _values(setting.annotation)
    return options


def _function_options(function: Callable[..., Any]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    options: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for parameter in parameters:
        default = parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            options[UNKNOWN] = None, (1.0,)
        if default is parameter.empty or isinstance(default, str):
            continue  # without a default, or with a word, there is nothing to try
        if isinstance(default, bool):
            options[parameter.name] = default, (not default,)
        elif default is None or isinstance(default, int | float):
            options[parameter.name] = default, NUMBERS
        elif isinstance(default, tuple | list) and default and all(isinstance(each, int | float) for each in default):
            options[parameter.name] = default, tuple(type(default)(each * f for each in default) for f in (0.3, 1.7))
    return options


def _values(annotation: Any) -> tuple[Any, ...]:
    """Values of a setting's type that are worth trying."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return (False, True)
    if "list" in str(annotation):
        return ([0], [1])
    return (None, *NUMBERS)
