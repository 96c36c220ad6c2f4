"""Attention over a tree in C: the dense masked softmax and its gradients, whatever the tree, heads and threads."""

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


def plan_of(tree: PrefixTree) -> TreePlan:
    return TreePlan(tree.subtree_end, tree.positions)


def visible(tree: PrefixTree) -> Tensor:
    return torch.from_numpy(tree.visible(0, len(tree), np.arange(len(tree))))


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def states(tree: PrefixTree, heads: int = 6, key_heads: int = 2, width: int = 16) -> list[Tensor]:
    """As models lay them out: [T, heads, D] seen as [heads, T, D]."""
    return [
        normal(len(tree), count, width, seed=seed).transpose(0, 1)
        for seed, count in enumerate((heads, key_heads, key_heads))
    ]


def attend(tree: PrefixTree, given: list[Tensor], outer: Tensor, scale: float | None = None) -> list[Tensor]:
    """What comes out, and the gradients of query, key and value."""
    leaves = [state.detach().requires_grad_() for state in given]
    out = TreeAttention.apply(*leaves, plan_of(tree), scale or outer.shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, outer)]


def dense(tree: PrefixTree, given: list[Tensor], outer: Tensor, scale: float | None = None) -> list[Tensor]:
    leaves = [state.detach().double().requires_grad_() for state in given]
    out = dense_attention(*leaves, visible(tree), scale or outer.shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, outer.double())]


def check(tree: PrefixTree, heads: int = 6, key_heads: int = 2, width: int = 16) -> None:
    given, outer = states(tree, heads, key_heads, width), normal(len(tree), heads, width, seed=9)
    compare(attend(tree, given, outer), dense(tree, given, outer))


