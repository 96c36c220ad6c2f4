"""Fuse linear layers that read the same input, and pack weights for small-batch products on CPU.

Layers with a common input are detected in a forward pass, not by their names. Their parameters become views of the
fused weight, so code that copies new weights into them in place keeps working. In float32 on CPU with native kernels,
each weight is also stored packed for its product; elsewhere no weight is stored twice. No model code is changed, and
`restore` undoes all changes to the network. Results are not verified here; `select_decoder` compares a probe with the
model's own code.
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
"""Output features of a wide head that are computed together: their transpose is made while they are in the cache."""


def small_batch_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return states @ weight.T + bias; in float32 on CPU computed as (weight @ states.T).T, with that memory layout.

    Threads divide the rows of the first factor, and a small batch has too few of them. Measured on two cores with 64
    states: 125 GFLOP/s instead of 75 to 110, for the output head 105 instead of 60.
    """
    if states.device.type != "cpu" or states.dtype != torch.float32:
        return functional.linear(states, weight, bias)
    flat = states.reshape(-1, states.shape[-1]).t()
    if len(weight) >= 4 * VOCAB_CHUNK:
        out = flat.new_empty(flat.shape[1], len(weight))  # sampling reads along the vocabulary
        for first in range(0, len(weight), VOCAB_CHUNK):
            out[:, first : first + VOCAB_CHUNK] = torch.mm(weight[first : first + VOCAB_CHUNK], flat).t()
    else:
        out = torch.mm(weight, flat).t()
    if bias is not None:
        out += bias
    return out.view(*states.shape[:-1], -1)


class SharedProjection:
    """Output of several layers with a common input: the first layer called computes it, the others take their slice."""

    def __init__(self, projection: Callable[[Tensor], Tensor], output_sizes: Sequence[int]) -> None:
        self.projection, self.output_sizes = projection, list(output_sizes)
        self._input: Tensor | None = None
        self._slices: dict[int, Tensor] = {}

    def get_slice(self, index: int, states: Tensor) -> Tensor:
        """Return the output of layer number `index`."""
        # compared by identity; the tensor is held until all slices are taken, so that its id is not reused
        if self._input is not states or index not in self._slices:
            self._slices = dict(enumerate(torch.split(self.projection(states), self.output_sizes, -1)))
            self._input = states
        result = self._slices.pop(index)
        if not self._slices:
            self._input = None
        return result


class FusedSlice(nn.Module):
    """A layer without its own weight that returns its slice of a shared projection."""

    def __init__(self, shared: SharedProjection, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, states: Tensor) -> Tensor:
        return self.shared.get_slice(self.index, states)


class PackedWeight(ABC):
    """A weight that is packed on first use, and again after it has changed."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, pack: bool) -> None:
        self._packing_enabled = pack
        self._packed_matrix: PackedMatrix | None = None

    @property
    def packed_matrix(self) -> PackedMatrix | None:
        """The packed weight, or None if packing is disabled or not supported."""
        if self._packed_matrix is None and self._packing_enabled and self.weight.dtype == torch.float32:
            self._packed_matrix = PackedMatrix(self.weight.detach().t())
        return self._packed_matrix

    def refresh(self) -> None:
        """Discard the packed weight and sync with the layers after their weights have changed."""
        self._packed_matrix = None
        self.sync_weights()

    @abstractmethod
    def sync_weights(self) -> None:
        """Take over the current weights of the layers."""

    @abstractmethod
    def restore(self) -> None:
        """Undo all changes to the layers."""

    def __call__(self, states: Tensor) -> Tensor:
        packed = self.packed_matrix
        if packed is None or states.dtype != torch.float32:
            return small_batch_linear(states, self.weight, self.bias)
        rows = states.reshape(-1, states.shape[-1])
        return packed.matmul(rows, bias=self.bias).view(*states.shape[:-1], -1)


class FusedGroup(PackedWeight):
    """Layers with a common input and their fused weight, of which their own weights are views."""

    def __init__(self, layers: Sequence[nn.Linear], pack: bool) -> None:
        super().__init__(pack)
        self.layers = list(layers)
        self.sync_weights()
        self.shared = SharedProjection(self, [layer.out_features for layer in layers])
        for index, layer in enumerate(layers):
            layer.forward = partial(self.shared.get_slice, index)  # type: ignore[method-assign]

    @torch.no_grad()
    def sync_weights(self) -> None:
        if hasattr(self, "weight") and self.views_intact:
            return  # the new values were copied into the fused weight
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
        """Whether the layers' weights are still views of the fused weight."""
        address = self.weight.data_ptr()
        for layer in self.layers:
            if layer.weight.data_ptr() != address:
                return False
            address += layer.weight.numel() * layer.weight.element_size()
        return True

    @torch.no_grad()
    def restore(self) -> None:
        for layer in self.layers:
            del layer.forward
            layer.weight.data = layer.weight.data.clone()
            if self.bias is not None:
                layer.bias.data = layer.bias.data.clone()


class PackedLinear(PackedWeight):
    """A single layer whose weight is packed."""

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
    """The fused groups of a network and its remaining linear layers."""

    def __init__(self, network: Any, forward_pass: Callable[[], object], *, pack: bool = False) -> None:
        """`forward_pass` runs the network while its layers are observed. `pack` requires the native kernels."""
        self.groups = [FusedGroup(layers, pack) for layers in _find_shared_input_layers(network, forward_pass)]
        grouped = {layer for group in self.groups for layer in group.layers}
        self.singles = [
            PackedLinear(layer, pack)
            for layer in network.modules()
            if type(layer) is nn.Linear and layer not in grouped
        ]

    def refresh(self) -> None:
        """Sync with the network after its weights have changed, whether copied in place or replaced."""
        for linear in (*self.groups, *self.singles):
            linear.refresh()

    def restore(self) -> None:
        """Undo all changes to the network."""
        for linear in (*self.groups, *self.singles):
            linear.restore()
        self.groups, self.singles = [], []


def _find_shared_input_layers(network: Any, forward_pass: Callable[[], object]) -> list[list[nn.Linear]]:
    """Return groups of plain linear layers of one module, each called once, with the same input tensor."""
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
        properties = layer.bias is None, layer.weight.dtype, layer.weight.device
        # `seen` keeps the inputs alive, so their ids are distinct
        groups.setdefault((parent, id(states), *properties), []).append(layer)
    owners: dict[int, int] = {}
    for _, weight in network.named_parameters(remove_duplicate=False):
        owners[weight.data_ptr()] = owners.get(weight.data_ptr(), 0) + 1
    calls: dict[nn.Linear, int] = {}
    for _, layer, _ in seen:
        calls[layer] = calls.get(layer, 0) + 1
    return [
        layers
        for layers in groups.values()
        if len(layers) > 1 and all(calls[layer] == 1 and owners[layer.weight.data_ptr()] == 1 for layer in layers)
    ]
