"""Helpers for tests of the native kernels: a skip marker, random tensors and relative errors."""

import math

import pytest
import torch
from torch import Tensor

from keel.inference.kernels.build import load_kernels, unavailable_reason

needs_kernels = pytest.mark.skipif(
    load_kernels() is None, reason=f"native kernels are not available: {unavailable_reason()}"
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return a tensor of standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative_error(actual: Tensor, expected: Tensor, terms: int = 1) -> float:
    """Return the largest error relative to the largest expected value, or to sqrt(terms) if that is larger.

    A sum of `terms` random values can nearly cancel, so its own size is not a useful scale.
    """
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), math.sqrt(terms))
