"""Checkpoints of a run: `checkpoints/step_N/`, each complete, checked and enough to go on bit for bit.

A checkpoint holds the weights in the layout of Hugging Face or PEFT (vLLM, transformers and peft load the folder as it
is), `keel.json` (whose weights, which versions), and in `training/`, where loaders of weights do not look, the
optimizer's moments, the random states and the caller's own state as JSON. `manifest.json` has a hash of each file.
There is no pickle in it.

Guarantees: a checkpoint appears by one rename after its bytes are on the disk, whatever happens on the way; damage is
found by hash and the checkpoint before it used, with a warning; the one saved last is never removed to make room.
One run writes at a time; of several ranks each writes its own shards (`shards.py`), in a folder that all of them see,
and any number of ranks can go on from what any number has written.
"""

import json
import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from keel.common import atomic_files
from keel.config.trainer import CheckpointSettings
from keel.errors import ModelError
from keel.training.distributed.rank_command import encode_command
from keel.training.model import weights_io
from keel.training.model.model import Model
from keel.training.model.optimizer_state import (
    read_optimizer,
    restore_optimizer,
    restore_rng_state,
    write_optimizer,
    write_rng_state,
)
from keel.training.model.sharded_checkpoint import SHARDS_FOLDER, read_shards, write_shards

TRAINING_FOLDER = "training"
"""A folder of its own: vLLM takes every safetensors file beside config.json for weights of the model."""
OPTIMIZER_FILE = "optimizer.safetensors"


class Checkpoints:
    """The checkpoints of one run.

    A step is written once. To save one that exists and is good is refused, since two different checkpoints of one step
    mean that a run went back; `rewind` says so. One that exists and is broken is replaced.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        self.folder = folder
        self.settings = settings
        self._pinned: set[int] = set()

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step_{step}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order, by name alone: nothing incomplete ever has such a name."""
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def verify(self, step: int) -> None:
        """Read the whole checkpoint and refuse it, by the file's name, if anything is missing, truncated or changed."""
        if not self.path(step).is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ModelError(f"there is no checkpoint of step {step} in {self.folder}; steps that exist: {there}")
        atomic_files.verify_manifest(self.path(step))

    def latest(self) -> int | None:
        """The newest step whose checkpoint is whole. Each broken one on the way is a warning that names the file."""
        for step in reversed(self.steps()):
            try:
                self.verify(step)
            except atomic_files.UnreadableFile:
                raise  # to go back without asking would throw away training that is still there
            except ModelError as error:
                warnings.warn(f"checkpoint of step {step} is broken and not used: {error}", stacklevel=2)
            else:
                return step
        return None

    def save(self, step: int, model: Model, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove those that `keep_last` and `keep_every` do not keep.

        Whatever goes wrong is a `ModelError`, and all earlier checkpoints are as they were.
        """
        target = self.path(step)
        text = _to_json(state)
        if target.is_dir():
            self._remove_if_broken(step)
        with atomic_files.atomic_folder(target) as folder:
            (folder / TRAINING_FOLDER).mkdir()
            if model.world is None:
                weights_io.write_weights(folder, model, step=step)
                write_optimizer(folder / TRAINING_FOLDER / OPTIMIZER_FILE, model.parameters(), optimizer)
            else:
                with model.world.run_on_all_ranks(
                    "save", lambda: encode_command(folder=str(folder.resolve()), step=step)
                ):
                    write_rank_checkpoint(folder, model, optimizer, step)
            write_rng_state(folder / TRAINING_FOLDER / "random.safetensors")
            (folder / TRAINING_FOLDER / "state.json").write_text(text)
            atomic_files.write_manifest(folder)
        self._remove_old(step)
        return target

    def load(self, step: int, model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restore weights, optimizer and random states, and return the caller's state.

        Everything is read and checked before anything is set: a checkpoint that is refused leaves the model as it was.
        """
        self.verify(step)
        folder = self.path(step)
        said = atomic_files.read_json(folder / TRAINING_FOLDER / "state.json")
        ranks = (
            nullcontext()
            if model.world is None
            else model.world.run_on_all_ranks("load", lambda: encode_command(folder=str(folder.resolve())))
        )
        with ranks:
            restore_checkpoint(folder, model, optimizer)
        # last: reading networks may draw numbers for weights that are then replaced
        restore_rng_state(folder / TRAINING_FOLDER / "random.safetensors")
        return said

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step for as long as this object saves: something refers to it."""
        self._pinned.add(step)

    def rewind(self, step: int) -> None:
        """Remove every checkpoint after a step, because the run goes on from there and will write others."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _remove_if_broken(self, step: int) -> None:
        try:
            self.verify(step)
        except atomic_files.UnreadableFile:
            raise
        except ModelError as error:
            warnings.warn(f"checkpoint of step {step} is broken and is replaced: {error}", stacklevel=3)
            self._remove(step)
        else:
            raise ModelError(
                f"{self.path(step)} exists and is whole, and is not written over; a run that went back to an earlier"
                " step rewinds its checkpoints first"
            )

    def _remove_old(self, saved_step: int) -> None:
        """Remove what is older than the newest `keep_last` whole ones; a broken one is not counted among them."""
        whole = [step for step in self.steps() if step == saved_step or self._has_expected_sizes(step)]
        kept = set(whole[-self.settings.keep_last :]) | {saved_step}
        every = self.settings.keep_every
        for step in self.steps():
            if step < min(kept) and step not in self._pinned and not (every and step % every == 0):
                try:
                    self._remove(step)
                except ModelError as error:
                    warnings.warn(str(error), stacklevel=3)

    def _has_expected_sizes(self, step: int) -> bool:
        # sizes only: reading gigabytes of old checkpoints at every save would be felt
        try:
            atomic_files.verify_manifest(self.path(step), check_hashes=False)
        except ModelError:
            return False
        return True

    def _remove(self, step: int) -> None:
        try:
            atomic_files.remove_folder(self.path(step))
        except OSError as error:
            raise ModelError(f"{self.path(step)} could not be removed: {error.strerror}") from error


def write_rank_checkpoint(folder: Path, model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One rank's part of a checkpoint; rank 0's has the whole weights in it, as engines and others read them."""
    assert model.world is not None
    weights_io.write_weights(folder, model, step=step)
    write_shards(folder / TRAINING_FOLDER, model.parameters(), optimizer, is_first_rank=model.world.rank == 0)


def restore_checkpoint(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Weights and moments from a checkpoint, whole or in shards, into a model that is the one or the other."""
    parameters = model.parameters()
    if not (folder / TRAINING_FOLDER / SHARDS_FOLDER).is_dir():
        values = weights_io.read_weights(folder, model)
        moments, rates = read_optimizer(folder / TRAINING_FOLDER / OPTIMIZER_FILE, parameters, optimizer)
        weights_io.set_weights(values, model)
    else:
        weights_io.check_compatible(folder, model)
        values, moments, rates = read_shards(
            folder / TRAINING_FOLDER, parameters, optimizer, single_process=model.world is None
        )
        with torch.no_grad():
            for name, tensor in values.items():
                parameters[name].copy_(tensor)
    restore_optimizer(moments, rates, parameters, optimizer)


def _to_json(content: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(content), indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise ModelError(f"the state of a checkpoint must be JSON: {error}") from error
    return text
