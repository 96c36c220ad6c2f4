"""A training signal: from the tokens of a step to a loss whose every kept and dropped token is known.

An objective is a composition and nothing else; it holds no state between calls. The gradient with respect to the
policy's log-probs is formed in closed form in the forward pass, so one call costs a few passes over the tokens.
It does not compute log-probs, take optimizer steps or know what a file is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.errors import BatchError
from keel.objectives import Composition, ImportanceWeight, ObjectiveSettings, resolve_objective
from keel.signal.active_tokens import ActiveTokens, apply_bitmask_, keep_bitmask, ratio
from keel.signal.cpu_ops import greater_than
from keel.signal.gates import INVALID_LOGPROB, NOT_TRAINABLE, OTHER_ROLE, GateResult, reason_names
from keel.signal.loss_terms import LossTerm, penalty_term, policy_term, where_positive
from keel.signal.metrics import Metrics
from keel.signal.segments import SequenceTable
from keel.signal.step_metrics import Evaluated, compute_metrics
from keel.signal.step_totals import Gather, StepTotals, compute_totals, kept_tokens_by_sequence
from keel.signal.token_batch import TokenBatch


def objective(name: str | Composition | ObjectiveSettings | Mapping[str, Any], /, **parameters: Any) -> "Objective":
    """An objective from a recipe's name and parameters, or from a composition.

    `objective("icepop", ratio_high=8.0)` or `objective({"gates": [{"statistic": "ratio", "low": 0.2}]})`. Beside its
    parameters a recipe takes `gates`, `weights` and `penalties`, which are added to its own.
    """
    if isinstance(name, str):
        _, values, composition = resolve_objective({"name": name, **parameters})
        return Objective(composition, name=name, parameters=values)
    if parameters:
        raise TypeError(f"parameters ({', '.join(parameters)}) go with a recipe's name; a composition already has them")
    if isinstance(name, Composition):
        return Objective(name)
    recipe, values, composition = resolve_objective(name.table if isinstance(name, ObjectiveSettings) else name)
    return Objective(composition, name=recipe, parameters=values)


class Objective:
    """A composition that can be called on batches."""

    def __init__(
        self, composition: Composition, *, name: str | None = None, parameters: Mapping[str, Any] | None = None
    ) -> None:
        self.composition = composition
        self.name = name
        self.parameters = dict(parameters or {})
        self.reasons = reason_names(composition.gates)
        """The meaning of each number in `Result.reasons`."""

    def __repr__(self) -> str:
        return f"Objective({self.name or self.composition!r})"

    @property
    def token_local(self) -> bool:
        """Whether each token's gradient, up to one step-wide factor, follows from that token alone."""
        return self.composition.token_local

    def totals(self, batches: Sequence[TokenBatch], gather: Gather | None = None) -> StepTotals:
        """The step-wide centre, thresholds and denominators of these micro-batches.

        On several ranks, `gather` takes this rank's part of a sum and returns the parts of all ranks (for example by
        `torch.distributed.all_gather_object`); it is called the same number of times on each.
        """
        with torch.no_grad():
            views = [ActiveTokens(batch, self.composition) for batch in batches]
            return compute_totals(self.composition, views, gather)

    def __call__(self, batch: TokenBatch, totals: StepTotals | None = None) -> "ObjectiveResult":
        """The loss of a batch: as a whole step, or as the part that it is of the step with these totals."""
        with torch.no_grad():
            view = ActiveTokens(batch, self.composition)
            if totals is None:
                totals = compute_totals(self.composition, [view])
            elif totals.composition != self.composition:
                raise BatchError(f"the totals are of another objective than {self!r}: make them with its own totals()")
            elif self.composition.proximal == "interpolated":
                view.interpolate_proximal(totals.trainer_version)
            outcome = _evaluate(view, totals)
        loss: Tensor = _PrecomputedGradientLoss.apply(batch.logprobs, outcome.loss, outcome.gradient, view.index)  # type: ignore[no-untyped-call]
        return ObjectiveResult(loss, self, view, totals, outcome)


