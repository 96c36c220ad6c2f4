"""Objectives: compute a loss from the tokens of a step, and report what happened to every token.

An objective is defined by its composition and has no state between calls. The gradient with respect to the policy's
log-probs is computed in closed form in the forward pass, so a call costs a few passes over the tokens. This module does
not compute log-probs, take optimizer steps or read files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.errors import BatchError
from keel.objectives import Composition, ImportanceWeight, ObjectiveSettings, resolve_objective
from keel.objectives.resolve import is_loss_function
from keel.signal.active_tokens import ActiveTokens, apply_bitmask_, keep_bitmask, ratio
from keel.signal.cpu_ops import greater_than
from keel.signal.gates import INVALID_LOGPROB, NOT_TRAINABLE, OTHER_ROLE, GateResult, reason_names
from keel.signal.loss_terms import Evaluated, LossTerm, penalty_term, policy_term, where_positive
from keel.signal.metrics import Metrics
from keel.signal.segments import SequenceTable
from keel.signal.step_metrics import compute_metrics
from keel.signal.step_totals import (
    Gather,
    StepCounts,
    StepTotals,
    compute_totals,
    kept_tokens_by_sequence,
    totals_from_counts,
)
from keel.signal.token_batch import TokenBatch


def objective(
    name: str | Composition | ObjectiveSettings | Mapping[str, Any] | Callable[..., Any], /, **parameters: Any
) -> "Objective":
    """Return an objective from the name and parameters of a preset, from a composition, or from a loss function.

    `objective("icepop", ratio_high=8.0)` or `objective({"gates": [{"statistic": "ratio", "low": 0.2}]})`. In addition
    to its parameters, a preset takes `gates`, `weights` and `penalties`, which are added to its own. A loss function,
    or its `module:function`, takes `reads` and `options` (`keel/signal/function_objective.py`).
    """
    if callable(name) or is_loss_function(_table_name(name)):
        from keel.signal.function_objective import function_objective

        if callable(name):
            return function_objective(name, **parameters)
        table = name.table if isinstance(name, ObjectiveSettings) else {"name": name} if isinstance(name, str) else name
        assert isinstance(table, Mapping)
        return function_objective({**table, **parameters})
    if isinstance(name, str):
        _, values, composition = resolve_objective({"name": name, **parameters})
        return Objective(composition, name=name, parameters=values)
    if parameters:
        raise TypeError(
            f"parameters ({', '.join(parameters)}) need the name of a preset; a composition already contains them"
        )
    if isinstance(name, Composition):
        return Objective(name)
    preset, values, composition = resolve_objective(name.table if isinstance(name, ObjectiveSettings) else name)
    return Objective(composition, name=preset, parameters=values)


def _table_name(source: Any) -> Any:
    """Return the name in an `[objective]` table, or the name itself."""
    if isinstance(source, ObjectiveSettings):
        return source.name
    return source.get("name") if isinstance(source, Mapping) else source


class Objective:
    """A composition that can be called on batches."""

    def __init__(
        self, composition: Composition, *, name: str | None = None, parameters: Mapping[str, Any] | None = None
    ) -> None:
        self.composition = composition
        self.name = name
        self.parameters = dict(parameters or {})
        self.reasons = reason_names(composition.gates)
        """The name of each reason code in `ObjectiveResult.reasons`."""

    def __repr__(self) -> str:
        return f"Objective({self.name or self.composition!r})"

    @property
    def token_local(self) -> bool:
        """Whether each token's gradient depends on that token alone, up to one factor common to the step."""
        return self.composition.token_local

    def totals(self, batches: Sequence[TokenBatch], gather: Gather | None = None) -> StepTotals:
        """Compute the KL mean, thresholds and denominators of a step from its micro-batches.

        With several ranks, `gather` takes this rank's part of a sum and returns the parts of all ranks (for example
        with `torch.distributed.all_gather_object`). It is called the same number of times on each rank.
        """
        with torch.no_grad():
            active_batches = [ActiveTokens(batch, self.composition) for batch in batches]
            return compute_totals(self.composition, active_batches, gather)

    def __call__(self, batch: TokenBatch, totals: StepTotals | StepCounts | None = None) -> "ObjectiveResult":
        """Compute the loss of a batch. With `totals`, the batch is one micro-batch of the step with these totals.

        Raises `BatchError` if the loss is not finite. `StepCounts` are sufficient for complete sequences if
        `composition.step_logprob_parts()` is empty.
        """
        result = self.evaluate(batch, totals)
        if not bool(result.loss.detach().isfinite()):
            raise _overflow_error(result._active)
        return result

    def evaluate(self, batch: TokenBatch, totals: StepTotals | StepCounts | None = None) -> "ObjectiveResult":
        """Compute the loss like a call, also if it is not finite.

        For a trainer that finds the samples without a finite gradient, and trains the others.
        """
        with torch.no_grad():
            active = ActiveTokens(batch, self.composition)
            if totals is None:
                totals = compute_totals(self.composition, [active])
            elif isinstance(totals, StepCounts):
                totals = totals_from_counts(self.composition, active, totals)
            elif totals.composition != self.composition:
                raise BatchError(
                    f"the totals were computed by another objective than {self!r}: compute them with its totals()"
                )
            elif self.composition.proximal == "interpolated":
                active.interpolate_proximal(totals.trainer_version)
            evaluated = _evaluate(active, totals)
        loss = attach_gradient(batch.logprobs, evaluated, active.index)
        return ObjectiveResult(loss, self, active, totals, evaluated)


