"""The trainer behind the Python API: one step at a time, with its reference and its checkpoint.

A step has happened and is on disk, or has not happened: whatever fails, the weights, the optimizer and the step number
are those of the last checkpoint. One reference is held at a time, because each may be a copy of the model. Runs in the
caller's thread.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keel.config import CheckpointSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.errors import ModelError
from keel.signal import MovingBaseline, Objective
from keel.training import Checkpoints, Sample, StepReport, Trainer
from keel.training.model.references import load_references

INITIAL_STEP = 0
"""Step of the checkpoint that holds the model as registered; it is never removed."""


class CheckpointedTrainer(Trainer):
    """A trainer that writes a checkpoint per step. `step_number` is the last step and the version of its weights."""

    def __init__(
        self,
        model: ModelSettings,
        settings: TrainerSettings,
        folder: Path,
        checkpoint_settings: CheckpointSettings,
        seed: int,
    ) -> None:
        """Resume from the last intact checkpoint in the folder, or write the first one."""
        super().__init__(model, settings, seed=seed)
        self.seed = seed
        self.checkpoints = Checkpoints(folder, checkpoint_settings)
        self.checkpoints.pin(INITIAL_STEP)
        self.moving_baseline = MovingBaseline()
        self._reference_key: tuple[Any, ...] | None = None
        latest = self.checkpoints.latest()
        if latest is None and self.checkpoints.steps():
            raise ModelError(
                f"{folder} holds checkpoints, but none is intact; restore one, or use another folder or name"
            )
        self.step_number = INITIAL_STEP if latest is None else latest
        if latest is None:
            self.save(self.checkpoints, INITIAL_STEP, self._checkpoint_state())
        else:
            self._restore()

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint of the last step."""
        return self.checkpoints.path(self.step_number)

    def train_step(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        *,
        reference_source: str | None,
        learning_rate: float | None,
        commit: Callable[[StepReport], None],
    ) -> StepReport:
        """Train a step, record it with `commit` and write its checkpoint.

        `reference_source` is as in `ReferenceSettings.source`.
        """
        self._set_reference(reference_source)
        steps_before, settings = self.steps, self.settings
        if learning_rate is not None:
            optimizer = settings.optimizer.model_copy(update={"lr": learning_rate})
            self.settings = settings.model_copy(update={"optimizer": optimizer})
        try:
            report = self.step(samples, objective, version=self.step_number)
            if report.stepped:
                commit(report)
                self.save(self.checkpoints, self.step_number + 1, self._checkpoint_state())
                self.step_number += 1
        except BaseException:
            if self.steps != steps_before:
                self._restore()
            raise
        finally:
            self.settings = settings
        return report

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"moving_baseline": {str(agent): value for agent, value in self.moving_baseline.state.items()}}

    def _restore(self) -> None:
        stored = self.load(self.checkpoints, self.step_number)
        state = stored.get("moving_baseline", {})
        self.moving_baseline.state = {int(agent): float(value) for agent, value in state.items()}

    # reference

    def _set_reference(self, reference_source: str | None) -> None:
        """Hold this reference and no other; None: no reference."""
        key = None if reference_source is None else (reference_source, _adapter_stamp(reference_source))
        if key == self._reference_key:
            return
        self._clear_references()
        if reference_source is not None:
            kind, _, value = reference_source.partition(":")
            name = f"step_{value}" if kind == "step" else kind
            self.references = load_references(
                {name: ReferenceSettings(source=reference_source)}, self.model, self.checkpoints, self.seed
            )
        self._reference_key = key

    def _clear_references(self) -> None:
        self.references, self._reference_key = None, None
        self._forwards = {id(self.model): self.forward}
        if self.model.peft is not None:
            for name in [name for name in self.model.peft.peft_config if name.startswith("reference_")]:
                self.model.peft.delete_adapter(name)


def _adapter_stamp(source: str) -> tuple[Any, ...]:
    """Return a value that changes when an adapter on disk changes; steps and bases never change."""
    kind, _, value = source.partition(":")
    files = sorted(Path(value).expanduser().glob("adapter_*")) if kind == "adapter" else []
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
