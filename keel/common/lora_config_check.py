"""Check an adapter folder before peft loads it: only a plain LoRA, stored as safetensors, passes.

Guarantees that nothing in the configuration can import a module, run a slow pattern, change the base model or allocate
more memory than its tensors need, and that no pickle is opened. Whether the adapter fits a model is checked by the
loader. Imports neither peft nor torch.
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
"""The limit of the safetensors library itself."""
_UNRESTRICTED_KEYS = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "r"),
        *("lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "use_dora", "layers_to_transform"),
    }
)
"""Keys whose values are safe: plain numbers, switches and names."""
_FIXED_VALUES = {"bias": "none", "init_lora_weights": True, "megatron_core": "megatron.core", "qalora_group_size": 16}
"""Keys that peft writes into every configuration, with the only value allowed. Keys listed nowhere must be empty."""
_UNSUPPORTED_KEYS = ("modules_to_save", "trainable_token_indices")
_LAYER_NAME = re.compile(r"\^?(?:\.\*\\\.)?[\w.-]{1,500}\$?")
"""A layer name, or the simple suffix pattern that peft writes. Excludes patterns that could take long to match."""


def check_adapter(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter. Raises a `ModelError` that names the problem if the check fails."""
    try:
        config = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter {folder} has no readable {CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ModelError(f"adapter {folder} is of type {str(kind)[:40]}, not LORA")
    for name, value in config.items():
        _check_entry(folder, name, value)
    rank, stored_rank = _configured_rank(folder, config), _stored_rank(folder)
    if rank > stored_rank:
        raise ModelError(f"adapter {folder} has r = {rank}, but its tensors have rank {stored_rank}")
    return config


def _check_entry(folder: Path, name: str, value: Any) -> None:
    if name in _UNSUPPORTED_KEYS and value:
        raise ModelError(
            f"adapter {folder} has {name} = {str(value)[:80]}, which is not supported; load merged weights"
        )
    if name in ("target_modules", "target_parameters", "exclude_modules", "rank_pattern", "alpha_pattern"):
        # peft treats a string other than "all-linear", and the keys of a table, as regular expressions
        names = [] if value in (None, "all-linear") else value
        if not isinstance(names, list | dict) or not all(
            isinstance(layer, str) and _LAYER_NAME.fullmatch(layer) for layer in names
        ):
            raise ModelError(f"adapter {folder} has {name} = {str(value)[:80]}; only layer names are allowed")
    elif name in _FIXED_VALUES:
        if value not in (_FIXED_VALUES[name], None):
            raise ModelError(f"adapter {folder} has {name} = {str(value)[:80]}; only {_FIXED_VALUES[name]} is allowed")
    elif name not in _UNRESTRICTED_KEYS and value:
        raise ModelError(f"adapter {folder} has {name[:80]} = {str(value)[:80]}, which a plain LoRA does not have")


def _configured_rank(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the largest rank in the configuration."""
    ranks = [config.get("r", 8), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ModelError(f"adapter {folder} has a rank that is not a whole number above 0: {str(ranks)[:80]}")
    return int(max(ranks))


def _stored_rank(folder: Path) -> int:
    """Return the largest rank of the stored tensors, read from the header of their file."""
    path = folder / TENSORS_FILE
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size:,} bytes")
            header = parse_json(file.read(size))
        ranks_a = [entry["shape"][0] for name, entry in header.items() if ".lora_A" in name]
        ranks_b = [entry["shape"][-1] for name, entry in header.items() if ".lora_B" in name]
        return int(max(ranks_a + ranks_b))
    except FileNotFoundError:
        raise ModelError(f"adapter {folder} has no {TENSORS_FILE}; only safetensors files are loaded") from None
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
