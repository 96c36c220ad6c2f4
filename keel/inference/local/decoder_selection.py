"""Choose the fastest decoder for a model whose log-probs match the model's own forward pass.

A few tokens are decoded with each candidate and compared with the model's own code: first with native kernels, then
with torch, each with `LlamaForward` if the network supports it. If no batched decoder matches, the model gets the
`SequentialDecoder` and a warning gives the reason.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from keel.common.packing_support import packing_obstacle
from keel.config import Sampling
from keel.inference.kernels.build import load_kernels
from keel.inference.local.continuous_batch import Decoder, GenerationRequest
from keel.inference.local.decode_attention import DECODE_ATTENTION
from keel.inference.local.decode_step import CompletionKVCache
from keel.inference.local.decoders import BatchedDecoder, SequentialDecoder, reference_logits
from keel.inference.local.fused_linear import FusedLinears
from keel.inference.local.llama_forward import LlamaForward
from keel.inference.local.prefix_cache import PrefixCache
from keel.inference.local.sampling import StopStringDetector

log = logging.getLogger("keel")

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest mean difference between log-probs of the probe and of the model's own code; 1e-4 for other dtypes."""
_PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


def select_decoder(network: Any, model_name: str, *, native_kernels: bool = True, pack: bool = True) -> Decoder:
    """Return a batched decoder if its log-probs match the model's, else a sequential one.

    Sets the attention implementation of the network accordingly. `native_kernels` allows the native kernels, and `pack`
    weights that are packed for them.
    """
    reason = packing_obstacle(network)
    if reason is None:
        decoder = _build_batched_decoder(network, native_kernels, pack)
        if isinstance(decoder, BatchedDecoder):
            network.set_attn_implementation(DECODE_ATTENTION)
            return decoder
        reason = decoder
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        network.set_attn_implementation("eager")  # other implementations ignore the cap
    log.warning("%s: decoding sequences one at a time without a KV cache, which is slow: %s", model_name, reason)
    return SequentialDecoder(network)


def _build_batched_decoder(network: Any, native_kernels: bool, pack: bool) -> BatchedDecoder | str:
    """Return the fastest batched decoder whose log-probs match the model's, or the reason why there is none."""
    try:
        reference = _reference_logprobs(network)  # before layers are fused, so that errors of fusing show
    except _PROBE_ERRORS as error:
        return f"its forward pass fails for a sequence: {error}"
    use_native = native_kernels and network.device.type == "cpu" and load_kernels() is not None
    for native in (True, False) if use_native else (False,):
        fused = _fuse_linears(network, native and pack)
        if fused is None:
            break
        for llama_forward in dict.fromkeys((_build_llama_forward(network, fused), None)):
            decoder = BatchedDecoder(network, llama_forward=llama_forward, native_kernels=native)
            reason = _compare_with_reference(decoder, reference)
            if reason is None:
                decoder.fused = fused
                return decoder
        if native:
            log.warning("%s: decoding with torch instead of native kernels: %s", type(network).__name__, reason)
        fused.restore()
    decoder = BatchedDecoder(network)
    reason = _compare_with_reference(decoder, reference)
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
            return None  # the comparison with the reference reports the obstacle


def _compare_with_reference(decoder: BatchedDecoder, reference: Tensor) -> str | None:
    """Return why the decoder cannot be used, or None if its log-probs match the reference."""
    try:
        difference = float((_decoded_logprobs(decoder) - reference).abs().mean())
    except _PROBE_ERRORS as error:
        return f"its forward pass fails for a batch: {error}"
    finally:
        decoder.prefix_cache, decoder.kv_cache = PrefixCache(), CompletionKVCache()
    if difference <= TOLERANCE.get(decoder.network.dtype, 1e-4):
        return None
    return f"log-probs of a probe differ by {difference:.2g} on average"


def _probe_prompts(network: Any) -> list[tuple[list[int], list[int]]]:
    """Return three (prompt, completion) pairs with two distinct prompts."""
    count = min(256, network.config.get_text_config().vocab_size)
    ids = torch.randint(count, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return [(ids[:24], ids[24:30]), (ids[:24], ids[28:34]), ([*ids[:18], *ids[30:36]], ids[34:40])]


@torch.inference_mode()
def _reference_logprobs(network: Any) -> Tensor:
    """Return log-probs [completions, 6] of the probe's completions with the model's own code."""
    rows = []
    with _attention_implementation(network, "eager"):
        for prompt, completion in _probe_prompts(network):
            logits = reference_logits(network, [*prompt, *completion])[len(prompt) - 1 : -1]
            tokens = torch.tensor(completion, device=logits.device)
            rows.append(logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return torch.stack(rows)


@torch.inference_mode()
def _decoded_logprobs(decoder: BatchedDecoder) -> Tensor:
    """Return log-probs [completions, 6] of the probe's completions with the decoder."""
    probe = _probe_prompts(decoder.network)
    rows = [
        GenerationRequest(tuple(prompt), Sampling(), frozenset(), StopStringDetector(None, ()), 6)
        for prompt, _ in probe
    ]
    columns = []
    with _attention_implementation(decoder.network, DECODE_ATTENTION):
        for position in range(6):
            logprobs = decoder.compute_logits(rows).float().log_softmax(-1)
            tokens = [completion[position] for _, completion in probe]
            columns.append(logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0])
            for row, token in zip(rows, tokens, strict=True):
                row.tokens.append(token)
    return torch.stack(columns, 1)


@contextmanager
def _attention_implementation(network: Any, name: str) -> Iterator[None]:
    previous = network.config._attn_implementation
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(previous)
