"""Load and call the audited loss: a preset, a composition, or any function from a TokenBatch to a loss.

Checks see a target only through its loss and the gradient with respect to `batch.logprobs`, computed in float64.
"""

import inspect
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from keel.common.extras import import_object
from keel.config import load_settings
from keel.errors import ConfigError, KeelError
from keel.objectives import PRESETS, Composition
from keel.signal import Objective, TokenBatch, objective
from keel.signal.audit.declaration import Declaration, declaration_of, revise
from keel.signal.function_objective import LossFunctionError, dropped_masks, loss_of

NUMBERS = (0.0, 1e-6, 1e-3, 0.05, 0.5, 1.0, 2.0, 8.0, 1e3, 1e6)
"""Values tried for a numeric option, to see whether it has an effect."""

UNKNOWN_OPTION = "an_option_that_does_not_exist"

Options = dict[str, tuple[Any, tuple[Any, ...]]]
"""Options of a target: the default of each, and other values to try."""


class TargetError(KeelError):
    """The target cannot be loaded or called."""


class LossError(KeelError):
    """The target raised an exception on a valid batch, or its result is not finite."""

    def __init__(self, error: Exception, call: Callable[..., Any], batch: TokenBatch) -> None:
        reason = str(error).strip().split("\n")[0]
        kind = type(error).__name__
        super().__init__(
            f"{kind}: {reason} ({_location(error, call)})" if reason else f"{kind} ({_location(error, call)})"
        )
        self.error = error
        self.batch = batch
        """The batch that the target was called with."""


class NonFiniteError(LossError):
    """The loss or a gradient is NaN or infinite on a valid batch."""

    def __init__(self, message: str, batch: TokenBatch) -> None:
        KeelError.__init__(self, message)
        self.error = ArithmeticError(message)
        self.batch = batch


def _location(error: Exception, call: Callable[..., Any]) -> str:
    """Name the line that raised: in the file of the function if it is in the traceback, else outside Keel and torch."""
    try:
        own_file = inspect.getsourcefile(inspect.unwrap(call))
    except TypeError:  # an object with __call__, or a function written in C
        own_file = inspect.getsourcefile(type(call)) if type(call).__module__ != "functools" else None
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    outside = [frame for frame in frames if not frame.filename.startswith(libraries)]
    own = [frame for frame in frames if frame.filename == own_file]
    frame = (own or outside or frames)[-1]
    if not own and not outside:
        return "in backward()"
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno}, in {frame.name}"


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient with respect to the policy's log-probs."""

    loss: float
    gradient: Tensor


