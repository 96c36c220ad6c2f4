"""Attention of one decode step, by way of the models' own hook for attention functions.

A model whose attention implementation is set to DECODE gets all tokens of a step in one row: pieces of new prompts,
then one token for each answer under way. `decode_attention` stores their keys and values and attends: a piece of
prompt to what comes before it, an answer to its prompt, whose keys all samples of the prompt share and nobody copies,
and to its own tokens, in one softmax. Sliding windows, soft-capping, sinks and grouped heads are the model's own. No
model code is changed.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from keel.inference.kernels.decode_attention import Stretches, attend_rows, fits
from keel.inference.local.prefix_cache import Node, Shelf
from keel.inference.local.torch_rows import Columns

DECODE = "keel_decode"

QUERIES = 256
"""Queries of a prompt that are scored at once, so that a long prompt needs no square of its length."""
MASK = QUERIES * QUERIES
"""Entries of a mask that is worth remembering."""
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

    def write(
        self, layer: int, slots: Tensor, places: Tensor | int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one token of each slot, [n, key heads, D], at its place or all at one; gives what the layer has."""
        for store, new in ((self.keys, key), (self.values, value)):
            if layer not in store:
                # zeros: what no token has written is multiplied by a share of 0, which must not be NaN
                store[layer] = new.new_zeros(self.slots, new.shape[1], self.length, new.shape[2])
            if isinstance(places, int):
                store[layer][: len(new), :, places] = new  # a plain copy, many times faster than by index
            else:
                store[layer][slots, :, places] = new
        return self.keys[layer], self.values[layer]


class Side:
    """The new nodes of one shelf, computed side by side."""

    def __init__(self, nodes: Sequence[Node], first: Sequence[int], device: torch.device) -> None:
        """`first`: where in the step the tokens of each begin."""
        self.shelf, self.parent = nodes[0].shelf, nodes[0].parent
        self.length = self.shelf.length - self.shelf.before
        places = [list(range(start, start + len(node))) for node, start in zip(nodes, first, strict=True)]
        # a shorter one is filled up with its last token: what comes of that stands behind everything that is read
        take = [place for some in places for place in some + some[-1:] * (self.length - len(some))]
        self.take = torch.tensor(take, device=device)
        self.back = torch.tensor(
            [node * self.length + place for node, some in enumerate(places) for place in range(len(some))],
            device=device,
        )
        self.where = torch.tensor([place for some in places for place in some], device=device)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """From all keys and values [key heads, T, D] of the step; gives what the shelf holds, as it holds it."""
        shelf, parent = self.shelf, self.parent
        for store, new, read in ((shelf.keys, key, Node.keys), (shelf.values, value, Node.values)):
            held = new.new_empty(shelf.count, len(new), shelf.length, new.shape[-1])
            if shelf.before and parent is not None:
                held[:, :, : shelf.before] = torch.cat([read(one, layer) for one in parent.path], 1)
            held[:, :, shelf.before :] = torch.unflatten(
                new.index_select(1, self.take), 1, (shelf.count, -1)
            ).transpose(0, 1)
            store[layer] = held
        return shelf.keys[layer], shelf.values[layer]


Piece = tuple[Node, slice]
"""A node that is computed by itself, and where in the step its tokens are."""


def _pieces(nodes: Sequence[Node], device: torch.device) -> list[Side | Piece]:
    """New nodes, parents first, in the order of their tokens in the step."""
    starts = dict(zip(nodes, accumulate((len(node) for node in nodes), initial=0), strict=False))
    shelves: dict[Shelf, list[Node]] = {}
    for node in nodes:
        shelves.setdefault(node.shelf, []).append(node)
    found: list[Side | Piece] = []
    for shelf, some in shelves.items():
        alone = some[0].parent is not None and not shelf.before
        if alone or shelf.length > QUERIES:
            found += [(node, slice(starts[node], starts[node] + len(node))) for node in some]
        else:
            found.append(Side(some, [starts[node] for node in some], device))
    return found


