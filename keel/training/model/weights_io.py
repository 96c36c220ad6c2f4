"""A model's weights in a folder that others load as it is, and back.

Full training writes the Hugging Face layout (config, safetensors, generation config, tokenizer with chat template);
LoRA writes the PEFT layout, which is the adapter alone. `keel.json` beside them says which model they belong to.
Reading puts every bit back and refuses weights of another model, by name. It leaves out optimizer and random states.
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
    """What `keel.json` says: whose weights these are, and which versions wrote them."""
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
    """The weights that train, the tokenizer, and `keel.json` with `more` in it. Several ranks give, rank 0 writes."""
    if model.peft is None:
        tensors = full_state_dict(model) if model.world is not None else None
    else:
        tensors = gather_weights(model, adapter=True)
    if model.world is not None and model.world.rank:
        return
    write_gathered(folder, model, tensors, **extra)


def write_gathered(folder: Path, model: Model, tensors: dict[str, torch.Tensor] | None, **extra: Any) -> None:
    """The same with weights that `gather` gave: training may go on meanwhile. None: all that the network has."""
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
    """A copy of all weights by the names of the network's state, whole and on the CPU: training may go on at once.

    On several ranks one tensor after another is gathered; rank 0 gets them, and the others nothing.
    """
    return gather_weights(model, adapter=False)


def _adapter_state_dict(model: Model) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
        model.peft, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False
    )
    return found


def gather_weights(model: Model, *, adapter: bool) -> dict[str, torch.Tensor]:
    """Whole weights on the CPU, of the adapter or of all; each tensor once, so that what is tied stays tied.

    Other ranks than 0 call it when rank 0 does, and get nothing.
    """
    ranks = (
        nullcontext()
        if model.world is None
        else model.world.run_on_all_ranks("gather", lambda: encode_command(adapter=adapter))
    )
    # master weights are more precise than what anyone else computes with
    dtype = None if adapter or model.world is None else model.dtype
    found: dict[int, torch.Tensor] = {}
    with ranks:
        tensors = _adapter_state_dict(model) if adapter else model.network.state_dict(keep_vars=True)
        for tensor in tensors.values():
            if id(tensor) not in found:
                one = full_tensor(tensor, dtype)
                found[id(tensor)] = one[:0] if model.world is not None and model.world.rank else one.cpu().contiguous()
    return {} if model.world is not None and model.world.rank else {name: found[id(t)] for name, t in tensors.items()}


def write_network(
    folder: Path,
    network: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    base: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """A plain Hugging Face folder, with the settings of the base's config that training switched off as they were.

    `state`: the weights, where the network has only shards of them.
    """
    with suppress_hf_output():
        network.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    config = read_json(folder / "config.json")
    config.pop("quantization_config", None)  # of a base that was stored quantised: these weights are not
    write_json(folder / "config.json", _restore_base_config(config, read_json(base / "config.json")))


def read_weights(folder: Path, model: Model) -> dict[str, torch.Tensor]:
    """The weights in a folder of the same model, by the names of its state; nothing is set yet."""
    check_compatible(folder, model)
    if model.peft is None:
        return read_network(folder, type(model.network), model.dtype).state_dict()
    tensors, _ = read_tensors(folder / ADAPTER_FILE)
    expected = _adapter_state_dict(model)
    strangers = sorted(tensors.keys() ^ expected.keys())
    if strangers:
        raise ModelError(f"{folder / ADAPTER_FILE} is of another adapter: it and the model's differ by {strangers[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{folder / ADAPTER_FILE}: {name} has shape {tuple(tensor.shape)}, the model {tuple(expected[name].shape)}"
            )
    return tensors


def check_compatible(folder: Path, model: Model) -> None:
    """Refuse weights of another model, or of an adapter of another kind."""
    check_identity(folder, model)
    if model.peft is not None:
        _check_adapter_config(folder, model.peft.peft_config[TRAINED_ADAPTER])


def set_weights(weights: dict[str, torch.Tensor], model: Model) -> None:
    """Put what `read_weights` gave in its place, in the tensors that are there: an optimizer keeps hold of them."""
    if model.world is not None:
        there = model.network.state_dict() if model.peft is None else _adapter_state_dict(model)
        weights = {name: shard_like(tensor, there[name]) for name, tensor in weights.items()}
    if model.peft is None:
        model.network.load_state_dict(weights)
    else:
        with suppress_hf_output():
            peft.set_peft_model_state_dict(model.peft, weights, adapter_name=TRAINED_ADAPTER)


def read_network(folder: Path, model_class: Any, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The network in a Hugging Face folder, on the CPU, by transformers itself; only safetensors are read."""
    try:
        with suppress_hf_output():
            network, info = model_class.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            raise ModelError(f"the weights in {folder} do not fit their config: {problem} {sorted(info[problem])[0]}")
    result: transformers.PreTrainedModel = network
    return result


def check_identity(folder: Path, model: Model) -> None:
    """Refuse a folder whose weights belong to another model, and name both."""
    theirs, ours = read_json(folder / IDENTITY_FILE), model_identity(model)
    if theirs.get("format") != _FORMAT:
        raise ModelError(f"{folder} has format {theirs.get('format')}; this version of keel reads format {_FORMAT}")
    for key, advice in {
        "architecture": "load the model that was trained",
        "base_fingerprint": "load the model that was trained; a name may stand for other weights than it did",
        "kind": "set model.lora as it was when the checkpoint was written",
        "dtype": "set model.dtype as it was when the checkpoint was written",
    }.items():
        if theirs.get(key) != ours[key]:
            raise ModelError(
                f"{folder} is {_describe_identity(theirs)}, the model is {_describe_identity(ours)}: {advice}"
            )


def base_path(source: ModelSource) -> str:
    """How others find the base model: the hub's name where it has one, else the folder."""
    local = source.name in builtin_names() or Path(source.name).expanduser().is_dir()
    return str(source.folder) if local else source.name


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_identity(identity_info: dict[str, Any]) -> str:
    kind = "an adapter of" if identity_info.get("kind") == "adapter" else "all weights of"
    fingerprint = str(identity_info.get("base_fingerprint"))[:12]
    return f"{kind} {identity_info.get('base')} ({identity_info.get('architecture')}, {identity_info.get('dtype')}, fingerprint {fingerprint})"


def _check_adapter_config(folder: Path, ours: PeftConfig) -> None:
    theirs, mine = read_json(folder / ADAPTER_CONFIG_FILE), ours.to_dict()
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "target_parameters"):
        there, here = _to_json_value(theirs.get(key)), _to_json_value(mine.get(key))
        if there != here:
            raise ModelError(f"{folder / ADAPTER_CONFIG_FILE} has {key} = {there}, the model has {here}")


def _restore_base_config(config: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    # cache, dropout and routing noise are off while training; whoever loads the result should find them as usual
    off = ("use_cache", "dropout", "pdrop", "jitter_noise")
    result = {}
    for key, value in config.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = _restore_base_config(value, base[key])
        elif not key.endswith(off):
            result[key] = value
        elif key in base:
            result[key] = base[key]
    return result


def _to_json_value(value: Any) -> Any:
    """As JSON would have it; sets become sorted lists, so that equal adapters are equal bytes."""
    if isinstance(value, set | frozenset | list | tuple):
        items = [_to_json_value(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, dict):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    return value
