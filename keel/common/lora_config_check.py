"""What an adapter's folder may say before peft is given it: a plain LoRA, stored as safetensors, of the rank it says.

Guarantees that nothing in its configuration can import a module, run a pattern, change the base model or ask for memory
that its file does not fill; and that no pickle is opened. Whether it fits a model is the loader's to find out. Imports
neither peft nor torch.
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.common.safe_read import parse_json, read_json
from keel.errors import ModelError

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_MAX_HEADER_BYTES = 100 * 2**20
"""Bytes; safetensors itself takes no longer one."""
_UNRESTRICTED_KEYS = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "r"),
        *("lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "use_dora", "layers_to_transform"),
    }
)
"""Numbers, switches and names, none of which leads anywhere."""
_FIXED_VALUES = {"bias": "none", "init_lora_weights": True, "megatron_core": "megatron.core", "qalora_group_size": 16}
"""What stands in every configuration and must stand there so; all else must be empty."""
_UNSUPPORTED_KEYS = ("modules_to_save", "trainable_token_indices")
_LAYER_NAME = re.compile(r"\^?(?:\.\*\\\.)?[\w.-]{1,500}\$?")
"""A name, or one that ends so as peft itself writes it: no pattern that could take long."""


def check_adapter(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter, or a `ModelError` that names what is wrong with it."""
    try:
        config = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {folder} has no {CONFIG_FILE} that can be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ModelError(f"adapter {folder} is of type {str(kind)[:40]}, not LORA")
    for name, value in config.items():
        _check_entry(folder, name, value)
    rank, stored = _configured_rank(folder, config), _stored_rank(folder)
    if rank > stored:
        raise ModelError(f"adapter {folder} says r = {rank}, and its tensors have rank {stored}")
    return config


def _check_entry(folder: Path, name: str, value: Any) -> None:
    if name in _UNSUPPORTED_KEYS and value:
        raise ModelError(f"adapter {folder} has {name} = {str(value)[:80]}: load it merged, as weights")
    if name in ("target_modules", "target_parameters", "exclude_modules", "rank_pattern", "alpha_pattern"):
        # a text of others than "all-linear", and the keys of a table, are patterns to peft
        names = [] if value in (None, "all-linear") else value
        if not isinstance(names, list | dict) or not all(
            isinstance(one, str) and _LAYER_NAME.fullmatch(one) for one in names
        ):
            raise ModelError(f"adapter {folder} has {name} = {str(value)[:80]}; only names of layers are taken")
    elif name in _FIXED_VALUES:
        if value not in (_FIXED_VALUES[name], None):
            raise ModelError(f"adapter {folder} has {name} = {str(value)[:80]}; only {_FIXED_VALUES[name]} is taken")
    elif name not in _UNRESTRICTED_KEYS and value:
        raise ModelError(f"adapter {folder} has {name[:80]} = {str(value)[:80]}, which is not a plain LoRA's")


def _configured_rank(folder: Path, config: Mapping[str, Any]) -> int:
    """The largest rank that the configuration asks for."""
    ranks = [config.get("r", 8), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ModelError(f"adapter {folder} has a rank that is no whole number above 0: {str(ranks)[:80]}")
    return int(max(ranks))


def _stored_rank(folder: Path) -> int:
    """The largest rank among the stored tensors, by the header of their file."""
    path = folder / TENSORS_FILE
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {size:,} bytes")
            header = parse_json(file.read(size))
        first = [entry["shape"][0] for name, entry in header.items() if ".lora_A" in name]
        last = [entry["shape"][-1] for name, entry in header.items() if ".lora_B" in name]
        return int(max(first + last))
    except FileNotFoundError:
        raise ModelError(
            f"adapter {folder} has no {TENSORS_FILE}: other files than safetensors are not loaded"
        ) from None
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
