"""Packing a step as prefix trees: a token that samples share, with everything before it, is computed once.

Sequences are sorted, so that each one shares its longest prefix with its neighbour; laid out one after another without
what is shared, they stand in the depth-first order of their prefix tree. There, one number per token says everything:
token k is an ancestor of token q, and visible to it, exactly when k <= q < end[k]. Nothing is padded. What a
micro-batch costs, and where the next one starts, follows from the lengths of the shared prefixes alone.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

ATTENTION_COST = 1 / 2500
"""Cost of one query-key pair against one token through the rest of the model: of the order of 1 / (4 * width), which
is enough to balance micro-batches."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Sequences in the depth-first order of their prefix tree."""

    tokens: IntArray
    """[T] token ids."""
    positions: IntArray
    """[T] each token's position in its own sequences."""
    subtree_end: IntArray
    """[T] one past the last descendant: k is visible to q when k <= q < end[k]."""
    paths: tuple[IntArray, ...]
    """For each sequence, in the order they were given, where its tokens stand in the tree."""

    def __len__(self) -> int:
        return len(self.tokens)

    def visible(self, start: int, stop: int, keys: IntArray, window: int | None = None) -> NDArray[np.bool_]:
        """[last - first, keys] whether each query sees each key; a window counts positions of the sequence alone."""
        queries = np.arange(start, stop)[:, None]
        seen = (keys <= queries) & (queries < self.subtree_end[keys])
        if window is not None:
            seen &= self.positions[start:stop, None] - self.positions[keys] < window
        return seen


def shared_prefix_length(first: IntArray, second: IntArray) -> int:
    """How many tokens two sequences have in common from the start."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def sorted_order(sequences: Sequence[IntArray]) -> list[int]:
    """The order in which neighbours share the most: as words in a dictionary."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def build_tree(sequences: Sequence[IntArray], *, share: bool = True) -> PrefixTree:
    """One tree, or forest, of these sequences; without `share` they stand side by side."""
    order = sorted_order(sequences)
    paths: list[IntArray] = [np.zeros(0, np.int64)] * len(sequences)
    pieces: list[IntArray] = []
    ends: list[tuple[IntArray, int]] = []
    size, previous, path = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for index in order:
        sequence = sequences[index]
        common = shared_prefix_length(previous, sequence) if share else 0
        ends.append((path[common:], size))
        path = np.concatenate([path[:common], np.arange(size, size + len(sequence) - common)])
        pieces.append(sequence[common:])
        size += len(sequence) - common
        paths[index], previous = path, sequence
    ends.append((path, size))
    end = np.zeros(size, np.int64)
    for tokens, value in ends:
        end[tokens] = value
    positions = np.zeros(size, np.int64)
    for path in paths:
        positions[path] = np.arange(len(path))
    return PrefixTree(np.concatenate([np.zeros(0, np.int64), *pieces]), positions, end, tuple(paths))


def cost(new: int | IntArray, shared: int | IntArray) -> Any:
    """What `new` tokens after `shared` ones cost: each once through the model, and once against each key it sees."""
    return new + ATTENTION_COST * new * (shared + (new + 1) / 2)


