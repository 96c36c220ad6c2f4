"""Prefix-tree attention for training: forward and backward, for float32 on CPU.

The kernel computes the visible pairs of queries and keys and few others, for any tree, and reads tensors in the layout
models use. Results do not depend, bit for bit, on the number of threads or on tokens that are not visible, even
if these are not finite; a value that is not finite shows in the results of all tokens that see it. Sliding windows,
soft caps and sinks are not supported.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.inference.kernels.arguments import ANY, check_number, check_tensor, describe
from keel.inference.kernels.build import load_kernels, require_library

IntArray = NDArray[np.int64]

MAX_HEAD_DIM = 256
"""Largest supported head width."""
TARGET_PARTS = 64
"""Target number of work items, (part, key head) pairs: enough for the threads to finish at about the same time."""
MIN_PANELS_PER_PART = 6
"""Fewest panels per part, unless there is only one part: each part copies its keys and sums their gradients once."""
MAX_KEY_COPIES = 4
"""Most keys that all parts copy together, per token: bounds memory where each part sees much of what precedes it."""

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _TensorView(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("head_stride", _INT64), ("token_stride", _INT64)]


# A misspelt name would be set as an attribute of the Python object and leave the field empty: hence one list for each.
_TOKEN_FIELDS = ("end", "position", "run_start", "run_parent")
_PART_FIELDS = ("panel_start", "key_start", "first_token", "last_token")
_TENSOR_FIELDS = ("query", "key", "value", "out", "d_out", "d_query", "d_key", "d_value")


class _KernelArgs(ctypes.Structure):
    """The struct Call of tree_attention.c."""

    _fields_ = [
        *((name, _INT64) for name in ("size", "heads", "key_heads", "width", "parts", "threads")),
        *((name, _POINTER) for name in (*_TOKEN_FIELDS, *_PART_FIELDS)),
        *((name, _TensorView) for name in _TENSOR_FIELDS),
        *((name, _POINTER) for name in ("lse", "kv_grads", "scratch")),
        ("scratch_size", _INT64),
        ("scale", ctypes.c_float),
    ]


@cache
def _kernels() -> Any:
    library = require_library()
    library.tree_panel_rows.argtypes, library.tree_panel_rows.restype = [], _INT64
    library.tree_row_stride.argtypes, library.tree_row_stride.restype = [_INT64], _INT64
    library.tree_scratch_size.argtypes, library.tree_scratch_size.restype = [_INT64, _INT64], _INT64
    for function in (library.tree_forward, library.tree_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_KernelArgs)], None
    return library


def tree_kernel_supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors: query [heads, T, D], key and value [key heads, T, D]."""
    return not _problem(query, key, value) and load_kernels() is not None


