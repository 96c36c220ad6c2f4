"""Products and attention of rows in C: float64's numbers to rounding, each row by itself, whatever the threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from keel.inference.kernels.decode_attention import KeySpans, apply_rope, attend_rows
from keel.inference.kernels.packed_matmul import PackedMatrix, RMSNormParams
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def apart(found: Tensor, truth: Tensor, terms: int = 1) -> float:
    """Relative to the largest number, or to what a sum of so many numbers of one or so may be: it can nearly vanish."""
    return float((found - truth).abs().max()) / max(float(truth.abs().max()), math.sqrt(terms))


def turned(matrix: Tensor, transposed: bool) -> Tensor:
    """The same numbers, in memory the other way round."""
    return matrix.t().contiguous().t() if transposed else matrix


sizes = st.tuples(st.integers(1, 150), st.integers(1, 700), st.integers(1, 80))


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans(), st.booleans())
def test_a_product_is_that_of_float64_to_rounding_however_its_factors_lie(
    size: tuple[int, int, int], left_turned: bool, right_turned: bool
) -> None:
    m, k, n = size
    left, right = normal(m, k), normal(k, n, seed=1)
    found = PackedMatrix(turned(right, right_turned)).matmul(turned(left, left_turned))
    assert apart(found, left.double() @ right.double(), k) < 3e-6


@settings(max_examples=40, deadline=None)
@given(sizes, st.booleans(), st.booleans())
def test_norm_bias_and_residual_are_taken_along(size: tuple[int, int, int], biased: bool, add: bool) -> None:
    m, k, n = size
    left, right, weight = normal(m, k), normal(k, n, seed=1), normal(k, seed=2)
    bias, before = normal(n, seed=3), normal(m, n, seed=4)
    out = before.clone()
    given_bias = bias if biased else None
    PackedMatrix(right).matmul(left, norm=RMSNormParams(weight, 1e-5), bias=given_bias, out=out, accumulate=add)
    truth = functional.rms_norm(left.double(), (k,), weight.double(), 1e-5) @ right.double()
    truth += bias.double() if biased else 0
    truth += before.double() if add else 0
    assert apart(out, truth, k) < 3e-6


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_a_gate_is_taken_along(size: tuple[int, int, int]) -> None:
    m, k, n = size
    left, right = normal(m, 2 * k) * 10, normal(k, n, seed=1)
    gate, up = left.double().chunk(2, 1)
    truth = (functional.silu(gate) * up) @ right.double()
    found = PackedMatrix(right).matmul(left, gated=True)
    assert apart(found, truth, 10_000 * k) < 3e-6


def test_a_gate_far_from_zero_is_open_or_shut_and_never_nan() -> None:
    gates = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4]])
    found = PackedMatrix(torch.eye(7)).matmul(torch.cat([gates, torch.ones(1, 7)], 1), gated=True)
    assert torch.allclose(found, functional.silu(gates.double()).float(), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_own_row_and_nowhere_else(junk: float) -> None:
    left, panels = normal(9, 50), PackedMatrix(normal(50, 60, seed=1))
    clean = panels.matmul(left)
    left[4, 7] = junk
    found = panels.matmul(left)
    assert not found[4].isfinite().any()
    rest = [row for row in range(9) if row != 4]
    assert torch.equal(found[rest], clean[rest])
    assert not panels.matmul(left, norm=RMSNormParams(torch.ones(50), 1e-5))[4].isfinite().any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 140), st.integers(1, 140), st.integers(1, 600))
def test_a_row_depends_on_no_other_bit_for_bit(few: int, many: int, k: int) -> None:
    few, many = sorted((few, many))
    left, panels = normal(many, k), PackedMatrix(normal(k, 50, seed=1))
    assert torch.equal(panels.matmul(left[:few]), panels.matmul(left)[:few])


def test_the_number_of_threads_changes_no_bit() -> None:
    left, right = normal(130, 700), normal(700, 90, seed=1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(PackedMatrix(right).matmul(left))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_states_of_any_strides_are_normed_and_gated() -> None:
    panels, weight = PackedMatrix(normal(30, 8)), normal(30, seed=1)
    left, wide = normal(5, 30, seed=2), normal(5, 60, seed=3)
    assert torch.equal(
        panels.matmul(turned(left, True), norm=RMSNormParams(weight, 1e-5)),
        panels.matmul(left, norm=RMSNormParams(weight, 1e-5)),
    )
    assert torch.equal(panels.matmul(turned(wide, True), gated=True), panels.matmul(wide, gated=True))


# attention of rows


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=9),
    st.sampled_from([(1, 1), (3, 3), (2, 4), (1, 7)]),
    st.sampled_from([8, 16, 40, 64]),
)
def test_rows_attend_to_their_stretches_as_in_float64(
    lengths: list[list[int]], heads: tuple[int, int], width: int
) -> None:
    """Each row reads some stretches of two stores, and one key of its own at the end."""
    groups, rest = heads
    rows, room = len(lengths), 50
    stores = [[normal(rows * 4 + 1, groups, room, width, seed=seed) for seed in pair] for pair in ((0, 1), (2, 3))]
    query = normal(groups, rest, rows, width, seed=4)
    first, found, parts = [0], [], []
    along = room * width
    for row, some in enumerate(lengths):
        for number, length in enumerate([*some, 1]):
            place = row * 4 + number % 4
            found.append((number % 2, place * groups * along, length, along))
            parts.append([store[number % 2][place, :, :length] for store in stores])
        first.append(len(found))
    columns = [list(column) for column in zip(*found, strict=True)]
    out = torch.full((rows, groups * rest, width), math.nan)
    attend_rows(query, KeySpans(first, *columns), stores[0], stores[1], 0.3, out)
    for row in range(rows):
        mine = parts[first[row] : first[row + 1]]
        keys, values = (torch.cat([part[which] for part in mine], 1).double() for which in (0, 1))
        shares = (query[:, :, row].double() @ keys.transpose(1, 2) * 0.3).softmax(-1)
        assert apart(out[row], (shares @ values).flatten(0, 1)) < 3e-6


def test_a_row_with_a_key_that_is_not_finite_spoils_no_other() -> None:
    keys, values = normal(3, 1, 10, 8), normal(3, 1, 10, 8, seed=1)
    query, first = normal(1, 2, 3, 8, seed=2), [0, 1, 2, 3]
    stretches = KeySpans(first, [0] * 3, [0, 80, 160], [10, 7, 10], [80] * 3)
    clean, found = torch.empty(3, 2, 8), torch.empty(3, 2, 8)
    attend_rows(query, stretches, [keys], [values], 1.0, clean)
    keys[1, 0, 3] = math.nan
    keys[1, 0, 8], values[1, 0, 9] = math.nan, math.inf  # behind the stretch of row 1
    attend_rows(query, stretches, [keys], [values], 1.0, found)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([8, 24, 64]))
def test_queries_and_keys_are_rotated_and_values_are_not(size: int, heads: int, width: int) -> None:
    states = normal(size, (heads + 2) * width)
    angles = normal(size, width // 2, seed=1).double()
    found = states.clone()
    apply_rope(found, heads, angles.cos().float(), angles.sin().float())
    pairs = states.double().view(size, heads + 2, 2, width // 2)
    low, high = pairs[:, :heads, 0], pairs[:, :heads, 1]
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    truth = torch.stack([low * cosine - high * sine, high * cosine + low * sine], 2)
    assert float((found.view(size, heads + 2, 2, -1)[:, :heads] - truth).abs().max()) < 1e-5
    assert torch.equal(found[:, heads * width :], states[:, heads * width :])
