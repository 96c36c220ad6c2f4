"""Prefix cache: prompts as a tree whose shared prefixes are computed and stored once.

A `PrefixNode` is a segment of a prompt. Its keys and values are never copied per sample, and are freed with the last
request that uses the node or another node in the same `KVBlock`. Nodes belong to one set of weights: `clear` removes
them from the cache after new weights are loaded, while requests in flight keep theirs. Finished completions are
retained up to a number of bytes, so that the next turn of a conversation computes only its new tokens.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

import torch
from torch import Tensor

MIN_SHARED_TOKENS = 16
"""Shortest common prefix that gets its own node."""

CACHE_BYTES = 512 * 2**20
"""Bytes of keys and values to retain for later requests."""

TokenIds = tuple[int, ...]


class KVBlock:
    """Keys and values of nodes of the same depth and similar length, so that one batched product serves all of them.

    With `include_parent`, nodes with one common parent also store the keys and values of all tokens before them if the
    longest node has at least as many tokens: one product then covers both.
    """

    def __init__(self, nodes: "Sequence[PrefixNode]", include_parent: bool) -> None:
        parent, longest = nodes[0].parent, max(len(node) for node in nodes)
        self.parent_tokens = 0
        """Tokens before the nodes that are also stored here, for each node."""
        if include_parent and parent and parent.end <= longest and all(node.parent is parent for node in nodes):
            self.parent_tokens = parent.end
        self.node_count, self.length = len(nodes), self.parent_tokens + longest
        self.keys: dict[int, Tensor] = {}
        """Layer -> [nodes, key heads, length, D]; finite padding where a node is shorter."""
        self.values: dict[int, Tensor] = {}
        for index, node in enumerate(nodes):
            node.block, node.block_index = self, index
            if self.parent_tokens:
                node.kv_start, node.kv_parent = 0, None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for store in (self.keys, self.values) for tensor in store.values())


class PrefixNode:
    """Positions start..end of all prompts that begin with `ids`; its block stores keys and values of kv_start..end."""

    block: KVBlock
    block_index: int
    """Index of the node in its block."""

    def __init__(self, ids: TokenIds, parent: "PrefixNode | None" = None) -> None:
        self.ids, self.parent = ids, parent
        self.start: int = parent.end if parent else 0
        self.end: int = len(ids)
        self.depth: int = parent.depth + 1 if parent else 0
        self.kv_start, self.kv_parent = self.start, parent
        """First position stored in the node's block, and the node that stores the positions before it."""
        self.logits: Tensor | None = None
        """Logits [V] after the last position."""

    def __len__(self) -> int:
        return self.end - self.start

    def keys(self, layer: int) -> Tensor:
        """Return the stored keys of a layer, [key heads, end - kv_start, D]."""
        return self.block.keys[layer][self.block_index, :, : self.end - self.kv_start]

    def values(self, layer: int) -> Tensor:
        """Return the stored values of a layer, [key heads, end - kv_start, D]."""
        return self.block.values[layer][self.block_index, :, : self.end - self.kv_start]

    def store_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store copies of the keys and values [key heads, end - start, D] of a layer."""
        parent = self.parent if self.block.parent_tokens else None
        if parent is not None:
            key = torch.cat([*(node.keys(layer) for node in parent.kv_path), key], 1)
            value = torch.cat([*(node.values(layer) for node in parent.kv_path), value], 1)
        for store, new in ((self.block.keys, key), (self.block.values, value)):
            if layer not in store:
                # zeros: unwritten positions are multiplied by a weight of 0 and must not be NaN
                store[layer] = new.new_zeros(self.block.node_count, len(new), self.block.length, new.shape[-1])
            store[layer][self.block_index, :, : new.shape[1]] = new

    @property
    def ancestors(self) -> "Iterator[PrefixNode]":
        """This node and its parents up to the root; all of them live as long as this node."""
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def kv_path(self) -> "list[PrefixNode]":
        """Nodes that store positions 0..end, in order. Not cached: a node that refers to itself would not be freed."""
        nodes, node = [self], self.kv_parent
        while node is not None:
            nodes.append(node)
            node = node.kv_parent
        return nodes[::-1]


def allocate_blocks(nodes: Sequence[PrefixNode], *, include_parent: bool = False) -> None:
    """Assign new nodes to blocks, in which they keep their order. At most half of a block is padding."""
    groups: list[list[PrefixNode]] = []
    for node in sorted(nodes, key=lambda node: (node.depth, -len(node))):
        longest = groups[-1][0] if groups else None
        if longest is None or node.depth != longest.depth or 2 * len(node) < len(longest):
            groups.append([])
        groups[-1].append(node)
    order = {node: index for index, node in enumerate(nodes)}
    for group in groups:
        KVBlock(sorted(group, key=order.__getitem__), include_parent)


class RetainedPrefixes:
    """Keeps unused nodes and their ancestors alive up to `max_bytes`; the least recently used are evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._nodes: dict[TokenIds, PrefixNode] = {}
        self._block_users: Counter[KVBlock] = Counter()

    def add(self, node: PrefixNode) -> None:
        """Add a node, or mark it as most recently used."""
        self._evict(node.ids)
        self._nodes[node.ids] = node
        for ancestor in node.ancestors:
            self.used_bytes += 0 if self._block_users[ancestor.block] else ancestor.block.nbytes
            self._block_users[ancestor.block] += 1
        while self.used_bytes > self.max_bytes:
            self._evict(next(iter(self._nodes)))

    def _evict(self, ids: TokenIds) -> None:
        node = self._nodes.pop(ids, None)
        for ancestor in node.ancestors if node else ():
            self._block_users[ancestor.block] -= 1
            if not self._block_users[ancestor.block]:
                del self._block_users[ancestor.block]
                self.used_bytes -= ancestor.block.nbytes


