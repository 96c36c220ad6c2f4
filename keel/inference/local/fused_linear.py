"""Linear layers computed the way a CPU does few rows fastest: those that read the same input as one, packed.

Which layers read the same input is seen in a forward pass, not taken from their names. The parameters stay where they
are and become views of the fused weight, so that whatever copies new weights into them in place goes on working. In
float32 on CPU, where kernels can be compiled, each weight is held a second time, packed for its product; elsewhere
nothing is held twice. No model code is changed, and `undo` leaves the network as it was. Whether the numbers stay the
same is not asked here; the decoder's probe does that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.inference.kernels.packed_matmul import PackedMatrix

VOCAB_CHUNK = 2048
"""Words of a wide output head at once: what a piece gives is turned round while it is in the cache."""


def small_batch_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """states @ weight.T + bias; on CPU by weight @ states.T, and laid out like that.

    The threads share the rows of the first factor: of 64 states there are too few, of a weight there are many.
    Measured on two cores, 64 states: 125 GFLOP/s in place of 75 to 110, the output head 105 in place of 60.
    """
    if states.device.type != "cpu" or states.dtype != torch.float32:
        return functional.linear(states, weight, bias)
    flat = states.reshape(-1, states.shape[-1]).t()
    if len(weight) >= 4 * VOCAB_CHUNK:
        out = flat.new_empty(flat.shape[1], len(weight))  # whoever samples looks along the words
        for first in range(0, len(weight), VOCAB_CHUNK):
            out[:, first : first + VOCAB_CHUNK] = torch.mm(weight[first : first + VOCAB_CHUNK], flat).t()
    else:
        out = torch.mm(weight, flat).t()
    if bias is not None:
        out += bias
    return out.view(*states.shape[:-1], -1)


class SharedProjection:
    """What several layers make of one input: the first that is asked computes for all, the others take their part."""

    def __init__(self, projection: Callable[[Tensor], Tensor], output_sizes: Sequence[int]) -> None:
        self.projection, self.output_sizes = projection, list(output_sizes)
        self._input: Tensor | None = None
        self._slices: dict[int, Tensor] = {}

    def get_slice(self, index: int, states: Tensor) -> Tensor:
        # the same tensor, not an equal one: held until all parts are taken, so that no other can be mistaken for it
        if self._input is not states or index not in self._slices:
            self._slices = dict(enumerate(torch.split(self.projection(states), self.output_sizes, -1)))
            self._input = states
        found = self._slices.pop(index)
        if not self._slices:
            self._input = None
        return found


class FusedSlice(nn.Module):
    """One of the layers, where it has no weight of its own."""

    def __init__(self, shared: SharedProjection, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, states: Tensor) -> Tensor:
        return self.shared.get_slice(self.index, states)


class PackedWeight(ABC):
    """A weight that is packed when it is first used, and anew when it has changed."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, pack: bool) -> None:
        self._packing_enabled = pack
        self._packed_matrix: PackedMatrix | None = None

    @property
    def packed_matrix(self) -> PackedMatrix | None:
        """The packed weight, where it is to be packed."""
        if self._packed_matrix is None and self._packing_enabled and self.weight.dtype == torch.float32:
            self._packed_matrix = PackedMatrix(self.weight.detach().t())
        return self._packed_matrix

    def refresh(self) -> None:
        """The weight has changed."""
        self._packed_matrix = None
        self.sync_weights()

    @abstractmethod
    def sync_weights(self) -> None:
        """Take what the layers hold now."""

    @abstractmethod
    def restore(self) -> None:
        """Leave the network as it was."""

    def __call__(self, states: Tensor) -> Tensor:
        panels = self.packed_matrix
        if panels is None or states.dtype != torch.float32:
            return small_batch_linear(states, self.weight, self.bias)
        rows = states.reshape(-1, states.shape[-1])
        return panels.matmul(rows, bias=self.bias).view(*states.shape[:-1], -1)


