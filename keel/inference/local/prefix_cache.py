"""Prompts as a tree: what several share is computed once and kept once, for as long as somebody uses it.

A `Node` is a piece of prompt. Its keys and values are never copied for a sample, and they are dropped when the last
request that stands on it, or on a node that was computed beside it (a `Shelf`), is gone. Nodes belong to one set of
weights: after new ones are loaded `forget` makes the old nodes unfindable, while requests in flight keep theirs. What
answers have come to is kept for a while after them, up to a number of bytes, for the next turn of a conversation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

import torch
from torch import Tensor

MIN_SHARED_TOKENS = 16
"""A beginning shorter than this is not worth a node of its own."""

CACHE_BYTES = 512 * 2**20
"""Bytes of keys and values that are kept for requests which may come."""

TokenIds = tuple[int, ...]


class KVBlock:
    """Keys and values of nodes that are of one depth and about one length, so that one product serves all of them.

    With `whole`, of nodes that follow one parent and are no shorter than all before them, it holds that too: one
    product then serves for both.
    """

    def __init__(self, nodes: "Sequence[PrefixNode]", include_parent: bool) -> None:
        parent, longest = nodes[0].parent, max(len(node) for node in nodes)
        self.parent_tokens = 0
        """Tokens before the nodes that are held here for each of them."""
        if include_parent and parent and parent.end <= longest and all(node.parent is parent for node in nodes):
            self.parent_tokens = parent.end
        self.node_count, self.length = len(nodes), self.parent_tokens + longest
        self.keys: dict[int, Tensor] = {}
        """By layer: [nodes, key heads, length, D], zeros or anything finite where a node is shorter."""
        self.values: dict[int, Tensor] = {}
        for place, node in enumerate(nodes):
            node.block, node.block_index = self, place
            if self.parent_tokens:
                node.kv_start, node.kv_parent = 0, None

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for store in (self.keys, self.values) for one in store.values())


class PrefixNode:
    """Positions start..end of all prompts that begin with `ids`, and where keys and values of first..end are held."""

    block: KVBlock
    block_index: int
    """On the shelf."""

    def __init__(self, ids: TokenIds, parent: "PrefixNode | None" = None) -> None:
        self.ids, self.parent = ids, parent
        self.start: int = parent.end if parent else 0
        self.end: int = len(ids)
        self.depth: int = parent.depth + 1 if parent else 0
        self.kv_start, self.kv_parent = self.start, parent
        """Where what is held here begins, and the node that holds what comes before."""
        self.logits: Tensor | None = None
        """[V] after the last position."""

    def __len__(self) -> int:
        return self.end - self.start

    def keys(self, layer: int) -> Tensor:
        """[key heads, end - first, D]"""
        return self.block.keys[layer][self.block_index, :, : self.end - self.kv_start]

    def values(self, layer: int) -> Tensor:
        return self.block.values[layer][self.block_index, :, : self.end - self.kv_start]

    def store_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """[key heads, end - start, D] each, of which copies are kept."""
        parent = self.parent if self.block.parent_tokens else None
        if parent is not None:
            key = torch.cat([*(one.keys(layer) for one in parent.kv_path), key], 1)
            value = torch.cat([*(one.values(layer) for one in parent.kv_path), value], 1)
        for store, new in ((self.block.keys, key), (self.block.values, value)):
            if layer not in store:
                # zeros: what no token has written is multiplied by a share of 0, which must not be NaN
                store[layer] = new.new_zeros(self.block.node_count, len(new), self.block.length, new.shape[-1])
            store[layer][self.block_index, :, : new.shape[1]] = new

    @property
    def ancestors(self) -> "Iterator[PrefixNode]":
        """From here to the beginning, all that live as long as this one does."""
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def kv_path(self) -> "list[PrefixNode]":
        """What holds all from the beginning to here. Not stored: a node that holds itself would not be freed."""
        nodes, node = [self], self.kv_parent
        while node is not None:
            nodes.append(node)
            node = node.kv_parent
        return nodes[::-1]


def allocate_blocks(nodes: Sequence[PrefixNode], *, include_parent: bool = False) -> None:
    """Give new nodes their shelves, on which they keep their order. At most half of a shelf is empty."""
    shelves: list[list[PrefixNode]] = []
    for node in sorted(nodes, key=lambda node: (node.depth, -len(node))):
        longest = shelves[-1][0] if shelves else None
        if longest is None or node.depth != longest.depth or 2 * len(node) < len(longest):
            shelves.append([])
        shelves[-1].append(node)
    order = {node: place for place, node in enumerate(nodes)}
    for some in shelves:
        KVBlock(sorted(some, key=order.__getitem__), include_parent)


class RetainedPrefixes:
    """Holds nodes that nobody uses, and those they stand on, until they take too many bytes; the oldest go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._nodes: dict[TokenIds, PrefixNode] = {}
        self._block_users: Counter[KVBlock] = Counter()

    def add(self, node: PrefixNode) -> None:
        """Also when it is used again: it is the youngest then."""
        self._evict(node.ids)
        self._nodes[node.ids] = node
        for one in node.ancestors:
            self.used_bytes += 0 if self._block_users[one.block] else one.block.nbytes
            self._block_users[one.block] += 1
        while self.used_bytes > self.max_bytes:
            self._evict(next(iter(self._nodes)))

    def _evict(self, ids: TokenIds) -> None:
        node = self._nodes.pop(ids, None)
        for one in node.ancestors if node else ():
            self._block_users[one.block] -= 1
            if not self._block_users[one.block]:
                del self._block_users[one.block]
                self.used_bytes -= one.block.nbytes


