"""Summarise a run in a few lines: rewards, dropped rollouts and tokens, and where its files are."""

from collections.abc import Mapping
from typing import Any

from keel.config import CurriculumSettings, RunSettings
from keel.rollout.rollout_metrics import ENVIRONMENT_METRICS, REWARD_COMPONENTS
from keel.run.folder import RunFolder
from keel.run.scoring import constant_reward_warning


def summarize_run(folder: RunFolder) -> str:
    """Return the summary, computed from the ledger alone so that it is the same after a resume."""
    ledger, path = folder.ledger, folder.path
    steps = ledger.steps()
    lines = [*_evaluation_lines(ledger.evaluations())]
    rewards = [row.metrics["reward"] for row in steps if "reward" in row.metrics]
    if rewards:
        window = max(len(rewards) // 5, 1)
        first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
        seconds = sum(row.metrics.get("seconds", 0.0) for row in steps)
        lines.append(
            f"training   reward {first:.2f} in the first {window} of {len(rewards)} steps, {last:.2f} in the last"
            f" ({seconds / len(rewards):.1f} s per step)"
        )
    lines += _reported_lines([row.metrics for row in steps])
    lines += _token_lines([row.metrics for row in steps])
    lines += _task_lines(folder.settings, steps[-1].metrics if steps else {})
    outcomes = ledger.outcome_counts()
    trained = outcomes.pop("trained", 0)
    dropped = ", ".join(f"{reason} {count}" for reason, count in outcomes.items())
    lines.append(f"rollouts   {trained} trained; dropped: {dropped or 'none'}")
    if errors := ledger.errors():
        lines.append(f"errors     {errors}")
    if rewards and (warning := constant_reward_warning([row.metrics for row in steps])):
        lines.append(f"WARNING    {warning}")
    lines.append(f"folder     {path}: run.db, rollouts/, metrics.parquet, checkpoints/, config.toml")
    return "\n".join(lines)


def _evaluation_lines(evaluations: list[tuple[int, str, dict[str, Any]]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for _, name, _ in evaluations):
        results = [(step, metrics) for step, environment, metrics in evaluations if environment == name]
        shown = " -> ".join(
            f"{_format_interval(metrics)} after step {step}" for step, metrics in _first_and_last(results)
        )
        lines.append(f"evaluation {name} on {results[0][1]['tasks']:.0f} held-out tasks: {shown}")
    return lines


def _first_and_last(evaluations: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    return evaluations if len(evaluations) < 2 else [evaluations[0], evaluations[-1]]


def _format_interval(metrics: Mapping[str, Any]) -> str:
    low, high = metrics.get("low"), metrics.get("high")
    interval = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    return f"{metrics['reward']:.2f}{interval}"


def _reported_lines(steps: list[dict[str, float]]) -> list[str]:
    """Return the means of reward components and environment metrics over the first and the last fifth of the steps."""
    lines = []
    for title, prefix in (("components", f"{REWARD_COMPONENTS}/"), ("metrics", f"{ENVIRONMENT_METRICS}/")):
        parts = []
        for name in dict.fromkeys(name for metrics in steps for name in metrics if name.startswith(prefix)):
            values = [metrics[name] for metrics in steps if name in metrics]
            window = max(len(values) // 5, 1)
            first, last = (sum(part) / window for part in (values[:window], values[-window:]))
            parts.append(f"{name.removeprefix(prefix)} {first:.3g} -> {last:.3g}")
        if parts:
            lines.append(f"{title:<10} {', '.join(parts)}")
    return lines


def _task_lines(settings: RunSettings, metrics: Mapping[str, float]) -> list[str]:
    """Return how far the tasks of environments with a curriculum are after the last step."""
    parts = []
    for name, environment in settings.environments.items():
        if environment.curriculum != CurriculumSettings() and f"pass_rate/{name}" in metrics:
            seen, solved, unsolved = (100 * metrics[f"tasks_{each}/{name}"] for each in ("seen", "solved", "unsolved"))
            parts.append(
                f"{name} {seen:.0f} % seen, pass rate {metrics[f'pass_rate/{name}']:.2f}, {solved:.0f} % solved,"
                f" {unsolved:.0f} % unsolved, {metrics[f'tasks_retired/{name}']:.0f} retired"
            )
    return [f"tasks      {'; '.join(parts)}"] if parts else []


def _token_lines(steps: list[dict[str, float]]) -> list[str]:
    """Return how many tokens the gates dropped, in which direction, and the mean staleness."""
    tokens = sum(metrics.get("trainable_tokens", 0.0) for metrics in steps)
    if not tokens:
        return []
    low, high = (
        sum(metrics.get("trainable_tokens", 0.0) * metrics.get(name, 0.0) for metrics in steps) / tokens
        for name in ("is_masked_low", "is_masked_high")
    )
    staleness = sum(m.get("trainable_tokens", 0.0) * m.get("staleness", 0.0) for m in steps) / tokens
    return [
        f"tokens     {tokens:.0f} trainable; gates dropped {100 * low:.2f} % low, {100 * high:.2f} % high;"
        f" mean staleness {staleness:.2f} versions"
    ]
