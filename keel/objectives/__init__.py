"""Objectives as data: compositions, gate statistics, presets and their descriptions.

Nothing here imports torch. `keel.signal` turns a composition into tensor arithmetic.
"""

from keel.objectives.catalog import PRESETS
from keel.objectives.composition import Composition, Gate, ImportanceWeight, Penalty, PolicyTerm, Reduction
from keel.objectives.preset import ObjectivePreset
from keel.objectives.resolve import ObjectiveSettings, resolve_objective

__all__ = [
    "PRESETS",
    "Composition",
    "Gate",
    "ImportanceWeight",
    "ObjectivePreset",
    "ObjectiveSettings",
    "Penalty",
    "PolicyTerm",
    "Reduction",
    "resolve_objective",
]
