"""Matrix products in C: weights packed once, a norm or a gate in the same pass over what they are multiplied by.

For few rows, as in decoding, they take about two thirds of the time of torch's; for many they bring nothing. A row of a
product depends on that row alone, bit for bit. All tensors are float32 on CPU; nothing here records gradients.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keel.native.library import library

_PLAIN, _NORMED, _GATED = range(3)
_I, _P = ctypes.c_int64, ctypes.c_void_p


@cache
def _functions() -> Any:
    found = library()
    assert found is not None, "whoever packs has asked for the library"
    found.pack.argtypes = [_P, _I, _I, _I, _I, _P]
    found.product.argtypes = [
        *(_P, _I, _I, _I, _I, ctypes.c_int, _P, ctypes.c_float),
        *(_P, _I, _P, _P, _I, ctypes.c_int, _P),
    ]
    found.panel_columns.restype = _I
    for function in (found.pack, found.product):
        function.restype = None
    return found


@dataclass(frozen=True, eq=False)
class Norm:
    """Each row divided by its root mean square, times a weight."""

    weight: Tensor
    epsilon: float


class Panels:
    """A matrix [k, n], packed for products from the left."""

    def __init__(self, matrix: Tensor) -> None:
        """Of any strides; `weight.t()` for a linear layer's."""
        if matrix.dtype != torch.float32 or matrix.device.type != "cpu":
            raise ValueError(f"a matrix of {matrix.dtype} on {matrix.device} is not packed: float32 on cpu only")
        self.k, self.n = matrix.shape
        wide = int(_functions().panel_columns())
        self.data = matrix.new_empty(-(-self.n // wide) * wide * self.k)
        _functions().pack(matrix.data_ptr(), self.k, self.n, *matrix.stride(), self.data.data_ptr())

    def times(
        self,
        left: Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:
        """left [m, k] times the matrix, plus the bias; `gated`: left is [m, 2k]. Into `out`, or on top of it."""
        rows = len(left)
        if left.shape[1] != self.k * (2 if gated else 1) or left.dtype != torch.float32:
            raise ValueError(f"{tuple(left.shape)} of {left.dtype} cannot be multiplied by {self.k, self.n}")
        if norm is not None or gated:
            left = left if left.stride(1) == 1 else left.contiguous()  # these read along the row
        if out is None:
            out = left.new_empty(rows, self.n)
        kind = _NORMED if norm is not None else _GATED if gated else _PLAIN
        packed = left.new_empty((rows + 3) // 4 * 4 * self.k)  # whole groups of four
        _functions().product(
            *(left.data_ptr(), rows, self.k, *left.stride(), kind),
            *(None if norm is None else norm.weight.data_ptr(), 0.0 if norm is None else norm.epsilon),
            *(self.data.data_ptr(), self.n, None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), out.stride(0), int(add), packed.data_ptr()),
        )
        return out
