"""Native tree attention: equal to dense masked attention and its gradients for any tree, heads and threads."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.inference.kernels import tree_attention as module
from keel.inference.kernels.tree_attention import TreeAttention, TreePlan, tree_kernel_supports
from keel.training.step.prefix_tree import IntArray, PrefixTree, build_tree
from keel.training.step.tile_attention import TileAttention, build_tiles
from tests.support.kernels import needs_kernels
from tests.support.policy_strategies import dense_attention, sequences

pytestmark = needs_kernels


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_plan(tree: PrefixTree) -> TreePlan:
    return TreePlan(tree.subtree_end, tree.positions)


def visible(tree: PrefixTree) -> Tensor:
    return torch.from_numpy(tree.visible(0, len(tree), np.arange(len(tree))))


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def states(tree: PrefixTree, heads: int = 6, key_heads: int = 2, width: int = 16) -> list[Tensor]:
    """Return query, key and value in the memory layout of models: [T, heads, D] viewed as [heads, T, D]."""
    return [
        normal(len(tree), count, width, seed=seed).transpose(0, 1)
        for seed, count in enumerate((heads, key_heads, key_heads))
    ]


def attend(tree: PrefixTree, inputs: list[Tensor], d_out: Tensor, scale: float | None = None) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    leaves = [state.detach().requires_grad_() for state in inputs]
    out = TreeAttention.apply(*leaves, make_plan(tree), scale or d_out.shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def dense(tree: PrefixTree, inputs: list[Tensor], d_out: Tensor, scale: float | None = None) -> list[Tensor]:
    """Return the same as `attend`, by dense attention in float64."""
    leaves = [state.detach().double().requires_grad_() for state in inputs]
    out = dense_attention(*leaves, visible(tree), scale or d_out.shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.double())]


def check(tree: PrefixTree, heads: int = 6, key_heads: int = 2, width: int = 16) -> None:
    inputs, d_out = states(tree, heads, key_heads, width), normal(len(tree), heads, width, seed=9)
    compare(attend(tree, inputs, d_out), dense(tree, inputs, d_out))


def compare(results: list[Tensor], references: list[Tensor]) -> None:
    # a key's gradient sums over the query heads that read it: the rounding error grows with the root of their number
    heads_per_group = len(results[1]) // len(results[2])
    absolute = 1e-6 * max(1.0, heads_per_group / 16) ** 0.5
    for actual, expected in zip(results, references, strict=True):
        assert actual.shape == expected.shape
        # gradients of scores are differences of values of order one, and may be zero
        error = actual - expected
        assert float(error.norm()) <= 2e-6 * float(expected.norm()) + absolute * error.numel() ** 0.5
        if error.numel():
            assert float(error.abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def prompts(count: int = 3, length: int = 70, stem: int = 9, completions: int = 5, seed: int = 0) -> PrefixTree:
    """Return a tree of prompts with a common stem and completions of uneven lengths, some of which branch again."""
    rng = np.random.default_rng(seed)
    root, ids = rng.integers(0, 99, stem), []
    for _ in range(count):
        prompt = np.concatenate([root, rng.integers(0, 99, length - stem)])
        for _ in range(completions):
            sequence = np.concatenate([prompt, rng.integers(0, 99, rng.integers(1, 40))])
            cut = rng.integers(length, len(sequence) + 1)
            ids += [sequence, np.concatenate([sequence[:cut], rng.integers(0, 99, rng.integers(0, 20))])]
    return build_tree(ids)


def ladder(size: int) -> PrefixTree:
    """Return a tree in which each token has a leaf and one other child: many runs on the path of a token."""
    return build_tree([np.append(np.zeros(length, np.int64), 1) for length in range(size)])


@pytest.mark.parametrize(
    ("heads", "key_heads"), [(1, 1), (2, 1), (9, 3), (4, 4), (14, 2), (5, 1), (7, 7), (49, 1), (100, 1)]
)
def test_any_number_of_heads_equals_dense_attention_and_its_gradients(heads: int, key_heads: int) -> None:
    check(prompts(), heads, key_heads)


@pytest.mark.parametrize("width", [16, 24, 32, 40, 64, 72, 96, 128, 200, 248, 256])
def test_any_head_width_equals_dense_attention_and_its_gradients(width: int) -> None:
    check(prompts(2, 40), 3, 1, width)


@settings(max_examples=60)
@given(
    sequences(most=14),
    st.booleans(),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (60, 1)]),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_any_tree_in_any_number_of_parts_equals_dense_attention(
    ids: list[IntArray], share: bool, heads: tuple[int, int], repeats: int, target_parts: int
) -> None:
    longer = [np.repeat(sequence, repeats) for sequence in ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_PANELS_PER_PART", 1)
        patch.setattr(module, "TARGET_PARTS", target_parts)
        patch.setattr(module, "MAX_KEY_COPIES", 1000)
        check(build_tree(longer, share=share), *heads)


@pytest.mark.parametrize("size", [1, 2, 5, 47, 48, 49, 96, 97, 700])
def test_a_single_sequence_equals_causal_attention(size: int) -> None:
    check(build_tree([np.arange(size)]), 3, 1, 64)


def test_a_sequence_of_thousands_of_tokens_equals_causal_attention() -> None:
    check(build_tree([np.arange(4096)]), 2, 1, 32)


def test_an_empty_tree_gives_empty_results() -> None:
    tree = build_tree([np.zeros(0, np.int64)])
    results = attend(tree, states(tree), normal(0, 6, 16))
    assert [tuple(result.shape) for result in results] == [(0, 6, 16), (6, 0, 16), (2, 0, 16), (2, 0, 16)]


@pytest.mark.parametrize("tree", [ladder(120), build_tree([np.array([token]) for token in range(150)])])
def test_trees_with_many_runs_or_many_roots_equal_dense_attention(tree: PrefixTree) -> None:
    check(tree, 3, 1)


def test_the_result_equals_tile_attention() -> None:
    tree = prompts(4, 150, 30, 8)
    inputs, d_out = states(tree, 9, 3, 64), normal(len(tree), 9, 64, seed=9)
    leaves = [state.detach().requires_grad_() for state in inputs]
    out = TileAttention.apply(*leaves, build_tiles(tree, torch.float32), 0.125)
    tiled = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    for actual, expected in zip(attend(tree, inputs, d_out, 0.125), tiled, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_memory_layout_does_not_change_any_bit() -> None:
    tree = prompts()
    inputs, d_out = states(tree), normal(len(tree), 6, 16, seed=9)
    reference = attend(tree, inputs, d_out)
    fused = torch.cat([state.transpose(0, 1) for state in inputs], 1)  # [T, all heads, D], as from one projection
    layouts = [
        [state.contiguous() for state in inputs],
        [part.transpose(0, 1) for part in fused.split([6, 2, 2], 1)],
        [state.transpose(1, 2).contiguous().transpose(1, 2) for state in inputs],
        [torch.nn.functional.pad(state, (3, 2))[..., 3:-2] for state in inputs],
    ]
    for layout in layouts:
        for actual, expected in zip(attend(tree, layout, d_out), reference, strict=True):
            assert torch.equal(actual, expected)
    transposed = d_out.transpose(0, 2).contiguous().transpose(0, 2)
    for actual, expected in zip(attend(tree, inputs, transposed), reference, strict=True):
        assert torch.equal(actual, expected)


def test_an_expanded_output_gradient_is_supported() -> None:
    tree = prompts()
    inputs = states(tree)
    expanded = torch.ones(()).expand(len(tree), 6, 16)
    compare(attend(tree, inputs, expanded), dense(tree, inputs, expanded))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("tree", [prompts(6, 90), build_tree([np.arange(900)]), build_tree([np.arange(3)])])
def test_the_number_of_threads_does_not_change_any_bit(tree: PrefixTree) -> None:
    inputs, d_out = states(tree), normal(len(tree), 6, 16, seed=9)
    torch.set_num_threads(1)
    reference = attend(tree, inputs, d_out)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for actual, expected in zip(attend(tree, inputs, d_out), reference, strict=True):
            assert torch.equal(actual, expected)


def test_large_scores_do_not_overflow() -> None:
    tree = prompts()
    inputs, d_out = states(tree), normal(len(tree), 6, 16, seed=9)
    inputs[0] = inputs[0] * 300
    results, reference = attend(tree, inputs, d_out), dense(tree, inputs, d_out)
    assert all(bool(result.isfinite().all()) for result in results)
    # the rounding error of scores in the hundreds is about 1e-5
    torch.testing.assert_close(results[0].double(), reference[0], rtol=1e-2, atol=1e-3)


def test_huge_values_of_invisible_tokens_in_the_same_panel_have_no_effect() -> None:
    tree = build_tree([np.array([1, 2, 3]), np.array([1, 4, 5])])
    inputs, d_out = states(tree), normal(len(tree), 6, 16, seed=9)
    path, invisible = torch.from_numpy(tree.paths[1]), torch.from_numpy(tree.paths[0][1:])
    reference = attend(tree, inputs, d_out)[0]
    for state in inputs:
        state[:, invisible] = 1e30
    assert torch.equal(attend(tree, inputs, d_out)[0][path], reference[path])


@pytest.mark.parametrize("invalid", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "d_out"])
@pytest.mark.parametrize("token", [0, 40, 90, 200])
def test_a_value_that_is_not_finite_shows_only_in_results_that_depend_on_it(
    invalid: float, name: str, token: int
) -> None:
    tree = prompts()
    inputs, d_out = states(tree), normal(len(tree), 6, 16, seed=9)
    clean = attend(tree, inputs, d_out)
    seen = visible(tree)
    if name == "d_out":
        d_out[token, :, 3] = invalid
    else:
        inputs[("query", "key", "value").index(name)][:, token, 3] = invalid
    out, d_query, d_key, d_value = attend(tree, inputs, d_out)
    # rows whose sums contain the value, and the tokens that these rows see
    rows = seen[:, token] if name in ("key", "value") else torch.arange(len(tree)) == token
    reached = seen[rows].any(0)
    assert torch.equal(out[~rows], clean[0][~rows])
    assert torch.equal(d_query[:, ~rows], clean[1][:, ~rows])
    assert torch.equal(d_key[:, ~reached], clean[2][:, ~reached])
    assert torch.equal(d_value[:, ~reached], clean[3][:, ~reached])
    if invalid != invalid:  # an infinite score may give a weight of zero
        affected = [d_query[:, rows], d_key[:, reached]] + ([out[rows].transpose(0, 1)] if name != "d_out" else [])
        assert not any(bool(result.isfinite().all(-1).any()) for result in affected)
    if name == "value":
        assert not bool(out[rows][..., 3].isfinite().any())


def test_only_supported_tensors_are_accepted() -> None:
    query, key, value = states(prompts(), 6, 2, 16)
    assert tree_kernel_supports(query, key, value)
    assert not tree_kernel_supports(query.double(), key.double(), value.double())
    assert not tree_kernel_supports(query, key, value.double())
    assert not tree_kernel_supports(query.bfloat16(), key, value)
    assert not tree_kernel_supports(query[:5], key, value)
    assert not tree_kernel_supports(query, key[:, 1:], value[:, 1:])
    assert not tree_kernel_supports(query, key, value[..., :8])
    assert not tree_kernel_supports(*(state[..., :8] for state in (query, key, value)))
    assert not tree_kernel_supports(*(torch.nn.functional.pad(state, (0, 4)) for state in (query, key, value)))
    assert not tree_kernel_supports(*(torch.nn.functional.pad(state, (0, 256)) for state in (query, key, value)))
    assert not tree_kernel_supports(*(state.to("meta") for state in (query, key, value)))
    assert not tree_kernel_supports(query, key[:0], value[:0])


def test_without_native_kernels_no_tensors_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_kernels", lambda: None)
    assert not tree_kernel_supports(*states(prompts()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda query: query.double(), r"query is float64 on cpu, .*; required: float32 on cpu"),
        ("query", lambda query: query.to("meta"), r"query is float32 on meta"),
        ("query", lambda query: query[0], r"query is .* required: .* 3 dimensions"),
        ("query", lambda query: query[..., :12], r"query has heads of width 12; required: a multiple of 8 from 16"),
        ("query", lambda query: query[:5], r"key has shape .*divides the 5 heads of query"),
        ("query", lambda query: query[:0], r"key has shape .*divides the 0 heads of query"),
        ("key", lambda key: key.bfloat16(), r"key is bfloat16 on cpu"),
        ("key", lambda key: key[:, 1:], r"key has shape .*; required: \[key heads, "),
        ("key", lambda key: key[:0], r"key has shape \[0, "),
        ("value", lambda value: value.half(), r"value is float16 on cpu"),
        ("value", lambda value: value[..., :8], r"value has shape .*the shape of key"),
    ],
)
def test_unsupported_tensors_raise_an_error_that_names_them(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    tree = prompts()
    inputs = dict(zip(("query", "key", "value"), states(tree), strict=True))
    inputs[name] = change(inputs[name])
    assert not tree_kernel_supports(*inputs.values())
    with pytest.raises(ValueError, match=rf"^{message}.*; call `tree_kernel_supports` first and use TileAttention"):
        TreeAttention.apply(*inputs.values(), make_plan(tree), 0.3)


def test_too_many_tokens_for_32_bit_offsets_are_not_supported() -> None:
    query = torch.empty(1).expand(1, 2**27, 16)
    assert not tree_kernel_supports(query, query, query)
    assert "134217728 tokens; required: fewer" in module._problem(query, query, query)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_a_scale_that_is_not_finite_raises_an_error(scale: float) -> None:
    tree = prompts()
    with pytest.raises(ValueError, match=rf"^scale is {scale}; required: a finite number$"):
        TreeAttention.apply(*states(tree), make_plan(tree), scale)


def test_a_plan_of_another_tree_raises_an_error() -> None:
    tree = prompts()
    with pytest.raises(ValueError, match=f"^plan has 3 tokens; required: {len(tree)}"):
        TreeAttention.apply(*states(tree), make_plan(build_tree([np.arange(3)])), 0.3)


@pytest.mark.parametrize(
    ("end", "positions", "message"),
    [
        (np.array([2.0, 2.0]), np.array([0, 1]), r"end is float64 of shape \[2\]; required: one dimension of integers"),
        (np.array([2, 2]), np.array([[0, 1]]), r"positions is int64 of shape \[1, 2\]"),
        (np.array([2, 2]), np.array([0]), r"positions has 1 numbers; required: 2"),
        (np.array([2, 2]), np.array([0, 2]), r"positions\[1\] is 2; required: 0 to 1"),
    ],
)
def test_invalid_arrays_of_a_plan_raise_an_error(end: IntArray, positions: IntArray, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TreePlan(end, positions)


@pytest.mark.parametrize("name", ["key_heads", "heads_per_group", "rows_per_panel"])
def test_a_partition_with_a_size_of_zero_raises_an_error(name: str) -> None:
    sizes = {"key_heads": 1, "heads_per_group": 1, "rows_per_panel": 8} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name} is 0; required: at least 1"):
        make_plan(build_tree([np.arange(3)])).partition(**sizes)


@pytest.mark.parametrize(
    ("end", "positions"),
    [([2, 2], [0, 2]), ([2, 2], [0, 0]), ([1, 2], [0, 1]), ([3, 2], [0, 1]), ([0, 2], [0, 1]), ([2, 2], [-1, 0])],
)
def test_arrays_that_are_not_a_tree_raise_an_error(end: list[int], positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"position"):
        TreePlan(np.array(end), np.array(positions))


@settings(max_examples=50)
@given(sequences(), st.booleans(), st.integers(1, 3), st.integers(1, 60))
def test_parts_contain_every_panel_once_and_count_the_keys_they_see(
    ids: list[IntArray], share: bool, key_heads: int, heads_per_group: int
) -> None:
    tree, rows_per_panel = build_tree(ids, share=share), 8
    if not len(tree):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_PANELS_PER_PART", 1)
        panel_start, key_start, first, last = make_plan(tree).partition(key_heads, heads_per_group, rows_per_panel)
    assert panel_start[0] == 0
    assert panel_start[-1] == -(-len(tree) * heads_per_group // rows_per_panel)
    assert (np.diff(panel_start) > 0).all()
    assert key_start[-1] <= module.MAX_KEY_COPIES * len(tree) or len(panel_start) == 2
    seen = visible(tree).numpy()
    for keys, begin, stop in zip(np.diff(key_start), first, last, strict=True):
        assert keys == int(seen[begin:stop].any(0).sum())


def test_key_copies_are_bounded_where_each_part_sees_all_earlier_tokens() -> None:
    tree = build_tree([np.arange(4096)])
    _, key_start, _, _ = make_plan(tree).partition(3, 3, 48)
    assert key_start[-1] <= module.MAX_KEY_COPIES * 4096
