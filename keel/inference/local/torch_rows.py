"""How the scores of rows lie side by side when torch computes them: what rows share is one product for all of them.

Rows that stand on neighbouring nodes of a shelf are a `Run`; the `Columns` of a step say where the scores of each go.
Where the kernels in C attend (`keel.inference.kernels.decode_attention`) none of this is made.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from keel.inference.local.prefix_cache import KVBlock, PrefixNode


class SharedRows:
    """Rows that stand on nodes `first` to `last` of a shelf, each with as many places for rows as the fullest has."""

    def __init__(
        self,
        block: KVBlock,
        first_node: int,
        rows_by_node: Sequence[Sequence[int]],
        row_count: int,
        device: torch.device,
    ):
        self.block, self.first_node, self.end_node = block, first_node, first_node + len(rows_by_node)
        self.node_count, self.rows_per_node = len(rows_by_node), max(map(len, rows_by_node))
        # a place that no row has is filled with some row, and what comes of it is never read
        take = [row for some in rows_by_node for row in (*some, *[0] * (self.rows_per_node - len(some)))]
        where = [
            (row, node * self.rows_per_node + place)
            for node, some in enumerate(rows_by_node)
            for place, row in enumerate(some)
        ]
        where.sort()
        self.covers_all_rows = len(where) == row_count
        plain = self.covers_all_rows and take == list(range(row_count))
        self.gather_index = None if plain else torch.tensor(take, device=device)
        self.scatter_index = None if plain else torch.tensor([place for _, place in where], device=device)
        self.row_index = torch.tensor([row for row, _ in where], device=device)

    def scores(self, layer: int, query: Tensor) -> Tensor:
        """Query [n, key heads, rest, D] gives [rows here, key heads, rest, length of the shelf]."""
        return self._batched_matmul(query, self.block.keys[layer].transpose(2, 3))

    def weighted_values(self, layer: int, attn_weights: Tensor) -> Tensor:
        """Shares [n, key heads, rest, length of the shelf] give [rows here, key heads, rest, D]."""
        return self._batched_matmul(attn_weights, self.block.values[layer])

    def _batched_matmul(self, left: Tensor, right: Tensor) -> Tensor:
        groups, rest = left.shape[1:3]
        left = left if self.gather_index is None else left.index_select(0, self.gather_index)
        left = torch.unflatten(left, 0, (self.node_count, self.rows_per_node)).transpose(1, 2)
        left = left.reshape(self.node_count * groups, self.rows_per_node * rest, -1)
        found = torch.bmm(left, right[self.first_node : self.end_node].flatten(0, 1))
        found = found.view(self.node_count, groups, self.rows_per_node, rest, -1).transpose(1, 2).flatten(0, 1)
        return found if self.scatter_index is None else found.index_select(0, self.scatter_index)


class ScoreLayout:
    """Of the scores of rows on these paths: for the nodes of each depth as many as the longest shelf there has."""

    def __init__(self, paths: Sequence[Sequence[PrefixNode]], device: torch.device) -> None:
        self.shared_rows: list[tuple[slice, SharedRows]] = []
        """With the columns of each."""
        self.depths: list[tuple[int, Tensor, Tensor]] = []
        """Columns; of each row where its node begins, and how long that is."""
        self.column_count = 0
        for depth in range(max(map(len, paths))):
            here = [path[depth] if depth < len(path) else None for path in paths]
            width = max(node.block.length for node in here if node)
            starts = torch.tensor([node.kv_start if node else 0 for node in here], device=device)
            sizes = torch.tensor([node.end - node.kv_start if node else 0 for node in here], device=device)
            self.depths.append((width, starts, sizes))
            for run in _group_rows_by_block(here, device):
                self.shared_rows.append((slice(self.column_count, self.column_count + run.block.length), run))
            self.column_count += width


def _group_rows_by_block(nodes: Sequence[PrefixNode | None], device: torch.device) -> Iterator[SharedRows]:
    """Of the nodes of one depth, one for each row or None."""
    rows: dict[PrefixNode, list[int]] = {}
    for row, node in enumerate(nodes):
        if node is not None:
            rows.setdefault(node, []).append(row)
    some: list[PrefixNode] = []
    for node in sorted(rows, key=lambda node: (id(node.block), node.block_index)):
        if some:
            fullest = max(len(rows[one]) for one in (*some, node))
            padded, there = (
                fullest * (node.block_index - some[0].block_index + 1),
                sum(len(rows[one]) for one in (*some, node)),
            )
            if some[0].block is not node.block or padded > 2 * there:
                yield _make_shared_rows(some, rows, len(nodes), device)
                some = []
        some.append(node)
    yield _make_shared_rows(some, rows, len(nodes), device)


def _make_shared_rows(
    nodes: Sequence[PrefixNode], rows_by_node: Mapping[PrefixNode, Sequence[int]], row_count: int, device: torch.device
) -> SharedRows:
    """Of these nodes and what stands between them on their shelf."""
    here: list[Sequence[int]] = [()] * (nodes[-1].block_index - nodes[0].block_index + 1)
    for node in nodes:
        here[node.block_index - nodes[0].block_index] = rows_by_node[node]
    return SharedRows(nodes[0].block, nodes[0].block_index, here, row_count, device)
