"""Take one optimizer step: log-probs, the objective's gradient with respect to them, backward, checks, AdamW.

If the objective is token-local, each micro-batch is computed once and its gradient formed in the same pass. Otherwise
the objective needs the log-probs of the full step first: a single micro-batch keeps its graph and recomputes the logits
of kept tokens; several micro-batches are computed without a graph, and then again with one, without the samples that
have no gradient.

On several ranks each rank computes its share of the micro-batches. Log-probs are then exchanged, and every rank
evaluates the objective on the full step, raises the same errors and takes the same step on its shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keel.config import TrainerSettings
from keel.errors import StepSkippedError
from keel.signal import Metrics, Objective, ObjectiveResult, TokenBatch
from keel.training.distributed import fsdp
from keel.training.step import optimizer as adamw
from keel.training.step.forward import Forward, MicroBatch, merge_scores_across_ranks
from keel.training.step.lm_head import Scores, backward_into
from keel.training.step.step_report import StepColumns


@dataclass(frozen=True, eq=False)
class OptimizerStepResult:
    """The result of one optimizer step."""

    stepped: bool
    skip_reason: str
    loss: float
    terms: dict[str, float]
    grad_norm: float
    lr: float
    metrics: Metrics
    computed_tokens: int
    micro_batches: int


class OptimizerStep:
    """One optimizer step over some of a training step's samples."""

    def __init__(
        self,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        settings: TrainerSettings,
        objective: Objective,
        columns: StepColumns,
        samples: Sequence[int],
        version: int | None,
    ) -> None:
        self.forward, self.optimizer, self.settings, self.objective = forward, optimizer, settings, objective
        self.world = forward.world
        self.columns, self.samples = columns, list(samples)
        tokens = columns.tokens
        slices = [tokens.slice_of(index) for index in self.samples]
        ranges = [np.arange(part.start, part.stop) for part in slices]
        token_index = np.concatenate([np.zeros(0, np.int64), *ranges])
        self.token_index = torch.from_numpy(token_index).to(columns.logprobs.device)
        """Indices of this optimizer step's tokens among the training step's."""
        zeros = torch.zeros_like(columns.logprobs)
        proximal = columns.proximal_logprobs
        optional = {
            "reference_logprobs": columns.reference_logprobs,
            "proximal_logprobs": proximal,
            "teacher_logprobs": columns.teacher_logprobs,
        }
        self.template_batch = tokens.to_batch(
            zeros, version, **{name: value for name, value in optional.items() if value is not None}
        )
        self.policy_is_proximal = proximal is None and objective.composition.reads("proximal")

    def run(self, steps_taken: int) -> OptimizerStepResult:
        """Compute gradients and step the optimizer. `steps_taken` is the number of optimizer steps before this one."""
        self.optimizer.zero_grad(set_to_none=True)
        plan = self.forward.plan(self.columns.tokens, self.samples)
        with self.forward.tree_attention_enabled():
            result = self.backward(plan)
            norm = self._finite_grad_norm()
        lr = adamw.learning_rate(self.settings.optimizer, steps_taken)
        skip_reason = self._skip_reason(result)
        if not skip_reason:
            self._apply(norm, lr)
        self.optimizer.zero_grad(set_to_none=True)
        return OptimizerStepResult(
            stepped=not skip_reason,
            skip_reason=skip_reason,
            loss=float(result.loss),
            terms={name: float(value) for name, value in result.terms.items()},
            grad_norm=norm,
            lr=lr,
            metrics=result.metrics,
            computed_tokens=self._sum_over_ranks(sum(len(batch) for batch in plan if len(batch.token_index))),
            micro_batches=self._sum_over_ranks(sum(len(batch.token_index) > 0 for batch in plan)),
        )

    # gradients

    def backward(self, plan: Sequence[MicroBatch]) -> ObjectiveResult:
        """Run forward and backward of all micro-batches, filling parameter gradients and the step's columns."""
        return self._single_pass(plan) if self.objective.token_local else self._two_pass(plan)

    def _single_pass(self, plan: Sequence[MicroBatch]) -> ObjectiveResult:
        """Compute every micro-batch once: log-probs, dloss/dlogprob and gradients in one pass over the logits."""
        # totals do not depend on the policy's log-probs here, except a denominator that counts kept tokens; the pass
        # divides by the trainable tokens instead, which is one factor for the full step, corrected at the end
        provisional = _with_trainable_denominator(self.objective)
        totals = provisional.totals([self.template_batch.take(self.token_index)])
        for batch in plan:
            hidden = self.forward.hidden(batch)

            def logprob_grad(logprobs: Tensor, rows: slice, tokens: Tensor = batch.token_index) -> Tensor:
                if not len(logprobs):
                    return logprobs
                if self.world is None:
                    self._check_finite(logprobs, tokens[rows])
                    return provisional.evaluate(self._make_batch(tokens[rows], logprobs), totals).gradient
                # other ranks are in the same pass, so non-finite log-probs are masked here; all ranks raise after it
                finite = logprobs.isfinite()
                masked = torch.where(finite, logprobs, 0)
                return provisional.evaluate(self._make_batch(tokens[rows], masked), totals).gradient * finite

            scores, gradients = self.forward.head.score_and_grad(
                hidden.detach(), batch.targets, batch.temperature, logprob_grad, entropy=self.settings.compute_entropy
            )
            self._store_scores(batch, scores.logprobs, scores.entropy)
            if self.world is not None or gradients.hidden.any():
                backward_into(self.forward.head, hidden, gradients)
        self._merge_ranks(plan)
        result = self._evaluate_objective()
        self.forward.reduce_head_gradient()
        denominator = result.totals.denominator()
        factor = totals.denominator() / denominator if denominator else 0.0
        if factor != 1:
            for gradient in self._gradients():
                gradient.mul_(factor)
        return result

    def _two_pass(self, plan: Sequence[MicroBatch]) -> ObjectiveResult:
        """Compute the log-probs of all micro-batches first, then gradients from the known dloss/dlogprob."""
        if len(plan) == 1:
            (batch,) = plan
            hidden = self.forward.hidden(batch)
            scores = self.forward.head.score(
                hidden.detach(), batch.targets, batch.temperature, entropy=self.settings.compute_entropy
            )
            self._store_scores(batch, scores.logprobs, scores.entropy)
            self._merge_ranks(plan)
            result = self._evaluate_objective()
            self._backward_known_gradient([batch], hidden)
            return result
        for batch in plan:
            with torch.no_grad():
                hidden = self.forward.hidden(batch)
            scores = self.forward.head.score(
                hidden, batch.targets, batch.temperature, entropy=self.settings.compute_entropy
            )
            self._store_scores(batch, scores.logprobs, scores.entropy)
        self._merge_ranks(plan)
        result = self._evaluate_objective()
        self._backward_known_gradient(self.forward.plan(self.columns.tokens, self._samples_with_gradient()))
        return result

    def _backward_known_gradient(self, plan: Sequence[MicroBatch], hidden: Tensor | None = None) -> None:
        """Run the backward of micro-batches with known dloss/dlogprob; `hidden` is that of a single micro-batch."""
        head = self.forward.head
        for batch in plan:
            gradient = self.columns.dloss_dlogprob[batch.token_index]
            states = self.forward.hidden(batch) if hidden is None else hidden
            if self.world is not None or gradient.any():
                backward_into(head, states, head.backward(states.detach(), batch.targets, batch.temperature, gradient))
        self.forward.reduce_head_gradient()

    def _make_batch(self, tokens: Tensor, logprobs: Tensor) -> TokenBatch:
        batch = self.template_batch.take(tokens)
        # with a single optimizer step the proximal policy is the policy itself
        proximal = {"proximal_logprobs": logprobs} if self.policy_is_proximal else {}
        return batch.replace(logprobs=logprobs, **proximal)

    def _evaluate_objective(self) -> ObjectiveResult:
        """Evaluate the objective on all tokens of this optimizer step and store their reasons and gradients."""
        columns = self.columns
        self._check_finite(columns.logprobs[self.token_index], self.token_index)
        batch = self._make_batch(self.token_index, columns.logprobs[self.token_index])
        if columns.entropy is not None:
            batch = batch.replace(entropy=columns.entropy[self.token_index])
        result = self.objective.evaluate(batch)
        columns.reasons[self.token_index] = result.reasons
        columns.dloss_dlogprob[self.token_index] = result.gradient
        return result

    def _store_scores(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> None:
        self.columns.logprobs[batch.token_index] = logprobs
        if self.columns.entropy is not None and entropy is not None:
            self.columns.entropy[batch.token_index] = entropy

    def _merge_ranks(self, plan: Sequence[MicroBatch]) -> None:
        """Exchange the scores of each rank's tokens between all ranks; a no-op on one rank."""
        if self.world is None:
            return
        columns = self.columns
        own = torch.cat([batch.token_index for batch in plan]) if plan else self.token_index[:0]
        entropy = None if columns.entropy is None else columns.entropy[own]
        own_scores = Scores(columns.logprobs[own], entropy)
        scores = merge_scores_across_ranks(own_scores, own, len(columns.tokens), self.world)
        columns.logprobs[self.token_index] = scores.logprobs[self.token_index]
        if columns.entropy is not None and scores.entropy is not None:
            columns.entropy[self.token_index] = scores.entropy[self.token_index]

    def _sum_over_ranks(self, count: int) -> int:
        return count if self.world is None else int(self.world.all_reduce_sum(torch.tensor(count)))

    def _samples_with_gradient(self) -> list[int]:
        """Return the samples with at least one token that has a gradient."""
        tokens, gradient = self.columns.tokens, self.columns.dloss_dlogprob.cpu()
        return [index for index in self.samples if gradient[tokens.slice_of(index)].any()]

    # checks and the optimizer step

    def _check_finite(self, logprobs: Tensor, tokens: Tensor) -> None:
        non_finite = tokens[~logprobs.isfinite()].cpu().numpy()
        if not len(non_finite):
            return
        self.optimizer.zero_grad(set_to_none=True)
        suspects = sorted(set(self.columns.tokens.sample[non_finite].tolist()))
        # NaN spreads to everything computed in the same row, so each suspect is computed separately
        offenders = [index for index in suspects if not self._score_separately(index).isfinite().all()] or suspects
        raise StepSkippedError(
            f"the policy's log-probs are not finite for {self._describe_samples(offenders)};"
            " this optimizer step was not taken",
            offenders,
        )

    def _score_separately(self, sample_index: int) -> Tensor:
        """Return the log-probs of one sample, computed without the others."""
        tokens = self.columns.tokens
        scores = self.forward.score(tokens, plan=self.forward.plan(tokens, [sample_index]))
        return scores.logprobs[tokens.slice_of(sample_index)]

    def _finite_grad_norm(self) -> float:
        norm = self._grad_norm()
        if math.isfinite(norm):
            return norm
        offenders = self._non_finite_samples()
        self.optimizer.zero_grad(set_to_none=True)
        origin = self._describe_samples(offenders) if offenders else "all samples together, but no single one"
        raise StepSkippedError(
            f"the gradient is not finite, from {origin}; this optimizer step was not taken", offenders
        )

    def _non_finite_samples(self) -> list[int]:
        """Return the samples whose own gradient is not finite."""
        offenders = []
        for index in self._samples_with_gradient():
            self.optimizer.zero_grad(set_to_none=True)
            self._backward_known_gradient(self.forward.plan(self.columns.tokens, [index]))
            if not math.isfinite(self._grad_norm()):
                offenders.append(index)
        return offenders

    def _describe_samples(self, sample_indices: Sequence[int]) -> str:
        samples = self.columns.tokens.samples
        names = [samples[index].name or f"number {index}" for index in sample_indices]
        rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"sample{'s' if len(names) > 1 else ''} {', '.join(names[:8])}{rest}"

    def _gradients(self) -> list[Tensor]:
        weights = self.forward.model.parameters().values()
        return [weight.grad for weight in weights if weight.grad is not None]

    def _grad_norm(self) -> float:
        wide = torch.promote_types(self.forward.model.dtype, torch.float32)
        return fsdp.grad_norm(self._gradients(), wide, self.world)

    def _skip_reason(self, result: ObjectiveResult) -> str:
        if not len(self.token_index):
            return "no sample has a trainable token"
        if not result.kept_tokens:
            return "every token was dropped by the objective"
        if not self.columns.dloss_dlogprob[self.token_index].any():
            return "no token has a gradient"
        return ""

    def _apply(self, norm: float, lr: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in self._gradients():
                gradient.mul_(limit / norm)
        adamw.set_learning_rate(self.optimizer, lr)
        self.optimizer.step()


def _with_trainable_denominator(objective: Objective) -> Objective:
    """Return the objective with all trainable tokens in its divisor."""
    reduction = objective.composition.reduction
    if reduction.denominator == "trainable":
        return objective
    reduction = reduction.model_copy(update={"denominator": "trainable"})
    return Objective(objective.composition.model_copy(update={"reduction": reduction}))
