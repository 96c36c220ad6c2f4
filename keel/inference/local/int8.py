"""Quantise the linear layers of a network to int8 with torch's dynamic quantisation on CPU.

Weights have one scale per output channel, activations one per token. Products are faster than in float32, but the
sampler no longer equals the policy: the mismatch is a deliberate trade. For inference only.
"""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic

from keel.inference.local.fused_linear import FusedLinears, FusedSlice, SharedProjection


def quantize_linears(network: Any, fused: FusedLinears | None = None) -> Any:
    """Return a copy whose linear layers are int8, fused groups as one layer. All other tensors share storage."""
    groups = fused.groups if fused else []
    shared: dict[int, Any] = {id(weight): weight for weight in (*network.parameters(), *network.buffers())}
    # these hold large weights, and their layers are replaced below: do not copy them
    shared |= {id(group.shared): group.shared for group in groups}
    shared |= {id(linear): linear for linear in fused.singles} if fused else {}
    quantized = copy.deepcopy(network, shared)
    names = {layer: name for name, layer in network.named_modules()}
    with warnings.catch_warnings():
        # torch deprecates quantised tensors; its version is pinned and its replacements are slower on CPU
        warnings.simplefilter("ignore")
        for group in groups:
            projection = SharedProjection(Int8Linear(group.weight, group.bias), group.shared.output_sizes)
            for index, layer in enumerate(group.layers):
                replace_layer(quantized, names[layer], FusedSlice(projection, index))
        for name, layer in list(quantized.named_modules()):
            if isinstance(layer, nn.Linear):
                replace_layer(quantized, name, Int8Linear(layer.weight, layer.bias))
    return quantized


def replace_layer(network: Any, name: str, layer: nn.Module) -> None:
    """Replace the submodule with this dotted name."""
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, layer)


class Int8Linear(nn.Module):
    """A dynamically quantised linear layer with one activation scale per row instead of one per call.

    Torch derives the scale from the smallest and largest value of a call. The states of a prompt's first token are a
    hundred times larger than the others, which would leave those almost no precision. Each row is therefore divided by
    its largest absolute value before the product and multiplied by it afterwards, and an extra row with -1 and 1 fixes
    the range of every call. The result of a row does not depend on other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_(min=1e-12).double() / 127
        zero_points = torch.zeros(len(weight), dtype=torch.int64)
        quantized = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
        # the constructor allocates and packs random weights first; it does not support meta tensors
        linear: Any = dynamic.Linear(weight.shape[1], weight.shape[0], bias_=False)  # type: ignore[no-untyped-call]
        linear.set_weight_bias(quantized, None)
        self.quantized_linear, self.bias = linear, None if bias is None else bias.detach().float()
        self.range_row = torch.zeros(weight.shape[1])
        self.range_row[0], self.range_row[-1] = 1.0, -1.0

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, states.shape[-1]).float()
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30)
        scaled = rows.new_empty(len(rows) + 1, rows.shape[1])
        torch.div(rows, largest, out=scaled[:-1])
        if not bool(largest.isfinite().all()):
            # NaN would widen the range for all rows; multiplying by `largest` below makes such a row non-finite again
            scaled.nan_to_num_(0.0)
        scaled[-1] = self.range_row
        output: Tensor = self.quantized_linear(scaled)[:-1].mul_(largest)
        if self.bias is not None:
            output += self.bias
        return output.view(*states.shape[:-1], -1).to(states.dtype)
