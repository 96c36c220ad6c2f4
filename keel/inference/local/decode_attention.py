"""Attention of one decode step, registered as an attention function of transformers models.

A model whose attention implementation is set to DECODE_ATTENTION gets all tokens of a step in one row: the tokens of
new prompts, then one token for each running completion (see `DecodeStep`). `decode_attention` stores their keys and
values and attends: prompt tokens to what precedes them; the token of a completion, in one softmax, to its prompt, whose
keys all samples share without a copy, and to its own earlier tokens. Sliding windows, soft-capping, sinks and grouped
heads follow the model. No model code is changed.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from keel.inference.kernels.decode_attention import attend_rows, decode_kernel_supports
from keel.inference.local.decode_step import QUERY_CHUNK, DecodeStep, PrefillGroup
from keel.inference.local.prefix_cache import PrefixNode

DECODE_ATTENTION = "keel_decode"
"""Name of the attention implementation."""
MAX_CACHED_MASK = QUERY_CHUNK * QUERY_CHUNK
"""Most entries of a prefill mask that is cached."""


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    decode_step: DecodeStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as a model's attention function: query [1, heads, T, D], key and value [1, key heads, T, D].

    Returns [1, T, heads, D]. `decode_step` is passed to the model's forward pass by `BatchedDecoder`.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    heads, size = query.shape[1:3]
    out = query.new_empty(size, heads, value.shape[-1])
    attend(decode_step, layer, query[0].view(key.shape[1], -1, size, query.shape[-1]), key[0], value[0], params, out)
    return out[None], None


def attend(
    step: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, params: "AttentionParams", out: Tensor
) -> None:
    """Store keys and values [key heads, T, D] and write the attention to `out` [T, heads, D].

    `query` is [key heads, group size, T, D], where the group size is the number of query heads per key head.
    """
    for prefill in step.prefills:
        if isinstance(prefill, PrefillGroup):
            _attend_prefill_group(prefill, layer, query, key, value, params, out)
        else:
            node, tokens = prefill
            node.store_kv(layer, key[:, tokens], value[:, tokens])
            _attend_prefill(node, layer, query[:, :, tokens], params, out[tokens])
    if step.row_count:
        rows = slice(step.row_start, step.row_start + step.row_count)
        _attend_decode_rows(step, layer, query[:, :, rows], key[:, rows], value[:, rows], params, out[rows])
    out[step.row_start + step.row_count :] = 0  # padding tokens


class AttentionParams:
    """Scale, sliding window, soft cap and sinks of one layer's attention."""

    def __init__(
        self, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    @property
    def is_plain(self) -> bool:
        """Whether there is no window, soft cap or sink."""
        return self.window is None and self.softcap is None and self.sinks is None

    def attn_weights(self, scores: Tensor, mask: Tensor, heads_axis: int) -> Tensor:
        """Turn scores (keys in the last dimension) into attention weights; may overwrite the scores.

        The key heads and the query heads of each are the dimensions `heads_axis` and `heads_axis + 1`.
        """
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores += mask
        dtype = torch.promote_types(scores.dtype, torch.float32)  # never compute the softmax in half precision
        if self.sinks is None:
            return torch.softmax(scores, -1, dtype=dtype).to(scores.dtype)
        shape = [size if heads_axis <= axis <= heads_axis + 1 else 1 for axis, size in enumerate(scores.shape)]
        sinks = self.sinks.to(scores.dtype).view(shape).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1, dtype=dtype)[..., :-1].to(scores.dtype)

    def scale_query(self, query: Tensor) -> Tensor:
        """Return a contiguous copy of the query, multiplied by the scale."""
        return torch.mul(query, self.scale, out=query.new_empty(query.shape))


def _attend_prefill_group(
    prefill: PrefillGroup, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, out: Tensor
) -> None:
    """Attend from all new nodes of a block to their parents and themselves; the tensors cover the whole step."""
    key_heads, group_size, _, width = query.shape
    keys, values = prefill.store_kv(layer, key, value)
    count, length, before = prefill.block.node_count, prefill.length, prefill.block.parent_tokens
    queries = torch.unflatten(query.index_select(2, prefill.gather_index), 2, (count, length)).permute(2, 0, 1, 3, 4)
    queries = params.scale_query(queries).view(count * key_heads, group_size * length, width)
    scores = torch.bmm(queries, keys.flatten(0, 1).transpose(1, 2)).view(count * key_heads, group_size, length, -1)
    mask = _causal_mask(0, before, before + length, params.window, scores.dtype, scores.device)
    weights = params.attn_weights(torch.unflatten(scores, 0, (count, key_heads)), mask, 1)
    result = torch.bmm(weights.view(count * key_heads, group_size * length, -1), values.flatten(0, 1))
    result = result.view(count, key_heads, group_size, length, -1).permute(0, 3, 1, 2, 4)
    result = result.reshape(count * length, key_heads * group_size, -1)
    out.index_copy_(0, prefill.token_index, result.index_select(0, prefill.scatter_index))


