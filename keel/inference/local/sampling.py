"""Sample tokens from logits (temperature, truncation, one random draw per request) and detect stop strings.

A row's token depends only on its own logits, settings and seed, not on the rest of the batch. The recorded log-prob is
that of the full distribution at the row's temperature, even if top_k, top_p or min_p restrict sampling to a part of it;
at temperature 0 it is that of the distribution at temperature 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keel.config import Sampling
from keel.inference.protocol import TopLogprobs

BLOCK_SIZE = 128
"""Tokens per block: a token is located in two searches, first over the sums of blocks, then inside one block."""


def sample_tokens(
    logits: Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return one token per row and its log-prob. `logits` [n, V] may be overwritten; `uniforms` are in [0, 1).

    A row whose logits are not finite gets a log-prob of NaN.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperatures = [settings.temperature or 1.0 for settings in sampling]
    if any(temperature != 1.0 for temperature in temperatures):
        scores.div_(torch.tensor(temperatures, dtype=scores.dtype, device=scores.device)[:, None])
    top = scores.amax(-1, keepdim=True)
    exp_logits = scores.sub(top).exp_()
    pad = -exp_logits.shape[1] % BLOCK_SIZE
    if pad:
        exp_logits = torch.nn.functional.pad(exp_logits, (0, pad))
    blocks = exp_logits.view(len(exp_logits), -1, BLOCK_SIZE)
    sums = blocks.sum(-1).double()
    normaliser = top[:, 0].double() + sums.sum(-1).log()
    for row, settings in enumerate(sampling):
        if settings.truncates_distribution and settings.temperature > 0:
            truncate(exp_logits[row], settings)
            sums[row] = blocks[row].sum(-1)
    tokens = _locate_tokens(blocks, sums, torch.tensor(uniforms, dtype=torch.float64, device=scores.device))
    greedy = [settings.temperature == 0 for settings in sampling]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), tokens)
    tokens = tokens.clamp_(max=scores.shape[1] - 1)
    logprobs = scores.gather(1, tokens[:, None])[:, 0].double() - normaliser
    return tokens.tolist(), logprobs.float().tolist()


def top_logprobs(logprobs: Tensor, count: int) -> list[TopLogprobs]:
    """Return the `count` most likely tokens of each row of log-probs [n, V]."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


def score_tokens(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[list[float], list[TopLogprobs]]:
    """Return the log-prob of one token per row of logits [n, V], and the `count` most likely tokens of each row."""
    logprobs = log_softmax(logits)
    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return logprobs.gather(1, index[:, None])[:, 0].tolist(), top_logprobs(logprobs, count) if count else []


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probs, in float32 or float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def truncate(exp_logits: Tensor, sampling: Sampling) -> None:
    """Zero the entries of exp(logits - max) [V] that min_p, top_k and top_p exclude, in this order."""
    if sampling.min_p > 0:
        exp_logits[exp_logits < sampling.min_p] = 0
    if 0 < sampling.top_k < len(exp_logits):
        kept, index = exp_logits.topk(sampling.top_k)
        exp_logits.zero_()[index] = kept
    if sampling.top_p < 1:
        ordered, index = exp_logits.sort(descending=True)
        before = ordered.double().cumsum(0) - ordered
        exp_logits[index[before >= sampling.top_p * ordered.double().sum()]] = 0


def _locate_tokens(blocks: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Return the index at which each row's cumulative sum passes its uniform draw. Entries of 0 are never selected."""
    edges = sums.cumsum(-1)
    total = edges[:, -1]
    # below the total, so that rounding cannot select an index past the last entry
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(edges, target[:, None], right=True).clamp_(max=edges.shape[1] - 1)
    rest = target[:, None] - (edges.gather(1, block) - sums.gather(1, block))
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK_SIZE))[:, 0].double()
    index = torch.searchsorted(inside.cumsum(-1), rest, right=True)
    # the sum of the block was rounded differently: stay at or before its last entry that is not 0
    last = BLOCK_SIZE - 1 - (inside.flip(-1) > 0).to(torch.int8).argmax(-1, keepdim=True)
    return (block * BLOCK_SIZE + torch.minimum(index, last))[:, 0]


class StopStringDetector:
    """Detects stop strings in the text of a completion, after each token.

    Only the end of the completion is decoded each time, with a margin beyond the longest stop string, so that a
    character or word that begins before the window is complete where it matters.
    """

    SPARE_CHARS = 16
    """Characters decoded beyond the length of the longest stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(text for text in stop if text)
        self.tail_chars = max((len(text) for text in self.stop), default=0) + self.SPARE_CHARS
        self.window_start = 0

    def detect(self, tokens: Sequence[int]) -> bool:
        """Return whether the text of these tokens contains a stop string. Call it after every token."""
        if not self.stop:
            return False
        text = self._decode(tokens[self.window_start :])
        if any(stop in text for stop in self.stop):
            return True
        if len(text) > 4 * self.tail_chars:
            # move the window forward, but keep enough text for the longest stop string
            middle = (self.window_start + len(tokens)) // 2
            if middle > self.window_start and len(self._decode(tokens[middle:])) > self.tail_chars:
                self.window_start = middle
        return False

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
