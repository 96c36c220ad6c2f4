"""Packed matrix products: equal to float64 to rounding, with rows independent of each other and of the threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from keel.inference.kernels.packed_matmul import PackedMatrix, RMSNormParams
from tests.support.kernels import needs_kernels, normal, relative_error

pytestmark = needs_kernels


def with_layout(matrix: Tensor, transposed: bool) -> Tensor:
    """Return the same values, stored column by column if `transposed`."""
    return matrix.t().contiguous().t() if transposed else matrix


sizes = st.tuples(st.integers(1, 150), st.integers(1, 700), st.integers(1, 80))


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.booleans())
def test_a_product_equals_float64_to_rounding_for_any_memory_layout(
    size: tuple[int, int, int], left_transposed: bool, right_transposed: bool
) -> None:
    m, k, n = size
    left, right = normal(m, k), normal(k, n, seed=1)
    product = PackedMatrix(with_layout(right, right_transposed)).matmul(with_layout(left, left_transposed))
    assert relative_error(product, left.double() @ right.double(), k) < 3e-6


@settings(max_examples=40, deadline=None)
@given(sizes, st.booleans(), st.booleans())
def test_norm_bias_and_residual_are_applied(size: tuple[int, int, int], with_bias: bool, accumulate: bool) -> None:
    m, k, n = size
    left, right, weight = normal(m, k), normal(k, n, seed=1), normal(k, seed=2)
    bias, before = normal(n, seed=3), normal(m, n, seed=4)
    out = before.clone()
    norm = RMSNormParams(weight, 1e-5)
    PackedMatrix(right).matmul(left, norm=norm, bias=bias if with_bias else None, out=out, accumulate=accumulate)
    expected = functional.rms_norm(left.double(), (k,), weight.double(), 1e-5) @ right.double()
    expected += bias.double() if with_bias else 0
    expected += before.double() if accumulate else 0
    assert relative_error(out, expected, k) < 3e-6


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_a_gate_is_applied(size: tuple[int, int, int]) -> None:
    m, k, n = size
    left, right = normal(m, 2 * k) * 10, normal(k, n, seed=1)
    gate, up = left.double().chunk(2, 1)
    expected = (functional.silu(gate) * up) @ right.double()
    product = PackedMatrix(right).matmul(left, gated=True)
    assert relative_error(product, expected, 10_000 * k) < 3e-6


def test_extreme_gate_values_give_silu_and_never_nan() -> None:
    gates = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4]])
    product = PackedMatrix(torch.eye(7)).matmul(torch.cat([gates, torch.ones(1, 7)], 1), gated=True)
    assert torch.allclose(product, functional.silu(gates.double()).float(), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_only_in_its_own_row(invalid: float) -> None:
    left, packed = normal(9, 50), PackedMatrix(normal(50, 60, seed=1))
    clean = packed.matmul(left)
    left[4, 7] = invalid
    product = packed.matmul(left)
    assert not product[4].isfinite().any()
    other_rows = [row for row in range(9) if row != 4]
    assert torch.equal(product[other_rows], clean[other_rows])
    assert not packed.matmul(left, norm=RMSNormParams(torch.ones(50), 1e-5))[4].isfinite().any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 140), st.integers(1, 140), st.integers(1, 600))
def test_a_row_does_not_depend_on_other_rows_bit_for_bit(few: int, many: int, k: int) -> None:
    few, many = sorted((few, many))
    left, packed = normal(many, k), PackedMatrix(normal(k, 50, seed=1))
    assert torch.equal(packed.matmul(left[:few]), packed.matmul(left)[:few])


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    left, right = normal(130, 700), normal(700, 90, seed=1)
    before = torch.get_num_threads()
    products = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            products.append(PackedMatrix(right).matmul(left))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


def test_norm_and_gate_accept_inputs_with_any_strides() -> None:
    packed, weight = PackedMatrix(normal(30, 8)), normal(30, seed=1)
    left, wide = normal(5, 30, seed=2), normal(5, 60, seed=3)
    assert torch.equal(
        packed.matmul(with_layout(left, True), norm=RMSNormParams(weight, 1e-5)),
        packed.matmul(left, norm=RMSNormParams(weight, 1e-5)),
    )
    assert torch.equal(packed.matmul(with_layout(wide, True), gated=True), packed.matmul(wide, gated=True))
