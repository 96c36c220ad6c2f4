"""A causal language model ready to be trained: weights, tokenizer, what of it trains, and its adapters.

Guarantees that log-probs are functions of the tokens alone (no dropout, no routing noise, no cache), that every weight
came from the checkpoint or from the seed, and that an adapter lent to a reference pass leaves the trained one exactly
as it was. On several ranks each holds its shard of the network. It takes no step and computes no loss.
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
"""peft's name of the adapter that trains."""

_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


@dataclass
class Model:
    """A network on its device. With LoRA, peft has wrapped its linear layers and all but the adapter is frozen."""

    source: ModelSource
    settings: ModelSettings
    network: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    peft: PeftModel | None
    device: torch.device
    dtype: torch.dtype
    """What it computes in; master weights are float32 whatever this is."""
    world: World | None = None
    """The ranks that hold the network's shards; None: it is whole, in this process."""
    reduce_dtype: torch.dtype = torch.float32
    """In which gradients are summed over ranks."""

    def __post_init__(self) -> None:
        self._trainable_names = [name for name, weight in self.network.named_parameters() if weight.requires_grad]

    @property
    def body(self) -> nn.Module:
        """From tokens to the hidden states before the output head."""
        body: nn.Module = self.network.get_decoder()  # type: ignore[no-untyped-call]
        return body if body is not self.network else self.network.base_model

    @property
    def head(self) -> nn.Linear:
        """From hidden states to logits, before any soft-capping."""
        head = self.network.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear):
            raise ModelError(f"model {self.source.name} has no linear output head: {type(head).__name__}")
        return head

    def parameters(self) -> dict[str, nn.Parameter]:
        """What trains, by name, in the network's order; tied weights once."""
        # looked up each time: sharding replaces the objects and keeps the names
        weights = dict(self.network.named_parameters())
        return {name: weights[name] for name in self._trainable_names}

    def without_adapter(self) -> AbstractContextManager[None]:
        """The base model, with every adapter switched off."""
        return self._adapter_switched(None)

    def with_adapter(self, name: str) -> AbstractContextManager[None]:
        """Another adapter in place of the active one; it gets no gradient unless it is the trained one."""
        return self._adapter_switched(name)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load a frozen adapter, after checking that it was made for this base model and fits it."""
        wrapper = self._require_lora("add_adapter")
        if name in wrapper.peft_config or not name or "." in name:
            raise ModelError(
                f'adapter name "{name}" is taken, empty or has a dot; loaded: {sorted(wrapper.peft_config)}'
            )
        _check_base(folder, self.source)
        _check_shapes(folder, _layer_widths(self.network))
        with self._preserve_requires_grad(), suppress_hf_output():
            try:
                result = wrapper.load_adapter(str(folder), adapter_name=name, torch_device=str(self.device))
                missing = [key for key in result.missing_keys if f".{name}." in key]
                if missing:
                    raise RuntimeError(f"it has no {missing[0]}")
            except _LOAD_ERRORS as error:
                if name in wrapper.peft_config:
                    wrapper.delete_adapter(name)
                raise ModelError(f"adapter {folder} could not be loaded: {error}") from error

    def _require_lora(self, operation: str) -> PeftModel:
        if self.peft is None:
            raise ModelError(f"{operation} needs model.lora: with full training the base weights are not kept apart")
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
                # enabling makes the active adapter trainable, whatever was said before
                wrapper.set_requires_grad(to, False)

        with self._preserve_requires_grad():
            try:
                switch(active if name is None else name, name is None)
                yield
            finally:
                switch(active, off)

    @contextmanager
    def _preserve_requires_grad(self) -> Iterator[None]:
        # peft decides requires_grad anew at each switch; a weight that trained must come out as it went in
        before = {id(weight): weight.requires_grad for weight in self.network.parameters()}
        try:
            yield
        finally:
            for weight in self.network.parameters():
                weight.requires_grad_(before.get(id(weight), False))


def load_model(
    settings: ModelSettings, seed: int = 0, *, world: World | None = None, trainer: TrainerSettings | None = None
) -> Model:
    """The model that the settings name. Equal settings and seed give equal bits on the same machine.

    With a world, each of its ranks calls this and gets its shard; `trainer` then says in which precision shards are
    kept and summed.
    """
    device = find_device(settings.device)
    dtype = find_dtype(settings.dtype, device)
    kept, reduce = weight_and_reduce_dtypes(dtype, trainer)
    if settings.sft_warmup_steps and settings.name not in tiny_models.MODEL_NAMES:
        raise ConfigError(
            f"model.sft_warmup_steps = {settings.sft_warmup_steps} cannot act on model.name = {settings.name}: "
            f"it is for {', '.join(tiny_models.MODEL_NAMES)}"
        )
    source = resolve_model(settings.name, seed, settings.sft_warmup_steps)
    network, tokenizer = _load_pretrained(source, kept)
    if world is None:
        nn.Module.to(network, device)  # not network.to, whose annotation is lost in a decorator
    _make_deterministic(network)
    wrapper = _add_lora(network, settings.lora, source, seed) if settings.lora else None
    network.train(settings.gradient_checkpointing)
    if settings.gradient_checkpointing:
        if not network.supports_gradient_checkpointing:
            raise ConfigError(f"model.gradient_checkpointing = true: {type(network).__name__} does not support it")
        # not reentrant: the inputs of a frozen base need no gradient of their own. It acts in train mode only, which
        # differs from eval mode in nothing else once dropout is gone
        network.gradient_checkpointing_enable({"use_reentrant": False})
    model = Model(source, settings, network, tokenizer, wrapper, device, dtype, world, reduce)
    if world is not None:
        # from the CPU, layer by layer: no device ever holds more than its shard and one layer
        model.device = rank_device(world, device, settings.device)
        apply_fsdp(network, model.body, world.mesh(device.type), dtype, reduce)
    return model


def _dequantize_options(source: ModelSource) -> dict[str, Any]:
    """What to tell transformers about weights that are stored in another form than they train in."""
    stored = read_json(source.folder / "config.json").get("quantization_config")
    if not isinstance(stored, dict):
        return {}
    if stored.get("quant_method") == "mxfp4":  # as gpt-oss is published
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    raise ModelError(
        f"model {source.name} is quantised ({stored.get('quant_method')}), which cannot be trained: use the version "
        "that is not"
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
                use_safetensors=True,  # never a pickle
                output_loading_info=True,
                **_dequantize_options(source),
            )
            network, report = loaded
        except _LOAD_ERRORS as error:
            raise ModelError(f"model {source.name} in {source.folder} could not be loaded: {error}") from error
    missing = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if missing:
        # transformers would fill these in at random and only log it
        raise ModelError(f"model {source.name}: {source.folder} lacks {len(missing)} weights, such as {missing[0]}")
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
                f'model.lora.targets: "{target}" is no linear layer of {source.name}; it has {", ".join(sorted(known))}'
            )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        # a whole number where it can be: other readers of adapter_config.json expect one
        lora_alpha=int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,  # type: ignore[arg-type]
        target_modules=settings.targets,
        lora_dropout=0.0,
        bias="none",
    )
    # peft draws on the CPU and then moves: the same adapter on every device, and no other generator to disturb
    with suppress_hf_output(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            wrapper = get_peft_model(network, config)
        except ValueError as error:
            raise ConfigError(f"model.lora does not fit {source.name}: {error}") from error
    assert isinstance(wrapper, PeftModel)  # its other class is for adapters that are mixed in one forward pass
    return wrapper


def _check_base(folder: Path, source: ModelSource) -> None:
    """An adapter belongs to this base by its fingerprint where Keel wrote one, by the base's name elsewhere."""
    config = check_adapter(folder)
    note = folder / "keel.json"
    marked = read_json(note).get("base_fingerprint") if note.is_file() else None
    if marked is not None:
        if marked != source.fingerprint:
            raise ModelError(
                f"adapter {folder} was made for another base model: fingerprint {marked}, and {source.name} "
                f"has {source.fingerprint}"
            )
        return
    base = str(config.get("base_model_name_or_path") or "")
    # the same model has one path here and another there: only the last part of its name says which it is
    names = {Path(name).name.lower() for name in (source.name, str(source.folder))}
    if base and Path(base).name.lower() not in names:
        raise ModelError(f"adapter {folder} was made for another base model: {base}, and this is {source.name}")


def _layer_widths(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every layer that an adapter can sit on, by its name in the model without adapters."""
    widths = {
        name.removesuffix(".base_layer"): (layer.in_features, layer.out_features)
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear)
    }
    for name, layer in network.named_modules():
        # fused experts are parameters, not linear layers: their width shows only in the adapter that they carry
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
            raise ModelError(f"adapter {folder} holds {key}, for which this model has no linear layer")
        inputs, outputs = widths[name]
        if len(shape) != 2 or (shape[1] != inputs if part == "lora_A" else shape[0] != outputs):
            raise ModelError(
                f"adapter {folder}: {key} has shape {shape}, and its layer takes {inputs} inputs to {outputs} outputs"
            )
