"""A forward pass for Llama-like networks with a third of the operations of the transformers code.

Products include the preceding norm or gate and add to the residual in place, queries and keys are rotated together, and
the last layer computes only the tokens whose logits are needed. The weights are those of the network, through
`FusedLinears`, or of its int8 copy. Support is decided by the class and settings of the network; `select_decoder`
verifies the results with a probe. Forward hooks of submodules are not called, except those of the output head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from keel.inference.kernels.decode_attention import apply_rope
from keel.inference.kernels.packed_matmul import RMSNormParams
from keel.inference.local.decode_attention import AttentionParams, attend
from keel.inference.local.decode_step import DecodeStep
from keel.inference.local.fused_linear import FusedGroup, FusedLinears, FusedSlice, PackedLinear
from keel.inference.local.int8 import Int8Linear

LinearOp = FusedGroup | PackedLinear | Int8Linear
"""A linear operation: a fused group, a single packed layer or an int8 layer."""


class LlamaLayer:
    """One decoder layer."""

    def __init__(self, layer: Any, fused: FusedLinears) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.post_attention_norm = (
            _norm_params(layer.input_layernorm),
            _norm_params(layer.post_attention_layernorm),
        )
        self.qkv_proj = _find_fused_op([attention.q_proj, attention.k_proj, attention.v_proj], fused)
        self.gate_up_proj = _find_fused_op([mlp.gate_proj, mlp.up_proj], fused)
        self.o_proj, self.down_proj = (_find_single_op(linear, fused) for linear in (attention.o_proj, mlp.down_proj))
        self.layer_idx, self.head_dim = int(attention.layer_idx), int(attention.head_dim)
        self.num_heads, self.num_kv_heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
        self.attention_params = AttentionParams(attention.scaling, getattr(attention, "sliding_window", None))

    def __call__(
        self, states: Tensor, cos: Tensor, sin: Tensor, step: DecodeStep, output_positions: Tensor | None
    ) -> Tensor:
        """Return the states [T, features] after the layer, of all tokens or those at `output_positions`.

        Overwrites `states`.
        """
        size = len(states)
        qkv = _matmul(self.qkv_proj, states, norm=self.input_norm)
        _apply_rope(qkv, self.num_heads + self.num_kv_heads, cos, sin, step.native_kernels)
        sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        query, key, value = torch.split(qkv, sizes, 1)
        query = query.view(size, self.num_kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        key, value = (part.view(size, self.num_kv_heads, -1).transpose(0, 1) for part in (key, value))
        attended = qkv.new_empty(size, self.num_heads, self.head_dim)
        attend(step, self.layer_idx, query, key, value, self.attention_params, attended)
        if output_positions is not None:
            states, attended = states.index_select(0, output_positions), attended.index_select(0, output_positions)
        _matmul(self.o_proj, attended.flatten(1), out=states)
        gate_up = _matmul(self.gate_up_proj, states, norm=self.post_attention_norm)
        _matmul(self.down_proj, gate_up, gated=True, out=states)
        return states


class LlamaForward:
    """Fast forward pass of a supported network."""

    def __init__(self, network: Any, fused: FusedLinears) -> None:
        """Raise ValueError, KeyError, AttributeError or StopIteration if the network is not supported."""
        if type(network) not in (LlamaForCausalLM, Qwen2ForCausalLM):
            raise ValueError(f"{type(network).__name__} is not supported")
        if network.config.hidden_act != "silu" or network.dtype != torch.float32 or network.device.type != "cpu":
            raise ValueError("only silu in float32 on CPU is supported")
        self.network, self.fused, model = network, fused, network.model
        self.layers = [LlamaLayer(layer, fused) for layer in model.layers]
        self.norm = _norm_params(model.norm)

    def rebind(self, network: Any) -> "LlamaForward":
        """Return the forward pass for `network`: the original network or its int8 copy."""
        return self if network is self.network else LlamaForward(network, self.fused)

    def __call__(self, input_ids: Tensor, positions: Tensor, output_positions: Tensor, step: DecodeStep) -> Tensor:
        """Return the logits [outputs, V] after the tokens at `output_positions` of the step."""
        model = self.network.model
        states = model.embed_tokens.weight.index_select(0, input_ids)
        rotary = model.rotary_emb(states, positions[None])
        cos, sin = (part[0, :, : part.shape[-1] // 2].contiguous() for part in rotary)  # both halves are equal
        for layer in self.layers[:-1]:
            states = layer(states, cos, sin, step, None)
        states = self.layers[-1](states, cos, sin, step, output_positions)
        logits: Tensor = self.network.lm_head(_rms_norm(states, self.norm))
        return logits


def _norm_params(norm: Any) -> RMSNormParams:
    return RMSNormParams(norm.weight, norm.variance_epsilon)


def _rms_norm(states: Tensor, norm: RMSNormParams) -> Tensor:
    return (states * states.square().mean(1, keepdim=True).add_(norm.epsilon).rsqrt_()).mul_(norm.weight)


def _find_fused_op(layers: list[Any], fused: FusedLinears) -> LinearOp:
    """Return the operation that computes these layers in one product."""
    first = layers[0]
    if isinstance(first, FusedSlice) and all(
        isinstance(layer, FusedSlice) and layer.shared is first.shared for layer in layers
    ):
        projection, slices = first.shared.projection, [layer.index for layer in layers]
        if isinstance(projection, Int8Linear) and slices == list(range(len(first.shared.output_sizes))):
            return projection
    for group in fused.groups:
        if group.layers == layers:
            return group
    raise ValueError("layers with a common input are not fused")


def _find_single_op(layer: nn.Module, fused: FusedLinears) -> LinearOp:
    if isinstance(layer, Int8Linear):
        return layer
    return next(single for single in fused.singles if single.layer is layer)


def _matmul(
    linear: LinearOp,
    states: Tensor,
    *,
    norm: RMSNormParams | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply states, after an RMS norm or a gate; add the product to `out` if that is given."""
    packed = None if isinstance(linear, Int8Linear) else linear.packed_matrix
    if packed is not None and not isinstance(linear, Int8Linear):
        return packed.matmul(states, norm=norm, gated=gated, bias=linear.bias, out=out, accumulate=out is not None)
    if norm is not None:
        states = _rms_norm(states, norm)
    if gated:
        gate, up = states.chunk(2, 1)
        states = functional.silu(gate) * up
    product = linear(states)
    return product if out is None else out.add_(product)


def _apply_rope(states: Tensor, heads: int, cos: Tensor, sin: Tensor, native_kernels: bool) -> None:
    """Apply rotary embeddings to the first `heads` heads of each row, in place."""
    if native_kernels and states.stride(1) == 1:
        apply_rope(states, heads, cos, sin)
        return
    halves = states[:, : 2 * heads * cos.shape[1]].view(len(states), heads, 2, -1)
    low, high = halves.unbind(2)
    rotated = torch.stack([low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]], 2)
    halves.copy_(rotated)
