"""Attention over a prefix tree, by way of the models' own hook for attention functions.

A model whose attention implementation is set to TREE calls `tree_attention` with the layout that was given to its
forward as `tree=`. On CPU plain attention goes by a kernel in C (keel/inference/kernels/tree_attention.c), or where
that does not fit by tiles (tiles.py); with a window, a soft cap or sinks the tree is cut into blocks of neighbouring
queries, each against the keys of its ancestors and its own. Either way the work grows with what is really attended to
and not with the square of the packed length. On GPUs the same visibility rule drives flex attention. Grouped heads,
windows, caps and sinks are those of the model. No model code is changed.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from keel.inference.kernels.tree_attention import TreeAttention, TreePlan, tree_kernel_supports
from keel.training.step.prefix_tree import IntArray, PrefixTree
from keel.training.step.tile_attention import Tile, TileAttention, build_tiles

TREE_ATTENTION = "keel_tree"

BLOCK_STRIDE = 128
"""Blocks are cut at the nodes of the tree, and inside long nodes each so many tokens."""
MAX_BLOCK_QUERIES = 1024
"""No block has more queries than this, so that its scores stay in memory that is soon used again."""
BLOCK_OVERHEAD_PAIRS, GATHER_OVERHEAD_PAIRS = 4000, 30
"""What a block costs beside its query-key pairs: for being there, and for each ancestor key that is gathered."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Queries first..last against the keys of their ancestors, and themselves."""

    start: int
    stop: int
    keys: Tensor | slice
    """Where the keys stand; a slice when they are neighbours."""
    mask: Tensor
    """[queries of all heads that read one key head, keys] additive: 0 or -inf."""


