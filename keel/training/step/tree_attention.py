"""Compute attention over a prefix tree through the attention interface of transformers.

A model whose attention implementation is TREE_ATTENTION calls `tree_attention` with the layout passed to its forward as
`tree=`. On CPU, plain attention uses a native kernel (keel/inference/kernels/tree_attention.c), or tiles
(tile_attention.py) where the kernel is unavailable; with a window, a soft cap or sinks the tree is split into blocks of
contiguous queries, each against its own keys and those of its ancestors. In all cases the work grows with the number of
visible pairs, not with the square of the packed length. On GPUs the same visibility rule is passed to flex attention.
Grouped heads, windows, soft caps and sinks are the model's. No model code is changed.
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
"""Blocks may start at the nodes of the tree and, inside long nodes, every this many tokens."""
MAX_BLOCK_QUERIES = 1024
"""Largest number of queries in a block, so that the memory of its scores is reused while still in cache."""
BLOCK_OVERHEAD_PAIRS, GATHER_OVERHEAD_PAIRS = 4000, 30
"""Cost of a block in query-key pairs: fixed, and per gathered ancestor key."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Queries start..stop against the keys of their ancestors and their own."""

    start: int
    stop: int
    keys: Tensor | slice
    """Indices of the keys; a slice if they are contiguous."""
    mask: Tensor
    """[queries of all heads that read one key head, keys] additive: 0 or -inf."""