class _PrecomputedGradientLoss(torch.autograd.Function):
    """A loss whose gradient with respect to the log-probs is already known."""

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


def _scatter_to_batch(values: Tensor, index: Tensor | None, size: int, fill_value: int = 0) -> Tensor:
    """Values of selected tokens back at their positions, and `rest` elsewhere."""
    if index is None:
        return values
    return torch.full((size,), fill_value, dtype=values.dtype, device=values.device).index_copy_(0, index, values)


@dataclass(frozen=True, eq=False)
class ObjectiveResult:
    """What an objective made of a batch."""

    loss: Float[Tensor, ""]
    """This batch's part of the step's loss; differentiable through `batch.logprobs`."""
    objective: Objective
    _view: ActiveTokens
    totals: StepTotals
    _evaluated: Evaluated

    @cached_property
    def reasons(self) -> UInt8[Tensor, "T"]:
        """Why each token trains or not; `objective.reasons` names the numbers."""
        view, size = self._view, len(self._view.batch)
        reasons = _scatter_to_batch(self._evaluated.decision.reasons, view.index, size, INVALID_LOGPROB)
        if view.index is not None:
            others = torch.ones(size, dtype=torch.bool, device=reasons.device)
            if view.trainable_index is None:
                return reasons
            others[view.trainable_index] = False
            reasons.masked_fill_(others, OTHER_ROLE)
            reasons.masked_fill_(~view.batch.trainable, NOT_TRAINABLE)
        return reasons

    @cached_property
    def keep(self) -> Bool[Tensor, "T"]:
        """Which tokens train."""
        return self.reasons == 0

    @cached_property
    def gradient(self) -> Float[Tensor, "T"]:
        """d loss / d logprobs, without a backward pass."""
        return _scatter_to_batch(self._evaluated.gradient, self._view.index, len(self._view.batch))

    @property
    def terms(self) -> dict[str, Tensor]:
        """The loss by term, without gradient: "policy", and each penalty by what it is on."""
        return dict(self._evaluated.term_losses)

    @property
    def kept_tokens(self) -> int:
        """How many tokens of this batch train. When it is 0 over a step, the optimizer must not step."""
        return len(self._view) - self._evaluated.decision.num_dropped

    @cached_property
    def metrics(self) -> Metrics:
        """The accounts of this batch, each a (sum, count) pair; computed when asked for."""
        with torch.no_grad():
            return compute_metrics(self._view, self.totals, self._evaluated)


def _evaluate(view: ActiveTokens, totals: StepTotals) -> Evaluated:
    """Advantage, gates, policy term, penalties, reduction: one batch of a step."""
    composition = totals.composition
    if view.cached_decision is None:
        advantage = totals.advantage(view)
        view.cached_decision = advantage, totals.apply_gates(view, advantage)
    advantage, decision = view.cached_decision
    rows = totals.rows_of_view(view)
    scale = _token_scale(totals, rows, view.dtype)
    by_sequence = composition.policy.level == "sequence"
    if by_sequence:
        term, loss = _sequence_policy_term(view, totals, advantage, decision, rows, scale)
    if isinstance(scale, Tensor) and (composition.penalties or not by_sequence):
        scale = view.segments.expand(scale)
    if not by_sequence:
        term, loss = _token_policy_term(view, totals, advantage, decision, rows, scale)
    gradient, sizes = term.grad, {"policy": loss}
    for penalty in composition.penalties:
        drift = penalty_term(penalty, view)
        if penalty.scope == "kept":
            drift = LossTerm(decision.zero_dropped_(drift.value), decision.zero_dropped_(drift.grad))
        size, name = _scaled_sum(drift.value, scale), f"{penalty.estimator} {penalty.between}"
        sizes[name] = sizes[name] + size if name in sizes else size
        loss = loss + size
        gradient.add_(drift.grad.mul_(scale))
    clipped_sequences = by_sequence and composition.policy.token_clip is None
    return Evaluated(loss, gradient, decision, advantage, term.clipped, clipped_sequences, sizes)


