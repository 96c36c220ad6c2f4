"""Typed settings: what a run, an objective or a gate is made of, as data.

Nothing in this room imports torch, so that settings can be read, checked and printed anywhere in a moment.
"""

from keel.config.composition import Composition, Gate, Penalty, Policy, Reduction, Weight
from keel.config.launch import LaunchSettings
from keel.config.load import Loaded, load
from keel.config.objective import ObjectiveSettings, resolve_objective
from keel.config.policy import (
    CheckpointSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    ReferenceSettings,
    TrainerSettings,
)
from keel.config.recipe import Recipe
from keel.config.recipes import RECIPES
from keel.config.rollout import (
    EngineSettings,
    EnvironmentSettings,
    EpisodeLimits,
    PoolSettings,
    PublishSettings,
    RendererSettings,
    Sampling,
    SchedulerSettings,
)
from keel.config.run import AdvantageSettings, EvaluationSettings, MetricsSettings, RunSettings

__all__ = [
    "RECIPES",
    "AdvantageSettings",
    "CheckpointSettings",
    "Composition",
    "EngineSettings",
    "EnvironmentSettings",
    "EpisodeLimits",
    "EvaluationSettings",
    "Gate",
    "LaunchSettings",
    "Loaded",
    "LoraSettings",
    "MetricsSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "OptimizerSettings",
    "Penalty",
    "Policy",
    "PoolSettings",
    "PublishSettings",
    "Recipe",
    "Reduction",
    "ReferenceSettings",
    "RendererSettings",
    "RunSettings",
    "Sampling",
    "SchedulerSettings",
    "TrainerSettings",
    "Weight",
    "load",
    "resolve_objective",
]
