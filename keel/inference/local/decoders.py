"""The two ways to compute a step: all rows in one pass with shared prompts, or each sequence alone.

Which one a model gets is found out on the model itself: a few tokens are decoded together and compared with the model's
own forward pass. A model that cannot be batched without changing its numbers (a recurrent state, attention without a
hook, experts with a capacity) has each sequence computed from its beginning for every token: exact, but slow; the log
says why. It keeps no state between steps, so that new weights count for the whole sequence.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from keel.common.packing_support import packing_obstacle
from keel.config import Sampling
from keel.inference.kernels.build import load_kernels
from keel.inference.local.continuous_batch import Decoder, GenerationRequest
from keel.inference.local.decode_attention import DECODE_ATTENTION, CompletionKVCache, DecodeStep
from keel.inference.local.fused_linear import FusedLinears
from keel.inference.local.llama_forward import LlamaForward
from keel.inference.local.prefix_cache import CACHE_BYTES, KVBlock, PrefixCache, PrefixNode, TokenIds, allocate_blocks
from keel.inference.local.sampling import StopStringDetector

log = logging.getLogger("keel")

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far log-probs of the probe may be from the model's own, in the mean; elsewhere 1e-4."""
MAX_DEPTH = 8
"""Pieces that a kept beginning may have; above, they are put together, for each costs a product of its own."""
SPILL_TOKENS = 512
"""Own tokens that are stored beside those of other rows, all with room for the longest. The rest of a long answer gets
room of its own: one long answer must not reserve as much for every other."""
PAD_MULTIPLE = 8
"""On CPU a step has a multiple of so many tokens: products with 63 take up to half as long again as with 64."""
_PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


