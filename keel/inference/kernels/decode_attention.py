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
    found = require_library()
    found.decode_attention.argtypes = [
        *(_POINTER, _INT64, _INT64, _INT64, _INT64, _INT64, _INT64, _INT64),
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_float, _POINTER, _INT64, _INT64, _POINTER, _INT64),
    ]
    found.decode_attention.restype = ctypes.c_int
    found.apply_rope.argtypes = [_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _POINTER]
    found.apply_rope.restype = None
    return found


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
    """The keys each row attends to, as stretches of contiguous keys inside stores; the same for all layers.

    A store is a contiguous tensor of keys (or values), such as [sequences, key heads, length, D].
    """

    def __init__(
        self,
        row_starts: list[int],
        tensor_index: list[int],
        offsets: list[int],
        lengths: list[int],
        head_strides: list[int],
    ):
        """Row i reads stretches first[i] to first[i + 1].

        Stretch j begins `offset[j]` floats into store number `store[j]`, has `length[j]` keys for each key head, and
        `along[j]` floats from one key head to the next.
        """
        columns = {"store": tensor_index, "offset": offsets, "length": lengths, "along": head_strides}
        if len(row_starts) < 2 or row_starts[0] != 0 or any(end < begin for begin, end in pairwise(row_starts)):
            raise ValueError(
                f"first is {row_starts}; required: for one row or more, numbers that start at 0 and never fall"
            )
        for name, column in columns.items():
            if len(column) != row_starts[-1]:
                raise ValueError(
                    f"{name} has {len(column)} numbers; required: {row_starts[-1]}, the last number of first"
                )
            if min(column, default=0) < 0:
                raise ValueError(f"{name} has the number {min(column)}; required: no negative numbers")
        self.row_starts, self.lengths, self.head_strides = (
            np.array(some, np.int64) for some in (row_starts, lengths, head_strides)
        )
        self._tensor_index, self._byte_offsets = np.array(tensor_index, np.int64), np.array(offsets, np.int64)
        counts = [sum(lengths[begin:end]) for begin, end in pairwise(row_starts)]
        if min(counts) == 0:
            raise ValueError(f"length gives row {counts.index(0)} no key; required: at least one for each row")
        self.padded_length = -(-max(counts) // _LANES) * _LANES
        """Scores that one query needs room for: the keys of the longest row, rounded up to whole vectors."""
        self._sizes: dict[tuple[int, int], list[int]] = {}

    def addresses(self, tensors: list[Tensor]) -> IntArray:
        """Return the address of each stretch, for stores that `check` accepts."""
        found: IntArray = (
            np.array([store.data_ptr() for store in tensors], np.int64)[self._tensor_index] + 4 * self._byte_offsets
        )
        return found

    def check(self, name: str, stores: list[Tensor], groups: int, width: int) -> None:
        """Raise ValueError unless every stretch lies inside its store, for so many key heads of this width."""
        sizes = self._store_sizes(groups, width)
        if len(stores) < len(sizes):
            raise ValueError(f"{name} has {len(stores)} stores; required: at least {len(sizes)}")
        for number, (store, size) in enumerate(zip(stores, sizes, strict=False)):
            plain = store.dtype is torch.float32 and store.is_cpu and store.is_contiguous()
            if not plain or store.numel() < size:
                raise ValueError(
                    f"{name}[{number}] is {describe(store)}; required: float32 on cpu, {CONTIGUOUS}, at least {size}"
                    " numbers"
                )

    def _store_sizes(self, groups: int, width: int) -> list[int]:
        """Return how many floats the stretches need in each store; remembered, since all layers ask for it."""
        if (groups, width) not in self._sizes:
            ends = self._byte_offsets + max(groups - 1, 0) * self.head_strides + self.lengths * width
            sizes = np.zeros(int(self._tensor_index.max()) + 1, np.int64)
            np.maximum.at(sizes, self._tensor_index, np.where(self.lengths > 0, ends, 0))
            self._sizes[groups, width] = sizes.tolist()
        return self._sizes[groups, width]


def attend_rows(
    query: Tensor, spans: KeySpans, keys: list[Tensor], values: list[Tensor], scale: float, out: Tensor
) -> None:
    """Write softmax(scale * query keys) values to `out`, where each row has its own keys.

    `query` is [key heads, query heads per key head, rows, D] with unit stride in D, a multiple of 8. `keys` and
    `values` are the stores that `stretches` refers to. `out` is [rows, query heads, D]; only its rows may have gaps
    between them.
    """
    check_tensor("query", query, (None, None, None, None), UNIT_STRIDE)
    groups, rest, rows, width = query.shape
    if not width or width % _LANES:
        raise ValueError(f"query has heads of width {width}; required: a multiple of {_LANES}")
    if rows != len(spans.row_starts) - 1:
        raise ValueError(f"stretches describe {len(spans.row_starts) - 1} rows; required: {rows}, the rows of query")
    spans.check("keys", keys, groups, width)
    spans.check("values", values, groups, width)
    check_number("scale", scale)
    check_tensor("out", out, (rows, groups * rest, width), ROWS)
    threads = torch.get_num_threads()
    scores = query.new_empty(threads * rest * spans.padded_length)
    key_places, value_places = spans.addresses(keys), spans.addresses(values)
    failed = _kernels().decode_attention(
        *(query.data_ptr(), *query.stride()[:3], groups, rest, rows, width),
        *(spans.row_starts.ctypes.data, key_places.ctypes.data, value_places.ctypes.data),
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
        raise MemoryError(f"no memory for the list of {len(key_places)} stretches of keys of a decode step")


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
