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

from keel.inference.kernels.decode_attention import KeySpans, attend_rows, decode_kernel_supports
from keel.inference.local.prefix_cache import KVBlock, PrefixNode
from keel.inference.local.torch_rows import ScoreLayout

DECODE_ATTENTION = "keel_decode"

QUERY_CHUNK = 256
"""Queries of a prompt that are scored at once, so that a long prompt needs no square of its length."""
MAX_CACHED_MASK = QUERY_CHUNK * QUERY_CHUNK
"""Entries of a mask that is worth remembering."""
INITIAL_CAPACITY = 32
"""Own tokens that there is room for at first; the room doubles when it is full."""


class CompletionKVCache:
    """Keys and values of the tokens that answers wrote, by slot: layer -> [slots, key heads, length, D]."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slot_count, self.capacity = 0, INITIAL_CAPACITY

    def reserve(self, slots: int, length: int) -> None:
        """For so many slots of so many tokens. What is stored stays."""
        wanted = max(self.slot_count, slots), max(self.capacity, length)
        if wanted == (self.slot_count, self.capacity):
            return
        kept = self.slot_count, self.capacity
        self.slot_count = wanted[0]
        self.capacity = self.capacity if wanted[1] <= self.capacity else max(2 * self.capacity, wanted[1])
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = old.new_zeros(self.slot_count, old.shape[1], self.capacity, old.shape[3])
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
        if slot >= self.slot_count:
            return
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[slot].zero_()

    def write(
        self, layer: int, slots: Tensor, positions: Tensor | int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one token of each slot, [n, key heads, D], at its place or all at one; gives what the layer has."""
        for store, new in ((self.keys, key), (self.values, value)):
            if layer not in store:
                # zeros: what no token has written is multiplied by a share of 0, which must not be NaN
                store[layer] = new.new_zeros(self.slot_count, new.shape[1], self.capacity, new.shape[2])
            if isinstance(positions, int):
                store[layer][: len(new), :, positions] = new  # a plain copy, many times faster than by index
            else:
                store[layer][slots, :, positions] = new
        return self.keys[layer], self.values[layer]


class PrefillGroup:
    """The new nodes of one shelf, computed side by side."""

    def __init__(self, nodes: Sequence[PrefixNode], token_starts: Sequence[int], device: torch.device) -> None:
        """`first`: where in the step the tokens of each begin."""
        self.block, self.parent = nodes[0].block, nodes[0].parent
        self.length = self.block.length - self.block.parent_tokens
        places = [list(range(start, start + len(node))) for node, start in zip(nodes, token_starts, strict=True)]
        # a shorter one is filled up with its last token: what comes of that stands behind everything that is read
        take = [place for some in places for place in some + some[-1:] * (self.length - len(some))]
        self.gather_index = torch.tensor(take, device=device)
        self.scatter_index = torch.tensor(
            [node * self.length + place for node, some in enumerate(places) for place in range(len(some))],
            device=device,
        )
        self.token_index = torch.tensor([place for some in places for place in some], device=device)

    def store_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """From all keys and values [key heads, T, D] of the step; gives what the shelf holds, as it holds it."""
        shelf, parent = self.block, self.parent
        for store, new, read in ((shelf.keys, key, PrefixNode.keys), (shelf.values, value, PrefixNode.values)):
            held = new.new_empty(shelf.node_count, len(new), shelf.length, new.shape[-1])
            if shelf.parent_tokens and parent is not None:
                held[:, :, : shelf.parent_tokens] = torch.cat([read(one, layer) for one in parent.kv_path], 1)
            held[:, :, shelf.parent_tokens :] = torch.unflatten(
                new.index_select(1, self.gather_index), 1, (shelf.node_count, -1)
            ).transpose(0, 1)
            store[layer] = held
        return shelf.keys[layer], shelf.values[layer]


PrefillSlice = tuple[PrefixNode, slice]
"""A node that is computed by itself, and where in the step its tokens are."""