def _token_scale(totals: StepTotals, rows: SequenceTable | None, dtype: torch.dtype) -> Tensor | float:
    """What multiplies each token's terms: one number, or one per sequence when each divides by its own length."""
    reduction = totals.composition.reduction
    if reduction.over != "sequences":
        return 1.0 / totals.denominator()
    assert rows is not None
    lengths = rows["trainable" if reduction.denominator == "trainable" else "kept"].clamp(min=1)
    return (1.0 / totals.denominator()) / lengths.to(dtype)


def _scaled_sum(values: Tensor, scale: Tensor | float) -> Tensor:
    return torch.dot(values, scale) if isinstance(scale, Tensor) else values.sum() * scale


def _token_policy_term(
    view: ActiveTokens,
    totals: StepTotals,
    advantage: Tensor,
    decision: GateResult,
    rows: SequenceTable | None,
    scale: Tensor | float,
) -> tuple[LossTerm, Tensor]:
    """The policy term of each token, its slope scaled, and its part of the loss."""
    policy = totals.composition.policy
    log_ratio = None
    if policy.anchor != "none":
        log_ratio = view.log_ratio(f"policy/{policy.anchor}")
    term = policy_term(policy, log_ratio, view.logprob("policy"), advantage)
    for weight in totals.composition.weights:
        term = term.scaled(_token_weight(weight, view, advantage, rows))
    decision.zero_dropped_(term.grad)
    if term.value is not term.grad:
        decision.zero_dropped_(term.value)
    loss = _scaled_sum(term.value, scale) * term.sign
    term.grad.mul_(scale if term.sign == 1 else scale * term.sign)
    return term, loss


def _sequence_policy_term(
    view: ActiveTokens,
    totals: StepTotals,
    advantage: Tensor,
    decision: GateResult,
    rows: SequenceTable | None,
    scale: Tensor | float,
) -> tuple[LossTerm, Tensor]:
    """The policy term of each sequence: the same for all of its kept tokens, so only the slope is ever spread."""
    assert rows is not None
    policy = totals.composition.policy
    kept = rows["kept"].clamp(min=1)
    log_ratio = rows["kept log-ratio"] / kept
    term = policy_term(policy, log_ratio, view.logprob("policy"), rows["kept advantage"] / kept)
    for weight in totals.composition.weights:
        term = term.scaled(_sequence_weight(weight, rows))
    scale = scale * term.sign
    loss = (term.value * scale * kept_tokens_by_sequence(view, decision)).sum()
    slope = decision.zero_dropped_(view.segments.expand(term.grad * scale))
    clipped = term.clipped
    if policy.token_clip is not None:
        pushed = where_positive(advantage, 1.0, -1.0).mul_(view.log_ratio(f"policy/{policy.anchor}"))
        stopped = greater_than(pushed, policy.token_clip)
        apply_bitmask_(slope, keep_bitmask(stopped, slope.dtype))
        clipped = stopped if clipped is None else stopped | view.segments.expand(clipped)
    return LossTerm(term.value, slope, clipped), loss


def _token_weight(
    weight: ImportanceWeight, view: ActiveTokens, advantage: Tensor, rows: SequenceTable | None
) -> Tensor:
    """A weight for each token. It carries no gradient."""
    if weight.level == "token":
        return _weight_from_log_ratio(weight, view.log_ratio(weight.between), advantage)
    assert rows is not None
    return view.segments.expand(_sequence_weight(weight, rows))


def _sequence_weight(weight: ImportanceWeight, rows: SequenceTable) -> Tensor:
    """A weight for each sequence."""
    log_ratio = rows[f"sum {weight.between}"]
    if weight.level == "geometric":
        log_ratio = log_ratio / rows["valid"].clamp(min=1)
    return _weight_from_log_ratio(weight, log_ratio, rows["sum advantage"])


def _weight_from_log_ratio(weight: ImportanceWeight, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """From a log-ratio to the weight that it gives."""
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
