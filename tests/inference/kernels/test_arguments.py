"""Wrappers of native kernels raise an error that names an invalid argument and never pass its address to C."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.inference.kernels import build, decode_attention, packed_matmul
from keel.inference.kernels.decode_attention import KeySpans, apply_rope, attend_rows
from keel.inference.kernels.packed_matmul import PackedMatrix, RMSNormParams
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

K, N, M = 5, 6, 3
Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which an invalid argument reaches a kernel."""

    class Guard:
        def __getattr__(self, name: str) -> Any:
            pytest.fail(f"{name} was called")

    guard: Any = Guard()
    packing = packed_matmul._kernels()
    guard.pack_matrix, guard.panel_columns = packing.pack_matrix, packing.panel_columns
    monkeypatch.setattr(packed_matmul, "_kernels", lambda: guard)
    monkeypatch.setattr(decode_attention, "_kernels", lambda: guard)


def strided(tensor: Tensor) -> Tensor:
    """Return the same values with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.ones(K, N).bfloat16(), "matrix is bfloat16 on cpu, shape [5, 6]"),
        (torch.ones(K, N, device="meta"), "matrix is float32 on meta"),
        (torch.ones(K), "matrix is float32 on cpu, shape [5], strides [1]; required: float32 on cpu, shape [any, any]"),
        (torch.ones(0, N), "matrix has shape [0, 6]; required: at least one row and one column"),
        (torch.ones(K, 0), "matrix has shape [5, 0]"),
    ],
)
def test_a_matrix_that_cannot_be_packed_raises_an_error_that_names_it(matrix: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        PackedMatrix(matrix)


FLOAT64 = "is float64 on cpu"
META = "is float32 on meta"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"left": torch.ones(M, K).double()}, f"left {FLOAT64}"),
        ({"left": torch.ones(M, K, device="meta")}, f"left {META}"),
        (
            {"left": torch.ones(M, K + 1)},
            "left is float32 on cpu, shape [3, 6], strides [6, 1]; required: float32 on cpu,",
        ),
        ({"left": torch.ones(K)}, "left is float32 on cpu, shape [5]"),
        (
            {"gated": True},
            "left is float32 on cpu, shape [3, 5], strides [5, 1]; required: float32 on cpu, shape [any, 10]",
        ),
        (
            {"left": torch.ones(M, 2 * K), "gated": True, "norm": RMSNormParams(torch.ones(K), 0.1)},
            "norm and gated are both given; required: at most one of them",
        ),
        ({"norm": RMSNormParams(torch.ones(K).double(), 0.1)}, f"norm.weight {FLOAT64}"),
        ({"norm": RMSNormParams(torch.ones(K, device="meta"), 0.1)}, f"norm.weight {META}"),
        ({"norm": RMSNormParams(torch.ones(K - 1), 0.1)}, "norm.weight is float32 on cpu, shape [4]"),
        ({"norm": RMSNormParams(torch.ones(1, K), 0.1)}, "norm.weight is float32 on cpu, shape [1, 5]"),
        ({"norm": RMSNormParams(strided(torch.ones(K)), 0.1)}, "norm.weight is float32 on cpu, shape [5], strides [2]"),
        ({"norm": RMSNormParams(torch.ones(K), -0.1)}, "norm.epsilon is -0.1; required: a finite number of at least 0"),
        ({"norm": RMSNormParams(torch.ones(K), math.nan)}, "norm.epsilon is nan"),
        ({"bias": torch.ones(N).half()}, "bias is float16 on cpu"),
        ({"bias": torch.ones(N, device="meta")}, f"bias {META}"),
        (
            {"bias": torch.ones(N - 1)},
            "bias is float32 on cpu, shape [5], strides [1]; required: float32 on cpu, shape [6]",
        ),
        ({"bias": torch.ones(1).expand(N)}, "bias is float32 on cpu, shape [6], strides [0]"),
        ({"out": torch.ones(M, N).double()}, f"out {FLOAT64}"),
        ({"out": torch.ones(M, N, device="meta")}, f"out {META}"),
        ({"out": torch.ones(M - 1, N)}, "out is float32 on cpu, shape [2, 6]"),
        ({"out": torch.ones(M, N + 1)}, "out is float32 on cpu, shape [3, 7]"),
        ({"out": torch.ones(M * N)}, "out is float32 on cpu, shape [18]"),
        ({"out": torch.ones(N, M).t()}, "out is float32 on cpu, shape [3, 6], strides [1, 3]"),
        ({"out": torch.ones(N).expand(M, N)}, "out is float32 on cpu, shape [3, 6], strides [0, 1]"),
        ({"accumulate": True}, "accumulate is True and out is None"),
    ],
)
def test_an_invalid_argument_of_a_product_is_named(changes: dict[str, Any], message: str) -> None:
    arguments = {"left": torch.ones(M, K)} | changes
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        PackedMatrix(torch.ones(K, N)).matmul(**arguments)


SPANS: dict[str, list[int]] = {
    "row_starts": [0, 1, 3],
    "tensor_index": [0, 0, 1],
    "offsets": [0, 64, 0],
    "lengths": [4, 2, 1],
    "head_strides": [32, 32, 32],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_starts": [0]}, "row_starts is [0]; required"),
        ({"row_starts": [1, 3]}, "row_starts is [1, 3]; required"),
        ({"row_starts": [0, 3, 2]}, "row_starts is [0, 3, 2]; required"),
        ({"row_starts": [0, 1, 4]}, "tensor_index has 3 numbers; required: 4"),
        ({"tensor_index": [0, 0]}, "tensor_index has 2 numbers; required: 3"),
        ({"tensor_index": [0, 0, -1]}, "tensor_index has the number -1; required: no negative numbers"),
        ({"offsets": [0, 64]}, "offsets has 2 numbers"),
        ({"offsets": [0, -8, 0]}, "offsets has the number -8"),
        ({"lengths": [4, 2, 1, 1]}, "lengths has 4 numbers"),
        ({"lengths": [4, 2, -1]}, "lengths has the number -1"),
        ({"lengths": [4, 0, 0]}, "lengths gives row 1 no key; required: at least one for each row"),
        ({"head_strides": []}, "head_strides has 0 numbers"),
        ({"head_strides": [32, 32, -32]}, "head_strides has the number -32"),
    ],
)
def test_an_invalid_list_of_key_spans_is_named(changes: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        KeySpans(**(SPANS | changes))


def kv_tensors() -> list[Tensor]:
    """Return tensors of 2 and 1 sequences, 2 key heads, 4 keys and width 8: SPANS reads all of the first."""
    return [torch.ones(2, 2, 4, 8), torch.ones(1, 2, 4, 8)]


def decode_arguments() -> dict[str, Any]:
    """Return valid arguments of `attend_rows`: 2 key heads, 3 query heads for each, 2 rows."""
    return {
        "query": torch.ones(2, 3, 2, 8),
        "spans": KeySpans(**SPANS),
        "keys": kv_tensors(),
        "values": kv_tensors(),
        "scale": 0.5,
        "out": torch.ones(2, 6, 8),
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda query: query.double(), f"query {FLOAT64}"),
        ("query", lambda query: query.to("meta"), f"query {META}"),
        ("query", lambda query: query[0], "query is float32 on cpu, shape [3, 2, 8]"),
        ("query", strided, "query is float32 on cpu, shape [2, 3, 2, 8], strides [96, 32, 16, 2]; required"),
        ("query", lambda query: query[..., :4], "query has heads of width 4; required: a multiple of 8"),
        ("query", lambda query: query[..., :0], "query has heads of width 0"),
        ("query", lambda query: query[:, :, :1], "spans describes 2 rows; required: 1, the rows of query"),
        ("scale", lambda _: math.nan, "scale is nan; required: a finite number"),
        ("out", lambda out: out.double(), f"out {FLOAT64}"),
        ("out", lambda out: out.to("meta"), f"out {META}"),
        ("out", lambda out: out[:1], "out is float32 on cpu, shape [1, 6, 8]"),
        ("out", lambda out: out[:, :5], "out is float32 on cpu, shape [2, 5, 8]"),
        ("out", lambda out: out[:, :, :4], "out is float32 on cpu, shape [2, 6, 4]"),
        ("out", strided, "out is float32 on cpu, shape [2, 6, 8], strides [96, 16, 2]"),
        ("out", lambda out: out.repeat(1, 2, 1)[:, ::2], "out is float32 on cpu, shape [2, 6, 8], strides [96, 16, 1]"),
        ("out", lambda out: out[:1].expand(2, 6, 8), "out is float32 on cpu, shape [2, 6, 8], strides [0, 8, 1]"),
    ],
)
def test_an_invalid_argument_of_decode_attention_is_named(name: str, change: Change, message: str) -> None:
    arguments = decode_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        attend_rows(**arguments)


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda tensor: tensor.double(), "[0] is float64 on cpu"),
        (1, lambda tensor: tensor.to("meta"), "[1] is float32 on meta"),
        (0, strided, "[0] is float32 on cpu, shape [2, 2, 4, 8], strides [128, 64, 16, 2]; required"),
        # the second span needs 64 + 32 + 2 * 8 numbers
        (
            0,
            lambda tensor: tensor.flatten()[:111],
            "[0] is float32 on cpu, shape [111], strides [1]; required: float32 on",
        ),
        (1, lambda tensor: tensor.flatten()[:39], "[1] is float32 on cpu, shape [39]"),
    ],
)
def test_an_invalid_tensor_of_keys_or_values_is_named(name: str, index: int, change: Change, message: str) -> None:
    arguments = decode_arguments()
    arguments[name][index] = change(arguments[name][index])
    with pytest.raises(ValueError, match=f"^{re.escape(name + message)}"):
        attend_rows(**arguments)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_missing_tensor_of_keys_or_values_is_reported(name: str) -> None:
    arguments = decode_arguments()
    arguments[name] = arguments[name][:1]
    with pytest.raises(ValueError, match=f"^{name} has 1 tensors; required: at least 2"):
        attend_rows(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": torch.ones(3, 32).double()}, f"states {FLOAT64}"),
        ({"states": torch.ones(3, 32, device="meta")}, f"states {META}"),
        ({"states": torch.ones(96)}, "states is float32 on cpu, shape [96]"),
        ({"states": strided(torch.ones(3, 32))}, "states is float32 on cpu, shape [3, 32], strides [64, 2]"),
        ({"states": torch.ones(32).expand(3, 32)}, "states is float32 on cpu, shape [3, 32], strides [0, 1]"),
        ({"heads": -1}, "heads is -1; required: 0 to 4"),
        ({"heads": 5}, "heads is 5; required: 0 to 4, the heads of width 8 in a row of states"),
        ({"cosine": torch.ones(3, 4).half()}, "cosine is float16 on cpu"),
        ({"cosine": torch.ones(3, 4, device="meta")}, f"cosine {META}"),
        ({"cosine": torch.ones(2, 4)}, "cosine is float32 on cpu, shape [2, 4]"),
        ({"cosine": torch.ones(4, 3).t()}, "cosine is float32 on cpu, shape [3, 4], strides [1, 3]"),
        ({"sine": torch.ones(3, 4).double()}, f"sine {FLOAT64}"),
        ({"sine": torch.ones(3, 4, device="meta")}, f"sine {META}"),
        ({"sine": torch.ones(3, 5)}, "sine is float32 on cpu, shape [3, 5]"),
        ({"sine": torch.ones(3, 1).expand(3, 4)}, "sine is float32 on cpu, shape [3, 4], strides [1, 0]"),
    ],
)
def test_an_invalid_argument_of_rotary_embeddings_is_named(changes: dict[str, Any], message: str) -> None:
    arguments = {"states": torch.ones(3, 32), "heads": 2, "cosine": torch.ones(3, 4), "sine": torch.ones(3, 4)}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        apply_rope(**(arguments | changes))


def test_decode_attention_does_not_support_other_dtypes_devices_strides_and_widths() -> None:
    query, value = torch.ones(2, 3, 2, 8), torch.ones(2, 2, 8)
    assert decode_attention.decode_kernel_supports(query, value)
    assert not decode_attention.decode_kernel_supports(query, value.double())
    assert not decode_attention.decode_kernel_supports(query.double(), value)
    assert not decode_attention.decode_kernel_supports(query, value.to("meta"))
    assert not decode_attention.decode_kernel_supports(query, value[..., :4])
    assert not decode_attention.decode_kernel_supports(query[..., :4], value[..., :4])
    assert not decode_attention.decode_kernel_supports(strided(query), value)


def test_without_native_kernels_the_error_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_once", lambda: (None, "there is no C compiler"))
    with pytest.raises(RuntimeError, match=r"native kernels are not available: there is no C compiler"):
        build.require_library()
