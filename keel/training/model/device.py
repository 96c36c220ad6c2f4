"""Where a model computes, and in what: devices and precisions from their names in the settings.

A device that is not there, or a precision that could not act, is refused by the setting's name.
"""

import torch

from keel.config.trainer import TrainerSettings
from keel.errors import ConfigError
from keel.training.distributed.world import World


def find_device(name: str) -> torch.device:
    """The device of that name; auto: the accelerator that torch finds."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return found or torch.device("cpu")
    here = f"this machine has cpu{f' and {found.type}' if found else ' only'}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'model.device = "{name}" is no device that torch knows; {here}') from error
    if device.type == "cpu":
        return device
    if found is None or device.type != found.type or (device.index or 0) >= torch.accelerator.device_count():
        raise ConfigError(f'model.device = "{name}" is not there; {here}')
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """What a model computes in; auto: bfloat16 on a GPU that has it."""
    if name != "auto":
        if name == "float64" and device.type == "mps":
            raise ConfigError(f'model.dtype = "float64" does not exist on model.device = "{device}"')
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def weight_and_reduce_dtypes(dtype: torch.dtype, trainer: TrainerSettings | None) -> tuple[torch.dtype, torch.dtype]:
    """What weights are kept in when layers compute in `dtype`, and what gradients are summed over ranks in."""
    if dtype == torch.float64 or trainer is None:
        return dtype, torch.promote_types(dtype, torch.float32)
    reduce: torch.dtype = getattr(torch, trainer.reduce_dtype)
    if not trainer.master_weights:
        return dtype, reduce
    if dtype == torch.float32:
        raise ConfigError("trainer.master_weights = true cannot act: model.dtype is float32 already; leave it out")
    return torch.float32, reduce


def rank_device(world: World, device: torch.device, name: str) -> torch.device:
    """The device of this rank among those of a kind."""
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ConfigError(
            f'model.device = "{name}" names one device for {world.size} ranks; use "{device.type}", and each rank takes'
            " its own"
        )
    count = torch.accelerator.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"rank {world.rank} is number {world.local_rank} on its machine, which has {count} of {device.type}; lower"
            " trainer.ranks"
        )
    torch.accelerator.set_device_index(world.local_rank)
    return torch.device(device.type, world.local_rank)
