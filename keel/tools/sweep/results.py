"""What came of the trials, from their ledgers alone: each run's numbers, and their mean and spread over seeds.

Means are over finished runs: half a run next to a whole one would compare lengths, not variants. Shares and mismatch
of a run are over its tokens, not means of its steps' means. Nothing is tested for significance.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.run.ledger import Ledger, StepRow
from keel.tools.compare.chart_data import BandPoint, Point
from keel.tools.compare.report import replace_non_finite
from keel.tools.sweep.plan import SweepPlan, Trial
from keel.tools.sweep.runner import TrialOutcome

MEASURES = ("training", "evaluation", "mismatch", "dropped_low", "dropped_high", "tokens", "seconds")
"""Of a run. training: mean reward of the last fifth of its steps; evaluation: mean reward on held-out tasks at its end;
mismatch: mean KL between sampler and policy; dropped: share of the trainable tokens that a gate refused, by side;
tokens: that trained; seconds: of all steps."""
CURVES = {
    "reward": "reward",
    "mismatch": "mismatch_kl",
    "masked low": "is_masked_low",
    "masked high": "is_masked_high",
}
"""What is drawn over steps, and the name of the number in a step."""


@dataclass(frozen=True)
class TrialResult:
    """One run."""

    name: str
    variant: str
    seed: int
    status: str
    """finished, stopped, failed, running, or waiting: not begun."""
    error: str
    steps: int
    measures: dict[str, float]
    """By MEASURES; NaN where it is not known."""
    evaluations: dict[str, dict[str, float]]
    """The last of each environment: reward, low, high."""
    step_rows: list[StepRow]
    evaluation_rows: list[tuple[int, str, dict[str, Any]]]

    @property
    def interval(self) -> tuple[float, float]:
        """Of the evaluation, over tasks; with several environments there is one for each and none for their mean."""
        if len(self.evaluations) != 1:
            return math.nan, math.nan
        (found,) = self.evaluations.values()
        return found["low"], found["high"]

    def curve(self, name: str) -> dict[int, float]:
        """One of CURVES, or "evaluation", by step."""
        if name != "evaluation":
            values = {row.step: row.metrics.get(CURVES[name], math.nan) for row in self.step_rows}
            return {step: value for step, value in values.items() if math.isfinite(value)}
        rewards: dict[int, list[float]] = {}
        for step, _, numbers in self.evaluation_rows:
            rewards.setdefault(step, []).append(numbers["reward"])
        return {step: statistics.fmean(values) for step, values in rewards.items()}


@dataclass(frozen=True)
class SeedStatistics:
    """One measure over seeds."""

    mean: float
    std: float
    """Standard deviation; NaN with one run."""
    values: list[float]


@dataclass(frozen=True)
class VariantResult:
    """All runs of a variant."""

    name: str
    trials: list[TrialResult]

    @property
    def finished(self) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.status == "finished"]

    def over_seeds(self, measure: str) -> SeedStatistics:
        values = [trial.measures[measure] for trial in self.finished]
        values = [value for value in values if math.isfinite(value)]
        mean = statistics.fmean(values) if values else math.nan
        return SeedStatistics(mean, statistics.stdev(values) if len(values) > 1 else math.nan, values)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the evaluation over tasks, in the mean over runs.

        All seeds are evaluated on the same tasks, so that more of them do not narrow it.
        """
        known = [trial.interval for trial in self.finished if math.isfinite(trial.interval[0])]
        if not known:
            return math.nan, math.nan
        return statistics.fmean(low for low, _ in known), statistics.fmean(high for _, high in known)

    def curve(self, name: str) -> tuple[list[Point], list[BandPoint]]:
        """The mean over seeds at each step, and from the lowest to the highest where there are several."""
        by_step: dict[int, list[float]] = {}
        for trial in self.trials:
            for step, value in trial.curve(name).items():
                by_step.setdefault(step, []).append(value)
        at = sorted(by_step.items())
        points = [(float(step), statistics.fmean(values)) for step, values in at]
        many = [
            (float(step), min(values), max(values)) if len(values) > 1 else (float(step), math.nan, math.nan)
            for step, values in at
        ]
        return points, many


