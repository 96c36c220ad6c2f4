"""Train short runs that differ in one setting and compare their results.

A trial is a variant (an objective, or values of settings) and a seed. All trials with the same seed share initial
weights, tasks, group names and sampling seeds. `plan` lists the trials, `runner` runs them, `results` reads their
ledgers, `html` and `long_table` write files. No winner is declared; means are shown with their spread.
"""

from keel.tools.sweep.plan import SweepPlan, Trial, Variant
from keel.tools.sweep.results import SweepResults
from keel.tools.sweep.runner import SweepCallback, SweepRunner, TrialOutcome

__all__ = ["SweepCallback", "SweepPlan", "SweepResults", "SweepRunner", "Trial", "TrialOutcome", "Variant"]
