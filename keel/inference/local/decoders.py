"""The two decoders: all rows of a step in one pass with shared prompts, or each sequence separately.

`BatchedDecoder` computes all rows and new prompts in one forward pass. `SequentialDecoder` is for models that cannot be
batched without changing their results (a recurrent state, attention without a hook, experts with a capacity): it
computes each sequence from the beginning for every token, which is exact but slow. It keeps no state between steps, so
new weights apply to the whole sequence. `select_decoder` chooses between them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keel.inference.local.continuous_batch import GenerationRequest
from keel.inference.local.decode_step import CompletionKVCache, DecodeStep
from keel.inference.local.fused_linear import FusedLinears
from keel.inference.local.llama_forward import LlamaForward
from keel.inference.local.prefix_cache import CACHE_BYTES, KVBlock, PrefixCache, PrefixNode, TokenIds, allocate_blocks

MAX_DEPTH = 8
"""Most nodes on the path of a retained prefix; longer paths are merged, since each node costs a separate product."""
SPILL_TOKENS = 512
"""Generated tokens stored in the shared KV cache, whose capacity is that of its longest row. Older tokens of a long
completion move to a separate node, so that one long completion does not reserve as much memory for every row."""
SCORED_TOKENS = 512
"""Tokens of a prompt whose logits are computed together when a prompt is scored."""
PAD_MULTIPLE = 8
"""On CPU, steps are padded to a multiple of this many tokens: 63 tokens take up to 1.5 times as long as 64."""


class BatchedDecoder:
    """Computes all rows of a step, and the prompts of new rows, in one forward pass."""

    def __init__(
        self,
        network: Any,
        cache_bytes: int = CACHE_BYTES,
        llama_forward: LlamaForward | None = None,
        native_kernels: bool = False,
    ) -> None:
        """`llama_forward` replaces the network's own forward pass; `native_kernels` enables native attention."""
        self.network, self.llama_forward, self.native_kernels = network, llama_forward, native_kernels
        self.prefix_cache, self.kv_cache = PrefixCache(cache_bytes), CompletionKVCache()
        self.fused: FusedLinears | None = None
        self.pad_multiple = PAD_MULTIPLE if network.device.type == "cpu" else 1

    def find_prompt(self, prompt: TokenIds) -> PrefixNode | None:
        return self.prefix_cache.get(prompt)

    @torch.inference_mode()
    def compute_logits(self, rows: Sequence[GenerationRequest]) -> Tensor:
        running = [row for row in rows if row.tokens]
        new = rows[len(running) :]
        nodes = self.prefix_cache.insert(row.prompt for row in new)
        for row in new:
            row.leaf = self.prefix_cache.get(row.prompt)
        for slot, row in enumerate(running):
            if row.cached_length >= SPILL_TOKENS:
                self._spill(slot, row)
        parts = [self._forward(nodes, running)] if nodes or running else []
        parts += [torch.stack([row.leaf.logits for row in new])] if new else []  # type: ignore[union-attr,misc]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _spill(self, slot: int, row: GenerationRequest) -> None:
        """Move the generated tokens of a row from the KV cache to a node, merged with what it has spilled before."""
        leaf, length = row.leaf, row.cached_length
        assert leaf is not None
        has_spilled = leaf.end > len(row.prompt)
        row.leaf = self._build_extended_node(slot, row, length, [leaf] if has_spilled else [])

    def _build_extended_node(
        self, slot: int, row: GenerationRequest, length: int, merged_nodes: list[PrefixNode]
    ) -> PrefixNode:
        """Build a node from `merged_nodes`, the last ones of the row's path, and the row's tokens in the KV cache."""
        parent = merged_nodes[0].kv_parent if merged_nodes else row.leaf
        node = PrefixNode((*row.prompt, *row.tokens[:-1]), parent)
        allocate_blocks([node])
        for layer, own in self.kv_cache.keys.items():
            key, value = own[slot, :, :length], self.kv_cache.values[layer][slot, :, :length]
            if merged_nodes:
                key = torch.cat([*(merged.keys(layer) for merged in merged_nodes), key], 1)
                value = torch.cat([*(merged.values(layer) for merged in merged_nodes), value], 1)
            node.store_kv(layer, key, value)
        return node

    @torch.inference_mode()
    def retain_finished(self, rows: Mapping[int, GenerationRequest]) -> None:
        if not self.prefix_cache.retained.max_bytes:
            return
        new: dict[PrefixNode, int] = {}
        ends: dict[TokenIds, PrefixNode] = {}
        for slot, row in rows.items():
            leaf, prompt, ids = row.leaf, self.prefix_cache.get(row.prompt), (*row.prompt, *row.tokens[:-1])
            # a prompt missing from the cache was computed with other weights, so its completion may be too
            if leaf is None or prompt is None or prompt not in (leaf, leaf.parent) or ids in ends:
                continue
            node = self.prefix_cache.get(ids) or (None if row.cached_length else leaf)
            if node is None and leaf.depth >= MAX_DEPTH:
                node = self._build_extended_node(slot, row, row.cached_length, leaf.kv_path)
            if node is None:
                node = PrefixNode(ids, leaf)
                new[node] = slot
            ends[ids] = node
        allocate_blocks(list(new))
        self._copy_to_nodes(new)
        for node in ends.values():
            self.prefix_cache.retain(node)

    def _copy_to_nodes(self, slots_by_node: Mapping[PrefixNode, int]) -> None:
        """Copy the cached tokens of slots to their nodes. The blocks must contain no other nodes."""
        slots_by_block: dict[KVBlock, list[int]] = {}
        for node in sorted(slots_by_node, key=lambda node: node.block_index):
            slots_by_block.setdefault(node.block, []).append(slots_by_node[node])
        for block, slots in slots_by_block.items():
            index = torch.tensor(slots, device=self.network.device)
            for store, cached in ((block.keys, self.kv_cache.keys), (block.values, self.kv_cache.values)):
                store |= {
                    layer: tensor[:, :, : block.length].index_select(0, index) for layer, tensor in cached.items()
                }

    def _forward(self, nodes: Sequence[PrefixNode], rows: Sequence[GenerationRequest]) -> Tensor:
        """Return the logits [rows, V] and store those of new nodes."""
        device = self.network.device
        leaves = [row.leaf for row in rows if row.leaf is not None]
        lengths = [row.cached_length for row in rows]
        inputs = [token for node in nodes for token in node.ids[node.start :]] + [row.tokens[-1] for row in rows]
        positions = [position for node in nodes for position in range(node.start, node.end)]
        positions += [leaf.end + length for leaf, length in zip(leaves, lengths, strict=True)]
        ends, last = [], -1
        for node in nodes:
            last += len(node)
            ends.append(last)
        ends += range(last + 1, last + 1 + len(rows))
        step = DecodeStep(nodes, leaves, lengths, self.kv_cache, device, native_kernels=self.native_kernels)
        logits = self._run_step(inputs, positions, ends, step)
        for index, node in enumerate(nodes):
            node.logits = logits[index].clone()
        return logits[len(nodes) :]

    @torch.inference_mode()
    def prompt_logits(self, prompt: TokenIds) -> Iterator[Tensor]:
        """Yield the logits after each token in parts: those of a whole prompt may be larger than the model."""
        node: PrefixNode | None = None
        for end in (*range(SCORED_TOKENS, len(prompt), SCORED_TOKENS), len(prompt)):
            node = PrefixNode(prompt[:end], node)
            allocate_blocks([node])
            step = DecodeStep([node], [], [], self.kv_cache, self.network.device, native_kernels=self.native_kernels)
            positions = list(range(node.start, end))
            yield self._run_step(list(prompt[node.start : end]), positions, list(range(len(positions))), step)

    def _run_step(self, inputs: list[int], positions: list[int], outputs: list[int], step: DecodeStep) -> Tensor:
        """Return the logits [outputs, V] of a step."""
        input_ids, position_ids, output_positions = (
            torch.tensor(_pad_to_multiple(values, self.pad_multiple), device=self.network.device)
            for values in (inputs, positions, outputs)
        )
        if self.llama_forward is not None:
            self.llama_forward = self.llama_forward.rebind(self.network)
        forward = self.llama_forward or self._model_forward
        return forward(input_ids, position_ids, output_positions, step)[: len(outputs)]

    def _model_forward(
        self, input_ids: Tensor, positions: Tensor, output_positions: Tensor, step: DecodeStep
    ) -> Tensor:
        """Return the logits [outputs, V] with the model's own code."""
        output = self.network(
            input_ids=input_ids[None],
            position_ids=positions[None],
            # a mask of four dimensions is passed on unchanged, so the model does not allocate one of T x T
            attention_mask=torch.zeros(1, 1, 1, 1, device=input_ids.device),
            use_cache=False,
            logits_to_keep=output_positions,
            decode_step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def move_row(self, source: int, target: int, row: GenerationRequest) -> None:
        self.kv_cache.move(source, target, row.cached_length)

    def clear_row(self, row_index: int) -> None:
        self.kv_cache.clear(row_index)

    def clear_prefix_cache(self) -> None:
        self.prefix_cache.clear()


def _pad_to_multiple(values: list[int], multiple: int) -> list[int]:
    """Pad a list to a multiple by repeating its last value; the results of the padding are never read."""
    return values + values[-1:] * (-len(values) % multiple)


class SequentialDecoder:
    """Computes each sequence from the beginning, one at a time, with the model's own code; caches nothing."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.fused: FusedLinears | None = None

    def find_prompt(self, _prompt: TokenIds) -> PrefixNode | None:
        return None

    @torch.inference_mode()
    def compute_logits(self, rows: Sequence[GenerationRequest]) -> Tensor:
        return torch.stack([reference_logits(self.network, (*row.prompt, *row.tokens))[-1] for row in rows])

    @torch.inference_mode()
    def prompt_logits(self, prompt: TokenIds) -> Iterator[Tensor]:
        yield reference_logits(self.network, prompt)

    def move_row(self, source: int, target: int, row: GenerationRequest) -> None:
        """Do nothing."""

    def clear_row(self, row_index: int) -> None:
        """Do nothing."""

    def retain_finished(self, rows: Mapping[int, GenerationRequest]) -> None:
        """Do nothing."""

    def clear_prefix_cache(self) -> None:
        """Do nothing."""


def reference_logits(network: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [T, V] of a sequence with the model's own code."""
    logits: Tensor = network(input_ids=torch.tensor([list(ids)], device=network.device), use_cache=False).logits[0]
    return logits
