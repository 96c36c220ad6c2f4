"""Layout of one decode step: which tokens are computed, where their keys and values go, and what each row attends to.

A step computes the tokens of new prefix nodes (prefill), then one token for each running completion (a row). Keys and
values of prompts are in the blocks of their nodes and are never copied per sample; those of generated tokens are in the
`CompletionKVCache`, one slot per row. The layout is the same for all layers, so it is built once per step.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from keel.inference.kernels.decode_attention import KeySpans
from keel.inference.local.prefix_cache import KVBlock, PrefixNode
from keel.inference.local.torch_rows import ScoreLayout

QUERY_CHUNK = 256
"""Prompt queries that are scored together, so that a long prompt needs no score matrix of its length squared."""
INITIAL_CAPACITY = 32
"""Initial capacity of the completion KV cache in tokens per slot; it doubles when it is full."""


class CompletionKVCache:
    """Keys and values of generated tokens, by slot: layer -> [slots, key heads, capacity, D]."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slot_count, self.capacity = 0, INITIAL_CAPACITY

    def reserve(self, slots: int, length: int) -> None:
        """Grow to at least `slots` slots of `length` tokens; stored tokens are kept."""
        if slots <= self.slot_count and length <= self.capacity:
            return
        old_slots, old_capacity = self.slot_count, self.capacity
        self.slot_count = max(old_slots, slots)
        self.capacity = old_capacity if length <= old_capacity else max(2 * old_capacity, length)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = old.new_zeros(self.slot_count, old.shape[1], self.capacity, old.shape[3])
                store[layer][:old_slots, :, :old_capacity] = old

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        if not length:
            return  # a row that has just joined may not have a slot yet
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot. Values that are not finite would spoil the next completion here, even if masked."""
        if slot >= self.slot_count:
            return
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[slot].zero_()

    def write(
        self, layer: int, slots: Tensor, positions: Tensor | int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one token per slot, [n, key heads, D], and return all keys and values of the layer.

        `positions` is one position per slot, or an int if it is the same for all.
        """
        for store, new in ((self.keys, key), (self.values, value)):
            if layer not in store:
                # zeros: unwritten positions are multiplied by a weight of 0 and must not be NaN
                store[layer] = new.new_zeros(self.slot_count, new.shape[1], self.capacity, new.shape[2])
            if isinstance(positions, int):
                store[layer][: len(new), :, positions] = new  # a slice copy, many times faster than indexing
            else:
                store[layer][slots, :, positions] = new
        return self.keys[layer], self.values[layer]


class PrefillGroup:
    """The new nodes of one block, computed together in one batched product."""

    def __init__(self, nodes: Sequence[PrefixNode], token_starts: Sequence[int], device: torch.device) -> None:
        """`token_starts`: index in the step of the first token of each node."""
        self.block, self.parent = nodes[0].block, nodes[0].parent
        self.length = self.block.length - self.block.parent_tokens
        indices = [list(range(start, start + len(node))) for node, start in zip(nodes, token_starts, strict=True)]
        # shorter nodes are padded with their last token; the padded positions come after all that are read
        gather = [index for tokens in indices for index in tokens + tokens[-1:] * (self.length - len(tokens))]
        self.gather_index = torch.tensor(gather, device=device)
        self.scatter_index = torch.tensor(
            [node * self.length + offset for node, tokens in enumerate(indices) for offset in range(len(tokens))],
            device=device,
        )
        self.token_index = torch.tensor([index for tokens in indices for index in tokens], device=device)

    def store_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the group's part of the step's keys and values [key heads, T, D]; return all of the block's."""
        block, parent = self.block, self.parent
        for store, new, read in ((block.keys, key, PrefixNode.keys), (block.values, value, PrefixNode.values)):
            stored = new.new_empty(block.node_count, len(new), block.length, new.shape[-1])
            if block.parent_tokens and parent is not None:
                stored[:, :, : block.parent_tokens] = torch.cat([read(node, layer) for node in parent.kv_path], 1)
            stored[:, :, block.parent_tokens :] = torch.unflatten(
                new.index_select(1, self.gather_index), 1, (block.node_count, -1)
            ).transpose(0, 1)
            store[layer] = stored
        return block.keys[layer], block.values[layer]


