"""Compute log-probs of target tokens from hidden states, and their gradients, without materialising all logits.

Rows go through the output matrix in chunks of fixed size. When dloss/dlogprob is known inside a chunk, because the
objective is token-local or has already been evaluated, the gradients of hidden states and weights are computed from the
same probabilities, with three matrix products in total. Rows with zero gradient are excluded from the last two.
Log-probs are float32 or float64, even if the weights are in half precision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 96 << 20
"""Size of a chunk's logits: 512 rows of 49152 tokens. Smaller chunks read the weight gradient more often."""
SLICE_BYTES = 3 << 20
"""Rows are normalised in slices of this size, which stay in the CPU cache."""

LogprobGrad = Callable[[Tensor, slice], Tensor]
"""Maps the log-probs of the given rows to the gradient of the loss with respect to each of them."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Log-probs, and optionally entropy and top-k log-probs, at each target token."""

    logprobs: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"] | None = None
    """Entropy of the full distribution at the token."""
    top_logprobs: Float[Tensor, "n k"] | None = None
    top_ids: Int[Tensor, "n k"] | None = None

    def scatter(self, index: Int[Tensor, "n"], size: int) -> "Scores":
        """Return the scores scattered to `index` among `size` tokens; NaN, or -1 for ids, elsewhere."""
        columns = []
        for field in fields(self):
            values = getattr(self, field.name)
            if values is not None:
                fill = torch.nan if values.is_floating_point() else -1
                values = values.new_full((size, *values.shape[1:]), fill).index_copy_(0, index, values)
            columns.append(values)
        return Scores(*columns)


@dataclass(frozen=True, eq=False)
class HeadGradients:
    """Gradients of the loss with respect to the head's inputs; None for parameters that do not train."""

    hidden: Float[Tensor, "n d"]
    weight: Float[Tensor, "V d"] | None
    bias: Float[Tensor, "V"] | None


