"""Keel: reinforcement-learning post-training of language models with a training signal that can be checked.

Exported names are imported on first use, so that `import keel` and the settings do not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keel.common.extras import missing_dependency

__version__ = "0.1.0"

if TYPE_CHECKING:
    from keel.api.backend import LocalBackend, TrainResult
    from keel.api.run_result import RunResult
    from keel.api.train import train
    from keel.api.trainable_model import TrainableModel
    from keel.api.trajectories import Trajectory, TrajectoryGroup, gather_groups
    from keel.config import (
        CheckpointSettings,
        LoraSettings,
        ModelSettings,
        OptimizerSettings,
        ReferenceSettings,
        TrainerSettings,
        load_settings,
    )
    from keel.errors import BatchError, ConfigError, InvalidSignalError, KeelError, ModelError, StepSkippedError
    from keel.objectives import Composition, Gate, ImportanceWeight, Penalty, PolicyTerm, Reduction
    from keel.signal import (
        Metric,
        Metrics,
        MovingBaseline,
        Objective,
        ObjectiveResult,
        StepTotals,
        TokenBatch,
        advantages,
        objective,
    )
    from keel.signal.audit import declare
    from keel.training import Checkpoints, References, Sample, StepReport, Trainer, load_model

_EXPORTS = {
    "keel.signal.audit": ["declare"],
    "keel.config": [
        "CheckpointSettings",
        "LoraSettings",
        "ModelSettings",
        "OptimizerSettings",
        "ReferenceSettings",
        "TrainerSettings",
        "load_settings",
    ],
    "keel.objectives": ["Composition", "Gate", "ImportanceWeight", "Penalty", "PolicyTerm", "Reduction"],
    "keel.errors": ["BatchError", "ConfigError", "KeelError", "ModelError", "InvalidSignalError", "StepSkippedError"],
    "keel.training": ["Checkpoints", "References", "Sample", "StepReport", "Trainer", "load_model"],
    "keel.api.trainable_model": ["TrainableModel"],
    "keel.api.run_result": ["RunResult"],
    "keel.api.train": ["train"],
    "keel.api.backend": ["LocalBackend", "TrainResult"],
    "keel.api.trajectories": ["Trajectory", "TrajectoryGroup", "gather_groups"],
    "keel.signal": [
        "Metric",
        "Metrics",
        "MovingBaseline",
        "Objective",
        "ObjectiveResult",
        "StepTotals",
        "TokenBatch",
        "advantages",
        "objective",
    ],
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "BatchError",
    "CheckpointSettings",
    "Checkpoints",
    "Composition",
    "ConfigError",
    "Gate",
    "ImportanceWeight",
    "InvalidSignalError",
    "KeelError",
    "LocalBackend",
    "LoraSettings",
    "Metric",
    "Metrics",
    "ModelError",
    "ModelSettings",
    "MovingBaseline",
    "Objective",
    "ObjectiveResult",
    "OptimizerSettings",
    "Penalty",
    "PolicyTerm",
    "Reduction",
    "ReferenceSettings",
    "References",
    "RunResult",
    "Sample",
    "StepReport",
    "StepSkippedError",
    "StepTotals",
    "TokenBatch",
    "TrainResult",
    "TrainableModel",
    "Trainer",
    "TrainerSettings",
    "Trajectory",
    "TrajectoryGroup",
    "advantages",
    "declare",
    "gather_groups",
    "load_model",
    "load_settings",
    "objective",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'keel' has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        missing = missing_dependency(error)
        if missing is None:
            raise
        raise missing from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
