"""The training signal: who may train, how much, and what became of every token."""

from keel.signal.advantages import MovingBaseline, advantages
from keel.signal.metrics import Histogram, Metric, Metrics
from keel.signal.objective import Objective, ObjectiveResult, objective
from keel.signal.step_totals import StepTotals
from keel.signal.token_batch import TokenBatch

__all__ = [
    "Histogram",
    "Metric",
    "Metrics",
    "MovingBaseline",
    "Objective",
    "ObjectiveResult",
    "StepTotals",
    "TokenBatch",
    "advantages",
    "objective",
]
