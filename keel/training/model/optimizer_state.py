"""What a run needs beside its weights to go on as if it had not stopped: the optimizer's moments and the random states.

Both are safetensors: tensors by name and strings, no pickle, nothing that runs when it is read. The moments are stored
under the names of their parameters, so that they find their places in any order of parameters and groups. Of the
optimizer's settings only the learning rate is stored, the one that a schedule moves; the others are the caller's, who
may have changed them on purpose.
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
"""By parameter, then by the optimizer's own name: exp_avg, exp_avg_sq, step."""


def write_optimizer(path: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's tensors by parameter name, and the learning rate of each parameter."""
    tensors, rates = {}, {}
    for parameter, name, group in iter_named_parameters(parameters, optimizer):
        rates[name] = float(group["lr"])
        for entry, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{entry}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    write_tensors(path, tensors, {"optimizer": type(optimizer).__name__, "lr": rates})


def iter_named_parameters(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.nn.Parameter, str, dict[str, Any]]]:
    """What the optimizer holds: each parameter, its name and its group."""
    names = {parameter: name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ModelError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not train;"
                    " a checkpoint would lose its moments"
                )
            yield parameter, names[parameter], group


def read_optimizer(
    path: Path, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[Moments, dict[str, float]]:
    """Moments and learning rates by parameter name, checked against the model and the optimizer; nothing is set yet."""
    tensors, said = read_tensors(path)
    if said.get("optimizer") != type(optimizer).__name__:
        raise ModelError(f"{path} is the state of {said.get('optimizer')}, the optimizer is {type(optimizer).__name__}")
    rates: dict[str, float] = said["lr"] if isinstance(said.get("lr"), dict) else {}
    if not all(isinstance(rate, float | int) for rate in rates.values()):
        raise ModelError(f"{path} has a learning rate that is no number")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    expected = {name for name, parameter in parameters.items() if id(parameter) in held}
    if rates.keys() != expected:
        strangers = sorted(rates.keys() ^ expected)
        raise ModelError(
            f"{path} is of other parameters than the optimizer's: they differ by {_shorten_list(strangers)}"
        )
    moments: Moments = {name: {} for name in rates}
    for key, tensor in tensors.items():
        entry, _, name = key.partition(".")
        if name not in moments:
            raise ModelError(f"{path}: {key} is of a parameter that the optimizer does not have")
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
    """Put what was read in its place, this rank's part of what is whole. Bits are kept: nothing is cast."""
    for parameter, name, group in iter_named_parameters(parameters, optimizer):
        # torch keeps step counts on the CPU unless its kernels read them
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
    """The state of every generator a run may draw from: torch on each device, numpy, Python."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    said = {
        "python": [version, None if gauss is None else float(gauss).hex()],
        "numpy": [str(kind), int(place), int(has_gauss), float(cached).hex()],
    }
    write_tensors(path, tensors, said)


def restore_rng_state(path: Path) -> None:
    """Let every generator go on from where `write_random` found it. Devices that are not there are left out."""
    tensors, said = read_tensors(path)
    try:
        version, gauss = said["python"]
        kind, place, has_gauss, cached = said["numpy"]
        torch.set_rng_state(tensors["torch"])
        random.setstate((version, tuple(tensors["python"].tolist()), None if gauss is None else float.fromhex(gauss)))
        keys = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state((kind, keys, place, has_gauss, float.fromhex(cached)))
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    except (LookupError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ModelError(f"{path} holds no random states: {error}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Tensors and a few plain values. Equal contents are equal bytes."""
    # under one key: safetensors writes several in an order that differs from process to process
    save_file(tensors, path, metadata={"keel": json.dumps(metadata)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a safetensors file, on the CPU, and the plain values if Keel wrote any."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said = parse_json((file.metadata() or {}).get("keel", "{}"))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise ModelError(f"{path} cannot be read: what it says of itself is no object")
    return tensors, said


def _shorten_list(names: list[Any], count: int = 3) -> str:
    shown = ", ".join(map(str, names[:count]))
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
