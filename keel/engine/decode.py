"""Attention of one decode step, by way of the models' own hook for attention functions.

A model whose attention implementation is set to DECODE gets all tokens of a step in one row: pieces of new prompts,
then one token for each answer under way. `decode_attention` stores their keys and values and attends: a piece of
prompt to what comes before it, an answer to its prompt, whose keys all samples of the prompt share and nobody copies,
and to its own tokens, in one softmax. Sliding windows, soft-capping, sinks and grouped heads are the model's own. No
model code is changed.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from keel.engine.prefix import Node

DECODE = "keel_decode"

QUERIES = 256
"""Queries of a prompt that are scored at once, so that a long prompt needs no square of its length."""
LENGTH = 32
"""Own tokens that there is room for at first; the room doubles when it is full."""


class Tails:
    """Keys and values of the tokens that answers wrote, by slot: layer -> [slots, key heads, length, D]."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slots, self.length = 0, LENGTH

    def make_room(self, slots: int, length: int) -> None:
        """For so many slots of so many tokens. What is stored stays."""
        wanted = max(self.slots, slots), max(self.length, length)
        if wanted == (self.slots, self.length):
            return
        kept = self.slots, self.length
        self.slots = wanted[0]
        self.length = self.length if wanted[1] <= self.length else max(2 * self.length, wanted[1])
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = old.new_zeros(self.slots, old.shape[1], self.length, old.shape[3])
                store[layer][: kept[0], :, : kept[1]] = old

    def move(self, source: int, target: int, length: int) -> None:
        """The first tokens of one slot take the place of another's."""
        if not length:
            return  # a row that has just joined may not have a slot yet
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slot: int) -> None:
        """Forget numbers that are not finite: hidden or not, they would spoil the next answer here."""
        if slot >= self.slots:
            return
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[slot].zero_()

    def write(self, layer: int, slots: Tensor, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token of each slot, [n, key heads, D], and return what the layer has."""
        for store, new in ((self.keys, key), (self.values, value)):
            if layer not in store:
                # zeros: what no token has written is multiplied by a share of 0, which must not be NaN
                store[layer] = new.new_zeros(self.slots, new.shape[1], self.length, new.shape[2])
            store[layer][slots, :, places] = new
        return self.keys[layer], self.values[layer]


class Step:
    """Who attends to what in one forward pass: `nodes` to compute, then the rows at slots 0..n-1.

    Row i stands on the prompt that ends at node `leaves[i]` and has `lengths[i]` own tokens stored; its next one is
    in this pass. Scores have one column for each prompt position, then one for each own token.
    """

    def __init__(
        self, nodes: Sequence[Node], leaves: Sequence[Node], lengths: Sequence[int], tails: Tails, device: torch.device
    ) -> None:
        self.nodes, self.tails, self.device = nodes, tails, device
        self.new = sum(len(node) for node in nodes)
        self.count = len(leaves)
        self.own = max(lengths, default=0) + 1
        self.prompt = max((leaf.end for leaf in leaves), default=0)
        self._masks: dict[int | None, Tensor] = {}
        if not leaves:
            return
        tails.make_room(len(leaves), self.own)
        self.slots = torch.arange(len(leaves), device=device)
        self.places = torch.tensor(lengths, device=device)
        # rows of one node are neighbours in this order
        rank = {node: place for place, node in enumerate(dict.fromkeys(one for leaf in leaves for one in leaf.path))}
        order = sorted(range(len(leaves)), key=lambda row: [rank[node] for node in leaves[row].path])
        self.order = None if order == list(range(len(leaves))) else torch.tensor(order, device=device)
        self.back = None if self.order is None else torch.argsort(self.order)
        self.spans: dict[Node, tuple[int, int]] = {}
        for place, row in enumerate(order):
            for node in leaves[row].path:
                self.spans[node] = self.spans.get(node, (place, 0))[0], place + 1
        self._ends = torch.tensor([leaves[row].end for row in order], device=device)
        self._lengths = torch.tensor([lengths[row] for row in order], device=device)

    def hidden(self, window: int | None) -> Tensor:
        """[n, columns] what the rows, in order, do not see."""
        if window not in self._masks:
            ends, lengths = self._ends[:, None], self._lengths[:, None]
            prompt = torch.arange(self.prompt, device=self.device)
            own = torch.arange(self.own, device=self.device)
            parts = [prompt >= ends, own > lengths]
            if window is not None:
                first = ends + lengths - window  # positions up to this one are out of the window
                parts = [parts[0] | (prompt <= first), parts[1] | (own + ends <= first)]
            self._masks[window] = torch.cat(parts, 1)
        return self._masks[window]


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    decode: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_rest: Any,
) -> tuple[Tensor, None]:
    """What a model calls: query [1, heads, T, D], key and value [1, key heads, T, D]; gives [1, T, heads, D]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    rule = _Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    heads, size = query.shape[1:3]
    query, key, value = query[0].view(key.shape[1], -1, size, query.shape[-1]), key[0], value[0]
    out = query.new_empty(size, heads, value.shape[-1])
    first = 0
    for node in decode.nodes:
        here = slice(first, first + len(node))
        # clones, so that the keys of all other tokens of this step are not kept alive with these
        node.keys[layer], node.values[layer] = key[:, here].clone(), value[:, here].clone()
        _prefill(node, layer, query[:, :, here], rule, out[here])
        first += len(node)
    if decode.count:
        _rows(decode, layer, query[:, :, first:], key[:, first:], value[:, first:], rule, out[first:])
    return out[None], None


class _Rule:
    """From scores to shares, as one layer wants it."""

    def __init__(self, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    def shares(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """Scores [key heads, heads of a key head, queries, keys], of which `hidden` [queries, keys] do not count."""
        scores.mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores.masked_fill_(hidden, -math.inf)
        kind = torch.promote_types(scores.dtype, torch.float32)  # softmax is never taken in half precision
        if self.sinks is None:
            return torch.softmax(scores, -1, dtype=kind).to(scores.dtype)
        sinks = self.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(-1, -1, scores.shape[2], -1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1, dtype=kind)[..., :-1].to(scores.dtype)


def _prefill(node: Node, layer: int, query: Tensor, rule: _Rule, out: Tensor) -> None:
    """A piece of prompt, query [key heads, rest, T, D], against the pieces before it and itself."""
    keys = torch.cat([one.keys[layer] for one in node.path], 1) if node.parent else node.keys[layer]
    values = torch.cat([one.values[layer] for one in node.path], 1) if node.parent else node.values[layer]
    groups, rest = query.shape[:2]
    for first in range(0, len(node), QUERIES):
        some = query[:, :, first : first + QUERIES]
        count = some.shape[2]
        start, end = node.start + first, node.start + first + count
        lowest = 0 if rule.window is None else max(0, start - rule.window + 1)
        places = torch.arange(lowest, end, device=query.device)
        mine = torch.arange(start, end, device=query.device)[:, None]
        hidden = places > mine
        if rule.window is not None:
            hidden |= places <= mine - rule.window
        scores = torch.bmm(some.reshape(groups, -1, query.shape[-1]), keys[:, lowest:end].transpose(1, 2))
        shares = rule.shares(scores.view(groups, rest, count, -1), hidden)
        mixed = torch.bmm(shares.view(groups, rest * count, -1), values[:, lowest:end])
        out[first : first + count] = mixed.view(groups * rest, count, -1).transpose(0, 1)


def _rows(decode: Step, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: _Rule, out: Tensor) -> None:
    """Answers under way, query [key heads, rest, n, D], each against its prompt and its own tokens."""
    groups, rest, count, width = query.shape
    keys, values = decode.tails.write(layer, decode.slots, decode.places, key.transpose(0, 1), value.transpose(0, 1))
    keys = keys[:count].flatten(0, 1)[:, : decode.own]
    values = values[:count].flatten(0, 1)[:, : decode.own]
    own = torch.bmm(query.permute(2, 0, 1, 3).reshape(count * groups, rest, width), keys.transpose(1, 2))
    own = own.view(count, groups, rest, decode.own)
    if decode.order is not None:
        own, query = own.index_select(0, decode.order), query.index_select(2, decode.order)
    # columns of the prompt that a row does not have are never written: hidden, whatever they hold
    scores = query.new_empty(groups, rest, count, decode.prompt + decode.own)
    scores[..., decode.prompt :] = own.permute(1, 2, 0, 3)
    for node, (first, last) in decode.spans.items():
        found = torch.bmm(query[:, :, first:last].reshape(groups, -1, width), node.keys[layer].transpose(1, 2))
        scores[:, :, first:last, node.start : node.end] = found.view(groups, rest, last - first, -1)
    shares = rule.shares(scores, decode.hidden(rule.window))
    mixed = query.new_zeros(groups, rest, count, value.shape[-1])
    for node, (first, last) in decode.spans.items():
        some = shares[:, :, first:last, node.start : node.end].reshape(groups, -1, len(node))
        mixed[:, :, first:last] += torch.bmm(some, node.values[layer]).view(groups, rest, last - first, -1)
    mixed, own = mixed.permute(2, 0, 1, 3), shares[..., decode.prompt :].permute(2, 0, 1, 3)
    if decode.back is not None:
        mixed, own = mixed.index_select(0, decode.back), own.index_select(0, decode.back)
    wrote = torch.bmm(own.reshape(count * groups, rest, decode.own), values).view(count, groups, rest, -1)
    out.copy_((mixed + wrote).reshape(count, groups * rest, -1))


AttentionInterface.register(DECODE, decode_attention)
