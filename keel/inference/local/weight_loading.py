"""The weights an engine samples with: all of them from a folder, an adapter on top, and int8 copies of linear layers.

Everything is read and checked before the first weight changes, by its manifest where there is one: a folder that is
damaged or does not fit leaves the engine as it was.
An adapter is merged into the linear layers by peft; the weights it changes are kept, so that the next adapter replaces
it and does not add to it. With int8 the linear layers of a copy are quantised by torch (weights by output channel,
activations by token), again after every load; all else in the copy is shared with the network itself.
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
    """A network whose weights can be replaced in place. `live` is what samples."""

    def __init__(self, network: Any, *, int8: bool, fused: FusedLinears | None = None) -> None:
        if any(isinstance(layer, BaseTunerLayer) for layer in network.modules()):
            raise EngineError(
                "the network has an adapter of its own: give the engine the base model, then load the adapter with load_weights",
                retryable=False,
            )
        if int8 and network.device.type != "cpu":
            raise EngineError(f"engine.int8 = true works on cpu only, not on {network.device.type}", retryable=False)
        self.network, self.int8, self.fused = network, int8, fused
        self._base_values: list[tuple[nn.Parameter, Tensor]] = []
        self.active_network = quantize_linears(network, fused) if int8 else network

    def read_weights(self, folder: str) -> Mapping[str, Tensor]:
        """All weights in a folder, checked against the network. Changes nothing; may run beside decoding."""
        try:
            state = self._read_safetensors(folder)
        except ModelError as error:
            raise EngineError(f"weights in {folder} are refused: {error}", retryable=False) from error
        except _LOAD_ERRORS as error:
            raise EngineError(f"weights in {folder} could not be read: {error}", retryable=False) from error
        self.check_compatible(f"weights in {folder}", state)
        return state

    def check_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state dict after checking it against the network. Changes nothing; may run beside decoding."""
        self.check_compatible("the weights", tensors)
        return tensors

    @torch.no_grad()
    def replace_weights(self, state: Mapping[str, Tensor]) -> Any:
        """Take weights that `read` returned; an adapter is gone with the weights it was merged into."""
        own = self.network.state_dict()
        for name, value in state.items():
            own[name].copy_(value)
        self._base_values.clear()
        return self._refresh_network()

    def validate_adapter(self, folder: str) -> None:
        """Refuse an adapter that cannot be merged. Changes nothing; may run beside decoding."""
        try:
            check_weights(Path(folder))
            check_adapter(Path(folder))
        except ModelError as error:
            raise EngineError(f"adapter {folder} is refused: {error}", retryable=False) from error

    @torch.no_grad()
    def merge_adapter(self, folder: str) -> Any:
        """Merge an adapter that `read_adapter` took into the weights loaded last, in place of any adapter before."""
        try:
            wrapper = self._wrap_with_peft(folder)
            layers = [layer for layer in self.network.modules() if isinstance(layer, BaseTunerLayer)]
            touched = {id(one): one for layer in layers for one in _base_layer(layer).parameters()}
            touched |= {id(one): one for one, _ in self._base_values}
            merged = [(weight, weight.detach().clone()) for weight in touched.values()]
            _copy_values(self._base_values)
            kept = [(weight, weight.detach().clone()) for weight in touched.values()]
            try:
                wrapper.merge_and_unload()
            except BaseException:
                _copy_values(merged)
                raise
            self._base_values = kept
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
            what = f"it has no {missing[0]}" if missing else f"the model has no place for {result.unexpected_keys[0]}"
            raise ValueError(what)
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
        """Weights in another form than the network has in memory, which transformers knows how to read."""
        config = read_json(Path(folder) / "config.json")
        kind = config.get("model_type")
        if kind != self.network.config.model_type:
            raise ValueError(f"they are of a {kind} model, and this is a {self.network.config.model_type} model")
        with _no_progress_bars():
            # by the engine's own configuration: that of a folder could ask for any amount of memory
            loaded: Any = type(self.network).from_pretrained(
                folder,
                config=copy.deepcopy(self.network.config),
                dtype=self.network.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        network, report = loaded
        wrong = [str(key) for part in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[part]]
        if wrong:
            # transformers would fill these in at random and only log it
            raise ValueError(f"{len(wrong)} weights do not fit, such as {min(wrong)}")
        found: Mapping[str, Tensor] = network.state_dict()
        return found

    def check_compatible(self, description: str, state: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not of this network, by name."""
        own = self.network.state_dict()
        stored = {own[name].data_ptr() for name in state if name in own}
        # a tied weight is stored under one of its names
        missing = [name for name, value in own.items() if name not in state and value.data_ptr() not in stored]
        unknown = [name for name in state if name not in own]
        if missing or unknown:
            how = f"lack {missing[0]}" if missing else f"hold {unknown[0]}, which the model does not have"
            raise EngineError(f"{description} {how}: they are of another model", retryable=False)
        for name, value in state.items():
            if value.shape != own[name].shape:
                raise EngineError(
                    f"{description}: {name} has shape {tuple(value.shape)}, the model {tuple(own[name].shape)}",
                    retryable=False,
                )


def _copy_values(values: list[tuple[nn.Parameter, Tensor]]) -> None:
    for weight, value in values:
        weight.copy_(value)


def _base_layer(layer: BaseTunerLayer) -> nn.Module:
    base: nn.Module = layer.get_base_layer()
    return base


def _remove_peft_layers(network: Any) -> None:
    """Take peft's layers out again, whatever state they are in."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, BaseTunerLayer) and not name.endswith("base_layer"):
            replace_layer(network, name, _base_layer(layer))
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in vars(network):
            delattr(network, name)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
