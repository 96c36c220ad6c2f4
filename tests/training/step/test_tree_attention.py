"""Attention by tiles and by blocks: the dense masked softmax in float64, whatever the tree and however it is cut."""

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
    """Who sees whom, by walking along each sequence."""
    seen = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for path in tree.paths:
        for place, query in enumerate(path):
            first = 0 if window is None else max(0, place + 1 - window)
            seen[query, torch.from_numpy(path[first : place + 1])] = True
    return seen


@dataclass
class Case:
    """Queries, keys, values and sinks for a tree, and what the model says about attention."""

    tree: PrefixTree
    heads: int = 4
    key_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.6
    dtype: torch.dtype = torch.float64
    value_width: int = WIDTH
    turned: bool = False
    """Whether the tokens lie side by side in memory, and not the numbers of a head."""

    def __post_init__(self) -> None:
        chance = torch.Generator().manual_seed(len(self.tree))

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=chance, dtype=torch.float64).to(self.dtype).requires_grad_()

        size = len(self.tree)
        shapes = [(self.heads, WIDTH), (self.key_heads, WIDTH), (self.key_heads, self.value_width)]
        self.states = [normal(1, heads, size, width) for heads, width in shapes]
        if self.turned:
            self.states = [normal(1, heads, width, size).detach().transpose(2, 3) for heads, width in shapes]
            self.states = [state.requires_grad_() for state in self.states]
        self.aux = [normal(self.heads)] if self.sinks else []
        self.outer = normal(1, size, self.heads, self.value_width).detach()

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * self.outer).sum(), [*self.states, *self.aux])

    def dense(self) -> Tensor:
        query, key, value = (state[0] for state in self.states)
        seen = dense_visibility(self.tree, self.window)
        return dense_attention(query, key, value, seen, self.scale, self.softcap, *self.aux)[None]

    def by_blocks(self) -> Tensor:
        given: dict[str, Any] = {"sliding_window": self.window, "softcap": self.softcap, "scaling": self.scale}
        if self.sinks:
            given["s_aux"] = self.aux[0]
        layout = TreeLayout(self.tree, CPU, self.dtype)
        return tree_attention(nn.Identity(), *self.states, None, tree=layout, **given)[0]

    def check(self) -> None:
        out, wanted = self.by_blocks(), self.dense()
        torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-12)
        for actual, expected in zip(self.gradients(out), self.gradients(wanted), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def bushy(size: int = 40, seed: int = 0) -> PrefixTree:
    """Sequences that branch off from one another at any depth."""
    chance = np.random.default_rng(seed)
    found: list[IntArray] = [chance.integers(0, 9, size)]
    for _ in range(6):
        stem = found[chance.integers(len(found))]
        found.append(
            np.concatenate([stem[: chance.integers(len(stem))], chance.integers(0, 9, chance.integers(1, size))])
        )
    return build_tree(found)


def small_blocks(patch: pytest.MonkeyPatch, stride: int, longest: int, call: int = 0) -> None:
    for name, value in {
        "BLOCK_STRIDE": stride,
        "MAX_BLOCK_QUERIES": longest,
        "BLOCK_OVERHEAD_PAIRS": call,
        "GATHER_OVERHEAD_PAIRS": 0,
    }.items():
        patch.setattr(module, name, value)
    patch.setattr(tiles_module, "MAX_SQUARE", stride)
    patch.setattr(tiles_module, "SMALL_SUBTREE", longest)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "values of another width": {"value_width": 3},
    "laid out otherwise": {"turned": True},
    "one key head": {"key_heads": 1},
    "a key head each": {"key_heads": 4},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "everything": {"window": 5, "softcap": 1.1, "sinks": True, "key_heads": 1},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("stride", "longest", "call"), [(128, 1024, 4000), (7, 16, 0), (3, 1, 0), (1, 5, 50)])
def test_blocks_give_dense_attention_and_its_gradients(
    kind: dict[str, Any], stride: int, longest: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, stride, longest, call)
    Case(bushy(), **kind).check()


@settings(max_examples=25)
@given(
    sequences(),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([0, 20]),
    st.sampled_from(list(KINDS)),
)
def test_any_tree_in_any_blocks_is_dense_attention(
    found: list[IntArray], share: bool, stride: int, longest: int, call: int, kind: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, stride, longest, call)
        Case(build_tree(found, share=share), **KINDS[kind]).check()


@settings(max_examples=50)
@given(sequences(), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_tiles_hold_every_visible_pair_once_and_one_square_for_each_query(
    found: list[IntArray], longest: int, small: int, share: bool
) -> None:
    tree = build_tree(found, share=share)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, longest, small)
        squares, rectangles = build_tiles(tree, torch.float64)
    assert [query for tile in squares for query in range(len(tree))[tile.queries]] == list(range(len(tree)))
    times = torch.zeros(len(tree), len(tree))
    for tile in squares + rectangles:
        part = times[tile.queries, tile.keys]
        hidden = torch.ones_like(part).triu(1).bool() if tile.causal else torch.zeros_like(part).bool()
        part += ~(hidden if tile.mask is None else tile.mask < 0)
    assert torch.equal(times, dense_visibility(tree).float())


