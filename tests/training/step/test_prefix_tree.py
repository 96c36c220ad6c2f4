"""The tree: every sequence once, every shared token once, and who sees whom is who comes before whom."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.training.step import prefix_tree as module
from keel.training.step.prefix_tree import IntArray, build_tree, cost, plan_micro_batches, shared_prefix_length
from tests.support.policy_strategies import prefixes, sequences

shares = st.booleans()


def nodes(found: list[IntArray], *, share: bool) -> int:
    """How many tokens a step has, by counting."""
    return len(prefixes(found)) if share else sum(len(one) for one in found)


@settings(max_examples=50)
@given(sequences(), shares)
def test_every_path_spells_its_sequence_at_its_own_positions(found: list[IntArray], share: bool) -> None:
    tree = build_tree(found, share=share)
    assert len(tree.paths) == len(found)
    for one, path in zip(found, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == one.tolist()
        assert tree.positions[path].tolist() == list(range(len(one)))


@settings(max_examples=50)
@given(sequences(), shares)
def test_a_shared_token_is_there_once_and_nothing_is_padded(found: list[IntArray], share: bool) -> None:
    tree = build_tree(found, share=share)
    assert len(tree) == len(tree.positions) == len(tree.subtree_end) == nodes(found, share=share)
    used = np.concatenate([np.zeros(0, np.int64), *tree.paths])
    assert set(used.tolist()) == set(range(len(tree)))
    if not share:
        assert len(used) == len(tree)


@settings(max_examples=50)
@given(sequences(), shares, st.none() | st.integers(1, 5))
def test_a_token_sees_its_ancestors_and_itself_only(found: list[IntArray], share: bool, window: int | None) -> None:
    tree = build_tree(found, share=share)
    size = len(tree)
    wanted = np.zeros((size, size), bool)
    for path in tree.paths:
        for place, query in enumerate(path):
            first = 0 if window is None else max(0, place + 1 - window)
            wanted[query, path[first : place + 1]] = True
    assert (tree.visible(0, size, np.arange(size), window) == wanted).all()
    for first in range(0, size, 3):
        keys = np.arange(0, size, 2)
        part = tree.visible(first, min(first + 3, size), keys, window)
        assert (part == wanted[first : first + 3, keys]).all()


def test_ids_are_ordered_as_numbers_and_not_as_bytes() -> None:
    found = [np.array(one) for one in ([300, 1], [2, 7], [300, 2], [70000, 1], [2, 300], [70000])]
    assert len(build_tree(found)) == len(prefixes(found)) == 8


@settings(max_examples=50)
@given(sequences(most=2))
def test_a_shared_prefix_is_as_long_as_both_agree(found: list[IntArray]) -> None:
    first, second = found[0].tolist(), found[-1].tolist()
    size = shared_prefix_length(found[0], found[-1])
    assert first[:size] == second[:size]
    assert size == min(len(first), len(second)) or first[size] != second[size]


def test_cost_counts_every_token_once_and_every_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTENTION_COST", 0.01)
    for new, shared in [(1, 0), (4, 0), (3, 7), (0, 5)]:
        pairs = sum(shared + place + 1 for place in range(new))
        assert cost(new, shared) == pytest.approx(new + 0.01 * pairs)
    # a sequence in two pieces costs what it costs in one
    assert cost(4, 0) + cost(3, 4) == pytest.approx(cost(7, 0))


# micro-batches


def greedy(found: list[IntArray], budget: int, *, share: bool) -> list[list[int]]:
    """Sequences in the order of a dictionary, each into the open bin as long as it fits: by counting nodes."""
    bins: list[list[int]] = []
    for index in sorted(range(len(found)), key=lambda each: found[each].tolist()):
        if not len(found[index]):
            continue
        if bins and nodes([found[each] for each in [*bins[-1], index]], share=share) <= budget:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def price(found: list[IntArray], members: list[int], *, share: bool) -> float:
    """What a bin costs: its tokens, and for each the tokens it sees."""
    tree = build_tree([found[each] for each in members], share=share)
    return len(tree) + module.ATTENTION_COST * int((tree.positions + 1).sum())


@settings(max_examples=50)
@given(sequences(most=14), st.integers(0, 20), shares)
def test_micro_batches_hold_every_sequence_once_under_the_budget(found: list[IntArray], room: int, share: bool) -> None:
    budget = max([len(one) for one in found]) + room
    bins = plan_micro_batches(found, max(budget, 1), share=share)
    dealt = sorted(index for members in bins for index in members)
    assert dealt == [index for index, one in enumerate(found) if len(one)]
    for members in bins:
        assert members and nodes([found[each] for each in members], share=share) <= budget


@settings(max_examples=40)
@given(sequences(most=8), st.integers(0, 20), shares)
def test_of_all_ways_to_cut_the_order_micro_batches_are_the_fewest_with_the_least_squares(
    found: list[IntArray], room: int, share: bool
) -> None:
    budget = max(1, max(len(one) for one in found) + room)
    order = [each for each in sorted(range(len(found)), key=lambda each: found[each].tolist()) if len(found[each])]

    def worth(bins: list[list[int]]) -> tuple[int, float]:
        return len(bins), sum(price(found, members, share=share) ** 2 for members in bins)

    ways = []
    for cuts in itertools.product([False, True], repeat=max(len(order) - 1, 0)):
        bounds = [0, *[place + 1 for place, here in enumerate(cuts) if here], len(order)]
        bins = [order[first:last] for first, last in itertools.pairwise(bounds) if first < last]
        if all(nodes([found[each] for each in members], share=share) <= budget for members in bins):
            ways.append(worth(bins))
    # sequences that are equal may stand in any order, at the same cost
    assert worth(plan_micro_batches(found, budget, share=share)) == pytest.approx(min(ways))


def test_a_prompt_is_not_torn_apart_to_fill_a_micro_batch() -> None:
    prompts = [np.full(40, word) for word in range(4)]
    found = [np.concatenate([prompt, [90 + index] * 10]) for prompt in prompts for index in range(4)]
    # two groups of 80 and, torn apart, most of a third fit; then its prompt would be computed twice
    assert [len(members) for members in greedy(found, 230, share=True)] == [11, 5]
    assert plan_micro_batches(found, 230) == [list(range(8)), list(range(8, 16))]


def test_bins_are_balanced_where_greedy_ones_are_not() -> None:
    found = [np.full(10, word) for word in range(12)]
    assert [len(members) for members in greedy(found, 100, share=True)] == [10, 2]
    assert [len(members) for members in plan_micro_batches(found, 100)] == [6, 6]


def test_nothing_to_deal_is_no_micro_batch() -> None:
    assert plan_micro_batches([], 10) == []
    assert plan_micro_batches([np.zeros(0, np.int64)] * 3, 10) == []
    assert len(build_tree([])) == 0


def test_sharing_makes_fewer_micro_batches() -> None:
    prompt = np.arange(50)
    found = [np.concatenate([prompt, [100 + index]]) for index in range(8)]
    assert len(plan_micro_batches(found, 60)) == 1
    assert len(plan_micro_batches(found, 60, share=False)) == 8
