"""Plain attention over a prefix tree by torch's flash kernel for CPU, tile by tile.

In depth-first order the descendants of a node stand together. So everything that is attended to is tiled, each pair of
query and key once, by squares of nodes with themselves and rectangles of their descendants against them: neither keys
nor queries are copied. Each tile is a call of the kernel; partial results are merged by their log-sum-exp, and the
backward of a tile under the merged one is its exact part of the gradient. Leaves out windows, soft caps and sinks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.training.step.prefix_tree import IntArray, PrefixTree

MAX_SQUARE = 128
"""A longer square is halved: the kernel computes much of the half that a causal mask then throws away."""
SMALL_SUBTREE = 64
"""Neighbouring subtrees of so many tokens in all share a square, under a mask: calls would cost more than pairs."""

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries against keys, both neighbours in the tree's order. All are visible unless it is causal or has a mask."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None
    """[queries, keys] additive: 0 or -inf."""


def build_tiles(tree: PrefixTree, dtype: torch.dtype) -> tuple[list[Tile], list[Tile]]:
    """Squares, one for each query, and rectangles: together every visible pair once."""
    squares: list[Tile] = []
    rectangles: list[Tile] = []
    place, end = 0, tree.subtree_end
    while place < len(tree):
        first, last = place, int(end[place])
        if last - first > SMALL_SUBTREE:
            place = _tile_chain(end, first, squares, rectangles)
            continue
        while last < len(tree) and end[last] - first <= SMALL_SUBTREE:
            last = int(end[last])
        squares.append(_masked_square(tree, first, last, dtype))
        place = last
    return squares, rectangles


def _tile_chain(end: IntArray, start: int, squares: list[Tile], rectangles: list[Tile]) -> int:
    """A node, its first child, the first child of that, and so on, while they have many descendants; gives its end.

    They are neighbours, so that whoever branches off sees all of the line before in one rectangle.
    """
    after, branches = start, []
    while after < len(end) and (last := int(end[after])) - after > SMALL_SUBTREE:
        others = (end[after:last] != last).nonzero()[0]
        after = after + int(others[0]) if len(others) else last
        if after == last:
            break
        branches.append((after, last))
    _tile_causal(start, after, squares, rectangles)
    begin = after
    for branch, last in reversed(branches):
        rectangles.append(Tile(slice(begin, last), slice(start, branch)))
        begin = last
    return after


def _tile_causal(start: int, stop: int, squares: list[Tile], rectangles: list[Tile]) -> None:
    if stop - start <= MAX_SQUARE:
        squares.append(Tile(slice(start, stop), slice(start, stop), causal=True))
        return
    middle = (start + stop) // 2
    rectangles.append(Tile(slice(middle, stop), slice(start, middle)))
    _tile_causal(start, middle, squares, rectangles)
    _tile_causal(middle, stop, squares, rectangles)


def _masked_square(tree: PrefixTree, start: int, stop: int, dtype: torch.dtype) -> Tile:
    here = slice(start, stop)
    if (tree.subtree_end[here] == stop).all():
        return Tile(here, here, causal=True)
    seen = torch.from_numpy(tree.visible(start, stop, np.arange(start, stop)))
    return Tile(here, here, mask=torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf))


class TileAttention(torch.autograd.Function):
    """softmax(q k) v over the tiles: query [heads, T, D], key and value [key heads, T, D]; gives [T, heads, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiled: tuple[list[Tile], list[Tile]], scale: float
    ) -> Tensor:
        squares, rectangles = tiled
        query, key, value = map(_unit_stride, (query, key, value))
        grouped, keys, values = _group_heads(query, key, value)
        groups, each, size, width = grouped.shape
        out, norm = query.new_empty(size, groups * each, width), query.new_empty(groups, each, size)
        mixed = _view_by_head(out, grouped)
        for tile in squares:
            part, total = _attend_tile(tile, grouped, keys, values, scale)
            mixed[:, :, tile.queries], norm[:, :, tile.queries] = part, total
        for tile in rectangles:
            part, total = _attend_tile(tile, grouped, keys, values, scale)
            before = norm[:, :, tile.queries]
            mixed[:, :, tile.queries].lerp_(part, torch.sigmoid(total - before)[..., None])
            norm[:, :, tile.queries] = torch.logaddexp(before, total)
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.rest = tiled, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        (squares, rectangles), scale = ctx.rest
        grouped, keys, values = _group_heads(query, key, value)
        mixed, grad_output = _view_by_head(out, grouped), _view_by_head(_unit_stride(grad_output), grouped)
        d_query, d_key, d_value = torch.empty_like(grouped), torch.zeros_like(key), torch.zeros_like(value)
        for tile in squares + rectangles:
            here, there = tile.queries, tile.keys
            of_queries, of_keys, of_values = _flash_backward(
                grad_output[:, :, here],
                grouped[:, :, here],
                keys[:, :, there],
                values[:, :, there],
                mixed[:, :, here],
                norm[:, :, here],
                0.0,
                tile.causal,
                attn_mask=tile.mask,
                scale=scale,
            )
            if here == there:  # a square: each query has one, and it comes first
                d_query[:, :, here] = of_queries
            else:
                d_query[:, :, here] += of_queries
            d_key[:, there] += of_keys.sum(1)
            d_value[:, there] += of_values.sum(1)
        return d_query.view_as(query), d_key, d_value, None, None


def _unit_stride(state: Tensor) -> Tensor:
    """With the numbers of a head side by side: the kernel takes that for granted, and is wrong without a word else."""
    return state if state.stride(-1) == 1 else state.contiguous()


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All as [key heads, query heads of each, T, D]; keys and values are the same memory for every query head."""
    heads, size, width = query.shape
    each = heads // len(key)
    shape = len(key), each, size, width
    return query.view(shape), key[:, None].expand(shape), value[:, None].expand(shape)


def _view_by_head(state: Tensor, grouped: Tensor) -> Tensor:
    """[T, heads, D] seen as the grouped queries are."""
    return state.view(-1, *grouped.shape[:2], grouped.shape[-1]).permute(1, 2, 0, 3)


def _attend_tile(tile: Tile, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    here, there = tile.queries, tile.keys
    found: tuple[Tensor, Tensor] = _flash_forward(
        query[:, :, here], key[:, :, there], value[:, :, there], 0.0, tile.causal, attn_mask=tile.mask, scale=scale
    )
    return found