def attach_gradient(logprobs: Tensor, evaluated: Evaluated, index: Tensor | None) -> Tensor:
    """Return the loss with its precomputed gradient as the gradient with respect to the batch's log-probs."""
    loss: Tensor = _PrecomputedGradientLoss.apply(  # type: ignore[no-untyped-call]
        logprobs, evaluated.loss, evaluated.gradient, index
    )
    return loss


class _PrecomputedGradientLoss(torch.autograd.Function):
    """A loss whose gradient with respect to the log-probs is already computed."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, gradient: Tensor, index: Tensor | None) -> Tensor:
        ctx.save_for_backward(gradient, index)
        ctx.size, ctx.dtype = len(logprobs), logprobs.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradient, index = ctx.saved_tensors
        return _scatter_to_batch((gradient * grad_output).to(ctx.dtype), index, ctx.size), None, None, None


def _overflow_error(active: ActiveTokens) -> BatchError:
    """Return the error for a loss that is not finite although all its inputs are."""
    first = int(active.advantages.abs().argmax()) if len(active) else 0
    position = first if active.index is None else int(active.index[first])
    return BatchError(
        f"the loss overflows {str(active.dtype).removeprefix('torch.')}: batch.advantages[{position}] ="
        f" {active.batch.advantages[position].item():g} is the largest advantage; scale or clip the rewards"
    )


def _scatter_to_batch(values: Tensor, index: Tensor | None, size: int, fill_value: int = 0) -> Tensor:
    """Return a tensor with the values at their positions in the batch, and `fill_value` elsewhere."""
    if index is None:
        return values
    return torch.full((size,), fill_value, dtype=values.dtype, device=values.device).index_copy_(0, index, values)


@dataclass(frozen=True, eq=False)
class ObjectiveResult:
    """The loss of a batch, and what happened to each of its tokens."""

    loss: Float[Tensor, ""]
    """This batch's part of the step's loss, differentiable with respect to `batch.logprobs`."""
    objective: Objective
    _active: ActiveTokens
    totals: StepTotals
    _evaluated: Evaluated

    @cached_property
    def reasons(self) -> UInt8[Tensor, "T"]:
        """Why each token is trained or not, as codes whose names are in `objective.reasons`."""
        active, size = self._active, len(self._active.batch)
        reasons = _scatter_to_batch(self._evaluated.decision.reasons, active.index, size, INVALID_LOGPROB)
        if active.index is not None:
            if active.trainable_index is None:
                return reasons
            other_role = torch.ones(size, dtype=torch.bool, device=reasons.device)
            other_role[active.trainable_index] = False
            reasons.masked_fill_(other_role, OTHER_ROLE)
            reasons.masked_fill_(~active.batch.trainable, NOT_TRAINABLE)
        return reasons

    @cached_property
    def keep(self) -> Bool[Tensor, "T"]:
        """Whether each token is trained."""
        return self.reasons == 0

    @cached_property
    def gradient(self) -> Float[Tensor, "T"]:
        """d loss / d logprobs, without a backward pass."""
        return _scatter_to_batch(self._evaluated.gradient, self._active.index, len(self._active.batch))

    @property
    def terms(self) -> dict[str, Tensor]:
        """The loss by term, without gradient: "policy", and each penalty under its estimator and policies."""
        return dict(self._evaluated.term_losses)

    @property
    def kept_tokens(self) -> int:
        """The number of trained tokens in this batch. If it is 0 over a step, the optimizer must not step."""
        return len(self._active) - self._evaluated.decision.num_dropped

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of this batch, computed on first access."""
        with torch.no_grad():
            return compute_metrics(self._active, self.totals, self._evaluated)


