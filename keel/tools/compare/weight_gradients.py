"""Compute the gradients of the objectives with respect to a model's weights, on a few steps.

d loss / d log-prob is taken at the recorded log-probs, as in the rest of the comparison; the model provides
d log-prob / d weight. If the model is the policy of that step, this is the gradient of the step; the mean difference
between its log-probs and the recorded ones is reported. The gradients of all objectives are held in memory together,
and each needs one forward and backward pass. No weight is changed.
"""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from keel.config import ModelSettings
from keel.errors import KeelError
from keel.tools.compare.accumulators import cosine_of
from keel.tools.compare.evaluate import StepComparison
from keel.tools.compare.report import WeightGradientSummary
from keel.tools.compare.schema import RecordedStep
from keel.training import Forward, Model, Sample, TrainableTokens, load_model
from keel.training.step.forward import MicroBatch
from keel.training.step.lm_head import backward_into


def evenly_spaced_steps(steps: Sequence[int], count: int) -> list[int]:
    """Return `count` evenly spaced steps, including the first and the last."""
    if count >= len(steps):
        return list(steps)
    if count == 1:
        return [steps[len(steps) // 2]]
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


class WeightGradients:
    """Accumulates the inner products of the objectives' gradients over the steps that are added."""

    def __init__(self, model: Model | str, *, max_tokens: int = 4096) -> None:
        self.model = load_model(ModelSettings(name=model)) if isinstance(model, str) else model
        self.forward = Forward(self.model, max_tokens=max_tokens)
        self.steps: list[int] = []
        self.inner_products: dict[tuple[str, str], float] = {}
        self.logprob_difference = 0.0
        self.tokens = 0

    def add(self, comparison: StepComparison) -> None:
        """Add the weight gradients of every objective at one step."""
        step = comparison.step
        tokens = TrainableTokens(to_samples(step))
        plan = self.forward.plan(tokens)
        logprobs = self.forward.score(tokens, plan=plan).logprobs.cpu()
        self.logprob_difference += float((logprobs - step.batch.logprobs).abs().sum())
        self.tokens += len(tokens)
        weight_gradients: list[list[Tensor]] = []
        for name, gradient in zip(comparison.names, comparison.gradients, strict=True):
            weight_gradients.append(self._backward(plan, gradient.to(self.model.device)))
            for other, other_gradients in zip(comparison.names, weight_gradients, strict=False):
                pairs = zip(weight_gradients[-1], other_gradients, strict=True)
                product = math.fsum(_dot(left, right) for left, right in pairs)
                self.inner_products[name, other] = self.inner_products[other, name] = (
                    self.inner_products.get((name, other), 0.0) + product
                )
        self.steps.append(step.number)

    def _backward(self, plan: Sequence[MicroBatch], gradient: Tensor) -> list[Tensor]:
        """Return the weight gradients of one forward and backward pass, given the gradient of each log-prob."""
        weights, head = list(self.model.parameters().values()), self.forward.head
        with self.forward.tree_attention_enabled():
            for batch in plan:
                grad_logprobs = gradient[batch.token_index]
                if grad_logprobs.any():
                    hidden = self.forward.hidden(batch)
                    head_gradient = head.backward(hidden.detach(), batch.targets, batch.temperature, grad_logprobs)
                    backward_into(head, hidden, head_gradient)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad.detach() for weight in weights]
        for weight in weights:
            weight.grad = None
        return gradients

    def summary(self, names: Sequence[str]) -> WeightGradientSummary:
        """Return the gradient norms and cosines of the named objectives."""
        gram = np.array([[self.inner_products.get((row, column), math.nan) for column in names] for row in names])
        return WeightGradientSummary(
            model=self.model.source.name,
            steps=self.steps,
            parameters=sum(weight.numel() for weight in self.model.parameters().values()),
            logprob_difference=self.logprob_difference / max(self.tokens, 1),
            gradient_norm=np.sqrt(gram.diagonal() / max(len(self.steps), 1)).tolist(),
            cosine=cosine_of(gram).tolist(),
        )


def _dot(left: Tensor, right: Tensor) -> float:
    return float(torch.dot(left.flatten().double(), right.flatten().double()))


def to_samples(step: RecordedStep) -> list[Sample]:
    """Return the step's sequences as samples for a model, in the order of its tokens."""
    rows = step.rows
    if "token_ids" not in rows.column_names or rows["token_ids"].null_count:
        raise KeelError(
            f"step {step.number} has no token_ids for some sequence; --model needs them to compute gradients"
        )
    temperatures = rows["temperature"] if "temperature" in rows.column_names else pa.nulls(len(rows))
    columns = (rows["token_ids"].to_pylist(), rows["trainable"].to_pylist(), temperatures.to_pylist())
    samples = []
    for number, (ids, trainable, temperature) in enumerate(zip(*columns, strict=True)):
        if len(ids) != len(trainable):
            raise KeelError(
                f"step {step.number}, sequence {number}: {len(ids)} token_ids for {len(trainable)} trainable"
            )
        samples.append(
            Sample(
                token_ids=np.array(ids, np.int64),
                trainable=np.array([bool(flag) for flag in trainable], np.bool_),
                advantage=0.0,
                temperature=1.0 if temperature is None else temperature,
                name=f"{number} of step {step.number}",
            )
        )
    return samples
