"""Compute plain attention over a prefix tree tile by tile with torch's flash kernel for CPU.

In depth-first order the descendants of a node are contiguous. The visible query-key pairs are therefore covered, each
exactly once, by squares (nodes against themselves) and rectangles (descendants against ancestors), without copying keys
or queries. Each tile is one kernel call; partial results are merged by their log-sum-exp, and the backward of a tile
with the merged log-sum-exp is its exact part of the gradient. Sliding windows, soft caps and sinks are not supported.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.training.step.prefix_tree import IntArray, PrefixTree

MAX_SQUARE = 128
"""Longer squares are split in half: the kernel computes much of the half that the causal mask discards."""
SMALL_SUBTREE = 64
"""Adjacent subtrees of up to this many tokens in total share one masked square, which is cheaper than more calls."""

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Tile:
    """Contiguous queries against contiguous keys. All pairs are visible unless the tile is causal or has a mask."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None
    """[queries, keys] additive: 0 or -inf."""


def build_tiles(tree: PrefixTree, dtype: torch.dtype) -> tuple[list[Tile], list[Tile]]:
    """Return squares, exactly one per query, and rectangles; together they cover every visible pair once."""
    squares: list[Tile] = []
    rectangles: list[Tile] = []
    position, end = 0, tree.subtree_end
    while position < len(tree):
        start, stop = position, int(end[position])
        if stop - start > SMALL_SUBTREE:
            position = _tile_chain(end, start, squares, rectangles)
            continue
        while stop < len(tree) and end[stop] - start <= SMALL_SUBTREE:
            stop = int(end[stop])
        squares.append(_masked_square(tree, start, stop, dtype))
        position = stop
    return squares, rectangles


def _tile_chain(end: IntArray, start: int, squares: list[Tile], rectangles: list[Tile]) -> int:
    """Tile a chain: a node, its first child, the first child of that, and so on, while subtrees are large.

    The chain is contiguous, so a branch attends to all of the chain before it in one rectangle. Return its end.
    """
    chain_end, branches = start, []
    while chain_end < len(end) and (stop := int(end[chain_end])) - chain_end > SMALL_SUBTREE:
        branch_points = (end[chain_end:stop] != stop).nonzero()[0]
        chain_end = chain_end + int(branch_points[0]) if len(branch_points) else stop
        if chain_end == stop:
            break
        branches.append((chain_end, stop))
    _tile_causal(start, chain_end, squares, rectangles)
    first_query = chain_end
    for branch, stop in reversed(branches):
        rectangles.append(Tile(slice(first_query, stop), slice(start, branch)))
        first_query = stop
    return chain_end


def _tile_causal(start: int, stop: int, squares: list[Tile], rectangles: list[Tile]) -> None:
    if stop - start <= MAX_SQUARE:
        squares.append(Tile(slice(start, stop), slice(start, stop), causal=True))
        return
    middle = (start + stop) // 2
    rectangles.append(Tile(slice(middle, stop), slice(start, middle)))
    _tile_causal(start, middle, squares, rectangles)
    _tile_causal(middle, stop, squares, rectangles)


def _masked_square(tree: PrefixTree, start: int, stop: int, dtype: torch.dtype) -> Tile:
    rows = slice(start, stop)
    if (tree.subtree_end[rows] == stop).all():
        return Tile(rows, rows, causal=True)
    visible = torch.from_numpy(tree.visible(start, stop, np.arange(start, stop)))
    return Tile(rows, rows, mask=torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf))


class TileAttention(torch.autograd.Function):
    """softmax(q k) v over the tiles; query [heads, T, D], key and value [key heads, T, D]; returns [T, heads, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: tuple[list[Tile], list[Tile]], scale: float
    ) -> Tensor:
        squares, rectangles = tiles
        query, key, value = map(_unit_stride, (query, key, value))
        queries, keys, values = _group_heads(query, key, value)
        key_heads, heads_per_key, size, width = queries.shape
        out = query.new_empty(size, key_heads * heads_per_key, width)
        logsumexp = query.new_empty(key_heads, heads_per_key, size)
        out_by_head = _view_by_head(out, queries)
        for tile in squares:
            part, part_lse = _attend_tile(tile, queries, keys, values, scale)
            out_by_head[:, :, tile.queries], logsumexp[:, :, tile.queries] = part, part_lse
        for tile in rectangles:
            part, part_lse = _attend_tile(tile, queries, keys, values, scale)
            before = logsumexp[:, :, tile.queries]
            out_by_head[:, :, tile.queries].lerp_(part, torch.sigmoid(part_lse - before)[..., None])
            logsumexp[:, :, tile.queries] = torch.logaddexp(before, part_lse)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.rest = tiles, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        (squares, rectangles), scale = ctx.rest
        queries, keys, values = _group_heads(query, key, value)
        out_by_head, grad_output = _view_by_head(out, queries), _view_by_head(_unit_stride(grad_output), queries)
        d_query, d_key, d_value = torch.empty_like(queries), torch.zeros_like(key), torch.zeros_like(value)
        for tile in squares + rectangles:
            q_rows, k_rows = tile.queries, tile.keys
            tile_d_query, tile_d_key, tile_d_value = _flash_backward(
                grad_output[:, :, q_rows],
                queries[:, :, q_rows],
                keys[:, :, k_rows],
                values[:, :, k_rows],
                out_by_head[:, :, q_rows],
                logsumexp[:, :, q_rows],
                0.0,
                tile.causal,
                attn_mask=tile.mask,
                scale=scale,
            )
            if q_rows == k_rows:  # a square: each query has exactly one, and squares come first
                d_query[:, :, q_rows] = tile_d_query
            else:
                d_query[:, :, q_rows] += tile_d_query
            d_key[:, k_rows] += tile_d_key.sum(1)
            d_value[:, k_rows] += tile_d_value.sum(1)
        return d_query.view_as(query), d_key, d_value, None, None


def _unit_stride(state: Tensor) -> Tensor:
    """Make the last dimension contiguous: the kernel assumes it and silently returns wrong results otherwise."""
    return state if state.stride(-1) == 1 else state.contiguous()


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View all as [key heads, query heads per key head, T, D]; keys and values are expanded without a copy."""
    heads, size, width = query.shape
    shape = len(key), heads // len(key), size, width
    return query.view(shape), key[:, None].expand(shape), value[:, None].expand(shape)


def _view_by_head(state: Tensor, queries: Tensor) -> Tensor:
    """View [T, heads, D] with the dimensions of the grouped queries."""
    return state.view(-1, *queries.shape[:2], queries.shape[-1]).permute(1, 2, 0, 3)


def _attend_tile(tile: Tile, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of one tile."""
    q_rows, k_rows = tile.queries, tile.keys
    result: tuple[Tensor, Tensor] = _flash_forward(
        query[:, :, q_rows],
        key[:, :, k_rows],
        value[:, :, k_rows],
        0.0,
        tile.causal,
        attn_mask=tile.mask,
        scale=scale,
    )
    return result