@settings(max_examples=25)
@given(sequences(), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 20, 4000]))
def test_blocks_tile_the_queries_once_and_hold_every_ancestor(
    found: list[IntArray], stride: int, longest: int, call: int
) -> None:
    tree = build_tree(found)
    seen = dense_visibility(tree).numpy()
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, stride, longest, call)
        blocks = split_into_blocks(tree)
    assert [query for first, last, _ in blocks for query in range(first, last)] == list(range(len(tree)))
    for first, _, ancestors in blocks:
        assert ancestors.tolist() == np.flatnonzero(seen[first, :first]).tolist()


def test_no_block_is_longer_than_allowed() -> None:
    tree = build_tree([np.arange(3000)])
    blocks = split_into_blocks(tree)
    assert max(last - first for first, last, _ in blocks) <= module.MAX_BLOCK_QUERIES
    assert sum(last - first for first, last, _ in blocks) == 3000


def test_work_grows_with_what_is_seen_and_not_with_the_square_of_the_packed_length() -> None:
    prompts = [np.concatenate([[group], np.arange(300)]) for group in range(8)]
    answers = [np.concatenate([prompt, [word] * 60]) for prompt in prompts for word in range(8)]
    tree = build_tree(answers)
    layout = TreeLayout(tree, CPU, torch.float32)
    pairs = sum(block.mask.numel() for block in layout.blocks(None))
    seen = int((tree.positions + 1).sum())
    assert pairs < 2.5 * seen < 0.25 * len(tree) ** 2
    squares, rectangles = layout.tiles
    areas = [(one.queries.stop - one.queries.start) * (one.keys.stop - one.keys.start) for one in squares + rectangles]
    assert sum(areas) < 1.25 * seen


def test_keys_out_of_the_window_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 16, 16)
    layout = TreeLayout(build_tree([np.arange(400)]), CPU, torch.float32)
    assert max(block.mask.shape[1] for block in layout.blocks(8)) == 16 + 7
    # a window that nothing reaches is none
    assert layout.blocks(400) is layout.blocks(None)


@pytest.mark.parametrize("window", [9, 10, 11])
def test_a_window_about_as_long_as_the_sequence_hides_what_it_should(window: int) -> None:
    Case(build_tree([np.arange(11), np.arange(5)]), window=window).check()


def test_half_precision_is_computed_in_float32() -> None:
    case = Case(bushy(), dtype=torch.bfloat16, sinks=True)
    out = case.by_blocks()
    exact = Case(case.tree, sinks=True)
    exact.states = [state.detach().double() for state in case.states]
    exact.aux = [sink.detach().double() for sink in case.aux]
    assert out.dtype == torch.bfloat16
    # nothing but the last rounding
    torch.testing.assert_close(out.double(), exact.dense(), rtol=2**-8, atol=1e-5)


def test_the_usual_scale_is_one_over_the_root_of_the_width() -> None:
    case = Case(bushy(), scale=WIDTH**-0.5)
    layout = TreeLayout(case.tree, CPU, torch.float64)
    torch.testing.assert_close(tree_attention(nn.Identity(), *case.states, None, tree=layout)[0], case.dense())


def test_a_loud_stranger_in_the_same_block_is_not_heard() -> None:
    tree = build_tree([np.array([1, 2, 3]), np.array([1, 4, 5])])
    case = Case(tree, heads=1, key_heads=1)
    with torch.no_grad():
        quiet = case.by_blocks()
        for state in case.states[1:]:
            state[:, :, tree.paths[0][1:]] = 1e30
        assert torch.equal(case.by_blocks()[:, tree.paths[1]], quiet[:, tree.paths[1]])


@settings(max_examples=5)
@given(sequences(), st.none() | st.integers(1, 5))
def test_flex_attention_is_given_the_same_visibility(found: list[IntArray], window: int | None) -> None:
    tree = build_tree([*found, np.array([7, 7, 8])])
    mask = TreeLayout(tree, CPU, torch.float32).flex_block_mask(window)
    size = len(tree)
    nothing = torch.zeros((), dtype=torch.int64)
    place = torch.arange(size)
    seen = mask.mask_mod(nothing, nothing, place[:, None].expand(size, size), place[None].expand(size, size))
    assert torch.equal(seen, dense_visibility(tree, window))


def test_flex_attention_skips_blocks_that_nothing_sees() -> None:
    tree = build_tree([np.full(256, word) for word in range(4)])
    blocks = TreeLayout(tree, CPU, torch.float32).flex_block_mask(None).to_dense()[0, 0]
    # sequences of two blocks each: two on the diagonal and one below it
    assert int(blocks.sum()) == 4 * 3
