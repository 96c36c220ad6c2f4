"""Checks of tensors before their addresses are passed to C, which would read or write out of bounds silently.

Each check raises ValueError with the name of the argument, its actual value and the required value. The checks cost
about a microsecond each and read no tensor data.
"""

import math

import torch
from torch import Tensor

ANY = "any strides"
UNIT_STRIDE = "unit stride in the last dimension"
ROWS = "rows that are contiguous and do not overlap"
"""The first dimension may have any stride that keeps its entries apart; the others are contiguous."""
CONTIGUOUS = "contiguous"


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], layout: str = ANY) -> None:
    """Raise ValueError unless `tensor` is float32 on CPU with this shape (None: any size) and memory layout."""
    if (
        tensor.dtype is not torch.float32
        or not tensor.is_cpu
        or tensor.dim() != len(shape)
        or any(size is not None and size != actual for size, actual in zip(shape, tensor.shape, strict=True))
        or not _has_layout(tensor, layout)
    ):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} is {describe(tensor)}; required: float32 on cpu, shape [{sizes}], {layout}")


def check_number(name: str, value: float, *, least: float = -math.inf) -> None:
    """Raise ValueError unless `value` is finite and at least `least`."""
    if not (math.isfinite(value) and value >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{name} is {value}; required: a finite number{bound}")


def describe(tensor: Tensor) -> str:
    """Return dtype, device, shape and strides for an error message."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} on {tensor.device}, shape {list(tensor.shape)}, strides {list(tensor.stride())}"


def _has_layout(tensor: Tensor, layout: str) -> bool:
    if layout == ANY:
        return True
    if layout == UNIT_STRIDE:
        return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if layout == CONTIGUOUS or tensor.is_contiguous():
        return tensor.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.shape[0] <= 1 or tensor.stride(0) >= expected
