"""The trainer behind the Python API: one whole step at a time, with its reference, its checkpoint, and its way back.

Guarantees that a step has happened and is on disk, or has not happened: whatever fails on the way, the weights, the
optimizer and the step's number are those of the last checkpoint. One reference is held at a time, since each may be a
copy of the model. It runs in the caller's thread.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.config import CheckpointSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.errors import ModelError
from keel.signal import MovingBaseline, Objective
from keel.training import Checkpoints, Sample, StepReport, Trainer
from keel.training.model.references import prepare

BEGINNING = 0
"""The step whose checkpoint holds the model as it was registered; it is never removed."""


class Learner(Trainer):
    """A trainer that goes from checkpoint to checkpoint. `step` is the last one, and the version of its weights."""

    def __init__(
        self, model: ModelSettings, settings: TrainerSettings, folder: Path, kept: CheckpointSettings, seed: int
    ) -> None:
        """Goes on from the last whole checkpoint in the folder, or writes the first."""
        super().__init__(model, settings, seed=seed)
        self.seed = seed
        self.checkpoints = Checkpoints(folder, kept)
        self.checkpoints.pin(BEGINNING)
        self.moving = MovingBaseline()
        self._referred: tuple[Any, ...] | None = None
        found = self.checkpoints.latest()
        if found is None and self.checkpoints.steps():
            raise ModelError(
                f"{folder} holds checkpoints and none is whole; restore one, or begin in another folder or under"
                " another name"
            )
        self.step_number = BEGINNING if found is None else found
        if found is None:
            self.save(self.checkpoints, BEGINNING, self._state())
        else:
            self._restore()

    @property
    def checkpoint_path(self) -> Path:
        """Of the last step."""
        return self.checkpoints.path(self.step_number)

    def advance(
        self, samples: Sequence[Sample], objective: Objective, *, source: str | None, learning_rate: float | None
    ) -> StepReport:
        """One step and its checkpoint. `source`: the reference, as in `ReferenceSettings`."""
        self._refer(source)
        before, usual = self.steps, self.settings
        if learning_rate is not None:
            optimizer = usual.optimizer.model_copy(update={"lr": learning_rate})
            self.settings = usual.model_copy(update={"optimizer": optimizer})
        try:
            report = self.step(samples, objective, version=self.step_number)
            if report.stepped:
                self.save(self.checkpoints, self.step_number + 1, self._state())
                self.step_number += 1
        except BaseException:
            if self.steps != before:
                self._restore()
            raise
        finally:
            self.settings = usual
        return report

    def _state(self) -> dict[str, Any]:
        return {"moving_baseline": {str(agent): value for agent, value in self.moving.state.items()}}

    def _restore(self) -> None:
        said = self.load(self.checkpoints, self.step_number)
        state = said.get("moving_baseline", {})
        self.moving.state = {int(agent): float(value) for agent, value in state.items()}

    # the reference

    def _refer(self, source: str | None) -> None:
        """Hold this reference, and no other."""
        wanted = None if source is None else (source, _stamp(source))
        if wanted == self._referred:
            return
        self._forget()
        if source is not None:
            kind, _, value = source.partition(":")
            name = f"step_{value}" if kind == "step" else kind
            self.references = prepare({name: ReferenceSettings(source=source)}, self.model, self.checkpoints, self.seed)
        self._referred = wanted

    def _forget(self) -> None:
        self.references, self._referred = None, None
        self._frozen = {id(self.model): self.forward}
        if self.model.peft is not None:
            for name in [name for name in self.model.peft.peft_config if name.startswith("reference_")]:
                self.model.peft.delete_adapter(name)


def _stamp(source: str) -> tuple[Any, ...]:
    """What changes when an adapter on disk does; steps and bases do not."""
    kind, _, value = source.partition(":")
    files = sorted(Path(value).expanduser().glob("adapter_*")) if kind == "adapter" else []
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
