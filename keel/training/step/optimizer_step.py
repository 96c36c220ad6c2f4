"""One optimizer step: log-probs, the objective's gradient by each of them, backward, checks, AdamW.

Where the objective is token-local, each micro-batch is computed once and its gradient formed in the same pass.
Elsewhere the objective needs the log-probs of the whole step first: one micro-batch keeps its graph and forms the
logits of kept tokens again; several are computed without a graph, and then again, without the samples that nothing is
learned from.

On several ranks each computes its share of the micro-batches; log-probs are then known to all, and every rank evaluates
the objective on the whole step, refuses the same samples and takes the same step on its shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keel.config import TrainerSettings
from keel.errors import StepRefused
from keel.signal import Metrics, Objective, ObjectiveResult, TokenBatch
from keel.training.distributed import fsdp
from keel.training.step import optimizer as adamw
from keel.training.step.forward import Forward, MicroBatch, merge_scores_across_ranks
from keel.training.step.lm_head import Scores, backward_into
from keel.training.step.step_report import StepColumns


@dataclass(frozen=True, eq=False)
class OptimizerStepResult:
    """What one optimizer step was."""

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
    """One optimizer step over some of a step's samples."""

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
        places = [np.arange(tokens.slice_of(number).start, tokens.slice_of(number).stop) for number in self.samples]
        self.token_index = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *places])).to(
            columns.logprobs.device
        )
        """Which of the step's tokens belong to this update."""
        zeros = torch.zeros_like(columns.logprobs)
        proximal = columns.proximal_logprobs
        known = {
            "reference_logprobs": columns.reference_logprobs,
            "proximal_logprobs": proximal,
            "teacher_logprobs": columns.teacher_logprobs,
        }
        self.template_batch = tokens.to_batch(
            zeros, version, **{name: value for name, value in known.items() if value is not None}
        )
        self.policy_is_proximal = proximal is None and objective.composition.reads("proximal")

    def run(self, steps_taken: int) -> OptimizerStepResult:
        """The whole of it. `steps` is how many optimizer steps were taken before."""
        self.optimizer.zero_grad(set_to_none=True)
        plan = self.forward.plan(self.columns.tokens, self.samples)
        with self.forward.tree_attention_enabled():
            result = self.backward(plan)
            norm = self._finite_grad_norm()
        lr = adamw.learning_rate(self.settings.optimizer, steps_taken)
        why_not = self._skip_reason(result)
        if not why_not:
            self._apply(norm, lr)
        self.optimizer.zero_grad(set_to_none=True)
        return OptimizerStepResult(
            stepped=not why_not,
            skip_reason=why_not,
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
        """Forward and backward of the whole plan: gradients in the parameters, accounts in the ledger."""
        return self._single_pass(plan) if self.objective.token_local else self._two_pass(plan)

    def _single_pass(self, plan: Sequence[MicroBatch]) -> ObjectiveResult:
        """Every micro-batch once: log-probs, their worth and the gradients in one pass over the logits."""
        # counts and centres do not depend on the policy's log-probs here; only a count of kept tokens does, and that
        # is one factor for the whole step, put right at the end
        totals = self.objective.totals([self.template_batch.take(self.token_index)])
        for batch in plan:
            hidden = self.forward.hidden(batch)

            def worth(logprobs: Tensor, rows: slice, tokens: Tensor = batch.token_index) -> Tensor:
                if not len(logprobs):
                    return logprobs
                if self.world is None:
                    self._check_finite(logprobs, tokens[rows])
                    return self.objective(self._make_batch(tokens[rows], logprobs), totals).gradient
                # other ranks are in the same pass: what is not finite is left out here, and refused by all after it
                finite = logprobs.isfinite()
                known = torch.where(finite, logprobs, 0)
                return self.objective(self._make_batch(tokens[rows], known), totals).gradient * finite

            scores, gradients = self.forward.head.score_and_grad(
                hidden.detach(), batch.targets, batch.temperature, worth, entropy=self.settings.compute_entropy
            )
            self._store_scores(batch, scores.logprobs, scores.entropy)
            if self.world is not None or gradients.hidden.any():
                backward_into(self.forward.head, hidden, gradients)
        self._merge_ranks(plan)
        result = self._evaluate_objective()
        self.forward.reduce_head_gradient()
        factor = totals.denominator() / result.totals.denominator()
        if factor != 1:
            for gradient in self._gradients():
                gradient.mul_(factor)
        return result

    def _two_pass(self, plan: Sequence[MicroBatch]) -> ObjectiveResult:
        """Log-probs of all first; then the gradient, whose value by each log-prob is known."""
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
        """Backward of micro-batches whose gradient by each log-prob is known; `hidden`: of the only one."""
        head = self.forward.head
        for batch in plan:
            gradient = self.columns.dloss_dlogprob[batch.token_index]
            states = self.forward.hidden(batch) if hidden is None else hidden
            if self.world is not None or gradient.any():
                backward_into(head, states, head.backward(states.detach(), batch.targets, batch.temperature, gradient))
        self.forward.reduce_head_gradient()

    def _make_batch(self, tokens: Tensor, logprobs: Tensor) -> TokenBatch:
        batch = self.template_batch.take(tokens)
        # with one update the policy at its start is the policy itself
        proximal = {"proximal_logprobs": logprobs} if self.policy_is_proximal else {}
        return batch.replace(logprobs=logprobs, **proximal)

    def _evaluate_objective(self) -> ObjectiveResult:
        """The objective on all tokens of the update: their reasons, their gradient, the loss, the metrics."""
        ledger = self.columns
        self._check_finite(ledger.logprobs[self.token_index], self.token_index)
        batch = self._make_batch(self.token_index, ledger.logprobs[self.token_index])
        if ledger.entropy is not None:
            batch = batch.replace(entropy=ledger.entropy[self.token_index])
        result = self.objective(batch)
        ledger.reasons[self.token_index] = result.reasons
        ledger.dloss_dlogprob[self.token_index] = result.gradient
        return result

    def _store_scores(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> None:
        self.columns.logprobs[batch.token_index] = logprobs
        if self.columns.entropy is not None and entropy is not None:
            self.columns.entropy[batch.token_index] = entropy

    def _merge_ranks(self, plan: Sequence[MicroBatch]) -> None:
        """On several ranks: what each has found out about its tokens, to all."""
        if self.world is None:
            return
        ledger = self.columns
        own = torch.cat([batch.token_index for batch in plan]) if plan else self.token_index[:0]
        entropy = None if ledger.entropy is None else ledger.entropy[own]
        found = merge_scores_across_ranks(Scores(ledger.logprobs[own], entropy), own, len(ledger.tokens), self.world)
        ledger.logprobs[self.token_index] = found.logprobs[self.token_index]
        if ledger.entropy is not None and found.entropy is not None:
            ledger.entropy[self.token_index] = found.entropy[self.token_index]

    def _sum_over_ranks(self, count: int) -> int:
        return count if self.world is None else int(self.world.all_reduce_sum(torch.tensor(count)))

    def _samples_with_gradient(self) -> list[int]:
        """The samples with any token that has a gradient."""
        tokens, worth = self.columns.tokens, self.columns.dloss_dlogprob.cpu()
        return [number for number in self.samples if worth[tokens.slice_of(number)].any()]

    # checks and the step itself

    def _check_finite(self, logprobs: Tensor, tokens: Tensor) -> None:
        bad = tokens[~logprobs.isfinite()].cpu().numpy()
        if not len(bad):
            return
        self.optimizer.zero_grad(set_to_none=True)
        found = self.columns.tokens
        suspects = sorted(set(found.sample[bad].tolist()))
        # a NaN spreads to all that is computed in one row with it, so each suspect is asked alone
        numbers = [number for number in suspects if not self._score_alone(number).isfinite().all()] or suspects
        raise StepRefused(
            f"the policy's log-probs are not finite for {self._describe_samples(numbers)}; this update was not taken",
            numbers,
        )

    def _score_alone(self, sample_index: int) -> Tensor:
        """The log-probs of one sample, computed with no other."""
        tokens = self.columns.tokens
        return self.forward.score(tokens, plan=self.forward.plan(tokens, [sample_index])).logprobs[
            tokens.slice_of(sample_index)
        ]

    def _finite_grad_norm(self) -> float:
        norm = self._grad_norm()
        if math.isfinite(norm):
            return norm
        offenders = self._non_finite_samples()
        self.optimizer.zero_grad(set_to_none=True)
        whose = self._describe_samples(offenders) if offenders else "no sample alone, but all of them together"
        raise StepRefused(f"the gradient is not finite, from {whose}; this update was not taken", offenders)

    def _non_finite_samples(self) -> list[int]:
        """The samples whose gradient alone is not finite."""
        offenders = []
        for number in self._samples_with_gradient():
            self.optimizer.zero_grad(set_to_none=True)
            self._backward_known_gradient(self.forward.plan(self.columns.tokens, [number]))
            if not math.isfinite(self._grad_norm()):
                offenders.append(number)
        return offenders

    def _describe_samples(self, sample_indices: Sequence[int]) -> str:
        samples = self.columns.tokens.samples
        names = [samples[number].name or f"number {number}" for number in sample_indices]
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
            return "every token was refused by the objective"
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