class FusedGroup(PackedWeight):
    """Layers of one input and their fused weight, of which their own weights are views."""

    def __init__(self, layers: Sequence[nn.Linear], pack: bool) -> None:
        super().__init__(pack)
        self.layers = list(layers)
        self.sync_weights()
        self.shared = SharedProjection(self, [layer.out_features for layer in layers])
        for number, layer in enumerate(layers):
            layer.forward = partial(self.shared.get_slice, number)  # type: ignore[method-assign]

    @torch.no_grad()
    def sync_weights(self) -> None:
        if hasattr(self, "weight") and self.views_intact:
            return  # the new numbers were copied into it
        self.weight = torch.cat([layer.weight.data for layer in self.layers])
        self.bias = torch.cat([layer.bias.data for layer in self.layers]) if self.layers[0].bias is not None else None
        first = 0
        for layer in self.layers:
            last = first + layer.out_features
            layer.weight.data = self.weight[first:last]
            if self.bias is not None:
                layer.bias.data = self.bias[first:last]
            first = last

    @property
    def views_intact(self) -> bool:
        """Whether the layers' weights are still views of the fused one."""
        place = self.weight.data_ptr()
        for layer in self.layers:
            if layer.weight.data_ptr() != place:
                return False
            place += layer.weight.numel() * layer.weight.element_size()
        return True

    @torch.no_grad()
    def restore(self) -> None:
        for layer in self.layers:
            del layer.forward
            layer.weight.data = layer.weight.data.clone()
            if self.bias is not None:
                layer.bias.data = layer.bias.data.clone()


class PackedLinear(PackedWeight):
    """A layer that reads its input alone."""

    def __init__(self, layer: nn.Linear, pack: bool) -> None:
        super().__init__(pack)
        self.layer = layer
        self.sync_weights()
        layer.forward = self.__call__  # type: ignore[method-assign,assignment]

    def sync_weights(self) -> None:
        self.weight, self.bias = self.layer.weight, self.layer.bias

    def restore(self) -> None:
        del self.layer.forward


class FusedLinears:
    """The groups of a network, and its other linear layers."""

    def __init__(self, network: Any, forward_pass: Callable[[], object], *, pack: bool = False) -> None:
        """`run` is a forward pass, in which the layers are watched; `pack`: on CPU, where there are kernels in C."""
        self.groups = [FusedGroup(layers, pack) for layers in _find_shared_input_layers(network, forward_pass)]
        grouped = {layer for group in self.groups for layer in group.layers}
        self.singles = [
            PackedLinear(one, pack) for one in network.modules() if type(one) is nn.Linear and one not in grouped
        ]

    def refresh(self) -> None:
        """After weights were changed: whoever put others in place of them, instead of copying, is followed."""
        for one in (*self.groups, *self.singles):
            one.refresh()

    def restore(self) -> None:
        for one in (*self.groups, *self.singles):
            one.restore()
        self.groups, self.singles = [], []


def _find_shared_input_layers(network: Any, forward_pass: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain linear layers of one module that were each called once, with one and the same tensor."""
    seen: list[tuple[str, nn.Linear, Tensor]] = []
    handles = []
    for name, layer in network.named_modules():
        if type(layer) is nn.Linear:

            def note(layer: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                seen.append((name.rpartition(".")[0], layer, inputs[0]))  # type: ignore[arg-type]

            handles.append(layer.register_forward_pre_hook(note))
    try:
        forward_pass()
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[tuple[Any, ...], list[nn.Linear]] = {}
    for parent, layer, states in seen:
        kind = layer.bias is None, layer.weight.dtype, layer.weight.device
        groups.setdefault((parent, id(states), *kind), []).append(layer)  # `seen` holds the inputs: ids are distinct
    owners: dict[int, int] = {}
    for _, weight in network.named_parameters(remove_duplicate=False):
        owners[weight.data_ptr()] = owners.get(weight.data_ptr(), 0) + 1
    calls: dict[nn.Linear, int] = {}
    for _, layer, _ in seen:
        calls[layer] = calls.get(layer, 0) + 1
    return [
        layers
        for layers in groups.values()
        if len(layers) > 1 and all(calls[one] == 1 and owners[one.weight.data_ptr()] == 1 for one in layers)
    ]