class BatchedDecoder:
    """All rows of a step, and the prompts of new ones, in one forward pass."""

    def __init__(
        self,
        network: Any,
        cache_bytes: int = CACHE_BYTES,
        llama_forward: LlamaForward | None = None,
        native_kernels: bool = False,
    ) -> None:
        self.network, self.llama_forward, self.native_kernels = network, llama_forward, native_kernels
        """With a faster way to compute it."""
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
        """Move what the row has stored into a node of its own, one for all that it has spilled."""
        leaf, size = row.leaf, row.cached_length
        assert leaf is not None
        spilled = leaf.end > len(row.prompt)
        row.leaf = self._build_extended_node(slot, row, size, [leaf] if spilled else [])

    def _build_extended_node(
        self, slot: int, row: GenerationRequest, length: int, merged_nodes: list[PrefixNode]
    ) -> PrefixNode:
        """A node with what the nodes `before`, the last of the row's path, hold and the row has stored."""
        parent = merged_nodes[0].kv_parent if merged_nodes else row.leaf
        node = PrefixNode((*row.prompt, *row.tokens[:-1]), parent)
        allocate_blocks([node])
        for layer, own in self.kv_cache.keys.items():
            key, value = own[slot, :, :length], self.kv_cache.values[layer][slot, :, :length]
            if merged_nodes:
                key = torch.cat([*(one.keys(layer) for one in merged_nodes), key], 1)
                value = torch.cat([*(one.values(layer) for one in merged_nodes), value], 1)
            node.store_kv(layer, key, value)
        return node

    @torch.inference_mode()
    def retain_finished(self, rows: Mapping[int, GenerationRequest]) -> None:
        if not self.prefix_cache.retained.max_bytes:
            return
        new: dict[PrefixNode, int] = {}
        ends: dict[TokenIds, PrefixNode] = {}
        for number, row in rows.items():
            leaf, prompt, ids = row.leaf, self.prefix_cache.get(row.prompt), (*row.prompt, *row.tokens[:-1])
            # a prompt that cannot be found was computed by other weights, and so may be what stands on it
            if leaf is None or prompt is None or prompt not in (leaf, leaf.parent) or ids in ends:
                continue
            found = self.prefix_cache.get(ids) or (None if row.cached_length else leaf)
            if found is None and leaf.depth >= MAX_DEPTH:
                found = self._build_extended_node(number, row, row.cached_length, leaf.kv_path)
            if found is None:
                found = PrefixNode(ids, leaf)
                new[found] = number
            ends[ids] = found
        allocate_blocks(list(new))
        self._copy_to_nodes(new)
        for node in ends.values():
            self.prefix_cache.retain(node)

    def _copy_to_nodes(self, rows_by_node: Mapping[PrefixNode, int]) -> None:
        """What the rows of these numbers have stored into the nodes, which have their shelves to themselves."""
        shelves: dict[KVBlock, list[int]] = {}
        for node in sorted(rows_by_node, key=lambda node: node.block_index):
            shelves.setdefault(node.block, []).append(rows_by_node[node])
        for shelf, numbers in shelves.items():
            which = torch.tensor(numbers, device=self.network.device)
            for store, own in ((shelf.keys, self.kv_cache.keys), (shelf.values, self.kv_cache.values)):
                store |= {layer: one[:, :, : shelf.length].index_select(0, which) for layer, one in own.items()}

    def _forward(self, nodes: Sequence[PrefixNode], rows: Sequence[GenerationRequest]) -> Tensor:
        """[rows, V]; the nodes get theirs."""
        device = self.network.device
        leaves = [row.leaf for row in rows if row.leaf is not None]
        lengths = [row.cached_length for row in rows]
        inputs = [token for node in nodes for token in node.ids[node.start :]] + [row.tokens[-1] for row in rows]
        positions = [place for node in nodes for place in range(node.start, node.end)]
        positions += [leaf.end + length for leaf, length in zip(leaves, lengths, strict=True)]
        ends, last = [], -1
        for node in nodes:
            last += len(node)
            ends.append(last)
        ends += range(last + 1, last + 1 + len(rows))
        count = len(ends)
        inputs, positions, ends = (
            _pad_to_multiple(numbers, self.pad_multiple) for numbers in (inputs, positions, ends)
        )
        tokens, places, wanted = (torch.tensor(some, device=device) for some in (inputs, positions, ends))
        step = DecodeStep(nodes, leaves, lengths, self.kv_cache, device, native_kernels=self.native_kernels)
        if self.llama_forward is not None:
            self.llama_forward = self.llama_forward.rebind(self.network)
        logits = (self.llama_forward or self._model_forward)(tokens, places, wanted, step)[:count]
        for place, node in enumerate(nodes):
            node.logits = logits[place].clone()
        return logits[len(nodes) :]

    def _model_forward(
        self, input_ids: Tensor, positions: Tensor, output_positions: Tensor, step: DecodeStep
    ) -> Tensor:
        """Logits [wanted, V] by the model's own code."""
        output = self.network(
            input_ids=input_ids[None],
            position_ids=positions[None],
            # a mask of four dimensions is passed on as it is, so that the model does not make one of T x T
            attention_mask=torch.zeros(1, 1, 1, 1, device=input_ids.device),
            use_cache=False,
            logits_to_keep=output_positions,
            decode=step,
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
    """With the last one repeated. What is computed of it stands alone, and is never read."""
    return values + values[-1:] * (-len(values) % multiple)


class SequentialDecoder:
    """Each sequence from its beginning, one at a time, by the model's own code."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.fused: FusedLinears | None = None

    def find_prompt(self, _prompt: TokenIds) -> PrefixNode | None:
        return None

    @torch.inference_mode()
    def compute_logits(self, rows: Sequence[GenerationRequest]) -> Tensor:
        return torch.stack([reference_logits(self.network, (*row.prompt, *row.tokens))[-1] for row in rows])

    def move_row(self, source: int, target: int, row: GenerationRequest) -> None:
        """Nothing is kept."""

    def clear_row(self, row_index: int) -> None:
        """Nothing is kept."""

    def retain_finished(self, rows: Mapping[int, GenerationRequest]) -> None:
        """Nothing is kept."""

    def clear_prefix_cache(self) -> None:
        """Nothing is kept."""


def select_decoder(network: Any, model_name: str, *, native_kernels: bool = True, pack: bool = True) -> Decoder:
    """Together if that gives the model's own log-probs, else Alone. Sets the network's attention accordingly.

    `compiled`: by the kernels in C where they can be used, and with `pack` by weights that are packed for them.
    """
    reason = packing_obstacle(network)
    if reason is None:
        found = _build_batched_decoder(network, native_kernels, pack)
        if isinstance(found, BatchedDecoder):
            network.set_attn_implementation(DECODE_ATTENTION)
            return found
        reason = found
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        network.set_attn_implementation("eager")  # the usual kernels leave the cap out
    log.warning("%s: answers are decoded one at a time, from the beginning for each token: %s", model_name, reason)
    return SequentialDecoder(network)


def _build_batched_decoder(network: Any, native_kernels: bool, pack: bool) -> BatchedDecoder | str:
    """By the fastest way that gives the model's own log-probs; or why none does."""
    try:
        truth = _reference_logprobs(
            network
        )  # before anything is fused: what is wrong with that must not be wrong here too
    except _PROBE_ERRORS as error:
        return f"its code does not take a sequence: {error}"
    for in_c in (
        (True, False) if native_kernels and network.device.type == "cpu" and load_kernels() is not None else (False,)
    ):
        fused = _fuse_linears(network, in_c and pack)
        if fused is None:
            break
        for own in dict.fromkeys((_build_llama_forward(network, fused), None)):
            decoder = BatchedDecoder(network, llama_forward=own, native_kernels=in_c)
            reason = _compare_with_reference(decoder, truth)
            if reason is None:
                decoder.fused = fused
                return decoder
        if in_c:
            log.warning("%s: decoding goes by torch, the kernels in C are off: %s", type(network).__name__, reason)
        fused.restore()
    decoder = BatchedDecoder(network)
    reason = _compare_with_reference(decoder, truth)
    return decoder if reason is None else reason


def _build_llama_forward(network: Any, fused: FusedLinears) -> LlamaForward | None:
    try:
        return LlamaForward(network, fused)
    except (*_PROBE_ERRORS, StopIteration):
        return None


@torch.inference_mode(False)
def _fuse_linears(network: Any, pack: bool) -> FusedLinears | None:
    with torch.no_grad():
        try:
            return FusedLinears(network, lambda: reference_logits(network, [0, 1]), pack=pack)
        except _PROBE_ERRORS:
            return None  # the probe says what the obstacle is


def _compare_with_reference(decoder: BatchedDecoder, reference: Tensor) -> str | None:
    """Why the network cannot be decoded like this."""
    try:
        off = float((_decoded_logprobs(decoder) - reference).abs().mean())
    except _PROBE_ERRORS as error:
        return f"its code does not take a batch: {error}"
    finally:
        decoder.prefix_cache, decoder.kv_cache = PrefixCache(), CompletionKVCache()
    return None if off <= TOLERANCE.get(decoder.network.dtype, 1e-4) else f"log-probs of a probe differ by {off:.2g}"


def reference_logits(network: Any, ids: Sequence[int]) -> Tensor:
    """[T, V] by the model's own code."""
    logits: Tensor = network(input_ids=torch.tensor([list(ids)], device=network.device), use_cache=False).logits[0]
    return logits


def _probe_prompts(network: Any) -> list[tuple[list[int], list[int]]]:
    """Three short answers to two prompts."""
    count = min(256, network.config.get_text_config().vocab_size)
    ids = torch.randint(count, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return [(ids[:24], ids[24:30]), (ids[:24], ids[28:34]), ([*ids[:18], *ids[30:36]], ids[34:40])]


@torch.inference_mode()
def _reference_logprobs(network: Any) -> Tensor:
    """[answers, 6] log-probs of the tokens of the answers, by the model's own code."""
    found = []
    with _attention_implementation(network, "eager"):
        for prompt, answer in _probe_prompts(network):
            scores = reference_logits(network, [*prompt, *answer]).float().log_softmax(-1)[len(prompt) - 1 : -1]
            found.append(scores.gather(1, torch.tensor(answer, device=scores.device)[:, None])[:, 0])
    return torch.stack(found)


@torch.inference_mode()
def _decoded_logprobs(decoder: BatchedDecoder) -> Tensor:
    """The same, decoded together."""
    questions = _probe_prompts(decoder.network)
    rows = [
        GenerationRequest(tuple(prompt), Sampling(), frozenset(), StopStringDetector(None, ()), 6)
        for prompt, _ in questions
    ]
    found = []
    with _attention_implementation(decoder.network, DECODE_ATTENTION):
        for place in range(6):
            scores = decoder.compute_logits(rows).float().log_softmax(-1)
            wanted = [answer[place] for _, answer in questions]
            found.append(scores.gather(1, torch.tensor(wanted, device=scores.device)[:, None])[:, 0])
            for row, token in zip(rows, wanted, strict=True):
                row.tokens.append(token)
    return torch.stack(found, 1)


@contextmanager
def _attention_implementation(network: Any, name: str) -> Iterator[None]:
    before = network.config._attn_implementation
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(before)