def _attend_prefill(node: PrefixNode, layer: int, query: Tensor, params: AttentionParams, out: Tensor) -> None:
    """Attend from one node, query [key heads, group size, T, D], to its ancestors and itself."""
    path = node.kv_path
    keys = torch.cat([part.keys(layer) for part in path], 1) if node.kv_parent else node.keys(layer)
    values = torch.cat([part.values(layer) for part in path], 1) if node.kv_parent else node.values(layer)
    key_heads, group_size = query.shape[:2]
    for first in range(0, len(node), QUERY_CHUNK):
        chunk = params.scale_query(query[:, :, first : first + QUERY_CHUNK])
        count = chunk.shape[2]
        start, end = node.start + first, node.start + first + count
        lowest = 0 if params.window is None else max(0, start - params.window + 1)
        scores = torch.bmm(chunk.view(key_heads, group_size * count, -1), keys[:, lowest:end].transpose(1, 2))
        mask = _causal_mask(lowest, start, end, params.window, scores.dtype, scores.device)
        weights = params.attn_weights(scores.view(key_heads, group_size, count, -1), mask, 0)
        result = torch.bmm(weights.view(key_heads, group_size * count, -1), values[:, lowest:end])
        out[first : first + count] = result.view(key_heads * group_size, count, -1).transpose(0, 1)


def _causal_mask(
    lowest: int, start: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the additive mask [queries start..end, keys lowest..end]: -inf for later keys and outside the window."""
    make = _cached_mask if (end - start) * (end - lowest) <= MAX_CACHED_MASK else _build_mask
    return make(lowest, start, end, window, dtype, device)


def _build_mask(
    lowest: int, start: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    key_positions = torch.arange(lowest, end, device=device)
    query_positions = torch.arange(start, end, device=device)[:, None]
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


_cached_mask = lru_cache(maxsize=64)(_build_mask)
"""Masks are the same for all layers, and often from step to step."""


def _attend_decode_rows(
    step: DecodeStep, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, out: Tensor
) -> None:
    """Attend from each row, query [key heads, group size, n, D], to its prompt and its own tokens."""
    key_heads, group_size, count, width = query.shape
    keys, values = step.kv_cache.write(
        layer, step.slots, step.write_position, key.transpose(0, 1), value.transpose(0, 1)
    )
    if step.native_kernels and params.is_plain and decode_kernel_supports(query, value):
        all_keys = [*(block.keys[layer] for block in step.blocks), keys]
        all_values = [*(block.values[layer] for block in step.blocks), values]
        attend_rows(query, step.key_spans(key_heads, width), all_keys, all_values, params.scale, out)
        return
    keys = keys[:count].flatten(0, 1)[:, : step.max_own_tokens]
    values = values[:count].flatten(0, 1)[:, : step.max_own_tokens]
    query = params.scale_query(query.permute(2, 0, 1, 3))
    prompt_columns, shared = step.score_layout.column_count, step.score_layout.shared_rows
    # zeros: columns that a row does not have are masked, but must not be NaN
    scores = query.new_zeros(count, key_heads, group_size, prompt_columns + step.max_own_tokens)
    own = torch.bmm(query.view(count * key_heads, group_size, width), keys.transpose(1, 2))
    scores[..., prompt_columns:] = own.view(count, key_heads, group_size, step.max_own_tokens)
    for columns, rows in shared:
        if rows.covers_all_rows:
            scores[..., columns] = rows.scores(layer, query)
        else:
            scores[..., columns].index_copy_(0, rows.row_index, rows.scores(layer, query))
    weights = params.attn_weights(scores, step.mask(params.window, scores.dtype), 1)
    own = weights[..., prompt_columns:].flatten(0, 1)
    result = torch.bmm(own, values).view(count, key_heads, group_size, -1)
    for columns, rows in shared:
        if rows.covers_all_rows:
            result += rows.weighted_values(layer, weights[..., columns])
        else:
            result.index_add_(0, rows.row_index, rows.weighted_values(layer, weights[..., columns]))
    out.copy_(result.view(count, key_heads * group_size, -1))


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