class Step:
    """Who attends to what in one forward pass: `nodes` to compute, then the rows at slots 0..n-1.

    Row i stands on the prompt that ends at node `leaves[i]` and has `lengths[i]` own tokens stored; its next one is
    in this pass. By torch, scores have the `columns` of the prompts, then one for each own token.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        leaves: Sequence[Node],
        lengths: Sequence[int],
        tails: Tails,
        device: torch.device,
        *,
        compiled: bool = False,
    ) -> None:
        """`compiled`: by the kernels in C, where they fit."""
        self.tails, self.device, self.compiled = tails, device, compiled
        self.pieces = _pieces(nodes, device)
        self.first, self.count = sum(map(len, nodes)), len(leaves)
        """Where the rows begin, and how many there are."""
        self.own = max(lengths, default=0) + 1
        self._masks: dict[int | None, Tensor] = {}
        if not leaves:
            return
        tails.make_room(len(leaves), self.own)
        self.slots = torch.arange(len(leaves), device=device)
        self.places = torch.tensor(lengths, device=device)
        self.target = lengths[0] if len(set(lengths)) == 1 else self.places
        self._ends = torch.tensor([leaf.end for leaf in leaves], device=device)
        self._lengths = lengths
        self._paths = [leaf.path for leaf in leaves]
        self.shelves = list(dict.fromkeys(node.shelf for path in self._paths for node in path))
        self._stretches: dict[tuple[int, int], Stretches] = {}

    def stretches(self, groups: int, width: int) -> Stretches:
        """What each row reads of the shelves and, after them, of the tails, for heads of this width."""
        if (groups, width) not in self._stretches:
            number = {shelf: place for place, shelf in enumerate(self.shelves)}
            first, found = [0], []
            for row, path in enumerate(self._paths):
                for node in path:
                    along = node.shelf.length * width
                    found.append((number[node.shelf], node.place * groups * along, node.end - node.first, along))
                along = self.tails.length * width
                found.append((len(number), row * groups * along, self._lengths[row] + 1, along))
                first.append(len(found))
            self._stretches[groups, width] = Stretches(first, *map(list, zip(*found, strict=True)))
        return self._stretches[groups, width]

    @cached_property
    def columns(self) -> Columns:
        """How the scores of all rows stand side by side."""
        return Columns(self._paths, self.device)

    def mask(self, window: int | None, kind: torch.dtype) -> Tensor:
        """[n, 1, 1, columns] to add to scores: -inf where the rows do not see, 0 elsewhere."""
        if window not in self._masks:
            first = None if window is None else (self._ends + self.places - window)[:, None]
            parts = []
            own = torch.arange(self.own, device=self.device)
            for width, starts, sizes in (*self.columns.depths, (self.own, self._ends, self.places + 1)):
                place = own if width == self.own else torch.arange(width, device=self.device)
                part = place >= sizes[:, None]
                if first is not None:  # positions up to this one are out of the window
                    part |= starts[:, None] + place <= first
                parts.append(part)
            hidden = torch.cat(parts, 1)[:, None, None]
            self._masks[window] = torch.zeros(hidden.shape, dtype=kind, device=self.device).masked_fill_(
                hidden, -math.inf
            )
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
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    heads, size = query.shape[1:3]
    out = query.new_empty(size, heads, value.shape[-1])
    attend(decode, layer, query[0].view(key.shape[1], -1, size, query.shape[-1]), key[0], value[0], rule, out)
    return out[None], None


def attend(decode: Step, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: "Rule", out: Tensor) -> None:
    """Query [key heads, heads of each, T, D], key and value [key heads, T, D]; fills out [T, heads, D]."""
    for piece in decode.pieces:
        if isinstance(piece, Side):
            _together(piece, layer, query, key, value, rule, out)
        else:
            node, here = piece
            node.store(layer, key[:, here], value[:, here])
            _prefill(node, layer, query[:, :, here], rule, out[here])
    if decode.count:
        here = slice(decode.first, decode.first + decode.count)
        _rows(decode, layer, query[:, :, here], key[:, here], value[:, here], rule, out[here])
    out[decode.first + decode.count :] = 0  # what the step was filled up with


class Rule:
    """From scores to shares, as one layer wants it."""

    def __init__(
        self, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    @property
    def plain(self) -> bool:
        return self.window is None and self.softcap is None and self.sinks is None

    def shares(self, scores: Tensor, mask: Tensor, first: int) -> Tensor:
        """Scores have keys last, to which the mask is added, and [key heads, heads of each] from `first` on."""
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores += mask
        kind = torch.promote_types(scores.dtype, torch.float32)  # softmax is never taken in half precision
        if self.sinks is None:
            return torch.softmax(scores, -1, dtype=kind).to(scores.dtype)
        heads = [size if first <= place <= first + 1 else 1 for place, size in enumerate(scores.shape)]
        sinks = self.sinks.to(scores.dtype).view(heads).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1, dtype=kind)[..., :-1].to(scores.dtype)

    def scaled(self, query: Tensor) -> Tensor:
        """Times the scale, and with its numbers side by side."""
        return torch.mul(query, self.scale, out=query.new_empty(query.shape))


def _together(side: Side, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule, out: Tensor) -> None:
    """All new nodes of a shelf against what comes before them and themselves; the tensors are of the whole step."""
    groups, rest, _, width = query.shape
    keys, values = side.store(layer, key, value)
    count, length, before = side.shelf.count, side.length, side.shelf.before
    some = torch.unflatten(query.index_select(2, side.take), 2, (count, length)).permute(2, 0, 1, 3, 4)
    some = rule.scaled(some).view(count * groups, rest * length, width)
    scores = torch.bmm(some, keys.flatten(0, 1).transpose(1, 2)).view(count * groups, rest, length, -1)
    mask = _causal(0, before, before + length, rule.window, scores.dtype, scores.device)
    shares = rule.shares(torch.unflatten(scores, 0, (count, groups)), mask, 1)
    mixed = torch.bmm(shares.view(count * groups, rest * length, -1), values.flatten(0, 1))
    mixed = mixed.view(count, groups, rest, length, -1).permute(0, 3, 1, 2, 4)
    out.index_copy_(0, side.where, mixed.reshape(count * length, groups * rest, -1).index_select(0, side.back))


def _prefill(node: Node, layer: int, query: Tensor, rule: Rule, out: Tensor) -> None:
    """A piece of prompt, query [key heads, rest, T, D], against the pieces before it and itself."""
    keys = torch.cat([one.keys(layer) for one in node.path], 1) if node.under else node.keys(layer)
    values = torch.cat([one.values(layer) for one in node.path], 1) if node.under else node.values(layer)
    groups, rest = query.shape[:2]
    for first in range(0, len(node), QUERIES):
        some = rule.scaled(query[:, :, first : first + QUERIES])
        count = some.shape[2]
        start, end = node.start + first, node.start + first + count
        lowest = 0 if rule.window is None else max(0, start - rule.window + 1)
        scores = torch.bmm(some.view(groups, rest * count, -1), keys[:, lowest:end].transpose(1, 2))
        mask = _causal(lowest, start, end, rule.window, scores.dtype, scores.device)
        shares = rule.shares(scores.view(groups, rest, count, -1), mask, 0)
        mixed = torch.bmm(shares.view(groups, rest * count, -1), values[:, lowest:end])
        out[first : first + count] = mixed.view(groups * rest, count, -1).transpose(0, 1)


def _causal(lowest: int, start: int, end: int, window: int | None, kind: torch.dtype, device: torch.device) -> Tensor:
    """[start..end, lowest..end] to add to scores: -inf for keys behind the query, or out of its window."""
    make = _mask_once if (end - start) * (end - lowest) <= MASK else _mask
    return make(lowest, start, end, window, kind, device)


def _mask(lowest: int, start: int, end: int, window: int | None, kind: torch.dtype, device: torch.device) -> Tensor:
    places = torch.arange(lowest, end, device=device)
    mine = torch.arange(start, end, device=device)[:, None]
    hidden = places > mine
    if window is not None:
        hidden |= places <= mine - window
    return torch.zeros(hidden.shape, dtype=kind, device=device).masked_fill_(hidden, -math.inf)


_mask_once = lru_cache(maxsize=64)(_mask)
"""The same for all layers, and often from step to step."""


def _rows(decode: Step, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule, out: Tensor) -> None:
    """Answers under way, query [key heads, rest, n, D], each against its prompt and its own tokens."""
    groups, rest, count, width = query.shape
    keys, values = decode.tails.write(layer, decode.slots, decode.target, key.transpose(0, 1), value.transpose(0, 1))
    if decode.compiled and rule.plain and fits(query, value):
        all_keys = [*(shelf.keys[layer] for shelf in decode.shelves), keys]
        all_values = [*(shelf.values[layer] for shelf in decode.shelves), values]
        attend_rows(query, decode.stretches(groups, width), all_keys, all_values, rule.scale, out)
        return
    keys = keys[:count].flatten(0, 1)[:, : decode.own]
    values = values[:count].flatten(0, 1)[:, : decode.own]
    query = rule.scaled(query.permute(2, 0, 1, 3))
    prompt, runs = decode.columns.count, decode.columns.runs
    # zeros: columns that a row does not have are hidden, but must not be NaN
    scores = query.new_zeros(count, groups, rest, prompt + decode.own)
    own = torch.bmm(query.view(count * groups, rest, width), keys.transpose(1, 2))
    scores[..., prompt:] = own.view(count, groups, rest, decode.own)
    for columns, run in runs:
        if run.every:
            scores[..., columns] = run.scores(layer, query)
        else:
            scores[..., columns].index_copy_(0, run.rows, run.scores(layer, query))
    shares = rule.shares(scores, decode.mask(rule.window, scores.dtype), 1)
    own = shares[..., prompt:].flatten(0, 1)
    mixed = torch.bmm(own, values).view(count, groups, rest, -1)
    for columns, run in runs:
        if run.every:
            mixed += run.mixed(layer, shares[..., columns])
        else:
            mixed.index_add_(0, run.rows, run.mixed(layer, shares[..., columns]))
    out.copy_(mixed.view(count, groups * rest, -1))


AttentionInterface.register(DECODE, decode_attention)
