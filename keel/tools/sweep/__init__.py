"""Several short runs that differ in one thing, side by side: the comparison that settles what a recording cannot.

A trial is a variant (an objective, or the values of some settings) and a seed. All trials of a seed have the same
start, the same tasks under the same group names and the same seeds of sampling. `plan` says which trials there are,
`work` runs them, `results` reads their ledgers, `page` and `long` render. No winner is named: one sees the spread.
"""

from keel.tools.sweep.plan import SweepPlan, Trial, Variant
from keel.tools.sweep.results import SweepResults
from keel.tools.sweep.runner import SweepCallback, SweepRunner, TrialOutcome

__all__ = ["SweepCallback", "SweepPlan", "SweepResults", "SweepRunner", "Trial", "TrialOutcome", "Variant"]
