"""What a rank other than 0 does: wait for a command, do its part with its own shard, and wait again.

It gets its settings from rank 0, so that command lines cannot disagree, and holds the same trainer as rank 0 does. It
owns no run folder and no terminal. It ends when rank 0 says so or is gone; an error that rank 0 does not have too ends
it with a message.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keel.common.sample import Sample
from keel.config import CheckpointSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.errors import KeelError, RankError
from keel.signal import Objective
from keel.training.distributed.rank_command import decode_command
from keel.training.distributed.rank_processes import connect_store
from keel.training.distributed.world import RankInfo, World
from keel.training.model.checkpoint import Checkpoints, restore_checkpoint, write_rank_checkpoint
from keel.training.model.weights_io import gather_weights
from keel.training.step.trainer import Trainer

COLLECTIVE_TIMEOUT = 3600.0
"""Seconds to wait for the others in a collective: rank 0 has the patience that the settings say, and ends this process
when it has run out."""


def run_rank_worker(rank_info: RankInfo) -> None:
    """Take part in a run as one of its other ranks, to its end."""
    logging.getLogger("keel").setLevel(logging.ERROR)  # rank 0 says the same
    world = World(rank_info, connect_store(rank_info), COLLECTIVE_TIMEOUT)
    follower = RankWorker(world)
    try:
        for command, content in world.commands():
            try:
                follower.execute(command, content)
            except KeelError as error:
                world.report_refusal(error)
            else:
                world.acknowledge()
    except RuntimeError as error:
        world.report_failure(error)
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise RankError(f"rank {rank_info.rank} cannot go on ({why}); rank 0 is gone, or says more") from error
    world.shutdown()


class RankWorker:
    """The trainer of one rank, and how it does what is asked of all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trainer: Trainer | None = None

    def execute(self, command: str, payload: bytes) -> None:
        """This rank's part of a command."""
        said, samples, objective = decode_command(payload)
        if command == "begin":
            self._create_trainer(**said)
            return
        assert self.trainer is not None
        parts: dict[str, Callable[..., Any]] = {
            "step": lambda version, steps: self._step(samples, objective, version, steps),
            "score": lambda: self._loaded_trainer.logprobs(samples),
            "refer": self._set_references,
            "save": lambda folder, step: write_rank_checkpoint(Path(folder), *self._model_and_optimizer, step),
            "load": lambda folder: restore_checkpoint(Path(folder), *self._model_and_optimizer),
            "gather": lambda adapter: gather_weights(self._loaded_trainer.model, adapter=adapter),
        }
        parts[command](**said)

    @property
    def _loaded_trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def _model_and_optimizer(self) -> tuple[Any, Any]:
        return self._loaded_trainer.model, self._loaded_trainer.optimizer

    def _create_trainer(self, model: Any, trainer: Any, teacher: Any, seed: int) -> None:
        self.trainer = None  # the one before, first: its memory is needed
        settings = TrainerSettings.model_validate(trainer)
        self.world.timeout = settings.rank_timeout
        self.trainer = Trainer(
            ModelSettings.model_validate(model),
            settings,
            teacher=None if teacher is None else ModelSettings.model_validate(teacher),
            seed=seed,
            world=self.world,
        )

    def _step(self, samples: list[Sample], objective: Objective | None, version: int | None, steps: int) -> None:
        assert objective is not None
        self._loaded_trainer.steps = steps  # rank 0 counts: the learning rate is a function of it
        self._loaded_trainer.step(samples, objective, version=version)

    def _set_references(self, named: dict[str, Any], checkpoints: str) -> None:
        settings = {name: ReferenceSettings.model_validate(one) for name, one in named.items()}
        self._loaded_trainer.set_references(settings, Checkpoints(Path(checkpoints), CheckpointSettings()))
