"""Decode attention (one query per sequence) and rotary embeddings. Float32 on CPU, gradients are not recorded."""

import ctypes
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.inference.kernels.arguments import CONTIGUOUS, ROWS, UNIT_STRIDE, check_number, check_tensor, describe
from keel.inference.kernels.build import load_kernels, require_library

IntArray = NDArray[np.int64]
_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_LANES = 8
"""Head widths must be multiples of the vector length of the kernels, which is 8 or 4 floats."""


@cache
def _kernels() -> Any:
    library = require_library()
    library.decode_attention.argtypes = [
        *(_POINTER, _INT64, _INT64, _INT64, _INT64, _INT64, _INT64, _INT64),
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_float, _POINTER, _INT64, _INT64, _POINTER, _INT64),
    ]
    library.decode_attention.restype = ctypes.c_int
    library.apply_rope.argtypes = [_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _POINTER]
    library.apply_rope.restype = None
    return library


def decode_kernel_supports(query: Tensor, value: Tensor) -> bool:
    """Return whether `attend_rows` supports a query and values of these dtypes, devices, strides and widths."""
    supported = all(state.dtype == torch.float32 and state.device.type == "cpu" for state in (query, value))
    width = query.shape[-1]
    return (
        supported
        and query.stride(-1) == 1
        and width % _LANES == 0
        and width == value.shape[-1]
        and load_kernels() is not None
    )


class KeySpans:
    """The keys each row attends to, as spans of contiguous keys inside tensors; the same for all layers.

    The tensors of keys (or values) are contiguous, for example [sequences, key heads, length, D].
    """

    def __init__(
        self,
        row_starts: list[int],
        tensor_index: list[int],
        offsets: list[int],
        lengths: list[int],
        head_strides: list[int],
    ):
        """Row i reads the spans row_starts[i] to row_starts[i + 1] - 1.

        Span j begins `offsets[j]` floats into tensor number `tensor_index[j]` and has `lengths[j]` keys for each key
        head, with `head_strides[j]` floats from one key head to the next.
        """
        columns = {
            "tensor_index": tensor_index,
            "offsets": offsets,
            "lengths": lengths,
            "head_strides": head_strides,
        }
        if len(row_starts) < 2 or row_starts[0] != 0 or any(end < begin for begin, end in pairwise(row_starts)):
            raise ValueError(
                f"row_starts is {row_starts}; required: for one row or more, numbers that start at 0 and never decrease"
            )
        for name, column in columns.items():
            if len(column) != row_starts[-1]:
                raise ValueError(
                    f"{name} has {len(column)} numbers; required: {row_starts[-1]}, the last number of row_starts"
                )
            if min(column, default=0) < 0:
                raise ValueError(f"{name} has the number {min(column)}; required: no negative numbers")
        self.row_starts, self.lengths, self.head_strides = (
            np.array(column, np.int64) for column in (row_starts, lengths, head_strides)
        )
        self._tensor_index, self._offsets = np.array(tensor_index, np.int64), np.array(offsets, np.int64)
        counts = [sum(lengths[begin:end]) for begin, end in pairwise(row_starts)]
        if min(counts) == 0:
            raise ValueError(f"lengths gives row {counts.index(0)} no key; required: at least one for each row")
        self.padded_length = -(-max(counts) // _LANES) * _LANES
        """Size of the score buffer of one query: the keys of the longest row, rounded up to full vectors."""
        self._sizes: dict[tuple[int, int], list[int]] = {}

    def addresses(self, tensors: list[Tensor]) -> IntArray:
        """Return the address of each span, for tensors that `check` accepts."""
        starts = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        addresses: IntArray = starts[self._tensor_index] + 4 * self._offsets
        return addresses

    def check(self, name: str, tensors: list[Tensor], key_heads: int, width: int) -> None:
        """Raise ValueError unless every span lies inside its tensor, for so many key heads of this width."""
        sizes = self._required_sizes(key_heads, width)
        if len(tensors) < len(sizes):
            raise ValueError(f"{name} has {len(tensors)} tensors; required: at least {len(sizes)}")
        for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=False)):
            supported = tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()
            if not supported or tensor.numel() < size:
                raise ValueError(
                    f"{name}[{index}] is {describe(tensor)}; required: float32 on cpu, {CONTIGUOUS}, at least {size}"
                    " numbers"
                )

    def _required_sizes(self, key_heads: int, width: int) -> list[int]:
        """Return how many floats the spans need in each tensor; cached, since every layer needs it."""
        if (key_heads, width) not in self._sizes:
            ends = self._offsets + max(key_heads - 1, 0) * self.head_strides + self.lengths * width
            sizes = np.zeros(int(self._tensor_index.max()) + 1, np.int64)
            np.maximum.at(sizes, self._tensor_index, np.where(self.lengths > 0, ends, 0))
            self._sizes[key_heads, width] = sizes.tolist()
        return self._sizes[key_heads, width]


