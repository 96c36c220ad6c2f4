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
from keel.signal import Metrics, Objective, Result, TokenBatch
from keel.training.distributed import fsdp
from keel.training.step import optimizer as adamw
from keel.training.step.forward import Forward, MicroBatch, exchange
from keel.training.step.lm_head import Scores, back_through
from keel.training.step.step_report import Ledger


@dataclass(frozen=True, eq=False)
class Updated:
    """What one optimizer step was."""

    stepped: bool
    why_not: str
    loss: float
    terms: dict[str, float]
    grad_norm: float
    lr: float
    metrics: Metrics
    computed_tokens: int
    micro_batches: int


class Update:
    """One optimizer step over some of a step's samples."""

    def __init__(
        self,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        settings: TrainerSettings,
        objective: Objective,
        ledger: Ledger,
        samples: Sequence[int],
        version: int | None,
    ) -> None:
        self.forward, self.optimizer, self.settings, self.objective = forward, optimizer, settings, objective
        self.world = forward.world
        self.ledger, self.samples = ledger, list(samples)
        tokens = ledger.tokens
        places = [np.arange(tokens.of(number).start, tokens.of(number).stop) for number in self.samples]
        self.index = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *places])).to(ledger.logprobs.device)
        """Which of the step's tokens belong to this update."""
        zeros = torch.zeros_like(ledger.logprobs)
        proximal = ledger.proximal_logprobs
        known = {
            "reference_logprobs": ledger.reference_logprobs,
            "proximal_logprobs": proximal,
            "teacher_logprobs": ledger.teacher_logprobs,
        }
        self.blank = tokens.batch(zeros, version, **{name: value for name, value in known.items() if value is not None})
        self.one_update = proximal is None and objective.composition.reads("proximal")

    def take(self, steps: int) -> Updated:
        """The whole of it. `steps` is how many optimizer steps were taken before."""
        self.optimizer.zero_grad(set_to_none=True)
        plan = self.forward.plan(self.ledger.tokens, self.samples)
        with self.forward.attending():
            result = self.backward(plan)
            norm = self._checked_norm()
        lr = adamw.rate(self.settings.optimizer, steps)
        why_not = self._why_not(result)
        if not why_not:
            self._step(norm, lr)
        self.optimizer.zero_grad(set_to_none=True)
        return Updated(
            stepped=not why_not,
            why_not=why_not,
            loss=float(result.loss),
            terms={name: float(value) for name, value in result.terms.items()},
            grad_norm=norm,
            lr=lr,
            metrics=result.metrics,
            computed_tokens=self._of_all(sum(len(batch) for batch in plan if len(batch.tokens))),
            micro_batches=self._of_all(sum(len(batch.tokens) > 0 for batch in plan)),
        )

    # gradients

    def backward(self, plan: Sequence[MicroBatch]) -> Result:
        """Forward and backward of the whole plan: gradients in the parameters, accounts in the ledger."""
        return self._local(plan) if self.objective.token_local else self._whole(plan)

    def _local(self, plan: Sequence[MicroBatch]) -> Result:
        """Every micro-batch once: log-probs, their worth and the gradients in one pass over the logits."""
        # counts and centres do not depend on the policy's log-probs here; only a count of kept tokens does, and that
        # is one factor for the whole step, put right at the end
        totals = self.objective.totals([self.blank.take(self.index)])
        for batch in plan:
            hidden = self.forward.hidden(batch)

            def worth(logprobs: Tensor, rows: slice, tokens: Tensor = batch.tokens) -> Tensor:
                if not len(logprobs):
                    return logprobs
                if self.world is None:
                    self._check_finite(logprobs, tokens[rows])
                    return self.objective(self._batch(tokens[rows], logprobs), totals).gradient
                # other ranks are in the same pass: what is not finite is left out here, and refused by all after it
                finite = logprobs.isfinite()
                known = torch.where(finite, logprobs, 0)
                return self.objective(self._batch(tokens[rows], known), totals).gradient * finite

            scores, gradients = self.forward.head.fused(
                hidden.detach(), batch.targets, batch.temperature, worth, entropy=self.settings.entropy
            )
            self._record(batch, scores.logprobs, scores.entropy)
            if self.world is not None or gradients.hidden.any():
                back_through(self.forward.head, hidden, gradients)
        self._exchange(plan)
        result = self._evaluate()
        self.forward.collect()
        factor = totals.denominator() / result.totals.denominator()
        if factor != 1:
            for gradient in self._gradients():
                gradient.mul_(factor)
        return result

    def _whole(self, plan: Sequence[MicroBatch]) -> Result:
        """Log-probs of all first; then the gradient, whose value by each log-prob is known."""
        if len(plan) == 1:
            (batch,) = plan
            hidden = self.forward.hidden(batch)
            scores = self.forward.head.score(
                hidden.detach(), batch.targets, batch.temperature, entropy=self.settings.entropy
            )
            self._record(batch, scores.logprobs, scores.entropy)
            self._exchange(plan)
            result = self._evaluate()
            self._backward([batch], hidden)
            return result
        for batch in plan:
            with torch.no_grad():
                hidden = self.forward.hidden(batch)
            scores = self.forward.head.score(hidden, batch.targets, batch.temperature, entropy=self.settings.entropy)
            self._record(batch, scores.logprobs, scores.entropy)
        self._exchange(plan)
        result = self._evaluate()
        self._backward(self.forward.plan(self.ledger.tokens, self._learning()))
        return result

    def _backward(self, plan: Sequence[MicroBatch], hidden: Tensor | None = None) -> None:
        """Backward of micro-batches whose gradient by each log-prob is known; `hidden`: of the only one."""
        head = self.forward.head
        for batch in plan:
            gradient = self.ledger.gradient[batch.tokens]
            states = self.forward.hidden(batch) if hidden is None else hidden
            if self.world is not None or gradient.any():
                back_through(head, states, head.backward(states.detach(), batch.targets, batch.temperature, gradient))
        self.forward.collect()

    def _batch(self, tokens: Tensor, logprobs: Tensor) -> TokenBatch:
        batch = self.blank.take(tokens)
        # with one update the policy at its start is the policy itself
        proximal = {"proximal_logprobs": logprobs} if self.one_update else {}
        return batch.replace(logprobs=logprobs, **proximal)

    def _evaluate(self) -> Result:
        """The objective on all tokens of the update: their reasons, their gradient, the loss, the metrics."""
        ledger = self.ledger
        self._check_finite(ledger.logprobs[self.index], self.index)
        batch = self._batch(self.index, ledger.logprobs[self.index])
        if ledger.entropy is not None:
            batch = batch.replace(entropy=ledger.entropy[self.index])
        result = self.objective(batch)
        ledger.reasons[self.index] = result.reasons
        ledger.gradient[self.index] = result.gradient
        return result

    def _record(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> None:
        self.ledger.logprobs[batch.tokens] = logprobs
        if self.ledger.entropy is not None and entropy is not None:
            self.ledger.entropy[batch.tokens] = entropy

    def _exchange(self, plan: Sequence[MicroBatch]) -> None:
        """On several ranks: what each has found out about its tokens, to all."""
        if self.world is None:
            return
        ledger = self.ledger
        own = torch.cat([batch.tokens for batch in plan]) if plan else self.index[:0]
        entropy = None if ledger.entropy is None else ledger.entropy[own]
        found = exchange(Scores(ledger.logprobs[own], entropy), own, len(ledger.tokens), self.world)
        ledger.logprobs[self.index] = found.logprobs[self.index]
        if ledger.entropy is not None and found.entropy is not None:
            ledger.entropy[self.index] = found.entropy[self.index]

    def _of_all(self, count: int) -> int:
        return count if self.world is None else int(self.world.sum(torch.tensor(count)))

    def _learning(self) -> list[int]:
        """The samples with any token that has a gradient."""
        tokens, worth = self.ledger.tokens, self.ledger.gradient.cpu()
        return [number for number in self.samples if worth[tokens.of(number)].any()]

    # checks and the step itself

    def _check_finite(self, logprobs: Tensor, tokens: Tensor) -> None:
        bad = tokens[~logprobs.isfinite()].cpu().numpy()
        if not len(bad):
            return
        self.optimizer.zero_grad(set_to_none=True)
        found = self.ledger.tokens
        suspects = sorted(set(found.sample[bad].tolist()))
        # a NaN spreads to all that is computed in one row with it, so each suspect is asked alone
        numbers = [number for number in suspects if not self._alone(number).isfinite().all()] or suspects
        raise StepRefused(
            f"the policy's log-probs are not finite for {self._names(numbers)}; this update was not taken", numbers
        )

    def _alone(self, number: int) -> Tensor:
        """The log-probs of one sample, computed with no other."""
        tokens = self.ledger.tokens
        return self.forward.score(tokens, plan=self.forward.plan(tokens, [number])).logprobs[tokens.of(number)]

    def _checked_norm(self) -> float:
        norm = self._norm()
        if math.isfinite(norm):
            return norm
        offenders = self._offenders()
        self.optimizer.zero_grad(set_to_none=True)
        whose = self._names(offenders) if offenders else "no sample alone, but all of them together"
        raise StepRefused(f"the gradient is not finite, from {whose}; this update was not taken", offenders)

    def _offenders(self) -> list[int]:
        """The samples whose gradient alone is not finite."""
        offenders = []
        for number in self._learning():
            self.optimizer.zero_grad(set_to_none=True)
            self._backward(self.forward.plan(self.ledger.tokens, [number]))
            if not math.isfinite(self._norm()):
                offenders.append(number)
        return offenders

    def _names(self, numbers: Sequence[int]) -> str:
        samples = self.ledger.tokens.samples
        names = [samples[number].name or f"number {number}" for number in numbers]
        rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"sample{'s' if len(names) > 1 else ''} {', '.join(names[:8])}{rest}"

    def _gradients(self) -> list[Tensor]:
        weights = self.forward.model.parameters().values()
        return [weight.grad for weight in weights if weight.grad is not None]

    def _norm(self) -> float:
        wide = torch.promote_types(self.forward.model.dtype, torch.float32)
        return fsdp.norm(self._gradients(), wide, self.world)

    def _why_not(self, result: Result) -> str:
        if not len(self.index):
            return "no sample has a trainable token"
        if not result.kept_tokens:
            return "every token was refused by the objective"
        if not self.ledger.gradient[self.index].any():
            return "no token has a gradient"
        return ""

    def _step(self, norm: float, lr: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            for gradient in self._gradients():
                gradient.mul_(limit / norm)
        adamw.set_rate(self.optimizer, lr)
        self.optimizer.step()
