"""Write a model's weights to a folder other libraries can load, and read them back.

Full training writes the Hugging Face layout (config, safetensors, generation config, tokenizer with chat template);
LoRA writes the PEFT layout, the adapter only. `keel.json` in the same folder identifies the model they belong to.
Reading restores every bit and raises an error that names both models if the weights belong to another one. Optimizer
and random states are handled by `optimizer_state`.
"""

import importlib.metadata
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import PeftConfig
from safetensors.torch import save_file

from keel.common.atomic_files import read_json, write_json
from keel.errors import ModelError
from keel.training.distributed.fsdp import full_tensor, shard_like
from keel.training.distributed.rank_command import encode_command
from keel.training.model.model import TRAINED_ADAPTER, Model
from keel.training.model.model_source import ModelSource, builtin_names, suppress_hf_output
from keel.training.model.optimizer_state import read_tensors

IDENTITY_FILE = "keel.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_FORMAT = 1
_PACKAGES = {"keel": "keel-rl", "torch": "torch", "transformers": "transformers", "peft": "peft"}


def model_identity(model: Model) -> dict[str, Any]:
    """Return the content of `keel.json`: which model the weights belong to and which versions wrote them."""
    return {
        "format": _FORMAT,
        "kind": "full" if model.peft is None else "adapter",
        "architecture": type(model.network).__name__,
        "dtype": dtype_name(model.dtype),
        "base": model.source.name,
        "base_fingerprint": model.source.fingerprint,
        "versions": {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()},
    }


def write_weights(folder: Path, model: Model, **extra: Any) -> None:
    """Write the trained weights, the tokenizer, and `keel.json` with the keys of `extra`.

    On several ranks every rank must call it; rank 0 writes.
    """
    if model.peft is None:
        tensors = full_state_dict(model) if model.world is not None else None
    else:
        tensors = gather_weights(model, adapter=True)
    if model.world is not None and model.world.rank:
        return
    write_gathered(folder, model, tensors, **extra)


def write_gathered(folder: Path, model: Model, tensors: dict[str, torch.Tensor] | None, **extra: Any) -> None:
    """Write weights returned by `gather_weights`, while training may continue; None writes the network's own."""
    write_json(folder / IDENTITY_FILE, model_identity(model) | extra)
    if model.peft is None:
        write_network(folder, model.network, model.tokenizer, model.source.folder, tensors)
        return
    assert tensors is not None
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = model.peft.peft_config[TRAINED_ADAPTER].to_dict()
    config |= {"base_model_name_or_path": base_path(model.source), "inference_mode": True}
    write_json(folder / ADAPTER_CONFIG_FILE, {key: _to_json_value(value) for key, value in config.items()})
    with suppress_hf_output():
        model.tokenizer.save_pretrained(folder)


def full_state_dict(model: Model) -> dict[str, torch.Tensor]:
    """Return a copy of all weights on the CPU, unsharded, by their state dict names; training may continue meanwhile.

    On several ranks the tensors are gathered one after another; rank 0 gets them, other ranks an empty dict.
    """
    return gather_weights(model, adapter=False)


def _adapter_state_dict(model: Model) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model.peft, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False
    )
    return state


def gather_weights(model: Model, *, adapter: bool) -> dict[str, torch.Tensor]:
    """Return unsharded weights on the CPU, of the adapter or of the network. Tied weights share one tensor.

    All ranks must call it; ranks other than 0 get an empty dict.
    """
    ranks = (
        nullcontext()
        if model.world is None
        else model.world.run_on_all_ranks("gather", lambda: encode_command(adapter=adapter))
    )
    # float32 master weights are written in the compute dtype, which is what engines load
    dtype = None if adapter or model.world is None else model.dtype
    other_rank = model.world is not None and model.world.rank != 0
    gathered: dict[int, torch.Tensor] = {}
    with ranks:
        tensors = _adapter_state_dict(model) if adapter else model.network.state_dict(keep_vars=True)
        for tensor in tensors.values():
            if id(tensor) not in gathered:
                full = full_tensor(tensor, dtype)
                gathered[id(tensor)] = full[:0] if other_rank else full.cpu().contiguous()
    return {} if other_rank else {name: gathered[id(tensor)] for name, tensor in tensors.items()}