class TreeLayout:
    """A prefix tree prepared for attention on one device; blocks and masks are built once per window."""

    def __init__(self, tree: PrefixTree, device: torch.device, dtype: torch.dtype, *, use_native: bool = True) -> None:
        """`use_native` allows the native kernel where it is supported."""
        self.tree, self.device, self.use_native = tree, device, use_native
        self.dtype = torch.promote_types(dtype, torch.float32)  # softmax is never computed in half precision
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
        """Return the window, or None if every sequence is too short for it to mask anything."""
        return window if window is not None and (self.tree.positions >= window).any() else None

    def blocks(self, window: int | None, heads: int = 1) -> list[AttentionBlock]:
        """Return the blocks for a window and `heads` query heads per key head."""
        window = self.effective_window(window)
        if (window, heads) not in self._blocks:
            self._blocks[window, heads] = [self._build_block(*bounds, window, heads) for bounds in self._block_ranges]
        return self._blocks[window, heads]

    def _build_block(
        self, start: int, stop: int, ancestors: IntArray, window: int | None, heads: int
    ) -> AttentionBlock:
        keys = np.concatenate([ancestors, np.arange(start, stop)])
        visible = self.tree.visible(start, stop, keys, window)
        used = np.flatnonzero(visible.any(0))
        keys, visible = keys[used], visible[:, used]
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~visible), -math.inf)
        contiguous = int(keys[-1]) - int(keys[0]) + 1 == len(keys)
        index = slice(int(keys[0]), int(keys[-1]) + 1) if contiguous else torch.from_numpy(keys).to(self.device)
        return AttentionBlock(start, stop, index, mask.repeat(heads, 1).to(self.device))

    def flex_block_mask(self, window: int | None) -> Any:
        """Return the same visibility as a block mask for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        if window not in self._flex_block_masks:
            end = torch.from_numpy(self.tree.subtree_end).to(self.device)
            positions = torch.from_numpy(self.tree.positions).to(self.device)

            def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                in_tree = (key <= query) & (query < end[key])
                return in_tree if window is None else in_tree & (positions[query] - positions[key] < window)

            size = len(self.tree)
            self._flex_block_masks[window] = create_block_mask(visible, None, None, size, size, device=str(self.device))
        return self._flex_block_masks[window]


def split_into_blocks(tree: PrefixTree) -> list[tuple[int, int, IntArray]]:
    """Return blocks (start, stop, ancestors of the first query) that minimise the sum of pairs and overheads."""
    size = len(tree)
    if not size:
        return []
    starts = np.flatnonzero(np.diff(tree.positions, prepend=-1) != 1)
    bounds = np.unique(np.concatenate([starts, np.arange(0, size, BLOCK_STRIDE), [size]]))
    # the position of a block's first token is the number of its ancestors before the block
    depth = tree.positions[bounds[:-1]]
    # dynamic programming over the bounds: lowest cost up to each one, and the previous bound on that path
    best, previous = np.full(len(bounds), np.inf), np.zeros(len(bounds), np.int64)
    best[0] = 0.0
    for index in range(1, len(bounds)):
        lowest = int(np.searchsorted(bounds, bounds[index] - MAX_BLOCK_QUERIES))
        candidates = np.arange(min(lowest, index - 1), index)
        width = bounds[index] - bounds[candidates]
        total = (
            best[candidates]
            + width * (depth[candidates] + width)
            + GATHER_OVERHEAD_PAIRS * depth[candidates]
            + BLOCK_OVERHEAD_PAIRS
        )
        winner = int(np.argmin(total))
        best[index], previous[index] = total[winner], candidates[winner]
    blocks, index = [], len(bounds) - 1
    while index:
        start = int(bounds[previous[index]])
        earlier = np.arange(start)
        blocks.append((start, int(bounds[index]), earlier[tree.subtree_end[:start] > start]))
        index = int(previous[index])
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
    """Attention function called by the model: query [1, heads, T, D], key and value [1, key heads, T, D].

    Returns [1, T, heads, D].
    """
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
    """softmax(q k) v by blocks; the backward recomputes attention weights. A sink is a column without a value."""

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
            rows = slice(block.start, block.stop)
            attn_weights, _ = _attention_weights(
                _fold_heads(query, key, rows), key[:, block.keys], block.mask, sinks, scale, softcap
            )
            block_out = torch.bmm(attn_weights[..., : block.mask.shape[1]], value[:, block.keys])
            out[rows] = block_out.view(heads, -1, value.shape[-1]).transpose(0, 1)
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
            rows, num_keys = slice(block.start, block.stop), block.mask.shape[1]
            queries, keys, values = _fold_heads(query, key, rows), key[:, block.keys], value[:, block.keys]
            attn_weights, softcap_grad = _attention_weights(
                queries, keys, block.mask, sinks, scale, softcap, with_softcap_grad=True
            )
            d_out = _fold_heads(grad_output, key, rows)
            _add_at(d_value, block.keys, torch.bmm(attn_weights[..., :num_keys].transpose(1, 2), d_out))
            d_weights = torch.bmm(d_out, values.transpose(1, 2))
            if len(sinks):
                d_weights = torch.nn.functional.pad(d_weights, (0, 1))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, attn_weights, -1, attn_weights.dtype)
            if len(sinks):
                d_sinks += d_scores[..., -1].reshape(heads, -1).sum(-1)
                d_scores = d_scores[..., :num_keys]
            if softcap_grad is not None:
                d_scores = d_scores * softcap_grad
            # the scale is applied to the smaller tensors, queries and keys, not to the scores
            d_query[:, rows] = torch.bmm(d_scores, keys).mul_(scale).view(heads, -1, query.shape[-1])
            _add_at(d_key, block.keys, torch.bmm(d_scores.transpose(1, 2), queries).mul_(scale))
        return d_query, d_key, d_value, d_sinks, None, None, None


def _fold_heads(query: Tensor, key: Tensor, rows: slice) -> Tensor:
    """Reshape rows of [heads, T, D] to [key heads, queries of all heads that read the key head, D]."""
    return query[:, rows].reshape(len(key), -1, query.shape[-1])


def _attention_weights(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor,
    sinks: Tensor,
    scale: float,
    softcap: float | None,
    *,
    with_softcap_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return attention weights [key heads, queries, keys (+ sink)], and the soft cap's derivative if requested."""
    softcap_grad = None
    if softcap is None:
        scores = torch.baddbmm(mask[None], queries, keys.transpose(1, 2), alpha=scale)
    else:
        capped = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale / softcap).tanh_()
        softcap_grad = 1 - capped.square() if with_softcap_grad else None
        scores = capped.mul_(softcap).add_(mask)
    if len(sinks):
        column = sinks.view(len(keys), -1, 1).repeat_interleave(queries.shape[1] * len(keys) // len(sinks), 1)
        scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1), softcap_grad


def _add_at(total: Tensor, index: Tensor | slice, part: Tensor) -> None:
    if isinstance(index, slice):
        total[:, index] += part
    else:
        total.index_add_(1, index, part)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