def _problem(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return why the kernel does not support these tensors, or an empty string."""
    for name, state in (("query", query), ("key", key), ("value", value)):
        if state.dtype != torch.float32 or state.device.type != "cpu" or state.dim() != 3:
            return f"{name} is {describe(state)}; required: float32 on cpu, 3 dimensions"
    heads, size, width = query.shape
    if not 16 <= width <= MAX_HEAD_DIM or width % 8:
        return f"query has heads of width {width}; required: a multiple of 8 from 16 to {MAX_HEAD_DIM}"
    if key.shape[1:] != query.shape[1:] or not len(key) or not heads or heads % len(key):
        return (
            f"key has shape {list(key.shape)}; required: [key heads, {size}, {width}], where the number of key heads"
            f" divides the {heads} heads of query"
        )
    if value.shape != key.shape:
        return f"value has shape {list(value.shape)}; required: {list(key.shape)}, the shape of key"
    if size * max(heads // len(key), width + 32) >= 2**31:
        return f"query has {size} tokens; required: fewer, since the kernel has 32-bit offsets"
    return ""


class TreePlan:
    """A tree in the form the kernel reads: built once, for all layers and any number of heads."""

    def __init__(self, end: IntArray, positions: IntArray) -> None:
        """`end` [T] is one past each token's last descendant, `positions` [T] its number of ancestors.

        Tokens are in depth-first order.
        """
        for name, array in (("end", end), ("positions", positions)):
            if array.ndim != 1 or array.dtype.kind != "i":
                raise ValueError(
                    f"{name} is {array.dtype} of shape {list(array.shape)}; required: one dimension of integers"
                )
        if len(end) != len(positions):
            raise ValueError(f"positions has {len(positions)} numbers; required: {len(end)}, the length of end")
        if len(end) >= 2**31:
            raise ValueError(f"end has {len(end)} numbers; required: fewer than 2**31")
        size = len(end)
        tokens = np.arange(size)
        first = np.flatnonzero((np.diff(positions, prepend=0) != 1) | (tokens == 0))
        last = np.append(first, size)[1:]
        run_parent = np.full(size, -1, np.int64)
        path = np.full(size + 1, -1, np.int64)  # position -> the last token there; -1 above a root
        for begin, stop in zip(first.tolist(), last.tolist(), strict=True):
            depth = int(positions[begin])
            if not 0 <= depth <= begin:
                raise ValueError(f"positions[{begin}] is {depth}; required: 0 to {begin}, as in `PrefixTree.positions`")
            run_parent[begin] = path[depth - 1] if depth else -1
            path[depth : depth + stop - begin] = tokens[begin:stop]
        parent = tokens - 1
        parent[first] = run_parent[first]
        child = np.flatnonzero(parent >= 0)
        # Every token that sees a child sees its parent. If no other tokens see the child, the visible pairs counted by
        # `end` are as many as those counted by `positions`.
        nested = (end > tokens).all() and (end <= size).all() and (end[parent[child]] >= end[child]).all()
        if not nested or (end - tokens).sum() != (positions + 1).sum():
            raise ValueError(
                f"end and positions of {size} tokens contradict each other; required: those of one tree in depth-first"
                " order"
            )
        self.size, self.positions = size, positions
        run_start = np.repeat(first, last - first)
        arrays = (end, positions, run_start, run_parent)
        self._token_arrays = [np.ascontiguousarray(array, np.int32) for array in arrays]
        self._partitions: dict[tuple[int, int], tuple[IntArray, ...]] = {}

    def partition(self, key_heads: int, heads_per_group: int, rows_per_panel: int) -> tuple[IntArray, ...]:
        """Divide the panels among parts of similar cost.

        `heads_per_group` is the number of query heads per key head. Returns `panel_start` [parts + 1], the first panel
        of each part; `key_start` [parts + 1], how many keys all parts before it copy; `first_token` and `last_token`
        [parts], its first token and one past its last token.
        """
        sizes = {"key_heads": key_heads, "heads_per_group": heads_per_group, "rows_per_panel": rows_per_panel}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; required: at least 1")
        if (key_heads, heads_per_group) not in self._partitions:
            panels = -(-self.size * heads_per_group // rows_per_panel)
            begin = np.arange(panels) * rows_per_panel // heads_per_group
            cost = np.cumsum(self.positions[begin] + 2 * rows_per_panel // heads_per_group + 1)
            count = max(1, min(-(-TARGET_PARTS // key_heads), panels // MIN_PANELS_PER_PART))
            while True:
                inner = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count) + 1
                panel_start = np.unique(np.concatenate([[0], inner, [panels]]))
                first = panel_start[:-1] * rows_per_panel // heads_per_group
                last = -(-np.minimum(panel_start[1:] * rows_per_panel, self.size * heads_per_group) // heads_per_group)
                key_start = np.concatenate([[0], np.cumsum(self.positions[first] + last - first)])
                if count == 1 or key_start[-1] <= MAX_KEY_COPIES * self.size:
                    break
                count -= 1
            self._partitions[key_heads, heads_per_group] = tuple(
                array.astype(np.int64) for array in (panel_start, key_start, first, last)
            )
        return self._partitions[key_heads, heads_per_group]


class TreeAttention(torch.autograd.Function):
    """softmax(scale * q k) v over a tree: query [heads, T, D], key and value [key heads, T, D]; returns [T, heads, D].

    Call `TreeAttention.apply(query, key, value, plan, scale)` with tensors that `tree_kernel_supports`
    accepts and the plan of their tree.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> Tensor:
        if problem := _problem(query, key, value):
            raise ValueError(f"{problem}; call `tree_kernel_supports` first and use TileAttention if it returns False")
        heads, size, width = query.shape
        if size != plan.size:
            raise ValueError(f"plan has {plan.size} tokens; required: {size}, the tokens of query")
        check_number("scale", scale)
        query, key, value = map(_unit_stride, (query, key, value))
        out, lse = query.new_empty(size, heads, width), query.new_empty(heads * size)
        views = {"query": query, "key": key, "value": value, "out": out.transpose(0, 1)}
        _call_kernel(_kernels().tree_forward, plan, views, lse, scale, kv_grads=False)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan_and_scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan, scale = ctx.plan_and_scale
        views = {"query": query, "key": key, "value": value, "out": out.transpose(0, 1)}
        check_tensor("the gradient of the output", d_out, tuple(out.shape), ANY)
        views["d_out"] = _unit_stride(d_out).transpose(0, 1)
        gradients = {f"d_{name}": _empty_like(views[name]) for name in ("query", "key", "value")}
        _call_kernel(_kernels().tree_backward, plan, views | gradients, lse, scale, kv_grads=True)
        return *gradients.values(), None, None


def _call_kernel(
    function: Any, plan: TreePlan, views: dict[str, Tensor], lse: Tensor, scale: float, *, kv_grads: bool
) -> None:
    """Call a kernel with tensors [heads or key heads, T, D] of unit stride in D.

    `kv_grads`: whether the kernel needs memory for the gradients of keys and values in each part.
    """
    (heads, size, width), key_heads = views["query"].shape, len(views["key"])
    if not size:
        return
    functions, threads = _kernels(), torch.get_num_threads()
    parts = panel_start, key_start, *_ = plan.partition(key_heads, heads // key_heads, functions.tree_panel_rows())
    most_keys = int(np.diff(key_start).max())
    scratch_size = -(-functions.tree_scratch_size(most_keys, width) // 16) * 16  # threads share no cache line
    scratch = lse.new_empty(threads * scratch_size)
    grads_size = 2 * key_heads * int(key_start[-1]) * functions.tree_row_stride(width)
    grads = lse.new_empty(grads_size if kv_grads else 0)
    call = _KernelArgs(size, heads, key_heads, width, len(panel_start) - 1, threads)
    for name, array in zip(_TOKEN_FIELDS, plan._token_arrays, strict=True):
        setattr(call, name, array.ctypes.data)
    for name, part_array in zip(_PART_FIELDS, parts, strict=True):
        setattr(call, name, part_array.ctypes.data)
    for name, view in views.items():
        setattr(call, name, _TensorView(view.data_ptr(), view.stride(0), view.stride(1)))
    call.lse, call.kv_grads, call.scratch = lse.data_ptr(), grads.data_ptr(), scratch.data_ptr()
    call.scratch_size, call.scale = scratch_size, scale
    function(ctypes.byref(call))


def _unit_stride(state: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, with unit stride in the last dimension."""
    return state if state.stride(-1) == 1 else state.contiguous()


def _empty_like(state: Tensor) -> Tensor:
    """Return an empty tensor with unit stride in the last dimension, and the strides of `state` where possible."""
    result = torch.empty_like(state)
    return result if result.stride(-1) == 1 else state.new_empty(state.shape)