def write_network(
    folder: Path,
    network: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    base: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a plain Hugging Face folder, restoring the base's config values that training disables.

    `state` has the weights if the network holds only shards of them.
    """
    with suppress_hf_output():
        network.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    config = read_json(folder / "config.json")
    config.pop("quantization_config", None)  # the base may have been quantised; these weights are not
    write_json(folder / "config.json", _restore_base_config(config, read_json(base / "config.json")))


def read_weights(folder: Path, model: Model) -> dict[str, torch.Tensor]:
    """Read the weights from a folder of the same model, by state dict name, without setting them."""
    check_compatible(folder, model)
    if model.peft is None:
        return read_network(folder, type(model.network), model.dtype).state_dict()
    tensors, _ = read_tensors(folder / ADAPTER_FILE)
    expected = _adapter_state_dict(model)
    unmatched = sorted(tensors.keys() ^ expected.keys())
    if unmatched:
        raise ModelError(
            f"{folder / ADAPTER_FILE} belongs to another adapter: only one of it and the model has {unmatched[0]}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{folder / ADAPTER_FILE}: {name} has shape {tuple(tensor.shape)}, in the model"
                f" {tuple(expected[name].shape)}"
            )
    return tensors


def check_compatible(folder: Path, model: Model) -> None:
    """Raise if the weights belong to another model or to an adapter with other LoRA settings."""
    check_identity(folder, model)
    if model.peft is not None:
        _check_adapter_config(folder, model.peft.peft_config[TRAINED_ADAPTER])


def set_weights(weights: dict[str, torch.Tensor], model: Model) -> None:
    """Copy weights from `read_weights` into the existing parameters, which the optimizer refers to."""
    if model.world is not None:
        current = model.network.state_dict() if model.peft is None else _adapter_state_dict(model)
        weights = {name: shard_like(tensor, current[name]) for name, tensor in weights.items()}
    if model.peft is None:
        model.network.load_state_dict(weights)
    else:
        with suppress_hf_output():
            peft.set_peft_model_state_dict(model.peft, weights, adapter_name=TRAINED_ADAPTER)


def read_network(folder: Path, model_class: Any, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Load the network in a Hugging Face folder on the CPU with transformers; only safetensors are read."""
    try:
        with suppress_hf_output():
            network, info = model_class.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            raise ModelError(f"the weights in {folder} do not match its config: {problem} {sorted(info[problem])[0]}")
    result: transformers.PreTrainedModel = network
    return result


def check_identity(folder: Path, model: Model) -> None:
    """Raise an error that names both models if the weights in a folder belong to another model."""
    theirs, ours = read_json(folder / IDENTITY_FILE), model_identity(model)
    if theirs.get("format") != _FORMAT:
        raise ModelError(f"{folder} has format {theirs.get('format')}; this version of keel reads format {_FORMAT}")
    for key, advice in {
        "architecture": "load the model that was trained",
        "base_fingerprint": "load the model that was trained; its name may now refer to other weights",
        "kind": "set model.lora as when the checkpoint was written",
        "dtype": "set model.dtype as when the checkpoint was written",
    }.items():
        if theirs.get(key) != ours[key]:
            raise ModelError(
                f"{folder} is {_describe_identity(theirs)}, the model is {_describe_identity(ours)}: {advice}"
            )


def base_path(source: ModelSource) -> str:
    """Return the base model's hub name if it has one, its folder otherwise."""
    local = source.name in builtin_names() or Path(source.name).expanduser().is_dir()
    return str(source.folder) if local else source.name


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_identity(identity: dict[str, Any]) -> str:
    kind = "an adapter of" if identity.get("kind") == "adapter" else "all weights of"
    details = f"{identity.get('architecture')}, {identity.get('dtype')}"
    fingerprint = str(identity.get("base_fingerprint"))[:12]
    return f"{kind} {identity.get('base')} ({details}, fingerprint {fingerprint})"


def _check_adapter_config(folder: Path, ours: PeftConfig) -> None:
    stored_config, expected_config = read_json(folder / ADAPTER_CONFIG_FILE), ours.to_dict()
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "target_parameters"):
        stored, expected = _to_json_value(stored_config.get(key)), _to_json_value(expected_config.get(key))
        if stored != expected:
            raise ModelError(f"{folder / ADAPTER_CONFIG_FILE} has {key} = {stored}, the model has {expected}")


def _restore_base_config(config: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    # training disables cache, dropout and routing noise; users of the exported model expect the base's values
    disabled = ("use_cache", "dropout", "pdrop", "jitter_noise")
    result = {}
    for key, value in config.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = _restore_base_config(value, base[key])
        elif not key.endswith(disabled):
            result[key] = value
        elif key in base:
            result[key] = base[key]
    return result


def _to_json_value(value: Any) -> Any:
    """Convert to JSON types; sets become sorted lists, so that equal adapters give identical bytes."""
    if isinstance(value, set | frozenset | list | tuple):
        items = [_to_json_value(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, dict):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    return value
