"""Prompts as a tree: what several share is computed once and kept once, for as long as somebody uses it.

A `Node` is a piece of prompt with its keys and values. It is never copied for a sample, and it is dropped when the last
request that stands on it is gone. Nodes belong to one set of weights: after new ones are loaded `forget` makes the
old nodes unfindable, while requests in flight keep theirs.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

from torch import Tensor

SHARED = 16
"""A beginning shorter than this is not worth a node of its own."""

Ids = tuple[int, ...]


class Node:
    """Positions start..end of all prompts that begin with `ids`."""

    def __init__(self, ids: Ids, parent: "Node | None" = None) -> None:
        self.ids, self.parent = ids, parent
        self.start: int = parent.end if parent else 0
        self.end: int = len(ids)
        self.keys: dict[int, Tensor] = {}
        """By layer: [key heads, end - start, D]; empty until the node is computed."""
        self.values: dict[int, Tensor] = {}
        self.logits: Tensor | None = None
        """[V] after the last position."""

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def path(self) -> "list[Node]":
        """From the beginning to here. Not stored: a node that holds itself is not freed when its last user goes."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


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
