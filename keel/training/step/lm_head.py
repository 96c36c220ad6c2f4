"""From hidden states to log-probs of chosen tokens, and back, without ever holding the logits of all of them.

Rows go through the output matrix in chunks of fixed size. When the gradient of the loss by each log-prob is known
inside a chunk, because the objective is token-local or was evaluated before, the gradients of hidden states and weights
are formed from the same probabilities: three matrix products in all. Rows whose gradient is zero take part in none of
the last two. Log-probs are float32 or better, whatever the weights are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 96 << 20
"""Size of a chunk's probabilities: 512 rows of 49152 words. Smaller ones read the weights' gradient more often."""
SLICE_BYTES = 3 << 20
"""Rows are normalised in slices that stay in the processor's cache."""

LogprobGrad = Callable[[Tensor, slice], Tensor]
"""Takes the log-probs of some rows and gives the gradient of the loss by each of them."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What the policy said about each chosen token."""

    logprobs: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"] | None = None
    """Of the whole distribution at the token."""
    top_logprobs: Float[Tensor, "n k"] | None = None
    top_ids: Int[Tensor, "n k"] | None = None

    def scatter(self, index: Int[Tensor, "n"], size: int) -> "Scores":
        """The same scores at these places among `size` tokens; NaN, or -1 for ids, elsewhere."""
        columns = []
        for field in fields(self):
            values = getattr(self, field.name)
            if values is not None:
                rest = torch.nan if values.is_floating_point() else -1
                values = values.new_full((size, *values.shape[1:]), rest).index_copy_(0, index, values)
            columns.append(values)
        return Scores(*columns)