class TreeLayout:
    """A tree as attention reads it: the blocks, with their masks by window, on one device."""

    def __init__(self, tree: PrefixTree, device: torch.device, dtype: torch.dtype, *, use_native: bool = True) -> None:
        """`compiled`: by the kernel in C, where it fits."""
        self.tree, self.device, self.use_native = tree, device, use_native
        self.dtype = torch.promote_types(dtype, torch.float32)  # softmax is never taken in half precision
        self._blocks: dict[tuple[int | None, int], list[AttentionBlock]] = {}
        self._flex_block_masks: dict[int | None, Any] = {}

    @cached_property
    def _block_ranges(self) -> list[tuple[int, int, IntArray]]:
        return split_into_blocks(self.tree)

    @cached_property
    def tiles(self) -> tuple[list[Tile], list[Tile]]:
        return build_tiles(self.tree, self.dtype)

    @cached_property
    def plan(self) -> TreePlan:
        return TreePlan(self.tree.subtree_end, self.tree.positions)

    def effective_window(self, window: int | None) -> int | None:
        """The window, or None when no token is so far from another that it hides anything."""
        return window if window is not None and (self.tree.positions >= window).any() else None

    def blocks(self, window: int | None, heads: int = 1) -> list[AttentionBlock]:
        """The blocks under a window, when so many heads read each key head."""
        window = self.effective_window(window)
        if (window, heads) not in self._blocks:
            self._blocks[window, heads] = [self._build_block(*piece, window, heads) for piece in self._block_ranges]
        return self._blocks[window, heads]

    def _build_block(
        self, start: int, stop: int, ancestors: IntArray, window: int | None, heads: int
    ) -> AttentionBlock:
        keys = np.concatenate([ancestors, np.arange(start, stop)])
        seen = self.tree.visible(start, stop, keys, window)
        used = np.flatnonzero(seen.any(0))
        keys, seen = keys[used], seen[:, used]
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~seen), -math.inf)
        together = int(keys[-1]) - int(keys[0]) + 1 == len(keys)
        place = slice(int(keys[0]), int(keys[-1]) + 1) if together else torch.from_numpy(keys).to(self.device)
        return AttentionBlock(start, stop, place, mask.repeat(heads, 1).to(self.device))

    def flex_block_mask(self, window: int | None) -> Any:
        """The same rule for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        if window not in self._flex_block_masks:
            end = torch.from_numpy(self.tree.subtree_end).to(self.device)
            positions = torch.from_numpy(self.tree.positions).to(self.device)

            def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                seen = (key <= query) & (query < end[key])
                return seen if window is None else seen & (positions[query] - positions[key] < window)

            size = len(self.tree)
            self._flex_block_masks[window] = create_block_mask(visible, None, None, size, size, device=str(self.device))
        return self._flex_block_masks[window]


def split_into_blocks(tree: PrefixTree) -> list[tuple[int, int, IntArray]]:
    """Blocks (first, last, ancestors of the first query) with the least sum of pairs and overheads."""
    size = len(tree)
    if not size:
        return []
    starts = np.flatnonzero(np.diff(tree.positions, prepend=-1) != 1)
    bounds = np.unique(np.concatenate([starts, np.arange(0, size, BLOCK_STRIDE), [size]]))
    # the ancestors of the first token of a block that lie before it are as many as its position
    depth = tree.positions[bounds[:-1]]
    best, come_from = np.full(len(bounds), np.inf), np.zeros(len(bounds), np.int64)
    best[0] = 0.0
    for place in range(1, len(bounds)):
        lowest = int(np.searchsorted(bounds, bounds[place] - MAX_BLOCK_QUERIES))
        before = np.arange(min(lowest, place - 1), place)
        width = bounds[place] - bounds[before]
        total = (
            best[before]
            + width * (depth[before] + width)
            + GATHER_OVERHEAD_PAIRS * depth[before]
            + BLOCK_OVERHEAD_PAIRS
        )
        winner = int(np.argmin(total))
        best[place], come_from[place] = total[winner], before[winner]
    blocks, place = [], len(bounds) - 1
    while place:
        first = int(bounds[come_from[place]])
        earlier = np.arange(first)
        blocks.append((first, int(bounds[place]), earlier[tree.subtree_end[:first] > first]))
        place = int(come_from[place])
    return blocks[::-1]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    tree: TreeLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_rest: Any,
) -> tuple[Tensor, None]:
    """What a model calls: query [1, heads, T, D], key and value [1, key heads, T, D]; gives [1, T, heads, D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cuda":
        from transformers.integrations.flex_attention import flex_attention_forward

        mask = tree.flex_block_mask(sliding_window)
        output, _ = flex_attention_forward(module, query, key, value, mask, scale, softcap, s_aux)
        return output, None
    states = [state[0].to(tree.dtype) for state in (query, key, value)]
    window = tree.effective_window(sliding_window)
    plain = window is None and softcap is None and s_aux is None and query.shape[-1] == value.shape[-1]
    if plain and query.device.type == "cpu":
        out: Tensor
        if tree.use_native and tree_kernel_supports(*states):
            out = TreeAttention.apply(*states, tree.plan, scale)  # type: ignore[no-untyped-call]
        else:
            out = TileAttention.apply(*states, tree.tiles, scale)  # type: ignore[no-untyped-call]
        return out[None].to(query.dtype), None
    sinks = query.new_zeros(0) if s_aux is None else s_aux
    blocks = tree.blocks(window, query.shape[1] // key.shape[1])
    out = _BlockAttention.apply(*states, sinks.to(tree.dtype), blocks, scale, softcap)  # type: ignore[no-untyped-call]
    return out[None].to(query.dtype), None


class _BlockAttention(torch.autograd.Function):
    """softmax(q k) v, block by block; shares are formed again in the backward. A sink is a column without a value."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        blocks: list[AttentionBlock],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        heads, size = query.shape[:2]
        out = query.new_empty(size, heads, value.shape[-1])
        for block in blocks:
            here = slice(block.start, block.stop)
            shares, _ = _attention_weights(
                _fold_heads(query, key, here), key[:, block.keys], block.mask, sinks, scale, softcap
            )
            mixed = torch.bmm(shares[..., : block.mask.shape[1]], value[:, block.keys])
            out[here] = mixed.view(heads, -1, value.shape[-1]).transpose(0, 1)
        ctx.save_for_backward(query, key, value, sinks)
        ctx.rest = blocks, scale, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        blocks, scale, softcap = ctx.rest
        heads, grad_output = len(query), grad_output.transpose(0, 1)
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        d_sinks = torch.zeros_like(sinks)
        for block in blocks:
            here, seen = slice(block.start, block.stop), block.mask.shape[1]
            folded, keys, values = _fold_heads(query, key, here), key[:, block.keys], value[:, block.keys]
            shares, slope = _attention_weights(folded, keys, block.mask, sinks, scale, softcap, with_softcap_grad=True)
            out = _fold_heads(grad_output, key, here)
            _add_at(d_value, block.keys, torch.bmm(shares[..., :seen].transpose(1, 2), out))
            d_shares = torch.bmm(out, values.transpose(1, 2))
            if len(sinks):
                d_shares = torch.nn.functional.pad(d_shares, (0, 1))
            d_scores = torch.ops.aten._softmax_backward_data(d_shares, shares, -1, shares.dtype)
            if len(sinks):
                d_sinks += d_scores[..., -1].reshape(heads, -1).sum(-1)
                d_scores = d_scores[..., :seen]
            if slope is not None:
                d_scores = d_scores * slope
            # the scale goes to what is small: queries and keys, not scores
            d_query[:, here] = torch.bmm(d_scores, keys).mul_(scale).view(heads, -1, query.shape[-1])
            _add_at(d_key, block.keys, torch.bmm(d_scores.transpose(1, 2), folded).mul_(scale))
        return d_query, d_key, d_value, d_sinks, None, None, None


def _fold_heads(query: Tensor, key: Tensor, rows: slice) -> Tensor:
    """[heads, T, D] at `here` as [key heads, queries of all heads that read the key head, D]."""
    return query[:, rows].reshape(len(key), -1, query.shape[-1])


def _attention_weights(
    folded: Tensor,
    keys: Tensor,
    mask: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float | None,
    *,
    with_softcap_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Shares [key heads, queries, keys, and the sink if there is one], and the soft cap's slope when asked for."""
    steepness = None
    if softcap is None:
        scores = torch.baddbmm(mask[None], folded, keys.transpose(1, 2), alpha=scale)
    else:
        bent = torch.bmm(folded, keys.transpose(1, 2)).mul_(scale / softcap).tanh_()
        steepness = 1 - bent.square() if with_softcap_grad else None
        scores = bent.mul_(softcap).add_(mask)
    if len(sinks):
        column = sinks.view(len(keys), -1, 1).repeat_interleave(folded.shape[1] * len(keys) // len(sinks), 1)
        scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1), steepness


def _add_at(total: Tensor, index: Tensor | slice, part: Tensor) -> None:
    if isinstance(index, slice):
        total[:, index] += part
    else:
        total.index_add_(1, index, part)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
