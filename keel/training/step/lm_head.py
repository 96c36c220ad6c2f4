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

Slope = Callable[[Tensor, slice], Tensor]
"""Takes the log-probs of some rows and gives the gradient of the loss by each of them."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What the policy said about each chosen token."""

    logprobs: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"] | None = None
    """Of the whole distribution at the token."""
    top_logprobs: Float[Tensor, "n k"] | None = None
    top_ids: Int[Tensor, "n k"] | None = None

    def placed(self, index: Int[Tensor, "n"], size: int) -> "Scores":
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
class Head:
    """logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap) / temperature."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, "V"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, network: Any) -> "Head":
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
        room = self._room(hidden)
        parts = [
            self._chunk(hidden[rows], targets[rows], _at(temperature, rows), entropy, top_k, room).scores
            for rows in self._chunks(len(hidden))
        ]
        return join(parts)

    @torch.no_grad()
    def fused(
        self,
        hidden: Float[Tensor, "n d"],
        targets: Int[Tensor, "n"],
        temperature: Float[Tensor, "n"] | float,
        slope: Slope,
        *,
        entropy: bool = False,
    ) -> tuple[Scores, HeadGradients]:
        """Log-probs, and gradients when `slope` says what each is worth, in one pass."""
        weight, bias = self.weight.detach(), self.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=wide) if self.weight.requires_grad else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and bias.requires_grad else None
        gradients, room = HeadGradients(d_hidden, d_weight, d_bias), self._room(hidden)
        parts = [
            self._fused_chunk(hidden, targets, temperature, slope, entropy, rows, gradients, room)
            for rows in self._chunks(len(hidden))
        ]
        return join(parts), HeadGradients(d_hidden, _as(d_weight, self.weight), _as(d_bias, bias))

    def _fused_chunk(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        slope: Slope,
        entropy: bool,
        rows: slice,
        gradients: HeadGradients,
        room: Tensor | None,
    ) -> Scores:
        """Scores of some rows; their part is added to the gradients."""
        chunk = self._chunk(hidden[rows], targets[rows], _at(temperature, rows), entropy, 0, room)
        worth = slope(chunk.scores.logprobs, rows)
        some = worth.nonzero()[:, 0]
        if not len(some):
            return chunk.scores
        weight = self.weight.detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        odds, states, places = chunk.odds, hidden[rows], targets[rows]
        if len(some) < len(worth):
            odds, states, places = odds[some], states[some], places[some]
        worth = (worth * self.scale / _at(temperature, rows))[some].to(wide)
        at_target, at_all = (worth * chunk.target_slope[some])[:, None], (worth / chunk.total[some])[:, None]
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
        gradient: Float[Tensor, "n"],
    ) -> HeadGradients:
        """Gradients for a known gradient by each log-prob; logits are formed again, of rows that matter only."""
        some = gradient.nonzero()[:, 0]
        worth = gradient[some]
        heat = temperature[some] if isinstance(temperature, Tensor) else temperature
        _, gradients = self.fused(hidden[some], targets[some], heat, lambda _, rows: worth[rows])
        d_hidden = torch.zeros_like(hidden).index_copy_(0, some, gradients.hidden)
        return HeadGradients(d_hidden, gradients.weight, gradients.bias)

    def _room(self, hidden: Tensor) -> Tensor | None:
        """Memory for one chunk's logits, used by all: a new piece for each would be taken beside the one just freed."""
        if self.weight.dtype.itemsize < 4 or not len(hidden):
            return None
        first = self._chunks(len(hidden))[0]
        return hidden.new_empty(first.stop, len(self.weight))

    def _chunks(self, size: int) -> list[slice]:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        step = max(1, CHUNK_BYTES // (len(self.weight) * wide.itemsize))
        # of no rows one empty chunk, so that every answer has its columns
        return [slice(first, min(first + step, size)) for first in range(0, max(size, 1), step)]

    def _chunk(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        entropy: bool,
        top_k: int,
        room: Tensor | None,
    ) -> "_Chunk":
        weight, bias = self.weight.detach(), self.bias
        odds = torch.mm(hidden, weight.T, out=None if room is None else room[: len(hidden)])
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
                logits.mul_(self.softcap / _column(temperature, here))
            elif self.scale != 1 or isinstance(temperature, Tensor) or temperature != 1:
                logits.mul_(self.scale / _column(temperature, here))
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
        return _Chunk(odds, total, target_slope, Scores(logprobs, spread, values, ids))


@dataclass(frozen=True, eq=False)
class _Chunk:
    odds: Float[Tensor, "n V"]
    """exp(logit - largest logit), times the slope of the soft cap."""
    total: Float[Tensor, "n"]
    """What the odds divide by to be probabilities."""
    target_slope: Float[Tensor, "n"]
    scores: Scores


def _at(temperature: Tensor | float, rows: slice) -> Tensor | float:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _column(temperature: Tensor | float, rows: slice) -> Tensor | float:
    return temperature[rows, None] if isinstance(temperature, Tensor) else temperature


def _as(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)


def _add_weight_gradient(
    d_weight: Tensor, odds: Tensor, states: Tensor, targets: Tensor, at_target: Tensor, at_all: Tensor
) -> None:
    """d_weight += one_hot(targets).T @ (at_target * states) - odds.T @ (at_all * states)."""
    d_weight.index_add_(0, targets, states * at_target)
    if odds.dtype == d_weight.dtype:
        d_weight.addmm_(odds.T, states * at_all, alpha=-1)
    else:
        d_weight.sub_(torch.mm(odds.T, (states * at_all).to(odds.dtype)))


def join(parts: Sequence[Scores]) -> Scores:
    """Scores of several chunks or micro-batches, one after another."""
    columns = []
    for field in fields(Scores):
        values = [getattr(part, field.name) for part in parts]
        columns.append(None if values[0] is None else torch.cat(values))
    return Scores(*columns)  # type: ignore[arg-type]


def logprobs(
    head: Head, hidden: Float[Tensor, "n d"], targets: Int[Tensor, "n"], temperature: Tensor | float = 1.0
) -> Float[Tensor, "n"]:
    """Log-probs of the targets, differentiable through hidden states, weight and bias."""
    result: Tensor = _Logprobs.apply(hidden, head.weight, head.bias, head, targets, temperature)  # type: ignore[no-untyped-call]
    return result


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, _weight: Tensor, _bias: Tensor | None, head: Head, targets: Tensor, temperature: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, targets)
        ctx.rest = head, temperature
        return head.score(hidden, targets, temperature).logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        head, temperature = ctx.rest
        gradients = head.backward(hidden, targets, temperature, outer)
        return gradients.hidden, gradients.weight, gradients.bias, None, None, None


def back_through(head: Head, hidden: Tensor, gradients: HeadGradients) -> None:
    """Send gradients that are already known through the graph behind hidden states, weight and bias."""
    tensors = [hidden, head.weight, head.bias]
    known = [gradients.hidden, gradients.weight, gradients.bias]
    pairs = [(tensor, grad) for tensor, grad in zip(tensors, known, strict=True) if tensor is not None]
    pairs = [(tensor, grad) for tensor, grad in pairs if grad is not None and tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
