"""How the scores of rows lie side by side when torch computes them: what rows share is one product for all of them.

Rows that stand on neighbouring nodes of a shelf are a `Run`; the `Columns` of a step say where the scores of each go.
Where the kernels in C attend (`keel.inference.kernels.decode_attention`) none of this is made.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from keel.inference.local.prefix_cache import Node, Shelf


class Run:
    """Rows that stand on nodes `first` to `last` of a shelf, each with as many places for rows as the fullest has."""

    def __init__(self, shelf: Shelf, first: int, rows: Sequence[Sequence[int]], count: int, device: torch.device):
        self.shelf, self.first, self.last = shelf, first, first + len(rows)
        self.nodes, self.room = len(rows), max(map(len, rows))
        # a place that no row has is filled with some row, and what comes of it is never read
        take = [row for some in rows for row in (*some, *[0] * (self.room - len(some)))]
        where = [(row, node * self.room + place) for node, some in enumerate(rows) for place, row in enumerate(some)]
        where.sort()
        self.every = len(where) == count
        plain = self.every and take == list(range(count))
        self.take = None if plain else torch.tensor(take, device=device)
        self.back = None if plain else torch.tensor([place for _, place in where], device=device)
        self.rows = torch.tensor([row for row, _ in where], device=device)

    def scores(self, layer: int, query: Tensor) -> Tensor:
        """Query [n, key heads, rest, D] gives [rows here, key heads, rest, length of the shelf]."""
        return self._product(query, self.shelf.keys[layer].transpose(2, 3))

    def mixed(self, layer: int, shares: Tensor) -> Tensor:
        """Shares [n, key heads, rest, length of the shelf] give [rows here, key heads, rest, D]."""
        return self._product(shares, self.shelf.values[layer])

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        groups, rest = left.shape[1:3]
        left = left if self.take is None else left.index_select(0, self.take)
        left = torch.unflatten(left, 0, (self.nodes, self.room)).transpose(1, 2)
        left = left.reshape(self.nodes * groups, self.room * rest, -1)
        found = torch.bmm(left, right[self.first : self.last].flatten(0, 1))
        found = found.view(self.nodes, groups, self.room, rest, -1).transpose(1, 2).flatten(0, 1)
        return found if self.back is None else found.index_select(0, self.back)


class Columns:
    """Of the scores of rows on these paths: for the nodes of each depth as many as the longest shelf there has."""

    def __init__(self, paths: Sequence[Sequence[Node]], device: torch.device) -> None:
        self.runs: list[tuple[slice, Run]] = []
        """With the columns of each."""
        self.depths: list[tuple[int, Tensor, Tensor]] = []
        """Columns; of each row where its node begins, and how long that is."""
        self.count = 0
        for depth in range(max(map(len, paths))):
            here = [path[depth] if depth < len(path) else None for path in paths]
            width = max(node.shelf.length for node in here if node)
            starts = torch.tensor([node.first if node else 0 for node in here], device=device)
            sizes = torch.tensor([node.end - node.first if node else 0 for node in here], device=device)
            self.depths.append((width, starts, sizes))
            for run in _runs(here, device):
                self.runs.append((slice(self.count, self.count + run.shelf.length), run))
            self.count += width


def _runs(nodes: Sequence[Node | None], device: torch.device) -> Iterator[Run]:
    """Of the nodes of one depth, one for each row or None."""
    rows: dict[Node, list[int]] = {}
    for row, node in enumerate(nodes):
        if node is not None:
            rows.setdefault(node, []).append(row)
    some: list[Node] = []
    for node in sorted(rows, key=lambda node: (id(node.shelf), node.place)):
        if some:
            fullest = max(len(rows[one]) for one in (*some, node))
            padded, there = fullest * (node.place - some[0].place + 1), sum(len(rows[one]) for one in (*some, node))
            if some[0].shelf is not node.shelf or padded > 2 * there:
                yield _run(some, rows, len(nodes), device)
                some = []
        some.append(node)
    yield _run(some, rows, len(nodes), device)


def _run(nodes: Sequence[Node], rows: Mapping[Node, Sequence[int]], count: int, device: torch.device) -> Run:
    """Of these nodes and what stands between them on their shelf."""
    here: list[Sequence[int]] = [()] * (nodes[-1].place - nodes[0].place + 1)
    for node in nodes:
        here[node.place - nodes[0].place] = rows[node]
    return Run(nodes[0].shelf, nodes[0].place, here, count, device)
