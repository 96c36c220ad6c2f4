"""The training signal: who may train, how much, and what became of every token."""

from keel.signal.advantages import MovingBaseline, advantages
from keel.signal.batch import TokenBatch
from keel.signal.metrics import Histogram, Metric, Metrics
from keel.signal.objective import Objective, Result, objective
from keel.signal.totals import Totals

__all__ = [
    "Histogram",
    "Metric",
    "Metrics",
    "MovingBaseline",
    "Objective",
    "Result",
    "TokenBatch",
    "Totals",
    "advantages",
    "objective",
]