def compare(found: list[Tensor], wanted: list[Tensor]) -> None:
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.shape == expected.shape
        # gradients of scores are differences of numbers of the order of one, and may themselves be zero
        error = actual - expected
        assert float(error.norm()) <= 2e-6 * float(expected.norm()) + 1e-6 * error.numel() ** 0.5
        if error.numel():
            assert float(error.abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def prompts(count: int = 3, length: int = 70, opening: int = 9, answers: int = 5, seed: int = 0) -> PrefixTree:
    """Prompts with one opening, each with answers of uneven lengths, some of which branch again."""
    chance = np.random.default_rng(seed)
    root, found = chance.integers(0, 99, opening), []
    for _ in range(count):
        prompt = np.concatenate([root, chance.integers(0, 99, length - opening)])
        for _ in range(answers):
            answer = np.concatenate([prompt, chance.integers(0, 99, chance.integers(1, 40))])
            cut = chance.integers(length, len(answer) + 1)
            found += [answer, np.concatenate([answer[:cut], chance.integers(0, 99, chance.integers(0, 20))])]
    return build_tree(found)


def ladder(size: int) -> PrefixTree:
    """Each token has a leaf beside the next one: as many turns as there are ancestors."""
    return build_tree([np.append(np.zeros(length, np.int64), 1) for length in range(size)])


@pytest.mark.parametrize(
    ("heads", "key_heads"), [(1, 1), (2, 1), (9, 3), (4, 4), (14, 2), (5, 1), (7, 7), (49, 1), (100, 1)]
)
def test_any_number_of_heads_gives_dense_attention_and_its_gradients(heads: int, key_heads: int) -> None:
    check(prompts(), heads, key_heads)


@pytest.mark.parametrize("width", [16, 24, 32, 40, 64, 72, 96, 128, 200, 248, 256])
def test_any_width_gives_dense_attention_and_its_gradients(width: int) -> None:
    check(prompts(2, 40), 3, 1, width)


@settings(max_examples=60)
@given(
    sequences(most=14),
    st.booleans(),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (60, 1)]),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_any_tree_in_any_parts_is_dense_attention(
    found: list[IntArray], share: bool, heads: tuple[int, int], stretch: int, items: int
) -> None:
    longer = [np.repeat(one, stretch) for one in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_PANELS_PER_PART", 1)
        patch.setattr(module, "TARGET_PARTS", items)
        patch.setattr(module, "MAX_KEY_COPIES", 1000)
        check(build_tree(longer, share=share), *heads)


@pytest.mark.parametrize("size", [1, 2, 5, 47, 48, 49, 96, 97, 700])
def test_a_single_chain_is_causal_attention(size: int) -> None:
    check(build_tree([np.arange(size)]), 3, 1, 64)


def test_a_chain_of_thousands_is_causal_attention() -> None:
    check(build_tree([np.arange(4096)]), 2, 1, 32)


def test_no_tokens_give_nothing() -> None:
    tree = build_tree([np.zeros(0, np.int64)])
    found = attend(tree, states(tree), normal(0, 6, 16))
    assert [tuple(one.shape) for one in found] == [(0, 6, 16), (6, 0, 16), (2, 0, 16), (2, 0, 16)]


@pytest.mark.parametrize("tree", [ladder(120), build_tree([np.array([word]) for word in range(150)])])
def test_many_turns_and_many_roots_are_dense_attention(tree: PrefixTree) -> None:
    check(tree, 3, 1)


def test_it_is_what_the_tiles_give() -> None:
    tree = prompts(4, 150, 30, 8)
    given, outer = states(tree, 9, 3, 64), normal(len(tree), 9, 64, seed=9)
    leaves = [state.detach().requires_grad_() for state in given]
    out = TileAttention.apply(*leaves, build_tiles(tree, torch.float32), 0.125)
    tiled = [out.detach(), *torch.autograd.grad(out, leaves, outer)]
    for actual, expected in zip(attend(tree, given, outer, 0.125), tiled, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_memory_laid_out_otherwise_changes_no_bit() -> None:
    tree = prompts()
    given, outer = states(tree), normal(len(tree), 6, 16, seed=9)
    wanted = attend(tree, given, outer)
    together = torch.cat([state.transpose(0, 1) for state in given], 1)  # [T, heads of all, D], as one projection gives
    layouts = [
        [state.contiguous() for state in given],
        [part.transpose(0, 1) for part in together.split([6, 2, 2], 1)],
        [state.transpose(1, 2).contiguous().transpose(1, 2) for state in given],
        [torch.nn.functional.pad(state, (3, 2))[..., 3:-2] for state in given],
    ]
    for layout in layouts:
        for actual, expected in zip(attend(tree, layout, outer), wanted, strict=True):
            assert torch.equal(actual, expected)
    turned = outer.transpose(0, 2).contiguous().transpose(0, 2)
    for actual, expected in zip(attend(tree, given, turned), wanted, strict=True):
        assert torch.equal(actual, expected)


def test_a_gradient_that_is_one_number_everywhere_is_read_as_such() -> None:
    tree = prompts()
    given = states(tree)
    spread = torch.ones(()).expand(len(tree), 6, 16)
    compare(attend(tree, given, spread), dense(tree, given, spread))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("tree", [prompts(6, 90), build_tree([np.arange(900)]), build_tree([np.arange(3)])])
def test_the_number_of_threads_changes_no_bit(tree: PrefixTree) -> None:
    given, outer = states(tree), normal(len(tree), 6, 16, seed=9)
    torch.set_num_threads(1)
    wanted = attend(tree, given, outer)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for actual, expected in zip(attend(tree, given, outer), wanted, strict=True):
            assert torch.equal(actual, expected)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    tree = prompts()
    given, outer = states(tree), normal(len(tree), 6, 16, seed=9)
    given[0] = given[0] * 300
    found, wanted = attend(tree, given, outer), dense(tree, given, outer)
    assert all(bool(one.isfinite().all()) for one in found)
    # scores of hundreds are rounded to some 1e-5 each
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-2, atol=1e-3)


def test_a_loud_stranger_in_the_same_panel_is_not_heard() -> None:
    tree = build_tree([np.array([1, 2, 3]), np.array([1, 4, 5])])
    given, outer = states(tree), normal(len(tree), 6, 16, seed=9)
    mine, strange = torch.from_numpy(tree.paths[1]), torch.from_numpy(tree.paths[0][1:])
    quiet = attend(tree, given, outer)[0]
    for state in given:
        state[:, strange] = 1e30
    assert torch.equal(attend(tree, given, outer)[0][mine], quiet[mine])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["query", "key", "value", "outer"])
@pytest.mark.parametrize("token", [0, 40, 90, 200])
def test_what_is_not_finite_shows_in_what_sees_it_and_changes_no_bit_of_anything_else(
    bad: float, which: str, token: int
) -> None:
    tree = prompts()
    given, outer = states(tree), normal(len(tree), 6, 16, seed=9)
    clean = attend(tree, given, outer)
    seen = visible(tree)
    if which == "outer":
        outer[token, :, 3] = bad
    else:
        given[("query", "key", "value").index(which)][:, token, 3] = bad
    out, d_query, d_key, d_value = attend(tree, given, outer)
    # rows that have it in their sums, and the tokens that these see
    rows = seen[:, token] if which in ("key", "value") else torch.arange(len(tree)) == token
    reached = seen[rows].any(0)
    assert torch.equal(out[~rows], clean[0][~rows])
    assert torch.equal(d_query[:, ~rows], clean[1][:, ~rows])
    assert torch.equal(d_key[:, ~reached], clean[2][:, ~reached])
    assert torch.equal(d_value[:, ~reached], clean[3][:, ~reached])
    if bad != bad:  # an infinite score may be a share of nothing
        shown = [d_query[:, rows], d_key[:, reached]] + ([out[rows].transpose(0, 1)] if which != "outer" else [])
        assert not any(bool(one.isfinite().all(-1).any()) for one in shown)
    if which == "value":
        assert not bool(out[rows][..., 3].isfinite().any())


