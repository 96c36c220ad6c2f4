"""Batched attention of decode rows to shared prompts in torch: rows on the same block share one product.

`SharedRows` are the rows on neighbouring nodes of a block; the `ScoreLayout` of a step assigns columns of the score
matrix to them. Not used where the native kernel (`keel.inference.kernels.decode_attention`) computes attention.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from keel.inference.local.prefix_cache import KVBlock, PrefixNode


class SharedRows:
    """Rows on the nodes `first_node` to `end_node` of a block, padded to the same number of rows per node."""

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
        # nodes with fewer rows are padded with row 0, whose extra results are never read
        gather = [row for rows in rows_by_node for row in (*rows, *[0] * (self.rows_per_node - len(rows)))]
        slots = [
            (row, node * self.rows_per_node + index)
            for node, rows in enumerate(rows_by_node)
            for index, row in enumerate(rows)
        ]
        slots.sort()
        self.covers_all_rows = len(slots) == row_count
        in_order = self.covers_all_rows and gather == list(range(row_count))
        self.gather_index = None if in_order else torch.tensor(gather, device=device)
        self.scatter_index = None if in_order else torch.tensor([slot for _, slot in slots], device=device)
        self.row_index = torch.tensor([row for row, _ in slots], device=device)

    def scores(self, layer: int, query: Tensor) -> Tensor:
        """Return scores [these rows, key heads, group size, block length] for query [n, key heads, group size, D]."""
        return self._batched_matmul(query, self.block.keys[layer].transpose(2, 3))

    def weighted_values(self, layer: int, attn_weights: Tensor) -> Tensor:
        """Return the values [these rows, key heads, group size, D] summed with attention weights of all n rows."""
        return self._batched_matmul(attn_weights, self.block.values[layer])

    def _batched_matmul(self, left: Tensor, right: Tensor) -> Tensor:
        key_heads, group_size = left.shape[1:3]
        left = left if self.gather_index is None else left.index_select(0, self.gather_index)
        left = torch.unflatten(left, 0, (self.node_count, self.rows_per_node)).transpose(1, 2)
        left = left.reshape(self.node_count * key_heads, self.rows_per_node * group_size, -1)
        result = torch.bmm(left, right[self.first_node : self.end_node].flatten(0, 1))
        result = result.view(self.node_count, key_heads, self.rows_per_node, group_size, -1)
        result = result.transpose(1, 2).flatten(0, 1)
        return result if self.scatter_index is None else result.index_select(0, self.scatter_index)


class ScoreLayout:
    """Columns of the prompt scores of rows on these paths: each depth has as many as its longest block."""

    def __init__(self, paths: Sequence[Sequence[PrefixNode]], device: torch.device) -> None:
        self.shared_rows: list[tuple[slice, SharedRows]] = []
        """Columns and rows of each batched product."""
        self.depths: list[tuple[int, Tensor, Tensor]] = []
        """Per depth: number of columns, and the first position and the length of each row's node."""
        self.column_count = 0
        for depth in range(max(map(len, paths))):
            nodes = [path[depth] if depth < len(path) else None for path in paths]
            width = max(node.block.length for node in nodes if node)
            starts = torch.tensor([node.kv_start if node else 0 for node in nodes], device=device)
            sizes = torch.tensor([node.end - node.kv_start if node else 0 for node in nodes], device=device)
            self.depths.append((width, starts, sizes))
            for rows in _group_rows_by_block(nodes, device):
                self.shared_rows.append((slice(self.column_count, self.column_count + rows.block.length), rows))
            self.column_count += width


def _group_rows_by_block(nodes: Sequence[PrefixNode | None], device: torch.device) -> Iterator[SharedRows]:
    """Group the rows of one depth, where `nodes` has the node of each row or None.

    Rows on neighbouring nodes of a block form one group unless padding would more than double its size.
    """
    rows: dict[PrefixNode, list[int]] = {}
    for row, node in enumerate(nodes):
        if node is not None:
            rows.setdefault(node, []).append(row)
    group: list[PrefixNode] = []
    for node in sorted(rows, key=lambda node: (id(node.block), node.block_index)):
        if group:
            counts = [len(rows[member]) for member in (*group, node)]
            padded = max(counts) * (node.block_index - group[0].block_index + 1)
            if group[0].block is not node.block or padded > 2 * sum(counts):
                yield _make_shared_rows(group, rows, len(nodes), device)
                group = []
        group.append(node)
    yield _make_shared_rows(group, rows, len(nodes), device)


def _make_shared_rows(
    nodes: Sequence[PrefixNode], rows_by_node: Mapping[PrefixNode, Sequence[int]], row_count: int, device: torch.device
) -> SharedRows:
    """Build the group of these nodes and the nodes between them in the block, which have no rows."""
    rows: list[Sequence[int]] = [()] * (nodes[-1].block_index - nodes[0].block_index + 1)
    for node in nodes:
        rows[node.block_index - nodes[0].block_index] = rows_by_node[node]
    return SharedRows(nodes[0].block, nodes[0].block_index, rows, row_count, device)
