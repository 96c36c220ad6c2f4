"""Objectives as data: compositions, gate statistics, presets and their descriptions.

Nothing here imports torch. `keel.signal` turns a composition into tensor arithmetic.
"""

from keel.objectives.catalog import RECIPES
from keel.objectives.composition import Composition, Gate, Penalty, Policy, Reduction, Weight
from keel.objectives.preset import Recipe
from keel.objectives.resolve import ObjectiveSettings, resolve_objective

__all__ = [
    "RECIPES",
    "Composition",
    "Gate",
    "ObjectiveSettings",
    "Penalty",
    "Policy",
    "Recipe",
    "Reduction",
    "Weight",
    "resolve_objective",
]
