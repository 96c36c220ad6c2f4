"""Native decode attention and rotary embeddings: equal to float64 to rounding, with independent rows."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.inference.kernels.decode_attention import KeySpans, apply_rope, attend_rows
from tests.support.kernels import needs_kernels, normal, relative_error

pytestmark = needs_kernels


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=9),
    st.sampled_from([(1, 1), (3, 3), (2, 4), (1, 7)]),
    st.sampled_from([8, 16, 40, 64]),
)
def test_rows_attend_to_their_key_spans_as_in_float64(
    lengths: list[list[int]], heads: tuple[int, int], width: int
) -> None:
    """Each row reads spans of two tensors, the last of which has one key."""
    key_heads, group_size = heads
    rows, capacity = len(lengths), 50
    keys, values = (
        [normal(rows * 4 + 1, key_heads, capacity, width, seed=seed) for seed in seeds] for seeds in ((0, 1), (2, 3))
    )
    query = normal(key_heads, group_size, rows, width, seed=4)
    row_starts, spans, span_tensors = [0], [], []
    head_stride = capacity * width
    for row, row_lengths in enumerate(lengths):
        for number, length in enumerate([*row_lengths, 1]):
            index, sequence = number % 2, row * 4 + number % 4
            spans.append((index, sequence * key_heads * head_stride, length, head_stride))
            span_tensors.append([tensors[index][sequence, :, :length] for tensors in (keys, values)])
        row_starts.append(len(spans))
    columns = [list(column) for column in zip(*spans, strict=True)]
    out = torch.full((rows, key_heads * group_size, width), math.nan)
    attend_rows(query, KeySpans(row_starts, *columns), keys, values, 0.3, out)
    for row in range(rows):
        row_spans = span_tensors[row_starts[row] : row_starts[row + 1]]
        row_keys, row_values = (torch.cat([span[which] for span in row_spans], 1).double() for which in (0, 1))
        weights = (query[:, :, row].double() @ row_keys.transpose(1, 2) * 0.3).softmax(-1)
        assert relative_error(out[row], (weights @ row_values).flatten(0, 1)) < 3e-6


def test_a_key_that_is_not_finite_affects_only_rows_that_read_it() -> None:
    keys, values = normal(3, 1, 10, 8), normal(3, 1, 10, 8, seed=1)
    query = normal(1, 2, 3, 8, seed=2)
    spans = KeySpans([0, 1, 2, 3], [0] * 3, [0, 80, 160], [10, 7, 10], [80] * 3)
    clean, out = torch.empty(3, 2, 8), torch.empty(3, 2, 8)
    attend_rows(query, spans, [keys], [values], 1.0, clean)
    keys[1, 0, 3] = math.nan
    keys[1, 0, 8], values[1, 0, 9] = math.nan, math.inf  # after the span of row 1
    attend_rows(query, spans, [keys], [values], 1.0, out)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([8, 24, 64]))
def test_rope_rotates_the_first_heads_and_leaves_the_others_unchanged(size: int, heads: int, width: int) -> None:
    states = normal(size, (heads + 2) * width)
    angles = normal(size, width // 2, seed=1).double()
    rotated = states.clone()
    apply_rope(rotated, heads, angles.cos().float(), angles.sin().float())
    pairs = states.double().view(size, heads + 2, 2, width // 2)
    low, high = pairs[:, :heads, 0], pairs[:, :heads, 1]
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.stack([low * cosine - high * sine, high * cosine + low * sine], 2)
    assert float((rotated.view(size, heads + 2, 2, -1)[:, :heads] - expected).abs().max()) < 1e-5
    assert torch.equal(rotated[:, heads * width :], states[:, heads * width :])