def _evaluate(active: ActiveTokens, totals: StepTotals) -> Evaluated:
    """Evaluate one batch of a step: advantage, gates, policy term, penalties and reduction."""
    composition = totals.composition
    if active.cached_decision is None:
        advantage = totals.advantage(active)
        active.cached_decision = advantage, totals.apply_gates(active, advantage)
    advantage, decision = active.cached_decision
    rows = totals.rows_for(active)
    scale = _token_scale(totals, rows, active.dtype)
    by_sequence = composition.policy.level == "sequence"
    if by_sequence:
        term, loss = _sequence_policy_term(active, totals, advantage, decision, rows, scale)
    if isinstance(scale, Tensor) and (composition.penalties or not by_sequence):
        scale = active.segments.expand(scale)
    if not by_sequence:
        term, loss = _token_policy_term(active, totals, advantage, decision, rows, scale)
    gradient, term_losses = term.grad, {"policy": loss}
    for penalty in composition.penalties:
        penalties = penalty_term(penalty, active)
        if penalty.scope == "kept":
            penalties = LossTerm(decision.zero_dropped_(penalties.value), decision.zero_dropped_(penalties.grad))
        penalty_loss, name = _scaled_sum(penalties.value, scale), f"{penalty.estimator} {penalty.between}"
        term_losses[name] = term_losses[name] + penalty_loss if name in term_losses else penalty_loss
        loss = loss + penalty_loss
        gradient.add_(penalties.grad.mul_(scale))
    clipped_sequences = by_sequence and composition.policy.token_clip is None
    return Evaluated(loss, gradient, decision, advantage, term.clipped, clipped_sequences, term_losses)


def _token_scale(totals: StepTotals, rows: SequenceTable | None, dtype: torch.dtype) -> Tensor | float:
    """Return the factor on each token's terms: one number, or one per sequence with reduction over sequences.

    It is 0 where the divisor is 0. With denominator "kept" that is a step, or a sequence of the reduction over
    sequences, of which no token is kept: a penalty on its dropped tokens has no count to be divided by.
    """
    reduction = totals.composition.reduction
    denominator = totals.denominator()
    scale = 1.0 / denominator if denominator else 0.0
    if reduction.over != "sequences":
        return scale
    assert rows is not None
    lengths = rows["trainable" if reduction.denominator == "trainable" else "kept"]
    return (scale / lengths.clamp(min=1).to(dtype)) * (lengths > 0)


def _scaled_sum(values: Tensor, scale: Tensor | float) -> Tensor:
    return torch.dot(values, scale) if isinstance(scale, Tensor) else values.sum() * scale


