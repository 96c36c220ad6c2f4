"""Pack the sequences of a step into prefix trees, so that every shared prefix is computed once.

Sequences are sorted, so that each shares its longest prefix with a neighbour; concatenated without the shared parts,
they are in the depth-first order of their prefix tree. In this order one number per token determines visibility: token
k is an ancestor of token q, and visible to it, exactly when k <= q < subtree_end[k]. There is no padding. The cost of a
micro-batch, and where the next one starts, follow from the lengths of the shared prefixes alone.
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
"""Cost of one query-key pair relative to one token through the rest of the model: about 1 / (4 * width), which is
precise enough to balance micro-batches."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Sequences in the depth-first order of their prefix tree."""

    tokens: IntArray
    """[T] token ids."""
    positions: IntArray
    """[T] position of each token in its sequences."""
    subtree_end: IntArray
    """[T] one past the last descendant: k is visible to q when k <= q < subtree_end[k]."""
    paths: tuple[IntArray, ...]
    """Indices in the tree of each sequence's tokens, in the order the sequences were passed."""

    def __len__(self) -> int:
        return len(self.tokens)

    def visible(self, start: int, stop: int, keys: IntArray, window: int | None = None) -> NDArray[np.bool_]:
        """Return [stop - start, keys]: whether each query sees each key. Windows count positions in the sequence."""
        queries = np.arange(start, stop)[:, None]
        visible = (keys <= queries) & (queries < self.subtree_end[keys])
        if window is not None:
            visible &= self.positions[start:stop, None] - self.positions[keys] < window
        return visible


def shared_prefix_length(first: IntArray, second: IntArray) -> int:
    """Return the length of the longest common prefix of two sequences."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def sorted_order(sequences: Sequence[IntArray]) -> list[int]:
    """Return indices in lexicographic order, in which neighbours share the longest prefixes."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def build_tree(sequences: Sequence[IntArray], *, share: bool = True) -> PrefixTree:
    """Build one prefix tree (or forest) of the sequences; without `share` they are concatenated."""
    order = sorted_order(sequences)
    paths: list[IntArray] = [np.zeros(0, np.int64)] * len(sequences)
    suffixes: list[IntArray] = []
    ends: list[tuple[IntArray, int]] = []
    size, previous, path = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for index in order:
        sequence = sequences[index]
        common = shared_prefix_length(previous, sequence) if share else 0
        ends.append((path[common:], size))
        path = np.concatenate([path[:common], np.arange(size, size + len(sequence) - common)])
        suffixes.append(sequence[common:])
        size += len(sequence) - common
        paths[index], previous = path, sequence
    ends.append((path, size))
    end = np.zeros(size, np.int64)
    for tokens, value in ends:
        end[tokens] = value
    positions = np.zeros(size, np.int64)
    for path in paths:
        positions[path] = np.arange(len(path))
    return PrefixTree(np.concatenate([np.zeros(0, np.int64), *suffixes]), positions, end, tuple(paths))


def cost(new: int | IntArray, shared: int | IntArray) -> Any:
    """Return the cost of `new` tokens after `shared` ones: each token through the model and against its keys."""
    return new + ATTENTION_COST * new * (shared + (new + 1) / 2)


