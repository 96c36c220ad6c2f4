"""Packing a step as prefix trees: a token that samples share, with everything before it, is computed once.

Sequences are sorted, so that each one shares its longest prefix with its neighbour; laid out one after another without
what is shared, they stand in the depth-first order of their prefix tree. There, one number per token says everything:
token k is an ancestor of token q, and visible to it, exactly when k <= q < end[k]. Nothing is padded. What a
micro-batch costs, and where the next one starts, follows from the lengths of the shared prefixes alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ATTENTION_COST = 1 / 2500
"""Cost of one query-key pair against one token through the rest of the model: of the order of 1 / (4 * width), which
is enough to balance micro-batches."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Sequences in the depth-first order of their prefix tree."""

    tokens: Ints
    """[T] token ids."""
    positions: Ints
    """[T] each token's position in its own sequences."""
    end: Ints
    """[T] one past the last descendant: k is visible to q when k <= q < end[k]."""
    paths: tuple[Ints, ...]
    """For each sequence, in the order they were given, where its tokens stand in the tree."""

    def __len__(self) -> int:
        return len(self.tokens)

    def visible(self, first: int, last: int, keys: Ints, window: int | None = None) -> NDArray[np.bool_]:
        """[last - first, keys] whether each query sees each key; a window counts positions of the sequence alone."""
        queries = np.arange(first, last)[:, None]
        seen = (keys <= queries) & (queries < self.end[keys])
        if window is not None:
            seen &= self.positions[first:last, None] - self.positions[keys] < window
        return seen


def shared_prefix(first: Ints, second: Ints) -> int:
    """How many tokens two sequences have in common from the start."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def sorted_order(sequences: Sequence[Ints]) -> list[int]:
    """The order in which neighbours share the most: as words in a dictionary."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def build_tree(sequences: Sequence[Ints], *, share: bool = True) -> Tree:
    """One tree, or forest, of these sequences; without `share` they stand side by side."""
    order = sorted_order(sequences)
    paths: list[Ints] = [np.zeros(0, np.int64)] * len(sequences)
    pieces: list[Ints] = []
    ends: list[tuple[Ints, int]] = []
    size, previous, path = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for index in order:
        sequence = sequences[index]
        common = shared_prefix(previous, sequence) if share else 0
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
    return Tree(np.concatenate([np.zeros(0, np.int64), *pieces]), positions, end, tuple(paths))


def cost(new: int, shared: int) -> float:
    """What `new` tokens after `shared` ones cost: each once through the model, and once against each key it sees."""
    return new + ATTENTION_COST * new * (shared + (new + 1) / 2)


def micro_batches(sequences: Sequence[Ints], max_tokens: int, *, share: bool = True) -> list[list[int]]:
    """Sequences dealt into as few trees as fit `max_tokens` each, of costs as equal as their order allows.

    A sequence longer than the budget is for the caller to refuse. Sequences without tokens belong to no micro-batch.
    """
    order = [index for index in sorted_order(sequences) if len(sequences[index])]
    lengths = [len(sequences[index]) for index in order]
    common = [0] * len(order)
    for place in range(1, len(order) if share else 0):
        common[place] = shared_prefix(sequences[order[place - 1]], sequences[order[place]])
    runs = _cut(lengths, common, max_tokens, float("inf"))
    low = max((cost(length, 0) for length in lengths), default=0.0)
    high = max((run_cost for _, _, run_cost in runs), default=0.0)
    for _ in range(20):
        middle = (low + high) / 2
        tried = _cut(lengths, common, max_tokens, middle)
        if len(tried) <= len(runs):
            runs, high = tried, middle
        else:
            low = middle
    return [order[first:last] for first, last, _ in runs]


def _cut(lengths: list[int], common: list[int], max_tokens: int, max_cost: float) -> list[tuple[int, int, float]]:
    """Runs of neighbours (first, last, cost), each as long as both limits allow."""
    runs: list[tuple[int, int, float]] = []
    first, tokens, spent = 0, 0, 0.0
    for place, (length, prefix) in enumerate(zip(lengths, common, strict=True)):
        shared = prefix if place > first else 0
        added, price = length - shared, cost(length - shared, shared)
        if place > first and (tokens + added > max_tokens or spent + price > max_cost):
            runs.append((first, place, spent))
            first, tokens, spent, added, price = place, 0, 0.0, length, cost(length, 0)
        tokens, spent = tokens + added, spent + price
    return [*runs, (first, len(lengths), spent)] if lengths else []