class PrefixCache:
    """The nodes that are in use or kept, and were computed by the weights that are live."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._nodes: WeakValueDictionary[TokenIds, PrefixNode] = WeakValueDictionary()
        self.retained = RetainedPrefixes(cache_bytes)

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """New requests compute their prompts anew."""
        self._nodes = WeakValueDictionary()
        self.retained = RetainedPrefixes(self.retained.max_bytes)

    def retain(self, node: PrefixNode) -> None:
        """A node that is computed, and stands on such as are here: for a while, whether or not somebody uses it."""
        self._nodes[node.ids] = node
        self.retained.add(node)

    def get(self, prompt: TokenIds) -> PrefixNode | None:
        return self._nodes.get(prompt)

    def insert(self, prompts: Iterable[TokenIds]) -> list[PrefixNode]:
        """New nodes so that each prompt ends at one, parents first. They must be computed before anything else."""
        order = {prompt: place for place, prompt in reversed(list(enumerate(prompts)))}
        missing = sorted(prompt for prompt in order if prompt not in self._nodes)
        ends = sorted({node.end for node in self._nodes.values() if node.end >= MIN_SHARED_TOKENS}, reverse=True)
        new: list[PrefixNode] = []
        below = [(self._longest_prefix(prompt, ends), prompt) for prompt in missing]
        for parent in dict.fromkeys(node for node, _ in below):
            self._split_prompts([prompt for node, prompt in below if node is parent], parent, new)
        # as they were asked for: rows that stand side by side find their prompts side by side
        new.sort(key=lambda node: (node.depth, order.get(node.ids, -1)))
        allocate_blocks(new, include_parent=True)
        self._nodes.update({node.ids: node for node in new})
        return new

    def _longest_prefix(self, prompt: TokenIds, ends: Sequence[int]) -> PrefixNode | None:
        """The longest node that the prompt begins with."""
        for end in ends:
            node = self._nodes.get(prompt[:end]) if end < len(prompt) else None
            if node is not None:
                return node
        return None

    def _split_prompts(self, prompts: list[TokenIds], parent: PrefixNode | None, new: list[PrefixNode]) -> None:
        """Nodes for these prompts, sorted and distinct, which all begin with the parent's ids."""
        if len(prompts) == 1:
            new.append(PrefixNode(prompts[0], parent))
            return
        common = _common_prefix_length(prompts[0], prompts[-1])  # of the first and the last, hence of all between
        if common == len(prompts[0]) or common - (parent.end if parent else 0) >= MIN_SHARED_TOKENS:
            parent = PrefixNode(prompts[0][:common], parent)
            new.append(parent)
        rest = [prompt for prompt in prompts if len(prompt) > common]
        for _, members in groupby(rest, key=lambda prompt: prompt[common]):
            self._split_prompts(list(members), parent, new)


def _common_prefix_length(first: TokenIds, second: TokenIds) -> int:
    """Of how many tokens the common beginning is."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