def plan_micro_batches(
    sequences: Sequence[IntArray], max_tokens: int, *, share: bool = True, ranks: int = 1
) -> list[list[int]]:
    """Split sequences into as few trees of at most `max_tokens` as possible, with the least sum of squared costs.

    Costs are thus balanced as far as possible without separating sequences that share long prefixes, which would then
    be computed twice. The caller must reject sequences longer than the budget. Empty sequences are in no micro-batch.
    With several ranks, micro-batches are added until every rank has the same number, and the most expensive one is as
    cheap as possible.
    """
    order = [index for index in sorted_order(sequences) if len(sequences[index])]
    if not order:
        return []
    length = np.array([len(sequences[index]) for index in order])
    common = _shared_with_previous(sequences, order, share)
    bounds = _split_runs(length, common, max_tokens)
    if ranks == 1:
        return [order[first:last] for first, last in itertools.pairwise(bounds)]
    num_bins = min(-(-(len(bounds) - 1) // ranks) * ranks, len(order))
    bounds = _split_runs(length, common, max_tokens, _min_max_cost(length, common, max_tokens, num_bins))
    contiguous = [[run] for run in itertools.pairwise(bounds)]
    balanced = _balance_runs(length, common, max_tokens, num_bins)
    best = min((contiguous, balanced), key=lambda bins: _max_cost(length, common, bins))
    return [[index for first, last in runs for index in order[first:last]] for runs in best]


def assign_to_ranks(
    sequences: Sequence[IntArray], bins: Sequence[list[int]], ranks: int, *, share: bool = True
) -> list[list[list[int] | None]]:
    """Assign the same number of micro-batches to each rank, padded with None.

    Ranks wait for each other in every layer, so micro-batches that run at the same time should have similar costs.
    """
    costs = []
    for members in bins:
        order = sorted(members, key=lambda index: sequences[index].astype(">u4").tobytes())
        common = _shared_with_previous(sequences, order, share)
        length = np.array([len(sequences[index]) for index in order])
        costs.append(float(cost(length - common, common).sum()))
    by_cost = sorted(range(len(bins)), key=lambda index: (-costs[index], index))
    rounds = [by_cost[first : first + ranks] for first in range(0, len(bins), ranks)]
    return [[bins[members[rank]] if rank < len(members) else None for members in rounds] for rank in range(ranks)]


def _shared_with_previous(sequences: Sequence[IntArray], order: Sequence[int], share: bool) -> IntArray:
    """Return the length of the prefix each sequence shares with the one before it."""
    common = np.zeros(len(order), np.int64)
    for index in range(1, len(order) if share else 0):
        common[index] = shared_prefix_length(sequences[order[index - 1]], sequences[order[index]])
    return common


def _min_max_cost(length: IntArray, common: IntArray, max_tokens: int, max_runs: int) -> float:
    """Return (approximately) the lowest limit on a run's cost that allows at most `max_runs` contiguous runs."""
    tokens, costs, tokens_before, costs_before = _prefix_sums(length, common)

    def count_runs(limit: float) -> int:
        first = runs = 0
        while first < len(length):
            by_tokens = np.searchsorted(tokens, tokens_before[first] + max_tokens, "right") - 1
            by_cost = np.searchsorted(costs, costs_before[first] + limit, "right") - 1
            first, runs = max(int(min(by_tokens, by_cost)), first + 1), runs + 1
        return runs

    low, high = float(cost(length, 0).max()), float(costs[-1]) + 1.0
    if count_runs(low) <= max_runs:
        return low * (1 + 1e-9)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if count_runs(middle) <= max_runs else (middle, high)
    return high * (1 + 1e-9)  # a margin for rounding errors


SequenceRange = tuple[int, int]
"""A contiguous run in sorted order: index of its first sequence, and one past its last."""


def _balance_runs(length: IntArray, common: IntArray, max_tokens: int, num_bins: int) -> list[list[SequenceRange]]:
    """Assign short contiguous runs, most expensive first, to the cheapest bin so far; empty list if they do not fit.

    Contiguous runs alone cannot balance a long sequence between short ones.
    """
    tokens, costs, tokens_before, costs_before = _prefix_sums(length, common)
    bounds = _split_runs(length, common, max_tokens, float(costs[-1]) / (4 * num_bins))
    runs = sorted(itertools.pairwise(bounds), key=lambda run: costs_before[run[0]] - costs[run[1]])
    bins: list[list[SequenceRange]] = [[] for _ in range(num_bins)]
    bin_tokens, bin_costs = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    for first, last in runs:
        fits = bin_tokens + tokens[last] - tokens_before[first] <= max_tokens
        if not fits.any():
            return []
        index = int(np.argmin(np.where(fits, bin_costs, np.inf)))
        bins[index].append((first, last))
        bin_tokens[index] += tokens[last] - tokens_before[first]
        bin_costs[index] += costs[last] - costs_before[first]
    return [sorted(members) for members in bins if members]


def _max_cost(length: IntArray, common: IntArray, bins: Sequence[Sequence[SequenceRange]]) -> float:
    _, costs, _, costs_before = _prefix_sums(length, common)
    totals = [sum(costs[last] - costs_before[first] for first, last in runs) for runs in bins]
    return float(max(totals, default=math.inf))


def _prefix_sums(length: IntArray, common: IntArray) -> tuple[IntArray, Any, IntArray, Any]:
    """Return cumulative tokens and costs, and the same to be subtracted for a run that starts at each sequence."""
    new = length - common
    tokens = np.concatenate([[0], np.cumsum(new)])
    costs = np.concatenate([[0.0], np.cumsum(cost(new, common))])
    # the first sequence of a run shares nothing; both sums to subtract are non-decreasing, as searchsorted requires
    return tokens, costs, tokens[:-1] - common, costs[:-1] - cost(common, 0)


def _split_runs(length: IntArray, common: IntArray, max_tokens: int, max_cost: float = math.inf) -> list[int]:
    """Return the bounds of contiguous runs: as few as possible, then with the least sum of squared costs."""
    tokens, costs, tokens_before, costs_before = _prefix_sums(length, common)
    count, squares = np.zeros(len(tokens), np.int64), np.zeros(len(tokens))
    previous = np.zeros(len(tokens), np.int64)
    for last in range(1, len(tokens)):
        lowest = int(np.searchsorted(tokens_before[:last], tokens[last] - max_tokens))
        if max_cost < math.inf:
            lowest = max(lowest, int(np.searchsorted(costs_before[:last], costs[last] - max_cost)))
        first = np.arange(min(lowest, last - 1), last)
        first = first[count[first] == count[first].min()]
        total = squares[first] + (costs[last] - costs_before[first]) ** 2
        best = int(np.argmin(total))
        previous[last], squares[last], count[last] = first[best], total[best], count[first[best]] + 1
    bounds = [len(length)]
    while bounds[-1]:
        bounds.append(int(previous[bounds[-1]]))
    return bounds[::-1]
