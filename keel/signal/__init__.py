"""The training signal: objectives, advantages and metrics as tensor arithmetic."""

from keel.signal.advantages import MovingBaseline, advantages
from keel.signal.metrics import Histogram, Metric, Metrics
from keel.signal.objective import Objective, ObjectiveResult, objective
from keel.signal.step_totals import StepCounts, StepTotals
from keel.signal.token_batch import TokenBatch

__all__ = [
    "Histogram",
    "Metric",
    "Metrics",
    "MovingBaseline",
    "Objective",
    "ObjectiveResult",
    "StepCounts",
    "StepTotals",
    "TokenBatch",
    "advantages",
    "objective",
]
