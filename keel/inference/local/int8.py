"""A copy of a network whose linear layers are int8, by torch's own dynamic quantisation on CPU.

Weights have a scale for each output, activations one for each token. There is less to multiply than in float32, and it
is not quite the policy any more: a mismatch bought on purpose. Nothing here trains.
"""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic

from keel.inference.local.fused_linear import FusedLinears, FusedSlice, SharedProjection


def quantize_linears(network: Any, fused: FusedLinears | None = None) -> Any:
    """A copy whose linear layers are int8, those that are fused as one. Everything else is the same storage."""
    groups = fused.groups if fused else []
    shared: dict[int, Any] = {id(weight): weight for weight in (*network.parameters(), *network.buffers())}
    # their layers are replaced below: what computes for them must not be copied with them
    shared |= {id(group.shared): group.shared for group in groups}
    shared |= {id(other): other for other in fused.singles} if fused else {}
    twin = copy.deepcopy(network, shared)
    names = {layer: name for name, layer in network.named_modules()}
    with warnings.catch_warnings():
        # torch announces that these tensors will go; its version is pinned, and nothing else in it is as fast on CPU
        warnings.simplefilter("ignore")
        for group in groups:
            both = SharedProjection(Int8Linear(group.weight, group.bias), group.shared.output_sizes)
            for number, layer in enumerate(group.layers):
                replace_layer(twin, names[layer], FusedSlice(both, number))
        for name, layer in list(twin.named_modules()):
            if isinstance(layer, nn.Linear):
                replace_layer(twin, name, Int8Linear(layer.weight, layer.bias))
    return twin


def replace_layer(network: Any, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, layer)


class Int8Linear(nn.Module):
    """A linear layer by torch's dynamic quantisation, with a scale for each row in place of one for all of them.

    Torch scales by the smallest and the largest number of a call, so that the first token of a prompt, whose states are
    a hundred times larger than others, would leave those no digits. So rows are divided by their largest number before
    and multiplied by it after; and a row that holds -1 and 1 makes the range the same in every call: what a row comes
    to depends on no other.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_(min=1e-12).double() / 127
        small = torch.quantize_per_channel(weight, scales, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
        # the constructor packs weights of its own first; meta tensors are not possible there
        made: Any = dynamic.Linear(weight.shape[1], weight.shape[0], bias_=False)  # type: ignore[no-untyped-call]
        made.set_weight_bias(small, None)
        self.quantized_linear, self.bias = made, None if bias is None else bias.detach().float()
        self.range_row = torch.zeros(weight.shape[1])
        self.range_row[0], self.range_row[-1] = 1.0, -1.0

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, states.shape[-1]).float()
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30)
        scaled = rows.new_empty(len(rows) + 1, rows.shape[1])
        torch.div(rows, largest, out=scaled[:-1])
        if not bool(largest.isfinite().all()):
            # the range would be spoilt for all; such a row is multiplied by its largest below, and not finite again
            scaled.nan_to_num_(0.0)
        scaled[-1] = self.range_row
        made: Tensor = self.quantized_linear(scaled)[:-1].mul_(largest)
        if self.bias is not None:
            made += self.bias
        return made.view(*states.shape[:-1], -1).to(states.dtype)
