"""From logits to tokens: temperature, truncation, a draw from each request's own chance, and when an answer ends.

A row's token depends on its own logits, settings and seed and on nothing else in the batch. The log-prob recorded is of
the whole distribution at the row's temperature, whatever part of it is sampled from; at temperature 0 it is of the
distribution at temperature 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keel.config import Sampling

BLOCK_SIZE = 128
"""A token is found in two looks: among the sums of so many neighbouring words, then inside one of them."""


def sample_tokens(
    logits: Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token per row and its log-prob. `logits` [n, V] is used up; `chance` is a number in [0, 1) for each row.

    A row whose logits are not finite gets a log-prob that is NaN.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    heat = [one.temperature or 1.0 for one in sampling]
    if any(value != 1.0 for value in heat):
        scores.div_(torch.tensor(heat, dtype=scores.dtype, device=scores.device)[:, None])
    top = scores.amax(-1, keepdim=True)
    shares = scores.sub(top).exp_()
    pad = -shares.shape[1] % BLOCK_SIZE
    if pad:
        shares = torch.nn.functional.pad(shares, (0, pad))
    blocks = shares.view(len(shares), -1, BLOCK_SIZE)
    sums = blocks.sum(-1).double()
    normaliser = top[:, 0].double() + sums.sum(-1).log()
    for row, one in enumerate(sampling):
        if one.truncates_distribution and one.temperature > 0:
            truncate(shares[row], one)
            sums[row] = blocks[row].sum(-1)
    tokens = _locate_tokens(blocks, sums, torch.tensor(uniforms, dtype=torch.float64, device=scores.device))
    greedy = [one.temperature == 0 for one in sampling]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), tokens)
    tokens = tokens.clamp_(max=scores.shape[1] - 1)
    logprobs = scores.gather(1, tokens[:, None])[:, 0].double() - normaliser
    return tokens.tolist(), logprobs.float().tolist()


def truncate(exp_logits: Tensor, sampling: Sampling) -> None:
    """Set the shares [V] to 0 that min_p, top_k and top_p leave out, in that order; the largest share is 1."""
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
    """Where each row's chance falls in its shares [n, blocks, BLOCK]. A share of 0 is never met."""
    edges = sums.cumsum(-1)
    total = edges[:, -1]
    # below the total, so that rounding cannot point past the last share
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(edges, target[:, None], right=True).clamp_(max=edges.shape[1] - 1)
    rest = target[:, None] - (edges.gather(1, block) - sums.gather(1, block))
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK_SIZE))[:, 0].double()
    place = torch.searchsorted(inside.cumsum(-1), rest, right=True)
    # the sum of the block was rounded otherwise: not past the last share that is there
    last = BLOCK_SIZE - 1 - (inside.flip(-1) > 0).to(torch.int8).argmax(-1, keepdim=True)
    return (block * BLOCK_SIZE + torch.minimum(place, last))[:, 0]


class StopStringDetector:
    """Whether the text of an answer holds a stop string, asked after each token.

    Only the end of the answer is decoded each time: some tokens more than the longest stop string needs, so that a
    character or a word that begins before them is whole where it matters.
    """

    SPARE_CHARS = 16

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(text for text in stop if text)
        self.tail_chars = max((len(text) for text in self.stop), default=0) + self.SPARE_CHARS
        self.window_start = 0

    def detect(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string is in the text of these tokens, of which all but the last were asked about before."""
        if not self.stop:
            return False
        text = self._decode(tokens[self.window_start :])
        if any(stop in text for stop in self.stop):
            return True
        if len(text) > 4 * self.tail_chars:
            # every token from here on is new text or nothing: go on from where enough of it remains
            middle = (self.window_start + len(tokens)) // 2
            if middle > self.window_start and len(self._decode(tokens[middle:])) > self.tail_chars:
                self.window_start = middle
        return False

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
