"""A loss function of the user with the interface of an objective.

The function is called once per optimizer step, with all of its tokens from all micro-batches and ranks in one
`TokenBatch`: whatever it divides by, it divides by the totals of the step, as a preset does. Its gradient with respect
to `batch.logprobs` is computed by autograd.

It returns a loss, a tensor with one element; or a mapping, or an object with attributes:

- `loss`: the tensor;
- `keep`, optional: a boolean tensor, false for the tokens that the loss drops. They must have no gradient, unless the
  function is declared with `dropped_from="policy term"`;
- `reasons`, optional: a mapping from the name of a reason to a boolean tensor of the tokens dropped for it. A token
  counts for the first reason that names it. Without `keep`, these are the dropped tokens.

The result of a preset is accepted as well.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.common.extras import import_object
from keel.errors import BatchError, KeelError
from keel.objectives.loss_function import FunctionSettings, LogprobSource
from keel.objectives.resolve import function_settings
from keel.signal.active_tokens import ActiveTokens
from keel.signal.gates import FIRST_GATE, GateResult, reason_names
from keel.signal.loss_terms import Evaluated
from keel.signal.objective import Objective, ObjectiveResult, attach_gradient
from keel.signal.step_totals import StepCounts, StepTotals, compute_totals
from keel.signal.token_batch import TokenBatch

OPTIONAL_SOURCES: tuple[LogprobSource, ...] = ("proximal", "reference", "teacher")
UNNAMED_REASON = "dropped by the loss function"
"""The reason of tokens that `keep` drops and no reason names."""
MAX_REASONS = 100
"""Different reasons of one function. Reasons are stored as bytes, two codes each."""

LossFunction = Callable[..., Any]


class LossFunctionError(KeelError):
    """A loss function raised an exception, or did not return what it must."""


class BoundLoss:
    """A loss function with its options, given only the log-probs that it is said to read.

    The audit calls it as the trainer does. Keyword arguments override single options.
    """

    def __init__(self, function: LossFunction, settings: FunctionSettings) -> None:
        self.__wrapped__ = function
        self.__name__ = settings.name
        self.__signature__ = _signature_with_defaults(function, settings.options)
        if hasattr(function, "keel_declaration"):
            self.keel_declaration = function.keel_declaration
        self._options = dict(settings.options)
        self._unread = {f"{source}_logprobs": None for source in OPTIONAL_SOURCES if source not in settings.reads}

    def __call__(self, batch: TokenBatch, **options: Any) -> Any:
        return self.__wrapped__(batch.replace(**self._unread), **{**self._options, **options})


class FunctionObjective(Objective):
    """A loss function with the interface of `Objective`."""

    def __init__(self, function: LossFunction, settings: FunctionSettings, *, importable: bool) -> None:
        super().__init__(settings.composition(), name=settings.name, parameters=settings.model_dump(exclude={"name"}))
        self.settings = settings
        self.importable = importable
        """Whether `settings.name` is an import path, so that other ranks can load the function."""
        self.function = BoundLoss(function, settings)
        self._reason_codes: dict[str, int] = {}
        declaration = getattr(function, "keel_declaration", None)
        self._penalises_dropped = getattr(declaration, "dropped_from", "") == "policy term"

    @property
    def source_hash(self) -> str:
        """The SHA-256 of the file of the function, or of its byte code where it is in no file."""
        return source_hash(self.function.__wrapped__)

    def evaluate(self, batch: TokenBatch, totals: StepTotals | StepCounts | None = None) -> ObjectiveResult:
        """Compute the loss of a whole step. The function has no totals, so the batch cannot be a part of the step."""
        if totals is not None and totals.num_trainable != int(batch.trainable.sum()):
            raise BatchError(
                f"{self.name} is a loss function and needs all tokens of the step in one batch; it is given"
                f" {int(batch.trainable.sum())} of {totals.num_trainable} trainable tokens"
            )
        with torch.no_grad():
            active = ActiveTokens(batch, self.composition)
            totals = compute_totals(self.composition, [active])
        loss, gradient, result = self._differentiate(self._restrict_roles(batch, active))
        with torch.no_grad():
            decision = self._decide(result, active, len(batch))
            gradient = active.take(gradient).to(active.dtype)
            self._check_dropped_gradient(decision, gradient)
        loss = loss.to(active.dtype).reshape(())
        evaluated = Evaluated(loss, gradient, decision, active.advantages, None, False, {"policy": loss})
        return ObjectiveResult(
            attach_gradient(batch.logprobs, evaluated, active.index), self, active, totals, evaluated
        )

    def _restrict_roles(self, batch: TokenBatch, active: ActiveTokens) -> TokenBatch:
        """Return the batch in which tokens of other roles are not trainable."""
        if self.composition.roles is None or active.trainable_index is None:
            return batch
        trainable = torch.zeros_like(batch.trainable)
        trainable[active.trainable_index] = True
        return batch.replace(trainable=trainable)

    def _differentiate(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Any]:
        """Call the function and return its loss without gradient, the gradient of every token, and its result."""
        leaf = batch.logprobs.detach().clone().requires_grad_()
        proximal = batch.proximal_logprobs
        detached = {} if proximal is None else {"proximal_logprobs": proximal.detach()}
        try:
            with torch.enable_grad():
                result = self.function(batch.replace(logprobs=leaf, **detached))
                loss = loss_of(result, self.function.__name__)
                gradient = None
                if loss.requires_grad:
                    (gradient,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
        except KeelError:
            raise
        except Exception as error:
            raise LossFunctionError(
                f"the loss function {self.name} raised {type(error).__name__}: {error}{_place(error)}"
            ) from error
        return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient, result

    def _decide(self, result: Any, active: ActiveTokens, size: int) -> GateResult:
        """Return which active tokens the result drops, and why."""
        decision = GateResult(len(active), active.advantages.device)
        # the sign of the log-ratio gives the side, as it does for a gate on a distance
        negative = active.log_ratio("policy/sampler") < 0
        for name, mask in dropped_masks(result, size, self.function.__name__).items():
            dropped, code = active.take(mask.to(negative.device)), self._code_of(name)
            decision.drop(dropped & negative, code)
            decision.drop(dropped & ~negative, code + 1)
        return decision

    def _code_of(self, reason: str) -> int:
        """Return the code of a reason for the low side; the next code is its high side, under the same name."""
        if reason not in self._reason_codes:
            if len(self._reason_codes) == MAX_REASONS:
                raise LossFunctionError(
                    f"the loss function {self.name} has returned more than {MAX_REASONS} different reasons; use names"
                    " that do not depend on values"
                )
            self._reason_codes[reason] = FIRST_GATE + 2 * len(self._reason_codes)
            names = [name for name in self._reason_codes for _side in ("low", "high")]
            self.reasons = (*reason_names(()), *names)
        return self._reason_codes[reason]

    def _check_dropped_gradient(self, decision: GateResult, gradient: Tensor) -> None:
        if decision.dropped is None or self._penalises_dropped:
            return
        count = int((gradient[decision.dropped] != 0).sum())
        if count:
            raise LossFunctionError(
                f"the loss function {self.name} drops {count} tokens that have a gradient; remove them from the loss,"
                ' or declare the function with @keel.declare(dropped_from="policy term")'
            )


def function_objective(
    function: str | LossFunction | Mapping[str, Any] | FunctionSettings,
    *,
    reads: Sequence[LogprobSource] = (),
    options: Mapping[str, Any] | None = None,
) -> FunctionObjective:
    """Return a loss function as an objective.

    `function` is the function, `module:function`, or an `[objective]` table. `reads` are the log-probs that it reads
    besides the policy's and the sampler's, and `options` are its keyword arguments.
    """
    if callable(function):
        name = getattr(function, "__name__", type(function).__name__)
        extra = {"reads": list(reads), "options": dict(options or {})}
        settings = function_settings({"name": f"python:{''.join(c if c.isalnum() else '_' for c in name)}", **extra})
        return FunctionObjective(function, settings.model_copy(update={"name": name}), importable=False)
    if isinstance(function, str):
        function = {"name": function, "reads": list(reads), "options": dict(options or {})}
    settings = function if isinstance(function, FunctionSettings) else function_settings(function)
    loaded = import_object(
        settings.name, f'objective.name = "{settings.name}"', "a function from a TokenBatch to a loss"
    )
    return FunctionObjective(loaded, settings, importable=True)


def loss_of(result: Any, name: str) -> Tensor:
    """Return the loss in the result of a loss function; raise if it is not a tensor with one element."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise LossFunctionError(f"{name} returned {found}; a loss must be a tensor with one element")


