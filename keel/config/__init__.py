"""Typed settings: what a run, an objective or a gate is made of, as data.

Nothing in this room imports torch, so that settings can be read, checked and printed anywhere in a moment.
"""

from keel.config.composition import Composition, Gate, Penalty, Policy, Reduction, Weight
from keel.config.load import Loaded, load
from keel.config.objective import ObjectiveSettings, resolve_objective
from keel.config.recipe import Recipe
from keel.config.recipes import RECIPES
from keel.config.run import RunSettings

__all__ = [
    "RECIPES",
    "Composition",
    "Gate",
    "Loaded",
    "ObjectiveSettings",
    "Penalty",
    "Policy",
    "Recipe",
    "Reduction",
    "RunSettings",
    "Weight",
    "load",
    "resolve_objective",
]