@dataclass(frozen=True, eq=False)
class Target:
    """A function that computes a loss from a batch, with its declaration and options."""

    name: str
    call: Callable[..., Any]
    declaration: Declaration
    objective: Objective | None = None
    options: Options = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    """The dtype of the batches it is given; float32 if it does not accept float64."""
    exact: bool = True
    """Whether it computes in float64; if not, a larger rounding error is accepted."""

    def precision(self, batch: TokenBatch) -> torch.dtype:
        """Return the dtype of its loss."""
        return self._loss(batch, batch.logprobs.detach().clone().requires_grad_()).dtype

    def evaluate(self, batch: TokenBatch, **options: Any) -> Evaluation:
        """Call the target with a copy of the log-probs as leaf. An exception of the target is raised as a LossError."""
        leaf = batch.logprobs.detach().clone().requires_grad_()
        loss = self._loss(batch, leaf, **options)
        gradient = None
        if loss.requires_grad:
            try:
                (gradient,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
            except Exception as error:
                raise LossError(error, self.call, batch) from error
        return Evaluation(float(loss.detach()), torch.zeros_like(leaf) if gradient is None else gradient)

    def evaluate_finite(self, batch: TokenBatch) -> Evaluation:
        """Call the target on an ordinary batch. A loss or gradient that is NaN or infinite raises a NonFiniteError."""
        evaluation = self.evaluate(batch)
        if not math.isfinite(evaluation.loss):
            raise NonFiniteError(f"the loss is {evaluation.loss} on an ordinary batch", batch)
        finite = evaluation.gradient.isfinite()
        if not bool(finite.all()):
            index = int((~finite).nonzero()[0])
            value = float(evaluation.gradient[index])
            raise NonFiniteError(f"the gradient of a token is {value} on an ordinary batch", batch)
        return evaluation

    def _loss(self, batch: TokenBatch, leaf: Tensor, **options: Any) -> Tensor:
        inputs = batch.replace(logprobs=leaf)
        if self.dtype != torch.float64:
            floats = {name: value for name, value in inputs.tensors().items() if value.is_floating_point()}
            inputs = inputs.replace(**{name: value.to(self.dtype) for name, value in floats.items()})
        try:
            result = self.call(inputs, **options)
        except Exception as error:
            raise LossError(error, self.call, batch) from error
        try:
            dropped_masks(result, len(batch), self.name)
            return loss_of(result, self.name)
        except LossFunctionError as error:
            raise TargetError(str(error)) from None


def find_target(
    source: str | Callable[..., Any] | Objective | Composition,
    parameters: dict[str, Any] | None = None,
    default: Declaration | None = None,
    **declared: Any,
) -> Target:
    """Make a target from a preset's name, a TOML file, `module:function`, a function, an objective or a composition.

    `default` is the declaration of a function that has none. `declared` overrides single fields of the declaration.
    """
    parameters = parameters or {}
    if isinstance(source, Composition):
        source = objective(source)
    if isinstance(source, str):
        source = _load(source, parameters)
    elif parameters:
        raise TargetError(f"parameters ({', '.join(parameters)}) can only be given with the name of a preset")
    if isinstance(source, Objective):
        if source.composition.roles is not None:
            # the roles of the probe tokens are arbitrary, so audit the objective without its role filter
            source = Objective(source.composition.model_copy(update={"roles": None}))
        target = Target(
            source.name or "composition",
            _configured(source),
            declaration_of(source.composition),
            source,
            _preset_options(source),
        )
    else:
        declaration = getattr(source, "keel_declaration", default or Declaration())
        name = getattr(source, "__name__", type(source).__name__)
        target = Target(name, source, declaration, None, _function_options(source))
    return replace(target, declaration=revise(target.declaration, declared)) if declared else target


def load_objective(source: str | Objective | Composition, parameters: dict[str, Any]) -> Objective:
    """Return the objective of a preset's name and parameters, of a TOML file or of a composition."""
    if isinstance(source, str) and not source.endswith(".toml"):
        return objective(source, **parameters)
    if parameters:
        kind = "a file" if isinstance(source, str) else "an objective"
        raise TargetError(
            f"parameters ({', '.join(parameters)}) can only be given with the name of a preset, not with {kind}"
        )
    if isinstance(source, str):
        return objective(load_settings(source).settings.objective)
    return objective(source) if isinstance(source, Composition) else source


def _load(source: str, parameters: dict[str, Any]) -> Objective | Callable[..., Any]:
    if ":" not in source or source.endswith(".toml"):
        return load_objective(source, parameters)
    if parameters:
        raise TargetError("parameters can only be given with the name of a preset, not with a function")
    try:
        function: Callable[..., Any] = import_object(source, source, "a function from a TokenBatch to a loss")
    except ConfigError as error:
        raise TargetError(f"the target cannot be loaded: {error}") from error
    return function


def _configured(preset: Objective) -> Callable[..., Any]:
    """Return a function that calls the objective, with some parameters changed if it is a preset."""
    preset_name = preset.name
    if preset_name is None:
        return preset
    fields = PRESETS[preset_name].parameters_class.model_fields
    given = {name: value for name, value in preset.parameters.items() if value != fields[name].default}
    resolved = objective(preset_name, **given).composition
    parts = {
        name: getattr(preset.composition, name)[len(getattr(resolved, name)) :]
        for name in ("gates", "weights", "penalties")
    }
    added = {name: [part.model_dump() for part in extra] for name, extra in parts.items() if extra}

    def call(batch: TokenBatch, **options: Any) -> Any:
        return (objective(preset_name, **{**given, **added, **options}) if options else preset)(batch)

    return call


def _preset_options(preset: Objective) -> Options:
    if preset.name is None:
        return {}
    options: Options = {}
    for name, setting in PRESETS[preset.name].parameters_class.model_fields.items():
        if name != "metrics_sample_size":  # it bounds the cost of the metrics and has no effect on the loss
            options[name] = preset.parameters[name], _values(setting.annotation)
    return options


def _function_options(function: Callable[..., Any]) -> Options:
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    options: Options = {}
    for parameter in parameters:
        default = parameter.default
        if parameter.kind is parameter.VAR_KEYWORD:
            options[UNKNOWN_OPTION] = None, (1.0,)
        if default is parameter.empty or isinstance(default, str):
            continue  # no value to try is known
        if isinstance(default, bool):
            options[parameter.name] = default, (not default,)
        elif default is None or isinstance(default, int | float):
            options[parameter.name] = default, NUMBERS
        elif isinstance(default, tuple | list) and default and all(isinstance(value, int | float) for value in default):
            options[parameter.name] = (
                default,
                tuple(type(default)(value * factor for value in default) for factor in (0.3, 1.7)),
            )
    return options


def _values(annotation: Any) -> tuple[Any, ...]:
    """Return values to try for a setting of this type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return (False, True)
    if "list" in str(annotation):
        return ([0], [1])
    return (None, *NUMBERS)
