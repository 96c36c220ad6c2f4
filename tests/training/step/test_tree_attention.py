"""Test that attention by tiles and by blocks equals dense masked attention in float64 for any tree and block size."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keel.training.step import tile_attention as tiles_module
from keel.training.step import tree_attention as module
from keel.training.step.prefix_tree import IntArray, PrefixTree, build_tree
from keel.training.step.tile_attention import build_tiles
from keel.training.step.tree_attention import TreeLayout, split_into_blocks, tree_attention
from tests.support.policy_strategies import dense_attention, sequences

WIDTH = 5
CPU = torch.device("cpu")


def dense_visibility(tree: PrefixTree, window: int | None = None) -> Tensor:
    """Return the visibility matrix, built by walking along each sequence."""
    visible = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for path in tree.paths:
        for position, query in enumerate(path):
            first = 0 if window is None else max(0, position + 1 - window)
            visible[query, torch.from_numpy(path[first : position + 1])] = True
    return visible


@dataclass
class Case:
    """Queries, keys, values and sinks for a tree, and the model's attention parameters."""

    tree: PrefixTree
    heads: int = 4
    key_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.6
    dtype: torch.dtype = torch.float64
    value_width: int = WIDTH
    transposed: bool = False
    """Whether the token dimension, not the head dimension, is contiguous in memory."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.tree))

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(self.dtype).requires_grad_()

        size = len(self.tree)
        shapes = [(self.heads, WIDTH), (self.key_heads, WIDTH), (self.key_heads, self.value_width)]
        self.states = [normal(1, heads, size, width) for heads, width in shapes]
        if self.transposed:
            self.states = [normal(1, heads, width, size).detach().transpose(2, 3) for heads, width in shapes]
            self.states = [state.requires_grad_() for state in self.states]
        self.sink_values = [normal(self.heads)] if self.sinks else []
        self.grad_output = normal(1, size, self.heads, self.value_width).detach()

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * self.grad_output).sum(), [*self.states, *self.sink_values])

    def dense(self) -> Tensor:
        query, key, value = (state[0] for state in self.states)
        visible = dense_visibility(self.tree, self.window)
        return dense_attention(query, key, value, visible, self.scale, self.softcap, *self.sink_values)[None]

    def tree_output(self) -> Tensor:
        arguments: dict[str, Any] = {"sliding_window": self.window, "softcap": self.softcap, "scaling": self.scale}
        if self.sinks:
            arguments["s_aux"] = self.sink_values[0]
        layout = TreeLayout(self.tree, CPU, self.dtype)
        return tree_attention(nn.Identity(), *self.states, None, tree=layout, **arguments)[0]

    def check(self) -> None:
        out, dense = self.tree_output(), self.dense()
        torch.testing.assert_close(out, dense, rtol=1e-11, atol=1e-12)
        for actual, expected in zip(self.gradients(out), self.gradients(dense), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def branching_tree(size: int = 40, seed: int = 0) -> PrefixTree:
    """Return a tree of sequences that branch off from one another at any depth."""
    rng = np.random.default_rng(seed)
    grown: list[IntArray] = [rng.integers(0, 9, size)]
    for _ in range(6):
        stem = grown[rng.integers(len(grown))]
        grown.append(np.concatenate([stem[: rng.integers(len(stem))], rng.integers(0, 9, rng.integers(1, size))]))
    return build_tree(grown)


def set_block_sizes(patch: pytest.MonkeyPatch, stride: int, longest: int, overhead: int = 0) -> None:
    for name, value in {
        "BLOCK_STRIDE": stride,
        "MAX_BLOCK_QUERIES": longest,
        "BLOCK_OVERHEAD_PAIRS": overhead,
        "GATHER_OVERHEAD_PAIRS": 0,
    }.items():
        patch.setattr(module, name, value)
    patch.setattr(tiles_module, "MAX_SQUARE", stride)
    patch.setattr(tiles_module, "SMALL_SUBTREE", longest)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "values of another width": {"value_width": 3},
    "transposed in memory": {"transposed": True},
    "one key head": {"key_heads": 1},
    "one key head per query head": {"key_heads": 4},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "everything": {"window": 5, "softcap": 1.1, "sinks": True, "key_heads": 1},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("stride", "longest", "overhead"), [(128, 1024, 4000), (7, 16, 0), (3, 1, 0), (1, 5, 50)])
def test_tree_attention_equals_dense_attention_with_its_gradients(
    kind: dict[str, Any], stride: int, longest: int, overhead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_block_sizes(monkeypatch, stride, longest, overhead)
    Case(branching_tree(), **kind).check()


@settings(max_examples=25)
@given(
    sequences(),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([0, 20]),
    st.sampled_from(list(KINDS)),
)
def test_attention_over_any_tree_with_any_block_size_equals_dense_attention(
    token_lists: list[IntArray], share: bool, stride: int, longest: int, overhead: int, kind: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_block_sizes(patch, stride, longest, overhead)
        Case(build_tree(token_lists, share=share), **KINDS[kind]).check()


@settings(max_examples=50)
@given(sequences(), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_tiles_cover_every_visible_pair_once_with_one_square_per_query(
    token_lists: list[IntArray], longest: int, small: int, share: bool
) -> None:
    tree = build_tree(token_lists, share=share)
    with pytest.MonkeyPatch.context() as patch:
        set_block_sizes(patch, longest, small)
        squares, rectangles = build_tiles(tree, torch.float64)
    assert [query for tile in squares for query in range(len(tree))[tile.queries]] == list(range(len(tree)))
    covered = torch.zeros(len(tree), len(tree))
    for tile in squares + rectangles:
        part = covered[tile.queries, tile.keys]
        hidden = torch.ones_like(part).triu(1).bool() if tile.causal else torch.zeros_like(part).bool()
        part += ~(hidden if tile.mask is None else tile.mask < 0)
    assert torch.equal(covered, dense_visibility(tree).float())


@settings(max_examples=25)
@given(sequences(), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 20, 4000]))
def test_blocks_cover_the_queries_once_and_include_every_ancestor(
    token_lists: list[IntArray], stride: int, longest: int, overhead: int
) -> None:
    tree = build_tree(token_lists)
    visible = dense_visibility(tree).numpy()
    with pytest.MonkeyPatch.context() as patch:
        set_block_sizes(patch, stride, longest, overhead)
        blocks = split_into_blocks(tree)
    assert [query for first, last, _ in blocks for query in range(first, last)] == list(range(len(tree)))
    for first, _, ancestors in blocks:
        assert ancestors.tolist() == np.flatnonzero(visible[first, :first]).tolist()


def test_no_block_has_more_queries_than_allowed() -> None:
    tree = build_tree([np.arange(3000)])
    blocks = split_into_blocks(tree)
    assert max(last - first for first, last, _ in blocks) <= module.MAX_BLOCK_QUERIES
    assert sum(last - first for first, last, _ in blocks) == 3000


def test_work_grows_with_visible_pairs_and_not_with_the_square_of_the_packed_length() -> None:
    prompts = [np.concatenate([[group], np.arange(300)]) for group in range(8)]
    completions = [np.concatenate([prompt, [token] * 60]) for prompt in prompts for token in range(8)]
    tree = build_tree(completions)
    layout = TreeLayout(tree, CPU, torch.float32)
    computed_pairs = sum(block.mask.numel() for block in layout.blocks(None))
    visible_pairs = int((tree.positions + 1).sum())
    assert computed_pairs < 2.5 * visible_pairs < 0.25 * len(tree) ** 2
    squares, rectangles = layout.tiles
    tiles = squares + rectangles
    areas = [(tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) for tile in tiles]
    assert sum(areas) < 1.25 * visible_pairs


def test_keys_outside_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_block_sizes(monkeypatch, 16, 16)
    layout = TreeLayout(build_tree([np.arange(400)]), CPU, torch.float32)
    assert max(block.mask.shape[1] for block in layout.blocks(8)) == 16 + 7
    # a window longer than every sequence has no effect
    assert layout.blocks(400) is layout.blocks(None)


@pytest.mark.parametrize("window", [9, 10, 11])
def test_a_window_about_as_long_as_the_sequence_is_exact(window: int) -> None:
    Case(build_tree([np.arange(11), np.arange(5)]), window=window).check()


def test_half_precision_is_computed_in_float32() -> None:
    case = Case(branching_tree(), dtype=torch.bfloat16, sinks=True)
    out = case.tree_output()
    exact = Case(case.tree, sinks=True)
    exact.states = [state.detach().double() for state in case.states]
    exact.sink_values = [sink.detach().double() for sink in case.sink_values]
    assert out.dtype == torch.bfloat16
    # only the final rounding differs
    torch.testing.assert_close(out.double(), exact.dense(), rtol=2**-8, atol=1e-5)


def test_the_default_scale_is_one_over_the_root_of_the_head_width() -> None:
    case = Case(branching_tree(), scale=WIDTH**-0.5)
    layout = TreeLayout(case.tree, CPU, torch.float64)
    torch.testing.assert_close(tree_attention(nn.Identity(), *case.states, None, tree=layout)[0], case.dense())


def test_large_values_of_another_sequence_in_the_same_block_have_no_effect() -> None:
    tree = build_tree([np.array([1, 2, 3]), np.array([1, 4, 5])])
    case = Case(tree, heads=1, key_heads=1)
    with torch.no_grad():
        before = case.tree_output()
        for state in case.states[1:]:
            state[:, :, tree.paths[0][1:]] = 1e30
        assert torch.equal(case.tree_output()[:, tree.paths[1]], before[:, tree.paths[1]])


@settings(max_examples=5)
@given(sequences(), st.none() | st.integers(1, 5))
def test_flex_attention_gets_the_same_visibility(token_lists: list[IntArray], window: int | None) -> None:
    tree = build_tree([*token_lists, np.array([7, 7, 8])])
    mask = TreeLayout(tree, CPU, torch.float32).flex_block_mask(window)
    size = len(tree)
    zero = torch.zeros((), dtype=torch.int64)
    index = torch.arange(size)
    visible = mask.mask_mod(zero, zero, index[:, None].expand(size, size), index[None].expand(size, size))
    assert torch.equal(visible, dense_visibility(tree, window))


def test_flex_attention_skips_fully_masked_blocks() -> None:
    tree = build_tree([np.full(256, token) for token in range(4)])
    blocks = TreeLayout(tree, CPU, torch.float32).flex_block_mask(None).to_dense()[0, 0]
    # each sequence has two blocks: two on the diagonal and one below it
    assert int(blocks.sum()) == 4 * 3
