"""Write and read the training state of several ranks with torch's distributed checkpoints; each rank writes its shards.

The files are safetensors with the position of each shard in their metadata, so they can be read on any number of ranks,
including one; nothing is pickled. They include the weights in the precision they are stored in. All ranks must share
the folder; the caller writes the manifest of the complete checkpoint.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from keel.common.atomic_files import read_json, write_json
from keel.errors import ModelError
from keel.training.model.optimizer_state import Moments, iter_named_parameters

SHARDS_FOLDER = "shards"
RATES_FILE = "rates.json"
_WEIGHT_KEY = "weight"
_STEP_KEY = "step"


def write_shards(
    training_folder: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, *, is_first_rank: bool
) -> None:
    """Write weights and moments; all ranks must call it. The first rank also writes learning rates and step counts."""
    state: dict[str, Any] = {f"{_WEIGHT_KEY}.{name}": parameter.detach() for name, parameter in parameters.items()}
    rates, steps = {}, {}
    for parameter, name, group in iter_named_parameters(parameters, optimizer):
        rates[name] = float(group["lr"])
        for entry, value in optimizer.state.get(parameter, {}).items():
            if entry == _STEP_KEY:
                steps[name] = float(value)  # a scalar, which cannot be sharded
            else:
                state[f"{entry}.{name}"] = value.detach()
    folder = training_folder / SHARDS_FOLDER
    folder.mkdir(exist_ok=True)
    try:
        save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise ModelError(f"{folder} could not be written: {_error_message(error)}") from error
    if is_first_rank:
        write_json(training_folder / RATES_FILE, {"optimizer": type(optimizer).__name__, "lr": rates, "steps": steps})


def read_shards(
    training_folder: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    single_process: bool,
) -> tuple[dict[str, Tensor], Moments, dict[str, float]]:
    """Read weights, moments and learning rates by parameter, sharded like the parameters, without setting them.

    `single_process` means that no other ranks read together with this process.
    """
    rates = read_json(training_folder / RATES_FILE)
    if rates.get("optimizer") != type(optimizer).__name__:
        raise ModelError(
            f"{training_folder} is the state of {rates.get('optimizer')}, not of {type(optimizer).__name__}"
        )
    folder = training_folder / SHARDS_FOLDER
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, ValueError, LookupError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    state: dict[str, Any] = {}
    for key, stored in metadata.items():
        name = key.partition(".")[2]
        if name not in parameters:
            raise ModelError(f"{folder} contains {key}, which is not a trainable parameter of the model")
        if stored.size != parameters[name].shape:  # type: ignore[union-attr]
            raise ModelError(f"{folder}: {key} has shape {tuple(stored.size)}, not {tuple(parameters[name].shape)}")  # type: ignore[union-attr]
        state[key] = torch.empty_like(parameters[name].detach(), dtype=stored.properties.dtype)  # type: ignore[union-attr]
    missing = sorted(name for name in parameters if f"{_WEIGHT_KEY}.{name}" not in state)
    if missing or rates["lr"].keys() != parameters.keys():
        raise ModelError(f"{folder} does not have the model's parameters: {(missing or ['some'])[0]} missing")
    try:
        with warnings.catch_warnings():
            # torch warns about reading in a single process, which is intended here
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=single_process)
    except (CheckpointException, OSError, ValueError) as error:
        raise ModelError(f"{folder} cannot be read: {_error_message(error)}") from error
    weights = {name: state.pop(f"{_WEIGHT_KEY}.{name}") for name in parameters}
    moments: Moments = {name: {} for name in parameters}
    for key, tensor in state.items():
        entry, _, name = key.partition(".")
        moments[name][entry] = tensor
    for name, step in rates["steps"].items():
        moments[name][_STEP_KEY] = torch.tensor(step)
    return weights, moments, dict(rates["lr"])


def _error_message(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error)
    rank, (reason, _) = next(iter(failures.items()))
    return f"rank {rank}: {reason}"
