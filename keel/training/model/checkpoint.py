"""Write and read the checkpoints of a run, `checkpoints/step_N/`; each is sufficient to resume bit for bit.

A checkpoint contains the weights in Hugging Face or PEFT layout (vLLM, transformers and peft load the folder
directly), `keel.json` (which model the weights belong to, which versions wrote them), and a `training/` folder, which
weight loaders do not read, with the optimizer's moments, the random states and the caller's state as JSON.
`manifest.json` has a hash of each file. Nothing is pickled.

Guarantees: a checkpoint appears by one rename after its bytes are on disk, even if the process is killed in between;
corruption is detected by hash and the previous checkpoint is used, with a warning; the newest checkpoint is never
removed to free space. One run writes at a time. Of several ranks each writes its own shards (`sharded_checkpoint`) to a
folder all ranks share, and a checkpoint can be loaded on a different number of ranks.
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
"""A separate folder, because vLLM loads every safetensors file next to config.json as model weights."""
OPTIMIZER_FILE = "optimizer.safetensors"


class Checkpoints:
    """The checkpoints of one run.

    A step is written once. Saving a step whose checkpoint exists and is intact raises, since two checkpoints of one
    step mean that the run went back to an earlier step; call `rewind` first. A corrupt checkpoint is replaced.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings) -> None:
        self.folder = folder
        self.settings = settings
        self._pinned: set[int] = set()

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self.folder / f"step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, sorted; incomplete checkpoints never have a step's folder name."""
        if not self.folder.is_dir():
            return []
        matches = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def verify(self, step: int) -> None:
        """Read the complete checkpoint and raise, naming the file, if anything is missing, truncated or changed."""
        if not self.path(step).is_dir():
            existing = ", ".join(map(str, self.steps())) or "none"
            raise ModelError(f"there is no checkpoint of step {step} in {self.folder}; steps that exist: {existing}")
        atomic_files.verify_manifest(self.path(step))

    def latest(self) -> int | None:
        """Return the newest step whose checkpoint is intact. Warn about each newer corrupt one, naming the file."""
        for step in reversed(self.steps()):
            try:
                self.verify(step)
            except atomic_files.UnreadableFile:
                raise  # falling back silently would discard training that is still on disk
            except ModelError as error:
                warnings.warn(f"checkpoint of step {step} is corrupt and not used: {error}", stacklevel=2)
            else:
                return step
        return None

    def save(self, step: int, model: Model, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove checkpoints not covered by `keep_last` and `keep_every`.

        Any failure raises `ModelError` and leaves all earlier checkpoints unchanged.
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

        Everything is read and checked before anything is set: an invalid checkpoint leaves the model unchanged.
        """
        self.verify(step)
        folder = self.path(step)
        state = atomic_files.read_json(folder / TRAINING_FOLDER / "state.json")
        ranks = (
            nullcontext()
            if model.world is None
            else model.world.run_on_all_ranks("load", lambda: encode_command(folder=str(folder.resolve())))
        )
        with ranks:
            restore_checkpoint(folder, model, optimizer)
        # last, because loading a network may draw random numbers for weights that are then replaced
        restore_rng_state(folder / TRAINING_FOLDER / "random.safetensors")
        return state

    def pin(self, step: int) -> None:
        """Never remove the checkpoint of this step in `save`, because something refers to it."""
        self._pinned.add(step)

    def rewind(self, step: int) -> None:
        """Remove every checkpoint after a step, because the run resumes from it and will write them again."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _remove_if_broken(self, step: int) -> None:
        try:
            self.verify(step)
        except atomic_files.UnreadableFile:
            raise
        except ModelError as error:
            warnings.warn(f"checkpoint of step {step} is corrupt and is replaced: {error}", stacklevel=3)
            self._remove(step)
        else:
            raise ModelError(
                f"{self.path(step)} exists, is intact and is not overwritten; after going back to an earlier step call"
                " Checkpoints.rewind first"
            )

    def _remove_old(self, saved_step: int) -> None:
        """Remove checkpoints older than the newest `keep_last` intact ones; corrupt ones do not count."""
        intact = [step for step in self.steps() if step == saved_step or self._has_expected_sizes(step)]
        kept = set(intact[-self.settings.keep_last :]) | {saved_step}
        every = self.settings.keep_every
        for step in self.steps():
            if step < min(kept) and step not in self._pinned and not (every and step % every == 0):
                try:
                    self._remove(step)
                except ModelError as error:
                    warnings.warn(str(error), stacklevel=3)

    def _has_expected_sizes(self, step: int) -> bool:
        # sizes only: hashing gigabytes of old checkpoints at every save would take too long
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
    """Write one rank's part of a checkpoint; rank 0 also writes the full weights, which engines and loaders read."""
    assert model.world is not None
    weights_io.write_weights(folder, model, step=step)
    write_shards(folder / TRAINING_FOLDER, model.parameters(), optimizer, is_first_rank=model.world.rank == 0)


def restore_checkpoint(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights and moments from a full or sharded checkpoint into a full or sharded model."""
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
        raise ModelError(f"the state of a checkpoint must be JSON-serialisable: {error}") from error
    return text