@dataclass(frozen=True)
class SweepResults:
    """A plan and what came of it."""

    folder: Path
    recipe: str
    variants: list[VariantResult]

    @property
    def trials(self) -> list[TrialResult]:
        return [trial for variant in self.variants for trial in variant.trials]

    @property
    def seeds(self) -> int:
        return max(len(variant.trials) for variant in self.variants)

    def as_json(self) -> dict[str, Any]:
        """For machines: what is not known is null."""
        variants = [
            {
                "name": one.name,
                "runs": len(one.trials),
                "finished": len(one.finished),
                "interval": list(one.interval),
                "measures": {name: asdict(one.over_seeds(name)) for name in MEASURES},
            }
            for one in self.variants
        ]
        fields = ("name", "variant", "seed", "status", "error", "steps", "measures", "evaluations")
        trials = [
            {name: getattr(one, name) for name in fields}
            | {"curves": {name: sorted(one.curve(name).items()) for name in (*CURVES, "evaluation")}}
            for one in self.trials
        ]
        said: dict[str, Any] = replace_non_finite(
            {"folder": str(self.folder), "recipe": self.recipe, "variants": variants, "trials": trials}
        )
        return said


def read_results(plan: SweepPlan, outcomes: Mapping[str, TrialOutcome] | None = None) -> SweepResults:
    """Read the ledgers. `outcomes` know of errors that no ledger does: a trial whose process was killed."""
    known = outcomes or {}
    found = [_read_trial(plan, trial, known.get(trial.name)) for trial in plan.trials]
    variants = [VariantResult(name, [one for one in found if one.variant == name]) for name in plan.variants]
    return SweepResults(plan.folder, plan.recipe, variants)


def _read_trial(plan: SweepPlan, trial: Trial, outcome: TrialOutcome | None) -> TrialResult:
    path = plan.path(trial) / "run.db"
    status, error = "waiting", ""
    rows, evaluated = list[StepRow](), list[tuple[int, str, dict[str, Any]]]()
    if path.is_file():
        ledger = Ledger(path)
        try:
            rows, evaluated = ledger.steps(), ledger.evaluations()
            status = ledger.get_meta("status") or "waiting"
            error = ledger.get_meta("why") or "" if status == "failed" else ""
        finally:
            ledger.close()
    if outcome is not None:
        status, error = outcome
    numbers = {"reward": math.nan, "low": math.nan, "high": math.nan}
    # what was evaluated before training says nothing about the trial
    last = {name: numbers | told for step, name, told in evaluated if step > 0}
    evaluations = {name: {key: told[key] for key in numbers} for name, told in last.items()}
    measures = _compute_measures([row.metrics for row in rows]) | {
        "evaluation": statistics.fmean(one["reward"] for one in evaluations.values()) if evaluations else math.nan
    }
    ordered = {name: measures[name] for name in MEASURES}
    return TrialResult(
        trial.name, trial.variant, trial.seed, status, error, len(rows), ordered, evaluations, rows, evaluated
    )


def _compute_measures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    rewards = [one["reward"] for one in steps if math.isfinite(one.get("reward", math.nan))]
    lost = ("is_masked", "signal/invalid_logprob_tokens")
    # a step that trained nothing has no mean of anything
    trained = [
        one for one in steps if one.get("trainable_tokens", 0.0) > 0 and math.isfinite(one.get("is_masked", math.nan))
    ]
    return {
        "training": statistics.fmean(rewards[-max(len(rewards) // 5, 1) :]) if rewards else math.nan,
        "mismatch": _token_mean(trained, "mismatch_kl"),
        "dropped_low": _token_mean(trained, "is_masked_low"),
        "dropped_high": _token_mean(trained, "is_masked_high"),
        "tokens": math.fsum(
            one["trainable_tokens"] * (1 - sum(one.get(name, 0.0) for name in lost)) for one in trained
        ),
        "seconds": math.fsum(one.get("seconds", 0.0) for one in steps),
    }


def _token_mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """The mean over tokens of a number that each step has the mean of."""
    known = [(one["trainable_tokens"], one[name]) for one in steps if math.isfinite(one.get(name, math.nan))]
    tokens = math.fsum(count for count, _ in known)
    return math.fsum(count * value for count, value in known) / tokens if tokens else math.nan