def attend_rows(
    query: Tensor, spans: KeySpans, keys: list[Tensor], values: list[Tensor], scale: float, out: Tensor
) -> None:
    """Write softmax(scale * query keys) values to `out`, where each row has its own keys.

    `query` is [key heads, query heads per key head, rows, D] with unit stride in D, a multiple of 8. `keys` and
    `values` are the tensors that `spans` refers to. `out` is [rows, query heads, D]; only its rows may have gaps
    between them.
    """
    check_tensor("query", query, (None, None, None, None), UNIT_STRIDE)
    key_heads, group_size, rows, width = query.shape
    if not width or width % _LANES:
        raise ValueError(f"query has heads of width {width}; required: a multiple of {_LANES}")
    if rows != len(spans.row_starts) - 1:
        raise ValueError(f"spans describes {len(spans.row_starts) - 1} rows; required: {rows}, the rows of query")
    spans.check("keys", keys, key_heads, width)
    spans.check("values", values, key_heads, width)
    check_number("scale", scale)
    check_tensor("out", out, (rows, key_heads * group_size, width), ROWS)
    threads = torch.get_num_threads()
    scores = query.new_empty(threads * group_size * spans.padded_length)
    key_addresses, value_addresses = spans.addresses(keys), spans.addresses(values)
    failed = _kernels().decode_attention(
        *(query.data_ptr(), *query.stride()[:3], key_heads, group_size, rows, width),
        *(spans.row_starts.ctypes.data, key_addresses.ctypes.data, value_addresses.ctypes.data),
        *(
            spans.lengths.ctypes.data,
            spans.head_strides.ctypes.data,
            scale,
            scores.data_ptr(),
            spans.padded_length,
            threads,
        ),
        *(out.data_ptr(), out.stride(0)),
    )
    if failed:
        raise MemoryError(f"out of memory for the list of {len(key_addresses)} key spans of a decode step")


def apply_rope(states: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> None:
    """Apply rotary embeddings to the first `heads` heads of each row of states [T, heads * D or more], in place.

    `cosine` and `sine` are [T, D / 2], contiguous. Element i of a head is paired with element i + D / 2. Only the rows
    of `states` may have gaps between them.
    """
    check_tensor("states", states, (None, None), ROWS)
    check_tensor("cosine", cosine, (len(states), None), CONTIGUOUS)
    check_tensor("sine", sine, tuple(cosine.shape), CONTIGUOUS)
    width = 2 * cosine.shape[1]
    if not 0 <= heads * width <= states.shape[1]:
        most = states.shape[1] // width if width else 0
        raise ValueError(f"heads is {heads}; required: 0 to {most}, the heads of width {width} in a row of states")
    _kernels().apply_rope(
        *(states.data_ptr(), len(states), states.stride(0), heads, width),
        *(cosine.data_ptr(), sine.data_ptr()),
    )