def test_tensors_are_served_only_when_they_fit() -> None:
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


def test_without_the_library_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_tensors_that_do_not_fit_raise_an_error_that_names_them(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    tree = prompts()
    given = dict(zip(("query", "key", "value"), states(tree), strict=True))
    given[name] = change(given[name])
    assert not tree_kernel_supports(*given.values())
    with pytest.raises(ValueError, match=rf"^{message}.*; call `fits` first and use TileAttention"):
        TreeAttention.apply(*given.values(), plan_of(tree), 0.3)


def test_too_many_tokens_for_the_offsets_of_the_kernel_do_not_fit() -> None:
    query = torch.empty(1).expand(1, 2**27, 16)
    assert not tree_kernel_supports(query, query, query)
    assert "134217728 tokens; required: fewer" in module._problem(query, query, query)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_a_scale_that_is_not_finite_raises_an_error(scale: float) -> None:
    tree = prompts()
    with pytest.raises(ValueError, match=rf"^scale is {scale}; required: a finite number$"):
        TreeAttention.apply(*states(tree), plan_of(tree), scale)


def test_a_plan_of_another_tree_raises_an_error() -> None:
    tree = prompts()
    with pytest.raises(ValueError, match=f"^plan has 3 tokens; required: {len(tree)}"):
        TreeAttention.apply(*states(tree), plan_of(build_tree([np.arange(3)])), 0.3)


@pytest.mark.parametrize(
    ("end", "positions", "message"),
    [
        (np.array([2.0, 2.0]), np.array([0, 1]), r"end is float64 of shape \[2\]; required: one dimension of integers"),
        (np.array([2, 2]), np.array([[0, 1]]), r"positions is int64 of shape \[1, 2\]"),
        (np.array([2, 2]), np.array([0]), r"positions has 1 numbers; required: 2"),
        (np.array([2, 2]), np.array([0, 2]), r"positions\[1\] is 2; required: 0 to 1"),
    ],
)
def test_a_plan_of_other_arrays_raises_an_error(end: IntArray, positions: IntArray, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TreePlan(end, positions)


@pytest.mark.parametrize("name", ["key_heads", "each", "rows"])
def test_parts_of_nothing_raise_an_error(name: str) -> None:
    sizes = {"key_heads": 1, "each": 1, "rows": 8} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name} is 0; required: at least 1"):
        plan_of(build_tree([np.arange(3)])).partition(**sizes)


@pytest.mark.parametrize(
    ("end", "positions"),
    [([2, 2], [0, 2]), ([2, 2], [0, 0]), ([1, 2], [0, 1]), ([3, 2], [0, 1]), ([0, 2], [0, 1]), ([2, 2], [-1, 0])],
)
def test_what_is_no_tree_is_refused(end: list[int], positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"position"):
        TreePlan(np.array(end), np.array(positions))


@settings(max_examples=50)
@given(sequences(), st.booleans(), st.integers(1, 3), st.integers(1, 60))
def test_parts_hold_every_panel_once_and_have_room_for_what_they_see(
    found: list[IntArray], share: bool, key_heads: int, each: int
) -> None:
    tree, rows = build_tree(found, share=share), 8
    if not len(tree):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_PANELS_PER_PART", 1)
        bounds, room, first, last = plan_of(tree).partition(key_heads, each, rows)
    assert bounds[0] == 0
    assert bounds[-1] == -(-len(tree) * each // rows)
    assert (np.diff(bounds) > 0).all()
    assert room[-1] <= module.MAX_KEY_COPIES * len(tree) or len(bounds) == 2
    seen = visible(tree).numpy()
    for keys, begin, stop in zip(np.diff(room), first, last, strict=True):
        assert keys == int(seen[begin:stop].any(0).sum())


def test_memory_beside_the_result_is_bounded_where_each_part_sees_all_before() -> None:
    tree = build_tree([np.arange(4096)])
    _, room, _, _ = plan_of(tree).partition(3, 3, 48)
    assert room[-1] <= module.MAX_KEY_COPIES * 4096