def _token_policy_term(
    active: ActiveTokens,
    totals: StepTotals,
    advantage: Tensor,
    decision: GateResult,
    rows: SequenceTable | None,
    scale: Tensor | float,
) -> tuple[LossTerm, Tensor]:
    """Compute the policy term of each token, with a scaled gradient, and its part of the loss."""
    policy = totals.composition.policy
    log_ratio = None
    if policy.anchor != "none":
        log_ratio = active.log_ratio(f"policy/{policy.anchor}")
    term = policy_term(policy, log_ratio, active.logprob("policy"), advantage)
    for weight in totals.composition.weights:
        term = term.scaled(_token_weight(weight, active, advantage, rows))
    decision.zero_dropped_(term.grad)
    if term.value is not term.grad:
        decision.zero_dropped_(term.value)
    loss = _scaled_sum(term.value, scale) * term.sign
    term.grad.mul_(scale if term.sign == 1 else scale * term.sign)
    return term, loss


def _sequence_policy_term(
    active: ActiveTokens,
    totals: StepTotals,
    advantage: Tensor,
    decision: GateResult,
    rows: SequenceTable | None,
    scale: Tensor | float,
) -> tuple[LossTerm, Tensor]:
    """Compute the policy term of each sequence. Its kept tokens share it, so only the gradient is expanded to
    tokens."""
    assert rows is not None
    policy = totals.composition.policy
    kept = rows["kept"].clamp(min=1)
    log_ratio = rows["kept log-ratio"] / kept
    term = policy_term(policy, log_ratio, active.logprob("policy"), rows["kept advantage"] / kept)
    for weight in totals.composition.weights:
        term = term.scaled(_sequence_weight(weight, rows))
    scale = scale * term.sign
    loss = (term.value * scale * kept_tokens_by_sequence(active, decision)).sum()
    grad = decision.zero_dropped_(active.segments.expand(term.grad * scale))
    clipped = term.clipped
    if policy.token_clip is not None:
        signed = where_positive(advantage, 1.0, -1.0).mul_(active.log_ratio(f"policy/{policy.anchor}"))
        clipped_tokens = greater_than(signed, policy.token_clip)
        apply_bitmask_(grad, keep_bitmask(clipped_tokens, grad.dtype))
        clipped = clipped_tokens if clipped is None else clipped_tokens | active.segments.expand(clipped)
    return LossTerm(term.value, grad, clipped), loss


def _token_weight(
    weight: ImportanceWeight, active: ActiveTokens, advantage: Tensor, rows: SequenceTable | None
) -> Tensor:
    """Return the importance weight of each token, without gradient."""
    if weight.level == "token":
        return _weight_from_log_ratio(weight, active.log_ratio(weight.between), advantage)
    assert rows is not None
    return active.segments.expand(_sequence_weight(weight, rows))


def _sequence_weight(weight: ImportanceWeight, rows: SequenceTable) -> Tensor:
    """Return the importance weight of each sequence."""
    log_ratio = rows[f"sum {weight.between}"]
    if weight.level == "geometric":
        log_ratio = log_ratio / rows["valid"].clamp(min=1)
    return _weight_from_log_ratio(weight, log_ratio, rows["sum advantage"])


def _weight_from_log_ratio(weight: ImportanceWeight, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Compute importance weights from log-ratios: exp, then the kernel, then the clamp."""
    factor = ratio(log_ratio)
    if weight.kernel == "gamma":
        assert weight.k_positive and weight.k_negative
        assert weight.rate_positive is not None and weight.rate_negative is not None
        power = where_positive(advantage, weight.k_positive, weight.k_negative)
        decay = where_positive(advantage, weight.rate_positive, weight.rate_negative)
        factor = ratio(power * log_ratio + decay * (1 - factor))
    if weight.low is not None or weight.high is not None:
        factor = factor.clamp(weight.low, weight.high)
    return factor
