"""Run a rank other than 0: wait for a command, execute it on its shard, and repeat.

A worker gets its settings from rank 0, so command lines cannot disagree, and has the same trainer as rank 0. It owns
neither the run folder nor the terminal. It exits on the end command or when rank 0 has exited; an error that does not
also occur on rank 0 ends it with a message.
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
"""Seconds to wait for other ranks in a collective. The configured trainer.rank_timeout applies on rank 0, which ends
this process when it expires."""


def run_rank_worker(rank_info: RankInfo) -> None:
    """Execute the commands of rank 0 until the run ends."""
    logging.getLogger("keel").setLevel(logging.ERROR)  # rank 0 logs the same warnings
    world = World(rank_info, connect_store(rank_info), COLLECTIVE_TIMEOUT)
    worker = RankWorker(world)
    try:
        for command, payload in world.commands():
            try:
                worker.execute(command, payload)
            except KeelError as error:
                world.report_refusal(error)
            else:
                world.acknowledge()
    except RuntimeError as error:
        world.report_failure(error)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise RankError(
            f"rank {rank_info.rank} failed ({reason}); rank 0 has exited, or see its message for details"
        ) from error
    world.shutdown()


class RankWorker:
    """The trainer of one rank and its handlers for the commands of rank 0."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trainer: Trainer | None = None

    def execute(self, command: str, payload: bytes) -> None:
        """Execute this rank's part of a command."""
        arguments, samples, objective = decode_command(payload)
        if command == "create":
            self._create_trainer(**arguments)
            return
        assert self.trainer is not None
        handlers: dict[str, Callable[..., Any]] = {
            "step": lambda version, steps: self._step(samples, objective, version, steps),
            "score": lambda: self._loaded_trainer.logprobs(samples),
            "set_references": self._set_references,
            "save": lambda folder, step: write_rank_checkpoint(Path(folder), *self._model_and_optimizer, step),
            "load": lambda folder: restore_checkpoint(Path(folder), *self._model_and_optimizer),
            "gather": lambda adapter: gather_weights(self._loaded_trainer.model, adapter=adapter),
        }
        handlers[command](**arguments)

    @property
    def _loaded_trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def _model_and_optimizer(self) -> tuple[Any, Any]:
        return self._loaded_trainer.model, self._loaded_trainer.optimizer

    def _create_trainer(self, model: Any, trainer: Any, teacher: Any, seed: int) -> None:
        self.trainer = None  # free the previous trainer's memory first
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
        self._loaded_trainer.steps = steps  # the count of rank 0, because the learning rate depends on it
        self._loaded_trainer.step(samples, objective, version=version)

    def _set_references(self, references: dict[str, Any], checkpoints: str) -> None:
        settings = {name: ReferenceSettings.model_validate(values) for name, values in references.items()}
        self._loaded_trainer.set_references(settings, Checkpoints(Path(checkpoints), CheckpointSettings()))
