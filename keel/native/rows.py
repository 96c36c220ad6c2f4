"""Attention of answers under way, and the rotation of queries and keys, in C. Float32 on CPU, no gradients."""

import ctypes
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.native.library import library

Ints = NDArray[np.int64]
_I, _P = ctypes.c_int64, ctypes.c_void_p
_LANES = 8
"""Widths must be multiples of what the kernels take at once, which is this or half of it."""


@cache
def _functions() -> Any:
    found = library()
    assert found is not None, "whoever attends has asked for the library"
    found.attend_rows.argtypes = [
        *(_P, _I, _I, _I, _I, _I, _I, _I),
        *(_P, _P, _P, _P, _P, ctypes.c_float, _P, _I, _I, _P, _I),
    ]
    found.attend_rows.restype = ctypes.c_int
    found.rotate.argtypes = [_P, _I, _I, _I, _I, _P, _P]
    found.rotate.restype = None
    return found


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether these can be attended with here."""
    plain = query.dtype == torch.float32 and query.device.type == "cpu" and query.stride(-1) == 1
    return plain and query.shape[-1] % _LANES == 0 and query.shape[-1] == value.shape[-1] and library() is not None


class Stretches:
    """Which keys each row reads: places among stores of keys and values, the same for all layers."""

    def __init__(self, first: list[int], store: list[int], offset: list[int], length: list[int], along: list[int]):
        """Row i reads those from first[i] to first[i + 1]; each begins `offset` floats into its store, has `length`
        keys, and `along` floats from one key head to the next."""
        self.first, self.length, self.along = (np.array(some, np.int64) for some in (first, length, along))
        self._store, self._offset = np.array(store, np.int64), 4 * np.array(offset, np.int64)
        longest = max(sum(length[here:end]) for here, end in pairwise(first))
        self.room = -(-longest // _LANES) * _LANES

    def places(self, stores: list[Tensor]) -> Ints:
        """Where they are in memory, in these stores."""
        found: Ints = np.array([store.data_ptr() for store in stores], np.int64)[self._store] + self._offset
        return found


def attend_rows(
    query: Tensor, stretches: Stretches, keys: list[Tensor], values: list[Tensor], scale: float, out: Tensor
) -> None:
    """Query [key heads, heads of each, n, D]; fills out [n, heads, D], of which only n may have gaps."""
    groups, rest, rows, width = query.shape
    threads = torch.get_num_threads()
    scores = query.new_empty(threads * rest * stretches.room)
    key_places, value_places = stretches.places(keys), stretches.places(values)
    failed = _functions().attend_rows(
        *(query.data_ptr(), *query.stride()[:3], groups, rest, rows, width),
        *(stretches.first.ctypes.data, key_places.ctypes.data, value_places.ctypes.data),
        *(stretches.length.ctypes.data, stretches.along.ctypes.data, scale, scores.data_ptr(), stretches.room, threads),
        *(out.data_ptr(), out.stride(0)),
    )
    if failed:
        raise MemoryError("no memory for the attention of a decode step")


def rotate(states: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> None:
    """The first `heads` heads of states [T, any] by the angles [T, D / 2], in place."""
    _functions().rotate(
        *(states.data_ptr(), len(states), states.stride(0), heads, 2 * cosine.shape[1]),
        *(cosine.data_ptr(), sine.data_ptr()),
    )
