"""Attention of training over a prefix tree in C: forward and backward, for float32 on CPU.

It computes what is seen and little else, in whatever tree, and reads tensors as models lay them out. No bit of a result
depends on the number of threads or on tokens that are not seen, not even if these are not finite; what is not finite
shows in all that see it. Leaves out windows, soft caps and sinks.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.native.library import library

Ints = NDArray[np.int64]

WIDEST = 256
ITEMS = 64
"""Parts of all key heads together: enough for the threads to end at about the same time."""
PANELS = 6
"""No part has fewer panels, unless it is all: its keys are copied, and their gradients added up, once for it."""
COPIES = 4
"""How many keys all parts have together, per token: what bounds memory where each part sees much of what is before."""

_I, _P = ctypes.c_int64, ctypes.c_void_p


class _View(ctypes.Structure):
    _fields_ = [("data", _P), ("head", _I), ("token", _I)]


_VIEWS = ("query", "key", "value", "out", "outer", "d_query", "d_key", "d_value")


class _Call(ctypes.Structure):
    """As in tree.c."""

    _fields_ = [
        *((name, _I) for name in ("size", "heads", "key_heads", "width", "parts", "threads")),
        *((name, _P) for name in ("end", "position", "start", "up", "bounds", "room", "first", "last")),
        *((name, _View) for name in _VIEWS),
        *((name, _P) for name in ("norm", "sums", "scratch")),
        ("scratch_size", _I),
        ("scale", ctypes.c_float),
    ]


@cache
def _functions() -> Any:
    found = library()
    assert found is not None, "whoever calls has asked whether it fits"
    found.tree_rows.argtypes, found.tree_rows.restype = [], _I
    found.tree_stride.argtypes, found.tree_stride.restype = [_I], _I
    found.tree_scratch.argtypes, found.tree_scratch.restype = [_I, _I], _I
    for function in (found.tree_forward, found.tree_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_Call)], None
    return found


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel serves these: query [heads, T, D], key and value [key heads, T, D]."""
    states = (query, key, value)
    width = query.shape[-1]
    return (
        all(state.dtype == torch.float32 and state.device.type == "cpu" and state.dim() == 3 for state in states)
        and key.shape == value.shape
        and query.shape[1:] == key.shape[1:]
        and len(key) > 0
        and len(query) > 0
        and len(query) % len(key) == 0
        and 16 <= width <= WIDEST
        and width % 8 == 0
        and query.shape[1] * max(len(query) // len(key), width + 32) < 2**31  # places are 32 bits wide
        and library() is not None
    )


class Plan:
    """A tree as the kernel reads it: made once, for all layers and any number of heads."""

    def __init__(self, end: Ints, positions: Ints) -> None:
        """[T] one past each token's last descendant, and how many tokens it sees before itself."""
        size = len(end)
        place = np.arange(size)
        first = np.flatnonzero((np.diff(positions, prepend=0) != 1) | (place == 0))
        last = np.append(first, size)[1:]
        up = np.full(size, -1, np.int64)
        path = np.full(size + 1, -1, np.int64)  # by position, of the token that was last; one before the root is none
        for begin, stop in zip(first.tolist(), last.tolist(), strict=True):
            depth = int(positions[begin])
            if not 0 <= depth <= begin:
                raise ValueError(f"token {begin} cannot be at position {depth}; give `end` and `positions` of one Tree")
            up[begin] = path[depth - 1] if depth else -1
            path[depth : depth + stop - begin] = place[begin:stop]
        parent = place - 1
        parent[first] = up[first]
        child = np.flatnonzero(parent >= 0)
        # whoever sees a child sees its parent; and if no others see it, pairs are as many as ancestors
        nested = (end > place).all() and (end <= size).all() and (end[parent[child]] >= end[child]).all()
        if not nested or (end - place).sum() != (positions + 1).sum():
            raise ValueError(f"`end` and `positions` of {size} tokens are not those of one tree in depth-first order")
        self.size, self.positions = size, positions
        runs = np.repeat(first, last - first)
        self._tokens = [np.ascontiguousarray(one, np.int32) for one in (end, positions, runs, up)]
        self._parts: dict[tuple[int, int], tuple[Ints, ...]] = {}

    def parts(self, key_heads: int, each: int, rows: int) -> tuple[Ints, ...]:
        """Parts of panels of so many rows, of like cost: their first panels, how many keys those before have, and the
        tokens from their first to their last."""
        if (key_heads, each) not in self._parts:
            panels = -(-self.size * each // rows)
            begin = np.arange(panels) * rows // each
            cost = np.cumsum(self.positions[begin] + 2 * rows // each + 1)
            count = max(1, min(-(-ITEMS // key_heads), panels // PANELS))
            while True:
                inner = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count) + 1
                bounds = np.unique(np.concatenate([[0], inner, [panels]]))
                first = bounds[:-1] * rows // each
                last = -(-np.minimum(bounds[1:] * rows, self.size * each) // each)
                room = np.concatenate([[0], np.cumsum(self.positions[first] + last - first)])
                if count == 1 or room[-1] <= COPIES * self.size:
                    break
                count -= 1
            self._parts[key_heads, each] = tuple(one.astype(np.int64) for one in (bounds, room, first, last))
        return self._parts[key_heads, each]


class TreeAttention(torch.autograd.Function):
    """softmax(q k) v over a tree: query [heads, T, D], key and value [key heads, T, D]; gives [T, heads, D].

    Called as `TreeAttention.apply(query, key, value, plan, scale)`, with tensors that fit and the plan of their tree.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float) -> Tensor:
        if not fits(query, key, value):
            shapes = ", ".join(f"{tuple(one.shape)} {one.dtype} {one.device}" for one in (query, key, value))
            raise ValueError(
                f"the kernel does not serve {shapes}; ask `fits` first, and use TileAttention where it says no"
            )
        heads, size, width = query.shape
        if size != plan.size:
            raise ValueError(f"{size} tokens under a plan of {plan.size}; make the plan of the same tree")
        query, key, value = map(_dense, (query, key, value))
        out, norm = query.new_empty(size, heads, width), query.new_empty(heads * size)
        views = {"query": query, "key": key, "value": value, "out": out.transpose(0, 1)}
        _run(_functions().tree_forward, plan, views, norm, scale, sums=False)
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.rest = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        plan, scale = ctx.rest
        views = {"query": query, "key": key, "value": value, "out": out.transpose(0, 1)}
        views["outer"] = _dense(outer).transpose(0, 1)
        found = {f"d_{name}": _alike(views[name]) for name in ("query", "key", "value")}
        _run(_functions().tree_backward, plan, views | found, norm, scale, sums=True)
        return *found.values(), None, None


def _run(function: Any, plan: Plan, views: dict[str, Tensor], norm: Tensor, scale: float, *, sums: bool) -> None:
    (heads, size, width), key_heads = views["query"].shape, len(views["key"])
    if not size:
        return
    functions, threads = _functions(), torch.get_num_threads()
    parts = bounds, room, *_ = plan.parts(key_heads, heads // key_heads, functions.tree_rows())
    each = -(-functions.tree_scratch(int(np.diff(room).max()), width) // 16) * 16
    scratch = norm.new_empty(threads * each)
    total = norm.new_empty(2 * key_heads * int(room[-1]) * functions.tree_stride(width) if sums else 0)
    call = _Call(size, heads, key_heads, width, len(bounds) - 1, threads)
    for name, numbers in zip(("end", "position", "start", "up"), plan._tokens, strict=True):
        setattr(call, name, numbers.ctypes.data)
    for name, counts in zip(("bounds", "room", "first", "last"), parts, strict=True):
        setattr(call, name, counts.ctypes.data)
    for name, view in views.items():
        setattr(call, name, _View(view.data_ptr(), view.stride(0), view.stride(1)))
    call.norm, call.sums, call.scratch = norm.data_ptr(), total.data_ptr(), scratch.data_ptr()
    call.scratch_size, call.scale = each, scale
    function(ctypes.byref(call))


def _dense(state: Tensor) -> Tensor:
    """With the numbers of a head side by side."""
    return state if state.stride(-1) == 1 else state.contiguous()


def _alike(state: Tensor) -> Tensor:
    """As it lies in memory, if that can be."""
    made = torch.empty_like(state)
    return made if made.stride(-1) == 1 else state.new_empty(state.shape)
