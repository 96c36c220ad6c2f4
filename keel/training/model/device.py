"""Resolve the device and dtypes of a model from its settings.

A device that does not exist, or a precision setting that would have no effect, raises an error that names the setting.
"""

import torch

from keel.config.trainer import TrainerSettings
from keel.errors import ConfigError
from keel.training.distributed.world import World


def find_device(name: str) -> torch.device:
    """Return the device of that name; "auto" means the accelerator torch detects, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    available = f"this machine has cpu{f' and {accelerator.type}' if accelerator else ' only'}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'model.device = "{name}" is not a torch device; {available}') from error
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count()
    if accelerator is None or device.type != accelerator.type or (device.index or 0) >= count:
        raise ConfigError(f'model.device = "{name}" is not available; {available}')
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype; "auto" means bfloat16 on GPUs that support it, float32 elsewhere."""
    if name != "auto":
        if name == "float64" and device.type == "mps":
            raise ConfigError(f'model.dtype = "float64" is not supported on model.device = "{device}"')
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def weight_and_reduce_dtypes(dtype: torch.dtype, trainer: TrainerSettings | None) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype weights are stored in when layers compute in `dtype`, and the dtype of gradient sums."""
    if dtype == torch.float64 or trainer is None:
        return dtype, torch.promote_types(dtype, torch.float32)
    reduce: torch.dtype = getattr(torch, trainer.reduce_dtype)
    if not trainer.master_weights:
        return dtype, reduce
    if dtype == torch.float32:
        raise ConfigError("trainer.master_weights = true has no effect: model.dtype is already float32; leave it out")
    return torch.float32, reduce


def rank_device(world: World, device: torch.device, name: str) -> torch.device:
    """Select the device of this rank among those of the given type."""
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ConfigError(
            f'model.device = "{name}" is a single device, but there are {world.size} ranks; use "{device.type}" to give'
            " each rank its own"
        )
    count = torch.accelerator.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"rank {world.rank} has local rank {world.local_rank}, but its machine has only {count} {device.type}"
            " devices; lower trainer.ranks"
        )
    torch.accelerator.set_device_index(world.local_rank)
    return torch.device(device.type, world.local_rank)
