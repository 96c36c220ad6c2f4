"""Load a causal language model for training: network, tokenizer, trainable parameters and adapters.

Guarantees that log-probs depend on the tokens alone (no dropout, no routing noise, no cache), that every weight comes
from the checkpoint or from the seed, and that switching adapters for a reference pass leaves the trained adapter
unchanged. On several ranks each rank holds its shard of the network. Optimizer steps and losses are not part of this
module.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils.quantization_config import Mxfp4Config

from keel.common.atomic_files import read_json
from keel.common.lora_config_check import check_adapter
from keel.common.settings import suggest_name
from keel.config.trainer import LoraSettings, ModelSettings, TrainerSettings
from keel.errors import ConfigError, ModelError
from keel.training.distributed.fsdp import apply_fsdp
from keel.training.distributed.world import World
from keel.training.model import tiny_models
from keel.training.model.device import find_device, find_dtype, rank_device, weight_and_reduce_dtypes
from keel.training.model.model_source import ModelSource, resolve_model, suppress_hf_output

TRAINED_ADAPTER = "default"
"""peft's name for the trained adapter."""

_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


@dataclass
class Model:
    """A network on its device. With LoRA, peft wraps its linear layers and only the adapter trains."""

    source: ModelSource
    settings: ModelSettings
    network: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    peft: PeftModel | None
    device: torch.device
    dtype: torch.dtype
    """Compute dtype; master weights are float32 regardless."""
    world: World | None = None
    """Ranks that hold the network's shards; None if the full network is in this process."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype in which gradients are summed over ranks."""

    def __post_init__(self) -> None:
        self._trainable_names = [name for name, weight in self.network.named_parameters() if weight.requires_grad]

    @property
    def body(self) -> nn.Module:
        """Return the module that maps tokens to the hidden states before the output head."""
        body: nn.Module = self.network.get_decoder()  # type: ignore[no-untyped-call]
        return body if body is not self.network else self.network.base_model

    @property
    def head(self) -> nn.Linear:
        """Return the linear layer that maps hidden states to logits, before any soft-capping."""
        head = self.network.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear):
            raise ModelError(f"model {self.source.name} has no linear output head: it is a {type(head).__name__}")
        return head

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name, in the network's order; tied weights appear once."""
        # looked up on each call: sharding replaces the parameter objects and keeps the names
        weights = dict(self.network.named_parameters())
        return {name: weights[name] for name in self._trainable_names}

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context manager that disables every adapter, leaving the base model."""
        return self._adapter_switched(None)

    def with_adapter(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that activates another adapter, frozen unless it is the trained one."""
        return self._adapter_switched(name)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load a frozen adapter after checking that it was trained on this base model and that its shapes match."""
        wrapper = self._require_lora("add_adapter")
        if name in wrapper.peft_config or not name or "." in name:
            raise ModelError(
                f'adapter name "{name}" is already used, empty or contains a dot; loaded: {sorted(wrapper.peft_config)}'
            )
        _check_base(folder, self.source)
        _check_shapes(folder, _layer_widths(self.network))
        with self._preserve_requires_grad(), suppress_hf_output():
            try:
                result = wrapper.load_adapter(str(folder), adapter_name=name, torch_device=str(self.device))
                missing = [key for key in result.missing_keys if f".{name}." in key]
                if missing:
                    raise RuntimeError(f"{missing[0]} is missing")
            except _LOAD_ERRORS as error:
                if name in wrapper.peft_config:
                    wrapper.delete_adapter(name)
                raise ModelError(f"adapter {folder} could not be loaded: {error}") from error

    def _require_lora(self, operation: str) -> PeftModel:
        if self.peft is None:
            raise ModelError(f"{operation} needs model.lora: full training does not keep the base weights separately")
        return self.peft

    @contextmanager
    def _adapter_switched(self, name: str | None) -> Iterator[None]:
        wrapper = self._require_lora("switching adapters")
        if name is not None and name not in wrapper.peft_config:
            raise ModelError(f"adapter {name} is not loaded; {suggest_name(name, wrapper.peft_config)}")
        layers = [layer for layer in self.network.modules() if isinstance(layer, BaseTunerLayer)]
        active, off = wrapper.active_adapter, any(layer.disable_adapters for layer in layers)

        def switch(to: str, disable: bool) -> None:
            wrapper.set_adapter(to, inference_mode=to != TRAINED_ADAPTER)
            for layer in layers:
                layer.enable_adapters(not disable)
            if to != TRAINED_ADAPTER:
                # enable_adapters makes the active adapter trainable, overriding inference_mode
                wrapper.set_requires_grad(to, False)

        with self._preserve_requires_grad():
            try:
                switch(active if name is None else name, name is None)
                yield
            finally:
                switch(active, off)

    @contextmanager
    def _preserve_requires_grad(self) -> Iterator[None]:
        # peft sets requires_grad again at each switch; restore the values from before
        before = {id(weight): weight.requires_grad for weight in self.network.parameters()}
        try:
            yield
        finally:
            for weight in self.network.parameters():
                weight.requires_grad_(before.get(id(weight), False))


def load_model(
    settings: ModelSettings, seed: int = 0, *, world: World | None = None, trainer: TrainerSettings | None = None
) -> Model:
    """Load the model named by the settings. Equal settings and seed give identical bits on the same machine.

    With a world, every rank must call this and gets its shard; `trainer` then sets the precision in which shards are
    stored and gradients are summed.
    """
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype, device)
    weight_dtype, reduce_dtype = weight_and_reduce_dtypes(dtype, trainer)
    if settings.sft_warmup_steps and settings.name not in tiny_models.MODEL_NAMES:
        raise ConfigError(
            f"model.sft_warmup_steps = {settings.sft_warmup_steps} has no effect with model.name = {settings.name}; "
            f"it applies to {', '.join(tiny_models.MODEL_NAMES)} only"
        )
    source = resolve_model(settings.name, seed, settings.sft_warmup_steps)
    network, tokenizer = _load_pretrained(source, weight_dtype)
    if world is None:
        nn.Module.to(network, device)  # network.to loses its type annotation in a decorator
    _make_deterministic(network)
    wrapper = _add_lora(network, settings.lora, source, seed) if settings.lora else None
    network.train(settings.gradient_checkpointing)
    if settings.gradient_checkpointing:
        if not network.supports_gradient_checkpointing:
            raise ConfigError(
                f"model.gradient_checkpointing = true is not supported by {type(network).__name__}; set it to false"
            )
        # non-reentrant, because the inputs of a frozen base require no gradient. Checkpointing is active in train mode
        # only; without dropout, train mode does not differ from eval mode otherwise
        network.gradient_checkpointing_enable({"use_reentrant": False})
    model = Model(source, settings, network, tokenizer, wrapper, device, dtype, world, reduce_dtype)
    if world is not None:
        # sharded from the CPU layer by layer, so that a device never holds more than its shard and one layer
        model.device = rank_device(world, device, settings.device)
        apply_fsdp(network, model.body, world.mesh(device.type), dtype, reduce_dtype)
    return model


def _dequantize_options(source: ModelSource) -> dict[str, Any]:
    """Return the from_pretrained arguments that dequantise weights stored in a quantised format."""
    quantization = read_json(source.folder / "config.json").get("quantization_config")
    if not isinstance(quantization, dict):
        return {}
    if quantization.get("quant_method") == "mxfp4":  # the format gpt-oss is published in
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    raise ModelError(
        f"model {source.name} is quantised ({quantization.get('quant_method')}) and cannot be trained; use the "
        "unquantised version"
    )


def _load_pretrained(
    source: ModelSource, dtype: torch.dtype
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    with suppress_hf_output():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,  # never load pickled weights
                output_loading_info=True,
                **_dequantize_options(source),
            )
            network, report = loaded
        except _LOAD_ERRORS as error:
            raise ModelError(f"model {source.name} in {source.folder} could not be loaded: {error}") from error
    missing = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if missing:
        # transformers would initialise these randomly and only log it
        raise ModelError(
            f"model {source.name}: {len(missing)} weights are missing from {source.folder}, such as {missing[0]}"
        )
    return network, tokenizer


def _make_deterministic(network: transformers.PreTrainedModel) -> None:
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                name.endswith(("dropout", "dropout_p", "pdrop")) or name == "jitter_noise"
            ):
                setattr(module, name, 0.0)
    config = network.config
    for part in (config, config.get_text_config()):
        part.use_cache = False
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and (name.endswith(("dropout", "pdrop")) or name == "router_jitter_noise"):
                setattr(part, name, 0.0)


def _add_lora(
    network: transformers.PreTrainedModel, settings: LoraSettings, source: ModelSource, seed: int
) -> PeftModel:
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    for target in settings.targets if isinstance(settings.targets, list) else ():
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = {name.rpartition(".")[2] for name in linear}
            raise ConfigError(
                f'model.lora.targets: "{target}" is not a linear layer of {source.name}; choose from '
                f"{', '.join(sorted(known))}"
            )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        # an int where possible: other readers of adapter_config.json expect one
        lora_alpha=int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,  # type: ignore[arg-type]
        target_modules=settings.targets,
        lora_dropout=0.0,
        bias="none",
    )
    # peft initialises on the CPU and then moves the adapter: it is the same on every device, and only the CPU generator
    # has to be forked
    with suppress_hf_output(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            wrapper = get_peft_model(network, config)
        except ValueError as error:
            raise ConfigError(f"model.lora does not fit {source.name}: {error}") from error
    assert isinstance(wrapper, PeftModel)  # get_peft_model returns PeftMixedModel for mixed=True only
    return wrapper


def _check_base(folder: Path, source: ModelSource) -> None:
    """Raise if the adapter belongs to another base: by fingerprint if Keel wrote one, by the base's name otherwise."""
    config = check_adapter(folder)
    identity = folder / "keel.json"
    base_fingerprint = read_json(identity).get("base_fingerprint") if identity.is_file() else None
    if base_fingerprint is not None:
        if base_fingerprint != source.fingerprint:
            raise ModelError(
                f"adapter {folder} was trained on another base model: its fingerprint is {base_fingerprint}, that of "
                f"{source.name} is {source.fingerprint}"
            )
        return
    base = str(config.get("base_model_name_or_path") or "")
    # paths differ between machines, so only the last component of the base's name is compared
    names = {Path(name).name.lower() for name in (source.name, str(source.folder))}
    if base and Path(base).name.lower() not in names:
        raise ModelError(f"adapter {folder} was trained on another base model: {base}, not {source.name}")


def _layer_widths(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of every layer an adapter can wrap, by its name in the base model."""
    widths = {
        name.removesuffix(".base_layer"): (layer.in_features, layer.out_features)
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear)
    }
    for name, layer in network.named_modules():
        # fused experts are parameters, not linear layers: their widths are only visible in their adapter
        if isinstance(layer, LoraLayer) and TRAINED_ADAPTER in layer.lora_A:
            first, second = layer.lora_A[TRAINED_ADAPTER], layer.lora_B[TRAINED_ADAPTER]
            assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
            widths[name] = (first.in_features, second.out_features)
    return widths


def _check_shapes(folder: Path, widths: dict[str, tuple[int, int]]) -> None:
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(f"adapter {folder}: adapter_model.safetensors cannot be read: {error}") from error
    for key, shape in shapes.items():
        name, _, part = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B") or name not in widths:
            raise ModelError(f"adapter {folder} contains {key}, but the model has no such linear layer")
        inputs, outputs = widths[name]
        if len(shape) != 2 or (shape[1] != inputs if part == "lora_A" else shape[0] != outputs):
            raise ModelError(
                f"adapter {folder}: {key} has shape {shape}, but its layer has {inputs} inputs and {outputs} outputs"
            )