@dataclass(frozen=True, eq=False)
class HeadGradients:
    """Gradients of the loss by what went into the head; None for what does not train."""

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
        """The head of a causal language model, with the scaling and capping that its configuration names."""
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
        """Log-probs, and what else is asked for; one matrix product."""
        room = self._logits_buffer(hidden)
        parts = [
            self._score_chunk(
                hidden[rows], targets[rows], _temperature_at(temperature, rows), entropy, top_k, room
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
        """Log-probs, and gradients when `slope` says what each is worth, in one pass."""
        weight, bias = self.weight.detach(), self.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=wide) if self.weight.requires_grad else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and bias.requires_grad else None
        gradients, room = HeadGradients(d_hidden, d_weight, d_bias), self._logits_buffer(hidden)
        parts = [
            self._score_and_grad_chunk(hidden, targets, temperature, logprob_grad, entropy, rows, gradients, room)
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
        """Scores of some rows; their part is added to the gradients."""
        chunk = self._score_chunk(hidden[rows], targets[rows], _temperature_at(temperature, rows), entropy, 0, buffer)
        worth = logprob_grad(chunk.scores.logprobs, rows)
        some = worth.nonzero()[:, 0]
        if not len(some):
            return chunk.scores
        weight = self.weight.detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        odds, states, places = chunk.exp_logits, hidden[rows], targets[rows]
        if len(some) < len(worth):
            odds, states, places = odds[some], states[some], places[some]
        worth = (worth * self.scale / _temperature_at(temperature, rows))[some].to(wide)
        at_target, at_all = (
            (worth * chunk.target_softcap_grad[some])[:, None],
            (worth / chunk.normalizer[some])[:, None],
        )
        odds = odds.to(weight.dtype)
        d_states = weight[places].to(wide).mul_(at_target).sub_(torch.mm(odds, weight).to(wide).mul_(at_all))
        gradients.hidden[rows.start + some] = d_states.to(hidden.dtype)
        if gradients.weight is not None:
            _add_weight_gradient(gradients.weight, odds, states.to(wide), places, at_target, at_all)
        if gradients.bias is not None:
            gradients.bias.index_add_(0, places, at_target[:, 0]).sub_(torch.mv(odds.to(wide).T, at_all[:, 0]))
        return chunk.scores

    def backward(
        self,
        hidden: Float[Tensor, "n d"],
        targets: Int[Tensor, "n"],
        temperature: Float[Tensor, "n"] | float,
        grad_logprob: Float[Tensor, "n"],
    ) -> HeadGradients:
        """Gradients for a known gradient by each log-prob; logits are formed again, of rows that matter only."""
        some = grad_logprob.nonzero()[:, 0]
        worth = grad_logprob[some]
        heat = temperature[some] if isinstance(temperature, Tensor) else temperature
        _, gradients = self.score_and_grad(hidden[some], targets[some], heat, lambda _, rows: worth[rows])
        d_hidden = torch.zeros_like(hidden).index_copy_(0, some, gradients.hidden)
        return HeadGradients(d_hidden, gradients.weight, gradients.bias)

    def _logits_buffer(self, hidden: Tensor) -> Tensor | None:
        """Memory for one chunk's logits, used by all: a new piece for each would be taken beside the one just freed."""
        if self.weight.dtype.itemsize < 4 or not len(hidden):
            return None
        first = self._row_chunks(len(hidden))[0]
        return hidden.new_empty(first.stop, len(self.weight))

    def _row_chunks(self, size: int) -> list[slice]:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        step = max(1, CHUNK_BYTES // (len(self.weight) * wide.itemsize))
        # of no rows one empty chunk, so that every answer has its columns
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
        odds = torch.mm(hidden, weight.T, out=None if buffer is None else buffer[: len(hidden)])
        odds = odds.to(torch.promote_types(odds.dtype, torch.float32))
        total, target_slope = odds.new_empty(len(odds)), odds.new_ones(len(odds))
        logprobs, spread = torch.empty_like(total), torch.empty_like(total) if entropy else None
        top = [(odds.new_empty(0, top_k), targets.new_empty(0, top_k))]
        step = max(1, SLICE_BYTES // max(len(weight) * odds.itemsize, 1))
        for first in range(0, len(odds), step):
            here = slice(first, first + step)
            logits, slope = odds[here], None
            if bias is not None:
                logits += bias
            if self.softcap is not None:
                bent = logits.mul_(self.scale / self.softcap).tanh_()
                slope = 1 - bent.square()
                target_slope[here] = slope.gather(1, targets[here, None])[:, 0]
                logits.mul_(self.softcap / _temperature_column(temperature, here))
            elif self.scale != 1 or isinstance(temperature, Tensor) or temperature != 1:
                logits.mul_(self.scale / _temperature_column(temperature, here))
            logits.sub_(logits.amax(1, keepdim=True))
            chosen = logits.gather(1, targets[here, None])[:, 0]
            best = logits.topk(top_k, dim=1) if top_k else None
            shifted = logits.clone() if spread is not None else logits
            total[here] = sums = logits.exp_().sum(1)
            logprobs[here] = chosen - sums.log()
            if spread is not None:
                spread[here] = sums.log() - torch.linalg.vecdot(logits, shifted) / sums
            if best is not None:
                top.append((best.values - sums.log()[:, None], best.indices))
            if slope is not None:
                logits.mul_(slope)
        values, ids = (torch.cat(column) if top_k else None for column in zip(*top, strict=True))
        return _ScoredChunk(odds, total, target_slope, Scores(logprobs, spread, values, ids))


@dataclass(frozen=True, eq=False)
class _ScoredChunk:
    exp_logits: Float[Tensor, "n V"]
    """exp(logit - largest logit), times the slope of the soft cap."""
    normalizer: Float[Tensor, "n"]
    """What the odds divide by to be probabilities."""
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
    """d_weight += one_hot(targets).T @ (at_target * states) - odds.T @ (at_all * states)."""
    d_weight.index_add_(0, targets, states * target_scale)
    if exp_logits.dtype == d_weight.dtype:
        d_weight.addmm_(exp_logits.T, states * softmax_scale, alpha=-1)
    else:
        d_weight.sub_(torch.mm(exp_logits.T, (states * softmax_scale).to(exp_logits.dtype)))


def concat_scores(parts: Sequence[Scores]) -> Scores:
    """Scores of several chunks or micro-batches, one after another."""
    columns = []
    for field in fields(Scores):
        values = [getattr(part, field.name) for part in parts]
        columns.append(None if values[0] is None else torch.cat(values))
    return Scores(*columns)  # type: ignore[arg-type]


def logprobs(
    head: LMHead, hidden: Float[Tensor, "n d"], targets: Int[Tensor, "n"], temperature: Tensor | float = 1.0
) -> Float[Tensor, "n"]:
    """Log-probs of the targets, differentiable through hidden states, weight and bias."""
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
    """Send gradients that are already known through the graph behind hidden states, weight and bias."""
    tensors = [hidden, head.weight, head.bias]
    known = [gradients.hidden, gradients.weight, gradients.bias]
    pairs = [(tensor, grad) for tensor, grad in zip(tensors, known, strict=True) if tensor is not None]
    pairs = [(tensor, grad) for tensor, grad in pairs if grad is not None and tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