def plan_micro_batches(
    sequences: Sequence[IntArray], max_tokens: int, *, share: bool = True, ranks: int = 1
) -> list[list[int]]:
    """Sequences dealt into as few trees as fit `max_tokens` each; then, of least squares of their costs.

    So they are of equal cost as far as that does not tear apart what shares much: it would be computed in both. A
    sequence longer than the budget is for the caller to refuse. Sequences without tokens belong to no micro-batch.
    For several ranks there are as many more as give each of them equally many, none dearer than it has to be.
    """
    order = [index for index in sorted_order(sequences) if len(sequences[index])]
    if not order:
        return []
    length = np.array([len(sequences[index]) for index in order])
    common = _shared_with_previous(sequences, order, share)
    bounds = _split_runs(length, common, max_tokens)
    if ranks == 1:
        return [order[first:last] for first, last in itertools.pairwise(bounds)]
    wanted = min(-(-(len(bounds) - 1) // ranks) * ranks, len(order))
    bounds = _split_runs(length, common, max_tokens, _min_max_cost(length, common, max_tokens, wanted))
    whole = [[piece] for piece in itertools.pairwise(bounds)]
    dealt = min(
        (whole, _balance_runs(length, common, max_tokens, wanted)), key=lambda one: _max_cost(length, common, one)
    )
    return [[index for first, last in pieces for index in order[first:last]] for pieces in dealt]


def assign_to_ranks(
    sequences: Sequence[IntArray], bins: Sequence[list[int]], ranks: int, *, share: bool = True
) -> list[list[list[int] | None]]:
    """Micro-batches for each rank, as many for one as for another; None where there are no more.

    Ranks that train one model wait for each other in each layer, so those that run at the same time are of like cost.
    """
    prices = []
    for members in bins:
        order = sorted(members, key=lambda index: sequences[index].astype(">u4").tobytes())
        common = _shared_with_previous(sequences, order, share)
        length = np.array([len(sequences[index]) for index in order])
        prices.append(float(cost(length - common, common).sum()))
    dearest = sorted(range(len(bins)), key=lambda place: (-prices[place], place))
    rounds = [dearest[first : first + ranks] for first in range(0, len(bins), ranks)]
    return [[bins[turn[rank]] if rank < len(turn) else None for turn in rounds] for rank in range(ranks)]


def _shared_with_previous(sequences: Sequence[IntArray], order: Sequence[int], share: bool) -> IntArray:
    """What each sequence has in common with the one before it."""
    common = np.zeros(len(order), np.int64)
    for place in range(1, len(order) if share else 0):
        common[place] = shared_prefix_length(sequences[order[place - 1]], sequences[order[place]])
    return common


def _min_max_cost(length: IntArray, common: IntArray, max_tokens: int, max_runs: int) -> float:
    """The smallest cost of the dearest of at most `wanted` runs of neighbours, nearly."""
    tokens, prices, tokens_before, prices_before = _prefix_sums(length, common)

    def count(limit: float) -> int:
        first = found = 0
        while first < len(length):
            by_tokens = np.searchsorted(tokens, tokens_before[first] + max_tokens, "right") - 1
            by_price = np.searchsorted(prices, prices_before[first] + limit, "right") - 1
            first, found = max(int(min(by_tokens, by_price)), first + 1), found + 1
        return found

    low, high = float(cost(length, 0).max()), float(prices[-1]) + 1.0
    if count(low) <= max_runs:
        return low * (1 + 1e-9)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if count(middle) <= max_runs else (middle, high)
    return high * (1 + 1e-9)  # not to be missed by a rounding


SequenceRange = tuple[int, int]
"""A run of neighbours: its first, and one past its last."""


def _balance_runs(length: IntArray, common: IntArray, max_tokens: int, num_bins: int) -> list[list[SequenceRange]]:
    """Short runs of neighbours, the dearest first, each to whichever has the least so far; none if they do not fit.

    A long sequence between short ones cannot be balanced by cutting alone.
    """
    tokens, prices, tokens_before, prices_before = _prefix_sums(length, common)
    bounds = _split_runs(length, common, max_tokens, float(prices[-1]) / (4 * num_bins))
    pieces = sorted(itertools.pairwise(bounds), key=lambda one: prices_before[one[0]] - prices[one[1]])
    found: list[list[SequenceRange]] = [[] for _ in range(num_bins)]
    held, spent = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    for first, last in pieces:
        room = held + tokens[last] - tokens_before[first] <= max_tokens
        if not room.any():
            return []
        place = int(np.argmin(np.where(room, spent, np.inf)))
        found[place].append((first, last))
        held[place] += tokens[last] - tokens_before[first]
        spent[place] += prices[last] - prices_before[first]
    return [sorted(members) for members in found if members]


def _max_cost(length: IntArray, common: IntArray, bins: Sequence[Sequence[SequenceRange]]) -> float:
    _, prices, _, prices_before = _prefix_sums(length, common)
    totals = [sum(prices[last] - prices_before[first] for first, last in pieces) for pieces in bins]
    return float(max(totals, default=math.inf))


def _prefix_sums(length: IntArray, common: IntArray) -> tuple[IntArray, Any, IntArray, Any]:
    """Tokens and costs up to each sequence, and what of them a run that begins there does not have."""
    new = length - common
    tokens = np.concatenate([[0], np.cumsum(new)])
    prices = np.concatenate([[0.0], np.cumsum(cost(new, common))])
    # the first of a run has no neighbour to share with; both sums grow with the number of the first
    return tokens, prices, tokens[:-1] - common, prices[:-1] - cost(common, 0)


def _split_runs(length: IntArray, common: IntArray, max_tokens: int, max_cost: float = math.inf) -> list[int]:
    """Where the runs of neighbours begin, and the end of the last."""
    tokens, prices, tokens_before, prices_before = _prefix_sums(length, common)
    count, squares = np.zeros(len(tokens), np.int64), np.zeros(len(tokens))
    come_from = np.zeros(len(tokens), np.int64)
    for last in range(1, len(tokens)):
        lowest = int(np.searchsorted(tokens_before[:last], tokens[last] - max_tokens))
        if max_cost < math.inf:
            lowest = max(lowest, int(np.searchsorted(prices_before[:last], prices[last] - max_cost)))
        first = np.arange(min(lowest, last - 1), last)
        first = first[count[first] == count[first].min()]
        total = squares[first] + (prices[last] - prices_before[first]) ** 2
        best = int(np.argmin(total))
        come_from[last], squares[last], count[last] = first[best], total[best], count[first[best]] + 1
    bounds = [len(length)]
    while bounds[-1]:
        bounds.append(int(come_from[bounds[-1]]))
    return bounds[::-1]
