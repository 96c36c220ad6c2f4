"""The settings of a run, from the root. Holds only what acts: each room adds its table when it exists."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.config.objective import ObjectiveSettings
from keel.config.policy import CheckpointSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.config.settings import Settings, refuse

Estimator = Literal["group_mean", "group_mean_std", "leave_one_out", "mean_normalised", "moving_baseline", "constant"]


class AdvantageSettings(Settings):
    """How rewards become advantages."""

    name: Estimator = "group_mean"
    """The baseline and scale; see docs/objectives.md."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """moving_baseline: the share of the old baseline that stays; not given: 0.95."""
    baseline: float | None = None
    """constant: the value subtracted from each reward; not given: 0."""

    @model_validator(mode="after")
    def _can_act(self) -> Self:
        for field, owner in (("decay", "moving_baseline"), ("baseline", "constant")):
            if getattr(self, field) is not None and self.name != owner:
                raise refuse(f'{{{field}}} cannot act: it belongs to name = "{owner}"', **{field: getattr(self, field)})
        return self


class RunSettings(Settings):
    """Everything a run is configured by."""

    objective: ObjectiveSettings = Field(default_factory=lambda: ObjectiveSettings(name="icepop"))
    """The training signal."""
    advantages: AdvantageSettings = AdvantageSettings()
    """From rewards to advantages."""
    model: ModelSettings = ModelSettings()
    """What is trained."""
    trainer: TrainerSettings = TrainerSettings()
    """From a step's samples to new weights."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """What stays on disk."""
    references: dict[str, ReferenceSettings] = {}
    """Frozen policies by name, for objectives that compare with a reference."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of everything that is random."""