class PrefixCache:
    """Nodes that are in use or retained and were computed with the live weights."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._nodes: WeakValueDictionary[TokenIds, PrefixNode] = WeakValueDictionary()
        self.retained = RetainedPrefixes(cache_bytes)

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Forget all nodes: new requests recompute their prompts."""
        self._nodes = WeakValueDictionary()
        self.retained = RetainedPrefixes(self.retained.max_bytes)

    def retain(self, node: PrefixNode) -> None:
        """Keep a computed node, whose ancestors are in the cache, even when no request uses it."""
        self._nodes[node.ids] = node
        self.retained.add(node)

    def get(self, prompt: TokenIds) -> PrefixNode | None:
        """Return the node that ends exactly where the prompt ends, or None."""
        return self._nodes.get(prompt)

    def insert(self, prompts: Iterable[TokenIds]) -> list[PrefixNode]:
        """Add the nodes that are missing so that each prompt ends at one; return them, parents first.

        They must be computed before anything else.
        """
        order = {prompt: index for index, prompt in reversed(list(enumerate(prompts)))}
        missing = sorted(prompt for prompt in order if prompt not in self._nodes)
        ends = sorted({node.end for node in self._nodes.values() if node.end >= MIN_SHARED_TOKENS}, reverse=True)
        new: list[PrefixNode] = []
        parents = [(self._longest_prefix(prompt, ends), prompt) for prompt in missing]
        for parent in dict.fromkeys(node for node, _ in parents):
            self._split_prompts([prompt for node, prompt in parents if node is parent], parent, new)
        # in request order, so that neighbouring rows have neighbouring nodes
        new.sort(key=lambda node: (node.depth, order.get(node.ids, -1)))
        allocate_blocks(new, include_parent=True)
        self._nodes.update({node.ids: node for node in new})
        return new

    def _longest_prefix(self, prompt: TokenIds, ends: Sequence[int]) -> PrefixNode | None:
        """Return the longest node that is a proper prefix of the prompt."""
        for end in ends:
            node = self._nodes.get(prompt[:end]) if end < len(prompt) else None
            if node is not None:
                return node
        return None

    def _split_prompts(self, prompts: list[TokenIds], parent: PrefixNode | None, new: list[PrefixNode]) -> None:
        """Append nodes for these prompts to `new`. The prompts are sorted, distinct and begin with the parent's ids."""
        if len(prompts) == 1:
            new.append(PrefixNode(prompts[0], parent))
            return
        common = _common_prefix_length(prompts[0], prompts[-1])  # common to the first and last, so to all of them
        if common == len(prompts[0]) or common - (parent.end if parent else 0) >= MIN_SHARED_TOKENS:
            parent = PrefixNode(prompts[0][:common], parent)
            new.append(parent)
        rest = [prompt for prompt in prompts if len(prompt) > common]
        for _, group in groupby(rest, key=lambda prompt: prompt[common]):
            self._split_prompts(list(group), parent, new)


def _common_prefix_length(first: TokenIds, second: TokenIds) -> int:
    """Return the length of the common prefix."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))
