"""The forward pass of a Llama-like network with a token in each column, for few tokens on a CPU.

A CPU multiplies weight @ states fastest (see `fuse`), which gives states [features, tokens]. They are kept like that
from the embedding to the head and turned round for attention alone; products add to the residual in place, queries and
keys are rotated together, and the last layer computes only the tokens whose logits are wanted: a third of the
operations that the model's own code makes. Weights are the network's own, read at every call, or those of its copy in
int8. Which networks may be computed like this is decided by their class and settings; that the numbers are the model's
is found out by the decoder's probe. Hooks on the network's parts are not called, but for the head's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from keel.engine.decode import Rule, Step, attend
from keel.engine.fuse import Fused, Group, Part
from keel.engine.int8 import Int8

FEW = 256
"""Up to so many tokens each is a column in memory too. Of more, as of new prompts, each is a row there, seen turned
round: with many states it is the other order of factors that is multiplied fastest."""


class Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, groups: dict[nn.Linear, Group]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.inputs = _together([attention.q_proj, attention.k_proj, attention.v_proj], groups)
        self.gates = _together([mlp.gate_proj, mlp.up_proj], groups)
        self.mixed, self.down = attention.o_proj, mlp.down_proj
        self.number, self.width = int(attention.layer_idx), int(attention.head_dim)
        self.heads, self.groups = attention.config.num_attention_heads, attention.config.num_key_value_heads
        self.rule = Rule(attention.scaling, getattr(attention, "sliding_window", None))

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, step: Step, wanted: Tensor | None) -> Tensor:
        """States [features, T] after the layer, of all tokens or of those that are wanted."""
        size, both = states.shape[1], self.heads + self.groups
        # attention is about one token after another: turned round once, and back by the product that reads it
        made = _times(self.inputs, _normed(self.before, states)).t().contiguous()
        halves = torch.unflatten(made[:, : both * self.width], 1, (both, 2, -1))
        turned = halves * cos
        turned[:, :, 0].addcmul_(halves[:, :, 1], sin[:, 0], value=-1)
        turned[:, :, 1].addcmul_(halves[:, :, 0], sin[:, 0])
        turned = turned.flatten(2)
        query = torch.unflatten(turned[:, : self.heads], 1, (self.groups, -1)).permute(1, 2, 0, 3)
        key = turned[:, self.heads :].transpose(0, 1)
        value = torch.unflatten(made[:, both * self.width :], 1, (self.groups, -1)).transpose(0, 1)
        mixed = made.new_empty(size, self.heads, self.width)
        attend(step, self.number, query, key, value, self.rule, mixed)
        if wanted is not None:
            states, mixed = states.index_select(1, wanted), mixed.index_select(0, wanted)
        _add(self.mixed, mixed.flatten(1).t(), states)
        gate, up = _times(self.gates, _normed(self.between, states)).chunk(2)
        _add(self.down, functional.silu(gate, inplace=True).mul_(up), states)
        return states


class Columns:
    """A network that can be computed with a token in each column."""

    def __init__(self, network: Any, fused: Fused) -> None:
        """Raises ValueError, KeyError or AttributeError when it cannot."""
        if type(network) not in (LlamaForCausalLM, Qwen2ForCausalLM):
            raise ValueError("its code may do something else")
        if network.config.hidden_act != "silu" or network.dtype != torch.float32 or network.device.type != "cpu":
            raise ValueError("silu in float32 on CPU only")
        groups = {group.layers[0]: group for group in fused.groups}
        self.network, self.fused, model = network, fused, network.model
        self.layers = [Layer(layer, groups) for layer in model.layers]
        self.few = 0 if isinstance(self.layers[0].down, Int8) else FEW
        """Up to so many tokens lie in memory as columns; int8 products take rows."""

    def follow(self, network: Any) -> "Columns":
        """The same for the network itself or its copy in int8, whichever is run now."""
        return self if network is self.network else Columns(network, self.fused)

    def __call__(self, inputs: Tensor, positions: Tensor, wanted: Tensor, step: Step) -> Tensor:
        """Logits [wanted, V] after the tokens in these places."""
        model = self.network.model
        states = model.embed_tokens.weight.index_select(0, inputs)
        turns = model.rotary_emb(states, positions[None])
        cos, sin = (turn[0, :, None, None, : turn.shape[-1] // 2].contiguous() for turn in turns)  # both halves are one
        states = states.t().contiguous() if len(inputs) <= self.few else states.t()
        for layer in self.layers[:-1]:
            states = layer(states, cos, sin, step, None)
        states = self.layers[-1](states, cos, sin, step, wanted)
        logits: Tensor = self.network.lm_head(_normed(model.norm, states).t())
        return logits


def _normed(norm: Any, states: Tensor) -> Tensor:
    scale = states.square().mean(0).add_(norm.variance_epsilon).rsqrt_()
    return (states * scale).mul_(norm.weight[:, None])


def _together(layers: list[Any], groups: dict[nn.Linear, Group]) -> Group | Int8:
    """What computes these layers as one."""
    first = layers[0]
    if isinstance(first, Part) and all(isinstance(one, Part) and one.shared is first.shared for one in layers):
        whole = first.shared.whole
        if isinstance(whole, Int8) and [one.number for one in layers] == list(range(len(first.shared.sizes))):
            return whole
    elif groups[first].layers == layers:
        return groups[first]
    raise ValueError("layers with one input are not one product")


def _times(group: Group | Int8, states: Tensor) -> Tensor:
    if isinstance(group, Int8):
        made: Tensor = group(states.t())
        return made.t()
    few = states.shape[1] <= FEW
    made = torch.mm(group.weight, states) if few else torch.mm(states.t(), group.weight.t()).t()
    return made if group.bias is None else made.add_(group.bias[:, None])


def _add(layer: nn.Linear | Int8, inputs: Tensor, states: Tensor) -> None:
    """What the layer makes of its inputs, added to the states."""
    if isinstance(layer, Int8):
        states += layer(inputs.t()).t()
        return
    if states.shape[1] <= FEW:
        states.addmm_(layer.weight, inputs)
    else:
        states.t().addmm_(inputs.t(), layer.weight.t())
    if layer.bias is not None:
        states += layer.bias[:, None]
