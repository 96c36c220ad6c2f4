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

SHARED = 16
"""A beginning shorter than this is not worth a node of its own."""

KEEP = 512 * 2**20
"""Bytes of keys and values that are kept for requests which may come."""

Ids = tuple[int, ...]


class Shelf:
    """Keys and values of nodes that are of one depth and about one length, so that one product serves all of them.

    With `whole`, of nodes that follow one parent and are no shorter than all before them, it holds that too: one
    product then serves for both.
    """

    def __init__(self, nodes: "Sequence[Node]", whole: bool) -> None:
        parent, longest = nodes[0].parent, max(len(node) for node in nodes)
        self.before = 0
        """Tokens before the nodes that are held here for each of them."""
        if whole and parent and parent.end <= longest and all(node.parent is parent for node in nodes):
            self.before = parent.end
        self.count, self.length = len(nodes), self.before + longest
        self.keys: dict[int, Tensor] = {}
        """By layer: [nodes, key heads, length, D], zeros or anything finite where a node is shorter."""
        self.values: dict[int, Tensor] = {}
        for place, node in enumerate(nodes):
            node.shelf, node.place = self, place
            if self.before:
                node.first, node.under = 0, None

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for store in (self.keys, self.values) for one in store.values())


class Node:
    """Positions start..end of all prompts that begin with `ids`, and where keys and values of first..end are held."""

    shelf: Shelf
    place: int
    """On the shelf."""

    def __init__(self, ids: Ids, parent: "Node | None" = None) -> None:
        self.ids, self.parent = ids, parent
        self.start: int = parent.end if parent else 0
        self.end: int = len(ids)
        self.depth: int = parent.depth + 1 if parent else 0
        self.first, self.under = self.start, parent
        """Where what is held here begins, and the node that holds what comes before."""
        self.logits: Tensor | None = None
        """[V] after the last position."""

    def __len__(self) -> int:
        return self.end - self.start

    def keys(self, layer: int) -> Tensor:
        """[key heads, end - first, D]"""
        return self.shelf.keys[layer][self.place, :, : self.end - self.first]

    def values(self, layer: int) -> Tensor:
        return self.shelf.values[layer][self.place, :, : self.end - self.first]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """[key heads, end - start, D] each, of which copies are kept."""
        parent = self.parent if self.shelf.before else None
        if parent is not None:
            key = torch.cat([*(one.keys(layer) for one in parent.path), key], 1)
            value = torch.cat([*(one.values(layer) for one in parent.path), value], 1)
        for store, new in ((self.shelf.keys, key), (self.shelf.values, value)):
            if layer not in store:
                # zeros: what no token has written is multiplied by a share of 0, which must not be NaN
                store[layer] = new.new_zeros(self.shelf.count, len(new), self.shelf.length, new.shape[-1])
            store[layer][self.place, :, : new.shape[1]] = new

    @property
    def line(self) -> "Iterator[Node]":
        """From here to the beginning, all that live as long as this one does."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def path(self) -> "list[Node]":
        """What holds all from the beginning to here. Not stored: a node that holds itself would not be freed."""
        nodes, node = [self], self.under
        while node is not None:
            nodes.append(node)
            node = node.under
        return nodes[::-1]


def shelve(nodes: Sequence[Node], *, whole: bool = False) -> None:
    """Give new nodes their shelves, on which they keep their order. At most half of a shelf is empty."""
    shelves: list[list[Node]] = []
    for node in sorted(nodes, key=lambda node: (node.depth, -len(node))):
        longest = shelves[-1][0] if shelves else None
        if longest is None or node.depth != longest.depth or 2 * len(node) < len(longest):
            shelves.append([])
        shelves[-1].append(node)
    order = {node: place for place, node in enumerate(nodes)}
    for some in shelves:
        Shelf(sorted(some, key=order.__getitem__), whole)


class Kept:
    """Holds nodes that nobody uses, and those they stand on, until they take too many bytes; the oldest go first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._nodes: dict[Ids, Node] = {}
        self._users: Counter[Shelf] = Counter()

    def add(self, node: Node) -> None:
        """Also when it is used again: it is the youngest then."""
        self._drop(node.ids)
        self._nodes[node.ids] = node
        for one in node.line:
            self.bytes += 0 if self._users[one.shelf] else one.shelf.bytes
            self._users[one.shelf] += 1
        while self.bytes > self.limit:
            self._drop(next(iter(self._nodes)))

    def _drop(self, ids: Ids) -> None:
        node = self._nodes.pop(ids, None)
        for one in node.line if node else ():
            self._users[one.shelf] -= 1
            if not self._users[one.shelf]:
                del self._users[one.shelf]
                self.bytes -= one.shelf.bytes


class Prefixes:
    """The nodes that are in use or kept, and were computed by the weights that are live."""

    def __init__(self, keep: int = KEEP) -> None:
        self._nodes: WeakValueDictionary[Ids, Node] = WeakValueDictionary()
        self.kept = Kept(keep)

    def __len__(self) -> int:
        return len(self._nodes)

    def forget(self) -> None:
        """New requests compute their prompts anew."""
        self._nodes = WeakValueDictionary()
        self.kept = Kept(self.kept.limit)

    def keep(self, node: Node) -> None:
        """A node that is computed, and stands on such as are here: for a while, whether or not somebody uses it."""
        self._nodes[node.ids] = node
        self.kept.add(node)

    def get(self, prompt: Ids) -> Node | None:
        return self._nodes.get(prompt)

    def grow(self, prompts: Iterable[Ids]) -> list[Node]:
        """New nodes so that each prompt ends at one, parents first. They must be computed before anything else."""
        order = {prompt: place for place, prompt in reversed(list(enumerate(prompts)))}
        missing = sorted(prompt for prompt in order if prompt not in self._nodes)
        ends = sorted({node.end for node in self._nodes.values() if node.end >= SHARED}, reverse=True)
        new: list[Node] = []
        below = [(self._below(prompt, ends), prompt) for prompt in missing]
        for parent in dict.fromkeys(node for node, _ in below):
            self._split([prompt for node, prompt in below if node is parent], parent, new)
        # as they were asked for: rows that stand side by side find their prompts side by side
        new.sort(key=lambda node: (node.depth, order.get(node.ids, -1)))
        shelve(new, whole=True)
        self._nodes.update({node.ids: node for node in new})
        return new

    def _below(self, prompt: Ids, ends: Sequence[int]) -> Node | None:
        """The longest node that the prompt begins with."""
        for end in ends:
            node = self._nodes.get(prompt[:end]) if end < len(prompt) else None
            if node is not None:
                return node
        return None

    def _split(self, prompts: list[Ids], parent: Node | None, new: list[Node]) -> None:
        """Nodes for these prompts, sorted and distinct, which all begin with the parent's ids."""
        if len(prompts) == 1:
            new.append(Node(prompts[0], parent))
            return
        common = _common(prompts[0], prompts[-1])  # of the first and the last, hence of all between
        if common == len(prompts[0]) or common - (parent.end if parent else 0) >= SHARED:
            parent = Node(prompts[0][:common], parent)
            new.append(parent)
        rest = [prompt for prompt in prompts if len(prompt) > common]
        for _, members in groupby(rest, key=lambda prompt: prompt[common]):
            self._split(list(members), parent, new)


def _common(first: Ids, second: Ids) -> int:
    """Of how many tokens the common beginning is."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
