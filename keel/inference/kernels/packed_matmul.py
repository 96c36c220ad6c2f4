"""Matrix products with weights that are packed once, with RMS norm, gate, bias and residual in the same pass.

For few rows, as in decoding, a product takes about two thirds of torch's time; for many rows there is no gain. Each row
of the result depends, bit for bit, only on that row of the left factor. All tensors are float32 on CPU; gradients are
not recorded.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from keel.inference.kernels.arguments import ANY, CONTIGUOUS, ROWS, check_number, check_tensor
from keel.inference.kernels.build import require_library

_PLAIN, _NORMED, _GATED = range(3)
"""The enum of packed_matmul.c."""
_GROUP = 4
"""Rows that are packed together, GROUP in packed_matmul.c."""
_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


@cache
def _kernels() -> Any:
    library = require_library()
    library.pack_matrix.argtypes = [_POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER]
    library.packed_matmul.argtypes = [
        *(_POINTER, _INT64, _INT64, _INT64, _INT64, ctypes.c_int, _POINTER, ctypes.c_float),
        *(_POINTER, _INT64, _POINTER, _POINTER, _INT64, ctypes.c_int, _POINTER),
    ]
    library.panel_columns.argtypes, library.panel_columns.restype = [], _INT64
    for function in (library.pack_matrix, library.packed_matmul):
        function.restype = None
    return library


@dataclass(frozen=True, eq=False)
class RMSNormParams:
    """RMS norm: each row x becomes weight * x / sqrt(mean(x ** 2) + epsilon)."""

    weight: Tensor
    epsilon: float


class PackedMatrix:
    """A copy of a matrix [k, n], packed as the right factor of products."""

    def __init__(self, matrix: Tensor) -> None:
        """Pack a matrix of any strides, for example `weight.t()` of a linear layer."""
        check_tensor("matrix", matrix, (None, None))
        self.k, self.n = matrix.shape
        if not self.k or not self.n:
            raise ValueError(f"matrix has shape {[self.k, self.n]}; required: at least one row and one column")
        columns = int(_kernels().panel_columns())
        self.data = matrix.new_empty(-(-self.n // columns) * columns * self.k)
        _kernels().pack_matrix(matrix.data_ptr(), self.k, self.n, *matrix.stride(), self.data.data_ptr())

    def matmul(
        self,
        left: Tensor,
        *,
        norm: RMSNormParams | None = None,
        gated: bool = False,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Return left [m, k] times the matrix plus `bias` [n], as a tensor [m, n].

        `norm` normalises the rows of `left` first. With `gated`, `left` is [m, 2k] and its halves (gate, up) are first
        replaced by silu(gate) * up; `norm` and `gated` exclude each other. The result is written to `out` if that is
        given, or added to it with `accumulate`. Only the rows of `out` may have gaps between them.
        """
        self._check(left, norm, gated, bias, out, accumulate)
        rows = len(left)
        if norm is not None or gated:
            left = left if left.stride(1) == 1 else left.contiguous()  # the kernel reads these along the row
        if out is None:
            out = left.new_empty(rows, self.n)
        kind = _NORMED if norm is not None else _GATED if gated else _PLAIN
        packed = left.new_empty(-(-rows // _GROUP) * _GROUP * self.k)
        _kernels().packed_matmul(
            *(left.data_ptr(), rows, self.k, *left.stride(), kind),
            *(None if norm is None else norm.weight.data_ptr(), 0.0 if norm is None else norm.epsilon),
            *(self.data.data_ptr(), self.n, None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), out.stride(0), int(accumulate), packed.data_ptr()),
        )
        return out

    def _check(
        self,
        left: Tensor,
        norm: RMSNormParams | None,
        gated: bool,
        bias: Tensor | None,
        out: Tensor | None,
        accumulate: bool,
    ) -> None:
        check_tensor("left", left, (None, 2 * self.k if gated else self.k), ANY)
        if norm is not None:
            if gated:
                raise ValueError("norm and gated are both given; required: at most one of them")
            check_tensor("norm.weight", norm.weight, (self.k,), CONTIGUOUS)
            check_number("norm.epsilon", norm.epsilon, least=0)
        if bias is not None:
            check_tensor("bias", bias, (self.n,), CONTIGUOUS)
        if out is not None:
            check_tensor("out", out, (len(left), self.n), ROWS)
        elif accumulate:
            raise ValueError("accumulate is True and out is None; required: the tensor to add to as out")
