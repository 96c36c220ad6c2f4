"""What came of a run, in a few lines for people: what was learned, what was refused and why, and where things are."""

from collections.abc import Mapping
from typing import Any

from keel.run.folder import RunFolder


def summarize_run(folder: RunFolder) -> str:
    """From the ledger alone, so that it says the same after a resume."""
    ledger, path = folder.ledger, folder.path
    steps = ledger.steps()
    lines = [*_evaluation_lines(ledger.evaluations())]
    rewards = [row.metrics["reward"] for row in steps if "reward" in row.metrics]
    if rewards:
        few = max(len(rewards) // 5, 1)
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        seconds = sum(row.metrics.get("seconds", 0.0) for row in steps)
        lines.append(
            f"training   reward {first:.2f} in the first {few} of {len(rewards)} steps, {last:.2f} in the last"
            f" ({seconds / len(rewards):.1f} s a step)"
        )
    lines += _token_lines([row.metrics for row in steps])
    fates = ledger.outcome_counts()
    trained = fates.pop("trained", 0)
    refused = ", ".join(f"{reason} {count}" for reason, count in fates.items())
    lines.append(f"rollouts   {trained} trained; dropped: {refused or 'none'}")
    lines.append(f"folder     {path}: run.db, rollouts/, metrics.parquet, checkpoints/, config.toml")
    return "\n".join(lines)


def _evaluation_lines(evaluations: list[tuple[int, str, dict[str, Any]]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for _, name, _ in evaluations):
        found = [(step, numbers) for step, environment, numbers in evaluations if environment == name]
        shown = " -> ".join(
            f"{_format_interval(numbers)} after step {step}" for step, numbers in _first_and_last(found)
        )
        lines.append(f"evaluation {name} on {found[0][1]['tasks']:.0f} unseen tasks: {shown}")
    return lines


def _first_and_last(evaluations: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    return evaluations if len(evaluations) < 2 else [evaluations[0], evaluations[-1]]


def _format_interval(metrics: Mapping[str, Any]) -> str:
    low, high = metrics.get("low"), metrics.get("high")
    known = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    return f"{metrics['reward']:.2f}{known}"


def _token_lines(steps: list[dict[str, float]]) -> list[str]:
    """How many tokens the gates dropped, and in which direction."""
    tokens = sum(one.get("trainable_tokens", 0.0) for one in steps)
    if not tokens:
        return []
    low, high = (
        sum(one.get("trainable_tokens", 0.0) * one.get(name, 0.0) for one in steps) / tokens
        for name in ("is_masked_low", "is_masked_high")
    )
    ages = sum(one.get("trainable_tokens", 0.0) * one.get("staleness", 0.0) for one in steps) / tokens
    return [
        f"tokens     {tokens:.0f} trainable; gates dropped {100 * low:.2f} % low, {100 * high:.2f} % high;"
        f" {ages:.2f} versions old in the mean"
    ]