def dropped_masks(result: Any, size: int, name: str) -> dict[str, Tensor]:
    """Return the dropped tokens of a result by reason, as masks over the batch."""
    if isinstance(result, ObjectiveResult):
        names, codes = result.objective.reasons, result.reasons
        return {names[code]: codes == code for code in torch.unique(codes).tolist() if code >= FIRST_GATE}
    if isinstance(result, Tensor):
        return {}
    fields = result if isinstance(result, Mapping) else {key: getattr(result, key, None) for key in ("keep", "reasons")}
    keep, reasons = fields.get("keep"), fields.get("reasons")
    if reasons is not None and not isinstance(reasons, Mapping):
        raise LossFunctionError(
            f"{name} returned reasons as a {type(reasons).__name__}; they must be a mapping from the name of a reason"
            " to a boolean tensor"
        )
    masks = {str(key): _mask(mask, size, f"{name} returned reasons[{key!r}]") for key, mask in (reasons or {}).items()}
    if keep is None:
        return masks
    dropped = ~_mask(keep, size, f"{name} returned keep")
    kept_but_named = sum(int((mask & ~dropped).sum()) for mask in masks.values())
    if kept_but_named:
        raise LossFunctionError(f"{name} returned reasons for {kept_but_named} tokens that keep does not drop")
    return {**masks, UNNAMED_REASON: dropped} if bool(dropped.any()) else masks


def _mask(value: Any, size: int, label: str) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.shape != (size,):
        found = (
            f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
        )
        raise LossFunctionError(f"{label} = {found}; it must be a boolean tensor of shape [{size}], as batch.logprobs")
    return value


def source_hash(function: LossFunction) -> str:
    """Return the SHA-256 of the file that defines a function, or of its byte code where there is no file."""
    function = inspect.unwrap(function)
    module = sys.modules.get(getattr(function, "__module__", ""), None)
    file = getattr(module, "__file__", None)
    if file is not None and Path(file).is_file():
        content = Path(file).read_bytes()
    else:
        code = getattr(function, "__code__", None)
        content = repr(function).encode() if code is None else code.co_code + repr(code.co_consts).encode()
    return hashlib.sha256(content).hexdigest()


def _signature_with_defaults(function: LossFunction, options: Mapping[str, Any]) -> inspect.Signature | None:
    """Return the signature with the options as defaults, for the audit, which tries other values."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    named = [parameter.replace(default=options.get(parameter.name, parameter.default)) for parameter in parameters]
    return signature.replace(parameters=named)


def _place(error: Exception) -> str:
    """Return the line that raised, outside of Keel's own code where there is one."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    outside = [frame for frame in frames if frame.filename != __file__ and "/torch/" not in frame.filename]
    return f" ({outside[-1].filename}:{outside[-1].lineno}, in {outside[-1].function})" if outside else ""
