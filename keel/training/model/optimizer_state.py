"""Save and restore optimizer moments and random states, which a run needs besides its weights to resume exactly.

Both are stored as safetensors: named tensors and strings, no pickle, no code run on reading. Moments are stored under
their parameters' names, independent of the order of parameters and groups. Of the optimizer's settings only the
learning rate is stored, because the schedule changes it; the others come from the caller, who may change them between
runs.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from keel.common.safe_read import parse_json
from keel.errors import ModelError
from keel.training.distributed.fsdp import shard_like

Moments = dict[str, dict[str, Tensor]]
"""Tensors by parameter name, then by the optimizer's name: exp_avg, exp_avg_sq, step."""


def write_optimizer(path: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write the optimizer's tensors by parameter name, and the learning rate of each parameter."""
    tensors, rates = {}, {}
    for parameter, name, group in iter_named_parameters(parameters, optimizer):
        rates[name] = float(group["lr"])
        for entry, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{entry}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    write_tensors(path, tensors, {"optimizer": type(optimizer).__name__, "lr": rates})


def iter_named_parameters(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.nn.Parameter, str, dict[str, Any]]]:
    """Yield each parameter of the optimizer with its name and its group."""
    names = {parameter: name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ModelError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not a trainable parameter"
                    " of the model; a checkpoint would lose its moments"
                )
            yield parameter, names[parameter], group


def read_optimizer(
    path: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[Moments, dict[str, float]]:
    """Read moments and learning rates by parameter name and check them against the optimizer, without setting them."""
    tensors, metadata = read_tensors(path)
    if metadata.get("optimizer") != type(optimizer).__name__:
        raise ModelError(
            f"{path} is the state of {metadata.get('optimizer')}, the optimizer is {type(optimizer).__name__}"
        )
    rates: dict[str, float] = metadata["lr"] if isinstance(metadata.get("lr"), dict) else {}
    if not all(isinstance(rate, float | int) for rate in rates.values()):
        raise ModelError(f"{path} has a learning rate that is not a number")
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    expected = {name for name, parameter in parameters.items() if id(parameter) in optimized}
    if rates.keys() != expected:
        unmatched = sorted(rates.keys() ^ expected)
        raise ModelError(f"{path} does not have the optimizer's parameters: they differ by {_shorten_list(unmatched)}")
    moments: Moments = {name: {} for name in rates}
    for key, tensor in tensors.items():
        entry, _, name = key.partition(".")
        if name not in moments:
            raise ModelError(f"{path}: {key} belongs to a parameter that the optimizer does not have")
        if tensor.ndim and tensor.shape != parameters[name].shape:
            raise ModelError(f"{path}: {key} has shape {tuple(tensor.shape)}, not {tuple(parameters[name].shape)}")
        moments[name][entry] = tensor
    return moments, rates


def restore_optimizer(
    moments: Moments,
    rates: dict[str, float],
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Set moments and learning rates, sharding full tensors for this rank. Nothing is cast."""
    for parameter, name, group in iter_named_parameters(parameters, optimizer):
        # torch keeps step counts on the CPU unless a fused or capturable kernel reads them
        on_device = bool(group.get("capturable") or group.get("fused"))
        group["lr"] = rates[name]
        optimizer.state.pop(parameter, None)
        if moments[name]:
            optimizer.state[parameter] = {
                entry: _place_like(tensor, parameter, on_device) for entry, tensor in moments[name].items()
            }


def _place_like(tensor: Tensor, parameter: torch.nn.Parameter, on_device: bool) -> Tensor:
    if not tensor.ndim:
        return tensor.to(parameter.device) if on_device else tensor
    tensor = tensor.to(parameter.device)
    return tensor if isinstance(tensor, DTensor) else shard_like(tensor, parameter)


def write_rng_state(path: Path) -> None:
    """Write the state of every generator a run may draw from: torch on each device, numpy and Python."""
    version, state, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(state, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    metadata = {
        "python": [version, None if gauss is None else float(gauss).hex()],
        "numpy": [str(algorithm), int(position), int(has_gauss), float(cached).hex()],
    }
    write_tensors(path, tensors, metadata)


def restore_rng_state(path: Path) -> None:
    """Restore every generator to the state saved by `write_rng_state`. Devices that do not exist are skipped."""
    tensors, metadata = read_tensors(path)
    try:
        version, gauss = metadata["python"]
        algorithm, position, has_gauss, cached = metadata["numpy"]
        torch.set_rng_state(tensors["torch"])
        random.setstate((version, tuple(tensors["python"].tolist()), None if gauss is None else float.fromhex(gauss)))
        keys = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state((algorithm, keys, position, has_gauss, float.fromhex(cached)))
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    except (LookupError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ModelError(f"{path} does not contain valid random states: {error}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write tensors and JSON metadata. Equal contents give identical bytes."""
    # under one key, because safetensors writes several metadata keys in an order that differs between processes
    save_file(tensors, path, metadata={"keel": json.dumps(metadata)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read all tensors of a safetensors file on the CPU, and its metadata if Keel wrote any."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = parse_json((file.metadata() or {}).get("keel", "{}"))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(metadata, dict):
        raise ModelError(f"{path} cannot be read: its metadata is not a JSON object")
    return tensors, metadata


def _shorten_list(names: list[Any], count: int = 3) -> str:
    shown = ", ".join(map(str, names[:count]))
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
