"""Prompts as a tree: what several share is computed once and kept once, for as long as somebody uses it.

A `Node` is a piece of prompt. Its keys and values are never copied for a sample, and they are dropped when the last
request that stands on it, or on a node that was computed beside it (a `Shelf`), is gone. Nodes belong to one set of
weights: after new ones are loaded `forget` makes the old nodes unfindable, while requests in flight keep theirs.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

from torch import Tensor

SHARED = 16
"""A beginning shorter than this is not worth a node of its own."""

Ids = tuple[int, ...]


class Shelf:
    """Keys and values of nodes that are of one depth and about one length, so that one product serves all of them."""

    def __init__(self, nodes: "Sequence[Node]") -> None:
        self.count, self.length = len(nodes), max(len(node) for node in nodes)
        self.keys: dict[int, Tensor] = {}
        """By layer: [nodes, key heads, length, D], zeros where a node is shorter; empty until they are computed."""
        self.values: dict[int, Tensor] = {}
        for place, node in enumerate(nodes):
            node.shelf, node.place = self, place


class Node:
    """Positions start..end of all prompts that begin with `ids`."""

    shelf: Shelf
    place: int
    """On the shelf."""

    def __init__(self, ids: Ids, parent: "Node | None" = None) -> None:
        self.ids, self.parent = ids, parent
        self.start: int = parent.end if parent else 0
        self.end: int = len(ids)
        self.depth: int = parent.depth + 1 if parent else 0
        self.logits: Tensor | None = None
        """[V] after the last position."""

    def __len__(self) -> int:
        return self.end - self.start

    def keys(self, layer: int) -> Tensor:
        """[key heads, end - start, D]"""
        return self.shelf.keys[layer][self.place, :, : len(self)]

    def values(self, layer: int) -> Tensor:
        return self.shelf.values[layer][self.place, :, : len(self)]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """[key heads, end - start, D] each, of which copies are kept."""
        for store, new in ((self.shelf.keys, key), (self.shelf.values, value)):
            if layer not in store:
                # zeros: what no token has written is multiplied by a share of 0, which must not be NaN
                store[layer] = new.new_zeros(self.shelf.count, len(new), self.shelf.length, new.shape[-1])
            store[layer][self.place, :, : len(self)] = new

    @property
    def path(self) -> "list[Node]":
        """From the beginning to here. Not stored: a node that holds itself is not freed when its last user goes."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def shelve(nodes: Sequence[Node]) -> None:
    """Give new nodes their shelves. At most half of a shelf is empty."""
    some: list[Node] = []
    for node in sorted(nodes, key=lambda node: (node.depth, -len(node))):
        if some and (node.depth != some[0].depth or 2 * len(node) < len(some[0])):
            Shelf(some)
            some = []
        some.append(node)
    if some:
        Shelf(some)


class Prefixes:
    """The nodes that are in use and were computed by the weights that are live."""

    def __init__(self) -> None:
        self._nodes: WeakValueDictionary[Ids, Node] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._nodes)

    def forget(self) -> None:
        """New requests compute their prompts anew."""
        self._nodes = WeakValueDictionary()

    def get(self, prompt: Ids) -> Node | None:
        return self._nodes.get(prompt)

    def grow(self, prompts: Iterable[Ids]) -> list[Node]:
        """New nodes so that each prompt ends at one, parents first. They must be computed before anything else."""
        missing = sorted({prompt for prompt in prompts if prompt not in self._nodes})
        known = list(self._nodes.values())
        new: list[Node] = []
        below = [(self._below(prompt, known), prompt) for prompt in missing]
        for parent in dict.fromkeys(node for node, _ in below):
            self._split([prompt for node, prompt in below if node is parent], parent, new)
        shelve(new)
        self._nodes.update({node.ids: node for node in new})
        return new

    def _below(self, prompt: Ids, known: Sequence[Node]) -> Node | None:
        """The longest node that the prompt begins with."""
        best: Node | None = None
        for node in known:
            if (best.end if best else SHARED - 1) < node.end < len(prompt) and prompt[: node.end] == node.ids:
                best = node
        return best

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
