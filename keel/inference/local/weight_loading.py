"""Load the weights an engine samples with: all weights of a folder, or an adapter on top; optionally int8.

Everything is read and checked, including the manifest if there is one, before the first weight changes: a damaged or
incompatible folder leaves the engine unchanged. peft merges an adapter into the linear layers; the base values of the
changed weights are kept, so that the next adapter replaces it instead of adding to it. With int8, the linear layers of
a copy are quantised (weights per output channel, activations per token) after every load; the copy shares all other
tensors with the network.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from keel.common.lora_config_check import check_adapter
from keel.common.manifest import check_weights
from keel.common.safe_read import read_json
from keel.errors import ModelError
from keel.inference.local.fused_linear import FusedLinears
from keel.inference.local.int8 import quantize_linears, replace_layer
from keel.inference.protocol import EngineError

_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError, SafetensorError)


class WeightSlot:
    """A network whose weights can be replaced in place. `active_network` is the one to sample from."""

    def __init__(self, network: Any, *, int8: bool, fused: FusedLinears | None = None) -> None:
        if any(isinstance(layer, BaseTunerLayer) for layer in network.modules()):
            raise EngineError(
                "the network already has an adapter: pass the base model, then load the adapter with load_weights",
                retryable=False,
            )
        if int8 and network.device.type != "cpu":
            raise EngineError(
                f"engine.int8 = true is supported on cpu only, not on {network.device.type}", retryable=False
            )
        self.network, self.int8, self.fused = network, int8, fused
        self._base_values: list[tuple[nn.Parameter, Tensor]] = []
        self.active_network = quantize_linears(network, fused) if int8 else network

    def read_weights(self, folder: str) -> Mapping[str, Tensor]:
        """Read all weights of a folder and check them against the network. Safe to run during decoding."""
        try:
            state = self._read_safetensors(folder)
        except ModelError as error:
            raise EngineError(f"weights in {folder} are invalid: {error}", retryable=False) from error
        except _LOAD_ERRORS as error:
            raise EngineError(f"weights in {folder} could not be read: {error}", retryable=False) from error
        self.check_compatible(f"weights in {folder}", state)
        return state

    def check_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state dict after checking it against the network. Changes nothing; may run during decoding."""
        self.check_compatible("the weights", tensors)
        return tensors

    @torch.no_grad()
    def replace_weights(self, state: Mapping[str, Tensor]) -> Any:
        """Copy weights that `read_weights` returned into the network; return the network to sample from.

        This removes a merged adapter.
        """
        own = self.network.state_dict()
        for name, value in state.items():
            own[name].copy_(value)
        self._base_values.clear()
        return self._refresh_network()

    def validate_adapter(self, folder: str) -> None:
        """Raise EngineError for an adapter that cannot be merged. Safe to run during decoding."""
        try:
            check_weights(Path(folder))
            check_adapter(Path(folder))
        except ModelError as error:
            raise EngineError(f"adapter {folder} is invalid: {error}", retryable=False) from error

    @torch.no_grad()
    def merge_adapter(self, folder: str) -> Any:
        """Merge a validated adapter into the weights loaded last, replacing any earlier adapter.

        Returns the network to sample from.
        """
        try:
            wrapper = self._wrap_with_peft(folder)
            layers = [layer for layer in self.network.modules() if isinstance(layer, BaseTunerLayer)]
            changed = {id(weight): weight for layer in layers for weight in _base_layer(layer).parameters()}
            changed |= {id(weight): weight for weight, _ in self._base_values}
            previous_values = [(weight, weight.detach().clone()) for weight in changed.values()]
            _copy_values(self._base_values)
            base_values = [(weight, weight.detach().clone()) for weight in changed.values()]
            try:
                wrapper.merge_and_unload()
            except BaseException:
                _copy_values(previous_values)
                raise
            self._base_values = base_values
        except _LOAD_ERRORS as error:
            raise EngineError(f"adapter {folder} could not be loaded: {error}", retryable=False) from error
        finally:
            _remove_peft_layers(self.network)
        return self._refresh_network()

    def _wrap_with_peft(self, folder: str) -> PeftModel:
        config = PeftConfig.from_pretrained(folder)
        config.inference_mode = True
        wrapper = PeftModel(self.network, config)
        result: Any = set_peft_model_state_dict(wrapper, load_peft_weights(folder, device=str(self.network.device)))
        missing = [key for key in result.missing_keys if "lora_" in key]
        if missing or result.unexpected_keys:
            raise ValueError(
                f"{missing[0]} is missing" if missing else f"the model has no layer for {result.unexpected_keys[0]}"
            )
        return wrapper

    def _refresh_network(self) -> Any:
        if self.fused is not None:
            self.fused.refresh()
        if self.int8:
            self.active_network = quantize_linears(self.network, self.fused)
        return self.active_network

    def _read_safetensors(self, folder: str) -> Mapping[str, Tensor]:
        check_weights(Path(folder))
        files = sorted(Path(folder).glob("*.safetensors"))
        state: dict[str, Tensor] = {}
        for file in files:
            state |= load_file(file)
        if state and state.keys() <= self.network.state_dict().keys():
            return state
        return self._read_with_transformers(folder)

    def _read_with_transformers(self, folder: str) -> Mapping[str, Tensor]:
        """Read weights stored in a format that transformers converts to that of the network."""
        config = read_json(Path(folder) / "config.json")
        model_type = config.get("model_type")
        if model_type != self.network.config.model_type:
            raise ValueError(f"they belong to a {model_type} model, not to a {self.network.config.model_type} model")
        with _no_progress_bars():
            # use the engine's configuration: that of the folder could demand any amount of memory
            loaded: Any = type(self.network).from_pretrained(
                folder,
                config=copy.deepcopy(self.network.config),
                dtype=self.network.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        network, report = loaded
        names = [str(key) for part in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[part]]
        if names:
            # transformers would initialise these at random and only log it
            raise ValueError(f"{len(names)} weights do not match the model, for example {min(names)}")
        state: Mapping[str, Tensor] = network.state_dict()
        return state

    def check_compatible(self, description: str, state: Mapping[str, Tensor]) -> None:
        """Raise EngineError unless the names and shapes of the weights are those of this network."""
        own = self.network.state_dict()
        stored = {own[name].data_ptr() for name in state if name in own}
        # a tied weight is stored under only one of its names
        missing = [name for name, value in own.items() if name not in state and value.data_ptr() not in stored]
        unknown = [name for name in state if name not in own]
        if missing or unknown:
            problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not a weight of the model"
            raise EngineError(f"{description} belong to another model: {problem}", retryable=False)
        for name, value in state.items():
            if value.shape != own[name].shape:
                raise EngineError(
                    f"{description}: {name} has shape {tuple(value.shape)}; required: {tuple(own[name].shape)}",
                    retryable=False,
                )


def _copy_values(values: list[tuple[nn.Parameter, Tensor]]) -> None:
    for weight, value in values:
        weight.copy_(value)


def _base_layer(layer: BaseTunerLayer) -> nn.Module:
    base: nn.Module = layer.get_base_layer()
    return base


def _remove_peft_layers(network: Any) -> None:
    """Replace peft's layers by their base layers, whatever state they are in."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, BaseTunerLayer) and not name.endswith("base_layer"):
            replace_layer(network, name, _base_layer(layer))
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in vars(network):
            delattr(network, name)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