def _plan_prefill(nodes: Sequence[PrefixNode], device: torch.device) -> list[PrefillGroup | PrefillSlice]:
    """New nodes, parents first, in the order of their tokens in the step."""
    starts = dict(zip(nodes, accumulate((len(node) for node in nodes), initial=0), strict=False))
    shelves: dict[KVBlock, list[PrefixNode]] = {}
    for node in nodes:
        shelves.setdefault(node.block, []).append(node)
    found: list[PrefillGroup | PrefillSlice] = []
    for shelf, some in shelves.items():
        alone = some[0].parent is not None and not shelf.parent_tokens
        if alone or shelf.length > QUERY_CHUNK:
            found += [(node, slice(starts[node], starts[node] + len(node))) for node in some]
        else:
            found.append(PrefillGroup(some, [starts[node] for node in some], device))
    return found


class DecodeStep:
    """Who attends to what in one forward pass: `nodes` to compute, then the rows at slots 0..n-1.

    Row i stands on the prompt that ends at node `leaves[i]` and has `lengths[i]` own tokens stored; its next one is
    in this pass. By torch, scores have the `columns` of the prompts, then one for each own token.
    """

    def __init__(
        self,
        nodes: Sequence[PrefixNode],
        leaves: Sequence[PrefixNode],
        own_lengths: Sequence[int],
        kv_cache: CompletionKVCache,
        device: torch.device,
        *,
        native_kernels: bool = False,
    ) -> None:
        """`compiled`: by the kernels in C, where they fit."""
        self.kv_cache, self.device, self.native_kernels = kv_cache, device, native_kernels
        self.prefills = _plan_prefill(nodes, device)
        self.row_start, self.row_count = sum(map(len, nodes)), len(leaves)
        """Where the rows begin, and how many there are."""
        self.max_own_tokens = max(own_lengths, default=0) + 1
        self._masks: dict[int | None, Tensor] = {}
        if not leaves:
            return
        kv_cache.reserve(len(leaves), self.max_own_tokens)
        self.slots = torch.arange(len(leaves), device=device)
        self.own_positions = torch.tensor(own_lengths, device=device)
        self.write_position = own_lengths[0] if len(set(own_lengths)) == 1 else self.own_positions
        self._prompt_ends = torch.tensor([leaf.end for leaf in leaves], device=device)
        self._own_lengths = own_lengths
        self._kv_paths = [leaf.kv_path for leaf in leaves]
        self.blocks = list(dict.fromkeys(node.block for path in self._kv_paths for node in path))
        self._key_spans: dict[tuple[int, int], KeySpans] = {}

    def key_spans(self, key_heads: int, head_dim: int) -> KeySpans:
        """What each row reads of the shelves and, after them, of the tails, for heads of this width."""
        if (key_heads, head_dim) not in self._key_spans:
            number = {shelf: place for place, shelf in enumerate(self.blocks)}
            first, found = [0], []
            for row, path in enumerate(self._kv_paths):
                for node in path:
                    along = node.block.length * head_dim
                    found.append(
                        (number[node.block], node.block_index * key_heads * along, node.end - node.kv_start, along)
                    )
                along = self.kv_cache.capacity * head_dim
                found.append((len(number), row * key_heads * along, self._own_lengths[row] + 1, along))
                first.append(len(found))
            self._key_spans[key_heads, head_dim] = KeySpans(first, *map(list, zip(*found, strict=True)))
        return self._key_spans[key_heads, head_dim]

    @cached_property
    def score_layout(self) -> ScoreLayout:
        """How the scores of all rows stand side by side."""
        return ScoreLayout(self._kv_paths, self.device)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, columns] to add to scores: -inf where the rows do not see, 0 elsewhere."""
        if window not in self._masks:
            first = None if window is None else (self._prompt_ends + self.own_positions - window)[:, None]
            parts = []
            own = torch.arange(self.max_own_tokens, device=self.device)
            for width, starts, sizes in (
                *self.score_layout.depths,
                (self.max_own_tokens, self._prompt_ends, self.own_positions + 1),
            ):
                place = own if width == self.max_own_tokens else torch.arange(width, device=self.device)
                part = place >= sizes[:, None]
                if first is not None:  # positions up to this one are out of the window
                    part |= starts[:, None] + place <= first
                parts.append(part)
            hidden = torch.cat(parts, 1)[:, None, None]
            self._masks[window] = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(
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
    decode: DecodeStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model calls: query [1, heads, T, D], key and value [1, key heads, T, D]; gives [1, T, heads, D]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    rule = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    heads, size = query.shape[1:3]
    out = query.new_empty(size, heads, value.shape[-1])
    attend(decode, layer, query[0].view(key.shape[1], -1, size, query.shape[-1]), key[0], value[0], rule, out)
    return out[None], None


def attend(
    step: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, params: "AttentionParams", out: Tensor
) -> None:
    """Query [key heads, heads of each, T, D], key and value [key heads, T, D]; fills out [T, heads, D]."""
    for piece in step.prefills:
        if isinstance(piece, PrefillGroup):
            _attend_prefill_group(piece, layer, query, key, value, params, out)
        else:
            node, here = piece
            node.store_kv(layer, key[:, here], value[:, here])
            _attend_prefill(node, layer, query[:, :, here], params, out[here])
    if step.row_count:
        here = slice(step.row_start, step.row_start + step.row_count)
        _attend_decode_rows(step, layer, query[:, :, here], key[:, here], value[:, here], params, out[here])
    out[step.row_start + step.row_count :] = 0  # what the step was filled up with


class AttentionParams:
    """From scores to shares, as one layer wants it."""

    def __init__(
        self, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and self.sinks is None

    def attn_weights(self, scores: Tensor, mask: Tensor, heads_axis: int) -> Tensor:
        """Scores have keys last, to which the mask is added, and [key heads, heads of each] from `first` on."""
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores += mask
        kind = torch.promote_types(scores.dtype, torch.float32)  # softmax is never taken in half precision
        if self.sinks is None:
            return torch.softmax(scores, -1, dtype=kind).to(scores.dtype)
        heads = [size if heads_axis <= place <= heads_axis + 1 else 1 for place, size in enumerate(scores.shape)]
        sinks = self.sinks.to(scores.dtype).view(heads).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1, dtype=kind)[..., :-1].to(scores.dtype)

    def scale_query(self, query: Tensor) -> Tensor:
        """Times the scale, and with its numbers side by side."""
        return torch.mul(query, self.scale, out=query.new_empty(query.shape))


def _attend_prefill_group(
    prefill: PrefillGroup, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, out: Tensor
) -> None:
    """All new nodes of a shelf against what comes before them and themselves; the tensors are of the whole step."""
    groups, rest, _, width = query.shape
    keys, values = prefill.store_kv(layer, key, value)
    count, length, before = prefill.block.node_count, prefill.length, prefill.block.parent_tokens
    some = torch.unflatten(query.index_select(2, prefill.gather_index), 2, (count, length)).permute(2, 0, 1, 3, 4)
    some = params.scale_query(some).view(count * groups, rest * length, width)
    scores = torch.bmm(some, keys.flatten(0, 1).transpose(1, 2)).view(count * groups, rest, length, -1)
    mask = _causal_mask(0, before, before + length, params.window, scores.dtype, scores.device)
    shares = params.attn_weights(torch.unflatten(scores, 0, (count, groups)), mask, 1)
    mixed = torch.bmm(shares.view(count * groups, rest * length, -1), values.flatten(0, 1))
    mixed = mixed.view(count, groups, rest, length, -1).permute(0, 3, 1, 2, 4)
    out.index_copy_(
        0, prefill.token_index, mixed.reshape(count * length, groups * rest, -1).index_select(0, prefill.scatter_index)
    )


def _attend_prefill(node: PrefixNode, layer: int, query: Tensor, params: AttentionParams, out: Tensor) -> None:
    """A piece of prompt, query [key heads, rest, T, D], against the pieces before it and itself."""
    keys = torch.cat([one.keys(layer) for one in node.kv_path], 1) if node.kv_parent else node.keys(layer)
    values = torch.cat([one.values(layer) for one in node.kv_path], 1) if node.kv_parent else node.values(layer)
    groups, rest = query.shape[:2]
    for first in range(0, len(node), QUERY_CHUNK):
        some = params.scale_query(query[:, :, first : first + QUERY_CHUNK])
        count = some.shape[2]
        start, end = node.start + first, node.start + first + count
        lowest = 0 if params.window is None else max(0, start - params.window + 1)
        scores = torch.bmm(some.view(groups, rest * count, -1), keys[:, lowest:end].transpose(1, 2))
        mask = _causal_mask(lowest, start, end, params.window, scores.dtype, scores.device)
        shares = params.attn_weights(scores.view(groups, rest, count, -1), mask, 0)
        mixed = torch.bmm(shares.view(groups, rest * count, -1), values[:, lowest:end])
        out[first : first + count] = mixed.view(groups * rest, count, -1).transpose(0, 1)


def _causal_mask(
    lowest: int, start: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[start..end, lowest..end] to add to scores: -inf for keys behind the query, or out of its window."""
    make = _cached_mask if (end - start) * (end - lowest) <= MAX_CACHED_MASK else _build_mask
    return make(lowest, start, end, window, dtype, device)


