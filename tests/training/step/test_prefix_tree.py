"""Test prefix trees: every shared token appears once, and each token sees exactly its ancestors."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.training.step import prefix_tree as module
from keel.training.step.prefix_tree import IntArray, build_tree, cost, plan_micro_batches, shared_prefix_length
from tests.support.policy_strategies import prefixes, sequences

shares = st.booleans()


def nodes(token_lists: list[IntArray], *, share: bool) -> int:
    """Return the number of tokens of a tree by counting."""
    return len(prefixes(token_lists)) if share else sum(len(tokens) for tokens in token_lists)


@settings(max_examples=50)
@given(sequences(), shares)
def test_every_path_has_the_tokens_and_positions_of_its_sequence(token_lists: list[IntArray], share: bool) -> None:
    tree = build_tree(token_lists, share=share)
    assert len(tree.paths) == len(token_lists)
    for tokens, path in zip(token_lists, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == tokens.tolist()
        assert tree.positions[path].tolist() == list(range(len(tokens)))


@settings(max_examples=50)
@given(sequences(), shares)
def test_a_shared_token_appears_once_and_there_is_no_padding(token_lists: list[IntArray], share: bool) -> None:
    tree = build_tree(token_lists, share=share)
    assert len(tree) == len(tree.positions) == len(tree.subtree_end) == nodes(token_lists, share=share)
    used = np.concatenate([np.zeros(0, np.int64), *tree.paths])
    assert set(used.tolist()) == set(range(len(tree)))
    if not share:
        assert len(used) == len(tree)


@settings(max_examples=50)
@given(sequences(), shares, st.none() | st.integers(1, 5))
def test_a_token_sees_only_its_ancestors_and_itself(
    token_lists: list[IntArray], share: bool, window: int | None
) -> None:
    tree = build_tree(token_lists, share=share)
    size = len(tree)
    expected = np.zeros((size, size), bool)
    for path in tree.paths:
        for position, query in enumerate(path):
            first = 0 if window is None else max(0, position + 1 - window)
            expected[query, path[first : position + 1]] = True
    assert (tree.visible(0, size, np.arange(size), window) == expected).all()
    for first in range(0, size, 3):
        keys = np.arange(0, size, 2)
        part = tree.visible(first, min(first + 3, size), keys, window)
        assert (part == expected[first : first + 3, keys]).all()


def test_ids_are_ordered_as_numbers_and_not_as_bytes() -> None:
    token_lists = [np.array(ids) for ids in ([300, 1], [2, 7], [300, 2], [70000, 1], [2, 300], [70000])]
    assert len(build_tree(token_lists)) == len(prefixes(token_lists)) == 8


@settings(max_examples=50)
@given(sequences(most=2))
def test_the_shared_prefix_is_the_longest_common_one(token_lists: list[IntArray]) -> None:
    first, second = token_lists[0].tolist(), token_lists[-1].tolist()
    size = shared_prefix_length(token_lists[0], token_lists[-1])
    assert first[:size] == second[:size]
    assert size == min(len(first), len(second)) or first[size] != second[size]


def test_cost_counts_every_token_once_and_every_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTENTION_COST", 0.01)
    for new, shared in [(1, 0), (4, 0), (3, 7), (0, 5)]:
        pairs = sum(shared + position + 1 for position in range(new))
        assert cost(new, shared) == pytest.approx(new + 0.01 * pairs)
    # the cost of a sequence does not depend on where it is split
    assert cost(4, 0) + cost(3, 4) == pytest.approx(cost(7, 0))


# micro-batches


def greedy(token_lists: list[IntArray], budget: int, *, share: bool) -> list[list[int]]:
    """Fill bins greedily in lexicographic order, by counting nodes."""
    bins: list[list[int]] = []
    for index in sorted(range(len(token_lists)), key=lambda i: token_lists[i].tolist()):
        if not len(token_lists[index]):
            continue
        if bins and nodes([token_lists[i] for i in [*bins[-1], index]], share=share) <= budget:
            bins[-1].append(index)
        else:
            bins.append([index])
    return bins


def bin_cost(token_lists: list[IntArray], members: list[int], *, share: bool) -> float:
    """Return the cost of a bin: its tokens, and for each the tokens it sees."""
    tree = build_tree([token_lists[index] for index in members], share=share)
    return len(tree) + module.ATTENTION_COST * int((tree.positions + 1).sum())


@settings(max_examples=50)
@given(sequences(most=14), st.integers(0, 20), shares)
def test_micro_batches_contain_every_sequence_once_within_the_budget(
    token_lists: list[IntArray], slack: int, share: bool
) -> None:
    budget = max([len(tokens) for tokens in token_lists]) + slack
    bins = plan_micro_batches(token_lists, max(budget, 1), share=share)
    assigned = sorted(index for members in bins for index in members)
    assert assigned == [index for index, tokens in enumerate(token_lists) if len(tokens)]
    for members in bins:
        assert members and nodes([token_lists[index] for index in members], share=share) <= budget


@settings(max_examples=40)
@given(sequences(most=8), st.integers(0, 20), shares)
def test_micro_batches_are_the_fewest_possible_with_the_least_sum_of_squared_costs(
    token_lists: list[IntArray], slack: int, share: bool
) -> None:
    budget = max(1, max(len(tokens) for tokens in token_lists) + slack)
    in_order = sorted(range(len(token_lists)), key=lambda index: token_lists[index].tolist())
    order = [index for index in in_order if len(token_lists[index])]

    def objective(bins: list[list[int]]) -> tuple[int, float]:
        return len(bins), sum(bin_cost(token_lists, members, share=share) ** 2 for members in bins)

    feasible = []
    for cuts in itertools.product([False, True], repeat=max(len(order) - 1, 0)):
        bounds = [0, *[index + 1 for index, is_cut in enumerate(cuts) if is_cut], len(order)]
        bins = [order[first:last] for first, last in itertools.pairwise(bounds) if first < last]
        if all(nodes([token_lists[index] for index in members], share=share) <= budget for members in bins):
            feasible.append(objective(bins))
    # the order of equal sequences is arbitrary and does not change the cost
    assert objective(plan_micro_batches(token_lists, budget, share=share)) == pytest.approx(min(feasible))


def test_a_group_is_not_split_to_fill_a_micro_batch() -> None:
    prompts = [np.full(40, token) for token in range(4)]
    token_lists = [np.concatenate([prompt, [90 + index] * 10]) for prompt in prompts for index in range(4)]
    # two groups of 80 and most of a third fit, but then the third prompt would be computed twice
    assert [len(members) for members in greedy(token_lists, 230, share=True)] == [11, 5]
    assert plan_micro_batches(token_lists, 230) == [list(range(8)), list(range(8, 16))]


def test_micro_batches_are_balanced_where_greedy_ones_are_not() -> None:
    token_lists = [np.full(10, token) for token in range(12)]
    assert [len(members) for members in greedy(token_lists, 100, share=True)] == [10, 2]
    assert [len(members) for members in plan_micro_batches(token_lists, 100)] == [6, 6]


def test_empty_sequences_give_no_micro_batch() -> None:
    assert plan_micro_batches([], 10) == []
    assert plan_micro_batches([np.zeros(0, np.int64)] * 3, 10) == []
    assert len(build_tree([])) == 0


def test_sharing_prefixes_gives_fewer_micro_batches() -> None:
    prompt = np.arange(50)
    token_lists = [np.concatenate([prompt, [100 + index]]) for index in range(8)]
    assert len(plan_micro_batches(token_lists, 60)) == 1
    assert len(plan_micro_batches(token_lists, 60, share=False)) == 8
