"""Read the results of trials from their ledgers: the measures of each run, and their mean and spread over seeds.

Means are over finished runs only, because unfinished ones have trained for fewer steps. Shares and mismatch of a run
are weighted by tokens, not means of step means. No significance test is made.
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
"""Measures of a run. training: mean reward of the last fifth of the steps; evaluation: mean reward on held-out tasks at
the end; mismatch: mean KL between sampler and policy; dropped_low, dropped_high: share of trainable tokens that a gate
dropped, by side; tokens: number of tokens trained on; seconds: duration of all steps."""
CURVES = {
    "reward": "reward",
    "mismatch": "mismatch_kl",
    "masked low": "is_masked_low",
    "masked high": "is_masked_high",
}
"""Curves over steps, by the name of the step metric."""


@dataclass(frozen=True)
class TrialResult:
    """The results of one run."""

    name: str
    variant: str
    seed: int
    status: str
    """finished, stopped, failed, running, or waiting (not started)."""
    error: str
    steps: int
    measures: dict[str, float]
    """Values of MEASURES; NaN if unknown."""
    evaluations: dict[str, dict[str, float]]
    """The last evaluation of each environment: reward, low, high."""
    step_rows: list[StepRow]
    evaluation_rows: list[tuple[int, str, dict[str, Any]]]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the evaluation over tasks; NaN with several environments, whose mean has no interval."""
        if len(self.evaluations) != 1:
            return math.nan, math.nan
        (evaluation,) = self.evaluations.values()
        return evaluation["low"], evaluation["high"]

    def curve(self, name: str) -> dict[int, float]:
        """Return one of CURVES, or "evaluation", by step."""
        if name != "evaluation":
            values = {row.step: row.metrics.get(CURVES[name], math.nan) for row in self.step_rows}
            return {step: value for step, value in values.items() if math.isfinite(value)}
        rewards: dict[int, list[float]] = {}
        for step, _, metrics in self.evaluation_rows:
            rewards.setdefault(step, []).append(metrics["reward"])
        return {step: statistics.fmean(values) for step, values in rewards.items()}


@dataclass(frozen=True)
class SeedStatistics:
    """Statistics of one measure over seeds."""

    mean: float
    std: float
    """Standard deviation; NaN for a single run."""
    values: list[float]


@dataclass(frozen=True)
class VariantResult:
    """The runs of one variant."""

    name: str
    trials: list[TrialResult]

    @property
    def finished(self) -> list[TrialResult]:
        return [trial for trial in self.trials if trial.status == "finished"]

    def over_seeds(self, measure: str) -> SeedStatistics:
        """Return the statistics of a measure over finished runs."""
        values = [trial.measures[measure] for trial in self.finished]
        values = [value for value in values if math.isfinite(value)]
        mean = statistics.fmean(values) if values else math.nan
        return SeedStatistics(mean, statistics.stdev(values) if len(values) > 1 else math.nan, values)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the evaluation over tasks, averaged over runs.

        All seeds are evaluated on the same tasks, so more seeds do not narrow it.
        """
        known = [trial.interval for trial in self.finished if math.isfinite(trial.interval[0])]
        if not known:
            return math.nan, math.nan
        return statistics.fmean(low for low, _ in known), statistics.fmean(high for _, high in known)

    def curve(self, name: str) -> tuple[list[Point], list[BandPoint]]:
        """Return the mean over seeds at each step, and the lowest and highest value where there are several."""
        by_step: dict[int, list[float]] = {}
        for trial in self.trials:
            for step, value in trial.curve(name).items():
                by_step.setdefault(step, []).append(value)
        ordered = sorted(by_step.items())
        points = [(float(step), statistics.fmean(values)) for step, values in ordered]
        band = [
            (float(step), min(values), max(values)) if len(values) > 1 else (float(step), math.nan, math.nan)
            for step, values in ordered
        ]
        return points, band


@dataclass(frozen=True)
class SweepResults:
    """The results of all trials of a plan."""

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
        """Return the results as JSON data, with null for unknown numbers."""
        variants = [
            {
                "name": variant.name,
                "runs": len(variant.trials),
                "finished": len(variant.finished),
                "interval": list(variant.interval),
                "measures": {name: asdict(variant.over_seeds(name)) for name in MEASURES},
            }
            for variant in self.variants
        ]
        fields = ("name", "variant", "seed", "status", "error", "steps", "measures", "evaluations")
        trials = [
            {name: getattr(trial, name) for name in fields}
            | {"curves": {name: sorted(trial.curve(name).items()) for name in (*CURVES, "evaluation")}}
            for trial in self.trials
        ]
        data: dict[str, Any] = replace_non_finite(
            {"folder": str(self.folder), "recipe": self.recipe, "variants": variants, "trials": trials}
        )
        return data


def read_results(plan: SweepPlan, outcomes: Mapping[str, TrialOutcome] | None = None) -> SweepResults:
    """Read the results from the ledgers. `outcomes` add errors that are in no ledger, such as of a killed process."""
    known = outcomes or {}
    trials = [_read_trial(plan, trial, known.get(trial.name)) for trial in plan.trials]
    variants = [VariantResult(name, [trial for trial in trials if trial.variant == name]) for name in plan.variants]
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
    unknown = {"reward": math.nan, "low": math.nan, "high": math.nan}
    # evaluations before training are the same for all trials
    last = {name: unknown | metrics for step, name, metrics in evaluated if step > 0}
    evaluations = {name: {key: metrics[key] for key in unknown} for name, metrics in last.items()}
    rewards = [evaluation["reward"] for evaluation in evaluations.values()]
    measures = _compute_measures([row.metrics for row in rows]) | {
        "evaluation": statistics.fmean(rewards) if rewards else math.nan
    }
    ordered = {name: measures[name] for name in MEASURES}
    return TrialResult(
        trial.name, trial.variant, trial.seed, status, error, len(rows), ordered, evaluations, rows, evaluated
    )


def _compute_measures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    rewards = [step["reward"] for step in steps if math.isfinite(step.get("reward", math.nan))]
    untrained_shares = ("is_masked", "signal/invalid_logprob_tokens")
    # a step without trained tokens has no means over tokens
    trained = [
        step
        for step in steps
        if step.get("trainable_tokens", 0.0) > 0 and math.isfinite(step.get("is_masked", math.nan))
    ]
    return {
        "training": statistics.fmean(rewards[-max(len(rewards) // 5, 1) :]) if rewards else math.nan,
        "mismatch": _token_mean(trained, "mismatch_kl"),
        "dropped_low": _token_mean(trained, "is_masked_low"),
        "dropped_high": _token_mean(trained, "is_masked_high"),
        "tokens": math.fsum(
            step["trainable_tokens"] * (1 - sum(step.get(name, 0.0) for name in untrained_shares)) for step in trained
        ),
        "seconds": math.fsum(step.get("seconds", 0.0) for step in steps),
    }


def _token_mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the mean over tokens of a metric that is a mean over the tokens of each step."""
    known = [(step["trainable_tokens"], step[name]) for step in steps if math.isfinite(step.get(name, math.nan))]
    tokens = math.fsum(count for count, _ in known)
    return math.fsum(count * value for count, value in known) / tokens if tokens else math.nan