def _build_mask(
    lowest: int, start: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    places = torch.arange(lowest, end, device=device)
    mine = torch.arange(start, end, device=device)[:, None]
    hidden = places > mine
    if window is not None:
        hidden |= places <= mine - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


_cached_mask = lru_cache(maxsize=64)(_build_mask)
"""The same for all layers, and often from step to step."""


def _attend_decode_rows(
    step: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, out: Tensor
) -> None:
    """Answers under way, query [key heads, rest, n, D], each against its prompt and its own tokens."""
    groups, rest, count, width = query.shape
    keys, values = step.kv_cache.write(
        layer, step.slots, step.write_position, key.transpose(0, 1), value.transpose(0, 1)
    )
    if step.native_kernels and params.is_plain and decode_kernel_supports(query, value):
        all_keys = [*(shelf.keys[layer] for shelf in step.blocks), keys]
        all_values = [*(shelf.values[layer] for shelf in step.blocks), values]
        attend_rows(query, step.key_spans(groups, width), all_keys, all_values, params.scale, out)
        return
    keys = keys[:count].flatten(0, 1)[:, : step.max_own_tokens]
    values = values[:count].flatten(0, 1)[:, : step.max_own_tokens]
    query = params.scale_query(query.permute(2, 0, 1, 3))
    prompt, runs = step.score_layout.column_count, step.score_layout.shared_rows
    # zeros: columns that a row does not have are hidden, but must not be NaN
    scores = query.new_zeros(count, groups, rest, prompt + step.max_own_tokens)
    own = torch.bmm(query.view(count * groups, rest, width), keys.transpose(1, 2))
    scores[..., prompt:] = own.view(count, groups, rest, step.max_own_tokens)
    for columns, run in runs:
        if run.covers_all_rows:
            scores[..., columns] = run.scores(layer, query)
        else:
            scores[..., columns].index_copy_(0, run.row_index, run.scores(layer, query))
    shares = params.attn_weights(scores, step.mask(params.window, scores.dtype), 1)
    own = shares[..., prompt:].flatten(0, 1)
    mixed = torch.bmm(own, values).view(count, groups, rest, -1)
    for columns, run in runs:
        if run.covers_all_rows:
            mixed += run.weighted_values(layer, shares[..., columns])
        else:
            mixed.index_add_(0, run.row_index, run.weighted_values(layer, shares[..., columns]))
    out.copy_(mixed.view(count, groups * rest, -1))


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