@dataclass(frozen=True, eq=False)
class LMHead:
    """logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap) / temperature."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, "V"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_network(cls, network: Any) -> "LMHead":
        """Return the head of a causal language model with the logit scaling and soft cap of its config."""
        linear, config = network.get_output_embeddings(), network.config.get_text_config()
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"the output head is a {type(linear).__name__}; it must be a linear layer")
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(linear.weight, linear.bias, float(scale), getattr(config, "final_logit_softcapping", None))

    @torch.no_grad()
    def score(
        self,
        hidden: Float[Tensor, "n d"],
        targets: Int[Tensor, "n"],
        temperature: Float[Tensor, "n"] | float = 1.0,
        *,
        entropy: bool = False,
        top_k: int = 0,
    ) -> Scores:
        """Compute log-probs, and entropy and top-k on request, with one matrix product."""
        buffer = self._logits_buffer(hidden)
        parts = [
            self._score_chunk(
                hidden[rows], targets[rows], _temperature_at(temperature, rows), entropy, top_k, buffer
            ).scores
            for rows in self._row_chunks(len(hidden))
        ]
        return concat_scores(parts)

    @torch.no_grad()
    def score_and_grad(
        self,
        hidden: Float[Tensor, "n d"],
        targets: Int[Tensor, "n"],
        temperature: Float[Tensor, "n"] | float,
        logprob_grad: LogprobGrad,
        *,
        entropy: bool = False,
    ) -> tuple[Scores, HeadGradients]:
        """Compute log-probs and, from `logprob_grad`, gradients in one pass."""
        weight, bias = self.weight.detach(), self.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=wide) if self.weight.requires_grad else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and bias.requires_grad else None
        gradients, buffer = HeadGradients(d_hidden, d_weight, d_bias), self._logits_buffer(hidden)
        parts = [
            self._score_and_grad_chunk(hidden, targets, temperature, logprob_grad, entropy, rows, gradients, buffer)
            for rows in self._row_chunks(len(hidden))
        ]
        return concat_scores(parts), HeadGradients(
            d_hidden, _cast_like(d_weight, self.weight), _cast_like(d_bias, bias)
        )

    def _score_and_grad_chunk(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        logprob_grad: LogprobGrad,
        entropy: bool,
        rows: slice,
        gradients: HeadGradients,
        buffer: Tensor | None,
    ) -> Scores:
        """Return the scores of some rows and add their part to the gradients."""
        chunk = self._score_chunk(hidden[rows], targets[rows], _temperature_at(temperature, rows), entropy, 0, buffer)
        d_logprob = logprob_grad(chunk.scores.logprobs, rows)
        active = d_logprob.nonzero()[:, 0]
        if not len(active):
            return chunk.scores
        weight = self.weight.detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        exp_logits, states, token_ids = chunk.exp_logits, hidden[rows], targets[rows]
        if len(active) < len(d_logprob):
            exp_logits, states, token_ids = exp_logits[active], states[active], token_ids[active]
        d_logprob = (d_logprob * self.scale / _temperature_at(temperature, rows))[active].to(wide)
        target_scale, softmax_scale = (
            (d_logprob * chunk.target_softcap_grad[active])[:, None],
            (d_logprob / chunk.normalizer[active])[:, None],
        )
        exp_logits = exp_logits.to(weight.dtype)
        from_softmax = torch.mm(exp_logits, weight).to(wide).mul_(softmax_scale)
        d_states = weight[token_ids].to(wide).mul_(target_scale).sub_(from_softmax)
        gradients.hidden[rows.start + active] = d_states.to(hidden.dtype)
        if gradients.weight is not None:
            _add_weight_gradient(gradients.weight, exp_logits, states.to(wide), token_ids, target_scale, softmax_scale)
        if gradients.bias is not None:
            gradients.bias.index_add_(0, token_ids, target_scale[:, 0])
            gradients.bias.sub_(torch.mv(exp_logits.to(wide).T, softmax_scale[:, 0]))
        return chunk.scores

    def backward(
        self,
        hidden: Float[Tensor, "n d"],
        targets: Int[Tensor, "n"],
        temperature: Float[Tensor, "n"] | float,
        grad_logprob: Float[Tensor, "n"],
    ) -> HeadGradients:
        """Compute gradients for known dloss/dlogprob; logits are recomputed for rows with a gradient only."""
        active = grad_logprob.nonzero()[:, 0]
        active_grad = grad_logprob[active]
        active_temperature = temperature[active] if isinstance(temperature, Tensor) else temperature
        _, gradients = self.score_and_grad(
            hidden[active], targets[active], active_temperature, lambda _, rows: active_grad[rows]
        )
        d_hidden = torch.zeros_like(hidden).index_copy_(0, active, gradients.hidden)
        return HeadGradients(d_hidden, gradients.weight, gradients.bias)

    def _logits_buffer(self, hidden: Tensor) -> Tensor | None:
        """Allocate memory for one chunk's logits, reused by all chunks to keep the peak at one chunk."""
        if self.weight.dtype.itemsize < 4 or not len(hidden):
            return None
        first = self._row_chunks(len(hidden))[0]
        return hidden.new_empty(first.stop, len(self.weight))

    def _row_chunks(self, size: int) -> list[slice]:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        step = max(1, CHUNK_BYTES // (len(self.weight) * wide.itemsize))
        # one empty chunk if there are no rows, so that results always have their columns
        return [slice(first, min(first + step, size)) for first in range(0, max(size, 1), step)]

    def _score_chunk(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        entropy: bool,
        top_k: int,
        buffer: Tensor | None,
    ) -> "_ScoredChunk":
        weight, bias = self.weight.detach(), self.bias
        # exp_logits holds the logits first and is transformed in place, slice by slice
        exp_logits = torch.mm(hidden, weight.T, out=None if buffer is None else buffer[: len(hidden)])
        exp_logits = exp_logits.to(torch.promote_types(exp_logits.dtype, torch.float32))
        normalizer, target_softcap_grad = exp_logits.new_empty(len(exp_logits)), exp_logits.new_ones(len(exp_logits))
        logprobs, entropies = torch.empty_like(normalizer), torch.empty_like(normalizer) if entropy else None
        top = [(exp_logits.new_empty(0, top_k), targets.new_empty(0, top_k))]
        step = max(1, SLICE_BYTES // max(len(weight) * exp_logits.itemsize, 1))
        for first in range(0, len(exp_logits), step):
            rows = slice(first, first + step)
            logits, softcap_grad = exp_logits[rows], None
            if bias is not None:
                logits += bias
            if self.softcap is not None:
                capped = logits.mul_(self.scale / self.softcap).tanh_()
                softcap_grad = 1 - capped.square()
                target_softcap_grad[rows] = softcap_grad.gather(1, targets[rows, None])[:, 0]
                logits.mul_(self.softcap / _temperature_column(temperature, rows))
            elif self.scale != 1 or isinstance(temperature, Tensor) or temperature != 1:
                logits.mul_(self.scale / _temperature_column(temperature, rows))
            logits.sub_(logits.amax(1, keepdim=True))
            target_logits = logits.gather(1, targets[rows, None])[:, 0]
            best = logits.topk(top_k, dim=1) if top_k else None
            shifted = logits.clone() if entropies is not None else logits
            normalizer[rows] = sums = logits.exp_().sum(1)
            logprobs[rows] = target_logits - sums.log()
            if entropies is not None:
                entropies[rows] = sums.log() - torch.linalg.vecdot(logits, shifted) / sums
            if best is not None:
                top.append((best.values - sums.log()[:, None], best.indices))
            if softcap_grad is not None:
                logits.mul_(softcap_grad)
        top_logprobs, top_ids = (torch.cat(column) if top_k else None for column in zip(*top, strict=True))
        scores = Scores(logprobs, entropies, top_logprobs, top_ids)
        return _ScoredChunk(exp_logits, normalizer, target_softcap_grad, scores)


@dataclass(frozen=True, eq=False)
class _ScoredChunk:
    exp_logits: Float[Tensor, "n V"]
    """exp(logit - largest logit), multiplied by the derivative of the soft cap."""
    normalizer: Float[Tensor, "n"]
    """Sum of exp(logit - largest logit) over the vocabulary."""
    target_softcap_grad: Float[Tensor, "n"]
    scores: Scores


def _temperature_at(temperature: Tensor | float, rows: slice) -> Tensor | float:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _temperature_column(temperature: Tensor | float, rows: slice) -> Tensor | float:
    return temperature[rows, None] if isinstance(temperature, Tensor) else temperature


def _cast_like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)


def _add_weight_gradient(
    d_weight: Tensor, exp_logits: Tensor, states: Tensor, targets: Tensor, target_scale: Tensor, softmax_scale: Tensor
) -> None:
    """d_weight += one_hot(targets).T @ (target_scale * states) - exp_logits.T @ (softmax_scale * states)."""
    d_weight.index_add_(0, targets, states * target_scale)
    if exp_logits.dtype == d_weight.dtype:
        d_weight.addmm_(exp_logits.T, states * softmax_scale, alpha=-1)
    else:
        d_weight.sub_(torch.mm(exp_logits.T, (states * softmax_scale).to(exp_logits.dtype)))


def concat_scores(parts: Sequence[Scores]) -> Scores:
    """Concatenate the scores of several chunks or micro-batches."""
    columns = []
    for field in fields(Scores):
        values = [getattr(part, field.name) for part in parts]
        columns.append(None if values[0] is None else torch.cat(values))
    return Scores(*columns)  # type: ignore[arg-type]


def logprobs(
    head: LMHead, hidden: Float[Tensor, "n d"], targets: Int[Tensor, "n"], temperature: Tensor | float = 1.0
) -> Float[Tensor, "n"]:
    """Return log-probs of the targets, differentiable with respect to hidden states, weight and bias."""
    result: Tensor = _LogprobsFunction.apply(hidden, head.weight, head.bias, head, targets, temperature)  # type: ignore[no-untyped-call]
    return result


class _LogprobsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, _weight: Tensor, _bias: Tensor | None, head: LMHead, targets: Tensor, temperature: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.rest = head, temperature
        return head.score(hidden, targets, temperature).logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        head, temperature = ctx.rest
        gradients = head.backward(hidden, targets, temperature, grad_output)
        return gradients.hidden, gradients.weight, gradients.bias, None, None, None


def backward_into(head: LMHead, hidden: Tensor, gradients: HeadGradients) -> None:
    """Backpropagate known gradients through the graph of hidden states, weight and bias."""
    tensors = [hidden, head.weight, head.bias]
    grads = [gradients.hidden, gradients.weight, gradients.bias]
    pairs = [(tensor, grad) for tensor, grad in zip(tensors, grads, strict=True) if tensor is not None]
    pairs = [(tensor, grad) for tensor, grad in pairs if grad is not None and tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
