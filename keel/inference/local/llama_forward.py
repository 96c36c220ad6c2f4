"""The engine's own forward pass of a Llama-like network, in a third of the operations of the model's own code.

Products take the norm or the gate before them along and add to the residual in place, queries and keys are rotated
together, and the last layer computes only the tokens whose logits are wanted. Weights are the network's own, as
`Fused` holds them, or those of its copy in int8. Which networks may be computed like this is decided by their class and
settings; that the numbers are the model's is found out by the decoder's probe. Hooks on the network's parts are not
called, but for the head's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from keel.inference.kernels.decode_attention import apply_rope
from keel.inference.kernels.packed_matmul import RMSNormParams
from keel.inference.local.decode_attention import AttentionParams, DecodeStep, attend
from keel.inference.local.fused_linear import FusedGroup, FusedLinears, FusedSlice, PackedLinear
from keel.inference.local.int8 import Int8Linear

LinearOp = FusedGroup | PackedLinear | Int8Linear
"""What multiplies."""


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
        self.o_proj, self.down_proj = (_find_single_op(one, fused) for one in (attention.o_proj, mlp.down_proj))
        self.layer_idx, self.head_dim = int(attention.layer_idx), int(attention.head_dim)
        self.num_heads, self.num_kv_heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
        self.attention_params = AttentionParams(attention.scaling, getattr(attention, "sliding_window", None))

    def __call__(
        self, states: Tensor, cos: Tensor, sin: Tensor, step: DecodeStep, output_positions: Tensor | None
    ) -> Tensor:
        """States [T, features] after the layer, of all tokens or of the wanted ones; changes those it is given."""
        size, both = len(states), self.num_heads + self.num_kv_heads
        made = _matmul(self.qkv_proj, states, norm=self.input_norm)
        _apply_rope(made, both, cos, sin, step.native_kernels)
        sizes = [one * self.head_dim for one in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        query, key, value = torch.split(made, sizes, 1)
        query = query.view(size, self.num_kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        key, value = (one.view(size, self.num_kv_heads, -1).transpose(0, 1) for one in (key, value))
        mixed = made.new_empty(size, self.num_heads, self.head_dim)
        attend(step, self.layer_idx, query, key, value, self.attention_params, mixed)
        if output_positions is not None:
            states, mixed = states.index_select(0, output_positions), mixed.index_select(0, output_positions)
        _matmul(self.o_proj, mixed.flatten(1), out=states)
        _matmul(
            self.down_proj, _matmul(self.gate_up_proj, states, norm=self.post_attention_norm), gated=True, out=states
        )
        return states


class LlamaForward:
    """A network that can be computed like this."""

    def __init__(self, network: Any, fused: FusedLinears) -> None:
        """Raises ValueError, KeyError or AttributeError when it cannot."""
        if type(network) not in (LlamaForCausalLM, Qwen2ForCausalLM):
            raise ValueError("its code may do something else")
        if network.config.hidden_act != "silu" or network.dtype != torch.float32 or network.device.type != "cpu":
            raise ValueError("silu in float32 on CPU only")
        self.network, self.fused, model = network, fused, network.model
        self.layers = [LlamaLayer(layer, fused) for layer in model.layers]
        self.norm = _norm_params(model.norm)

    def rebind(self, network: Any) -> "LlamaForward":
        """The same for the network itself or its copy in int8, whichever is run now."""
        return self if network is self.network else LlamaForward(network, self.fused)

    def __call__(self, input_ids: Tensor, positions: Tensor, output_positions: Tensor, step: DecodeStep) -> Tensor:
        """Logits [wanted, V] after the tokens in these places."""
        model = self.network.model
        states = model.embed_tokens.weight.index_select(0, input_ids)
        turns = model.rotary_emb(states, positions[None])
        cos, sin = (turn[0, :, : turn.shape[-1] // 2].contiguous() for turn in turns)  # both halves are one
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
    """What computes these layers as one."""
    first = layers[0]
    if isinstance(first, FusedSlice) and all(
        isinstance(one, FusedSlice) and one.shared is first.shared for one in layers
    ):
        whole = first.shared.projection
        if isinstance(whole, Int8Linear) and [one.index for one in layers] == list(
            range(len(first.shared.output_sizes))
        ):
            return whole
    for group in fused.groups:
        if group.layers == layers:
            return group
    raise ValueError("layers with one input are not one product")


def _find_single_op(layer: nn.Module, fused: FusedLinears) -> LinearOp:
    if isinstance(layer, Int8Linear):
        return layer
    return next(one for one in fused.singles if one.layer is layer)


def _matmul(
    linear: LinearOp,
    states: Tensor,
    *,
    norm: RMSNormParams | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The product of states that are normed or gated first; on top of `out` when that is given."""
    panels = None if isinstance(linear, Int8Linear) else linear.packed_matrix
    if panels is not None and not isinstance(linear, Int8Linear):
        return panels.matmul(states, norm=norm, gated=gated, bias=linear.bias, out=out, accumulate=out is not None)
    if norm is not None:
        states = _rms_norm(states, norm)
    if gated:
        gate, up = states.chunk(2, 1)
        states = functional.silu(gate) * up
    made = linear(states)
    return made if out is None else out.add_(made)


def _apply_rope(states: Tensor, heads: int, cos: Tensor, sin: Tensor, native_kernels: bool) -> None:
    """Rotate the first heads of each row, in place."""
    if native_kernels and states.stride(1) == 1:
        apply_rope(states, heads, cos, sin)
        return
    halves = states[:, : 2 * heads * cos.shape[1]].view(len(states), heads, 2, -1)
    low, high = halves.unbind(2)
    turned = torch.stack([low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]], 2)
    halves.copy_(turned)