PrefillSlice = tuple[PrefixNode, slice]
"""A node that is computed separately, and the slice of the step with its tokens."""


def _plan_prefill(nodes: Sequence[PrefixNode], device: torch.device) -> list[PrefillGroup | PrefillSlice]:
    """Group new nodes (parents first, in the order of their tokens in the step) by block."""
    starts = dict(zip(nodes, accumulate((len(node) for node in nodes), initial=0), strict=False))
    blocks: dict[KVBlock, list[PrefixNode]] = {}
    for node in nodes:
        blocks.setdefault(node.block, []).append(node)
    plan: list[PrefillGroup | PrefillSlice] = []
    for block, members in blocks.items():
        keys_elsewhere = members[0].parent is not None and not block.parent_tokens
        if keys_elsewhere or block.length > QUERY_CHUNK:
            plan += [(node, slice(starts[node], starts[node] + len(node))) for node in members]
        else:
            plan.append(PrefillGroup(members, [starts[node] for node in members], device))
    return plan


class DecodeStep:
    """Attention layout of one forward pass: the tokens of `nodes`, then one token for each row 0..n-1.

    Row i continues the prompt that ends at node `leaves[i]` and has `own_lengths[i]` generated tokens in the KV cache;
    its next token is computed in this pass. In torch, scores have the columns of the prompts, then one column for each
    generated token.
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
        """`native_kernels`: use the native kernels where they support the tensors."""
        self.kv_cache, self.device, self.native_kernels = kv_cache, device, native_kernels
        self.prefills = _plan_prefill(nodes, device)
        self.row_start, self.row_count = sum(map(len, nodes)), len(leaves)
        """Index of the first row's token in the step, and the number of rows."""
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
        """Return the spans each row reads from the blocks and then from the completion KV cache."""
        if (key_heads, head_dim) not in self._key_spans:
            block_numbers = {block: number for number, block in enumerate(self.blocks)}
            row_starts, spans = [0], []
            for row, path in enumerate(self._kv_paths):
                for node in path:
                    head_stride = node.block.length * head_dim
                    offset = node.block_index * key_heads * head_stride
                    spans.append((block_numbers[node.block], offset, node.end - node.kv_start, head_stride))
                head_stride = self.kv_cache.capacity * head_dim
                spans.append(
                    (len(block_numbers), row * key_heads * head_stride, self._own_lengths[row] + 1, head_stride)
                )
                row_starts.append(len(spans))
            self._key_spans[key_heads, head_dim] = KeySpans(row_starts, *map(list, zip(*spans, strict=True)))
        return self._key_spans[key_heads, head_dim]

    @cached_property
    def score_layout(self) -> ScoreLayout:
        """Columns of the prompt scores of all rows, for attention in torch."""
        return ScoreLayout(self._kv_paths, self.device)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [n, 1, 1, columns]: -inf where a row does not see a column, 0 elsewhere."""
        if window not in self._masks:
            # the last position outside the window of each row
            hidden_until = None if window is None else (self._prompt_ends + self.own_positions - window)[:, None]
            parts = []
            own = torch.arange(self.max_own_tokens, device=self.device)
            for width, starts, sizes in (
                *self.score_layout.depths,
                (self.max_own_tokens, self._prompt_ends, self.own_positions + 1),
            ):
                columns = own if width == self.max_own_tokens else torch.arange(width, device=self.device)
                part = columns >= sizes[:, None]
                if hidden_until is not None:
                    part |= starts[:, None] + columns <= hidden_until
                parts.append(part)
            hidden = torch.cat(parts, 1)[:, None, None]
            self._masks[window] = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(
                hidden, -math.inf
            )
        return self._masks[window]
