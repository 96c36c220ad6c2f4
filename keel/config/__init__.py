"""Typed settings of a run.

Nothing here imports torch, so settings can be read, validated and printed quickly on any machine.
"""

from keel.config.engine import EngineSettings, PoolSettings, PublishSettings
from keel.config.launch import LaunchSettings
from keel.config.load import LoadedSettings, load_settings
from keel.config.rollout import (
    CurriculumSettings,
    EnvironmentSettings,
    EpisodeLimits,
    RendererSettings,
    Sampling,
    SchedulerSettings,
)
from keel.config.run import AdvantageSettings, EvaluationSettings, MetricsSettings, RunSettings
from keel.config.sft import SftSettings
from keel.config.trainer import (
    CheckpointSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ReferenceSettings,
    TrainerSettings,
)

__all__ = [
    "AdvantageSettings",
    "CheckpointSettings",
    "CurriculumSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "EpisodeLimits",
    "EvaluationSettings",
    "LaunchSettings",
    "LoadedSettings",
    "LoraSettings",
    "MetricsSettings",
    "ModelSettings",
    "OptimizerSettings",
    "PoolSettings",
    "PublishSettings",
    "ReferenceSettings",
    "RendererSettings",
    "RunSettings",
    "Sampling",
    "SchedulerSettings",
    "SftSettings",
    "TrainerSettings",
    "load_settings",
]
