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

from keel.inference.kernels.decode_attention import rotate
from keel.inference.kernels.packed_matmul import Norm
from keel.inference.local.decode_attention import Rule, Step, attend
from keel.inference.local.fused_linear import Fused, Group, Part, Single
from keel.inference.local.int8 import Int8

Product = Group | Single | Int8
"""What multiplies."""


class Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, fused: Fused) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.inputs = _together([attention.q_proj, attention.k_proj, attention.v_proj], fused)
        self.gates = _together([mlp.gate_proj, mlp.up_proj], fused)
        self.mixed, self.down = (_alone(one, fused) for one in (attention.o_proj, mlp.down_proj))
        self.number, self.width = int(attention.layer_idx), int(attention.head_dim)
        self.heads, self.groups = attention.config.num_attention_heads, attention.config.num_key_value_heads
        self.rule = Rule(attention.scaling, getattr(attention, "sliding_window", None))

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, step: Step, wanted: Tensor | None) -> Tensor:
        """States [T, features] after the layer, of all tokens or of the wanted ones; changes those it is given."""
        size, both = len(states), self.heads + self.groups
        made = _times(self.inputs, states, norm=self.before)
        _turn(made, both, cos, sin, step.compiled)
        sizes = [one * self.width for one in (self.heads, self.groups, self.groups)]
        query, key, value = torch.split(made, sizes, 1)
        query = query.view(size, self.groups, -1, self.width).permute(1, 2, 0, 3)
        key, value = (one.view(size, self.groups, -1).transpose(0, 1) for one in (key, value))
        mixed = made.new_empty(size, self.heads, self.width)
        attend(step, self.number, query, key, value, self.rule, mixed)
        if wanted is not None:
            states, mixed = states.index_select(0, wanted), mixed.index_select(0, wanted)
        _times(self.mixed, mixed.flatten(1), out=states)
        _times(self.down, _times(self.gates, states, norm=self.between), gated=True, out=states)
        return states


class Own:
    """A network that can be computed like this."""

    def __init__(self, network: Any, fused: Fused) -> None:
        """Raises ValueError, KeyError or AttributeError when it cannot."""
        if type(network) not in (LlamaForCausalLM, Qwen2ForCausalLM):
            raise ValueError("its code may do something else")
        if network.config.hidden_act != "silu" or network.dtype != torch.float32 or network.device.type != "cpu":
            raise ValueError("silu in float32 on CPU only")
        self.network, self.fused, model = network, fused, network.model
        self.layers = [Layer(layer, fused) for layer in model.layers]
        self.norm = _norm(model.norm)

    def follow(self, network: Any) -> "Own":
        """The same for the network itself or its copy in int8, whichever is run now."""
        return self if network is self.network else Own(network, self.fused)

    def __call__(self, inputs: Tensor, positions: Tensor, wanted: Tensor, step: Step) -> Tensor:
        """Logits [wanted, V] after the tokens in these places."""
        model = self.network.model
        states = model.embed_tokens.weight.index_select(0, inputs)
        turns = model.rotary_emb(states, positions[None])
        cos, sin = (turn[0, :, : turn.shape[-1] // 2].contiguous() for turn in turns)  # both halves are one
        for layer in self.layers[:-1]:
            states = layer(states, cos, sin, step, None)
        states = self.layers[-1](states, cos, sin, step, wanted)
        logits: Tensor = self.network.lm_head(_normed(states, self.norm))
        return logits


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)


def _normed(states: Tensor, norm: Norm) -> Tensor:
    return (states * states.square().mean(1, keepdim=True).add_(norm.epsilon).rsqrt_()).mul_(norm.weight)


def _together(layers: list[Any], fused: Fused) -> Product:
    """What computes these layers as one."""
    first = layers[0]
    if isinstance(first, Part) and all(isinstance(one, Part) and one.shared is first.shared for one in layers):
        whole = first.shared.whole
        if isinstance(whole, Int8) and [one.number for one in layers] == list(range(len(first.shared.sizes))):
            return whole
    for group in fused.groups:
        if group.layers == layers:
            return group
    raise ValueError("layers with one input are not one product")


def _alone(layer: nn.Module, fused: Fused) -> Product:
    if isinstance(layer, Int8):
        return layer
    return next(one for one in fused.others if one.layer is layer)


def _times(
    product: Product, states: Tensor, *, norm: Norm | None = None, gated: bool = False, out: Tensor | None = None
) -> Tensor:
    """The product of states that are normed or gated first; on top of `out` when that is given."""
    panels = None if isinstance(product, Int8) else product.panels
    if panels is not None and not isinstance(product, Int8):
        return panels.times(states, norm=norm, gated=gated, bias=product.bias, out=out, add=out is not None)
    if norm is not None:
        states = _normed(states, norm)
    if gated:
        gate, up = states.chunk(2, 1)
        states = functional.silu(gate) * up
    made = product(states)
    return made if out is None else out.add_(made)


def _turn(made: Tensor, heads: int, cos: Tensor, sin: Tensor, compiled: bool) -> None:
    """Rotate the first heads of each row, in place."""
    if compiled and made.stride(1) == 1:
        rotate(made, heads, cos, sin)
        return
    halves = made[:, : 2 * heads * cos.shape[1]].view(len(made), heads, 2, -1)
    low, high = halves.unbind(2)
    turned = torch.stack([low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]], 2)
    halves.copy_(turned)
