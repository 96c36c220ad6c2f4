"""What came of a run, in a few lines for people: what was learned, what was refused and why, and where things are."""

from collections.abc import Mapping
from typing import Any

from keel.run.folder import RunFolder


def summary(folder: RunFolder) -> str:
    """From the ledger alone, so that it says the same after a resume."""
    ledger, path = folder.ledger, folder.path
    steps = ledger.steps()
    lines = [*_learned(ledger.evaluations())]
    rewards = [row.numbers["reward"] for row in steps if "reward" in row.numbers]
    if rewards:
        few = max(len(rewards) // 5, 1)
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        seconds = sum(row.numbers.get("seconds", 0.0) for row in steps)
        lines.append(
            f"training   reward {first:.2f} in the first {few} of {len(rewards)} steps, {last:.2f} in the last"
            f" ({seconds / len(rewards):.1f} s a step)"
        )
    lines += _tokens([row.numbers for row in steps])
    fates = ledger.fates()
    trained = fates.pop("trained", 0)
    refused = ", ".join(f"{reason} {count}" for reason, count in fates.items())
    lines.append(f"rollouts   {trained} trained; refused: {refused or 'none'}")
    lines.append(f"folder     {path}: run.db, rollouts/, metrics.parquet, checkpoints/, config.toml")
    return "\n".join(lines)


def _learned(evaluations: list[tuple[int, str, dict[str, Any]]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for _, name, _ in evaluations):
        found = [(step, numbers) for step, environment, numbers in evaluations if environment == name]
        shown = " -> ".join(f"{_interval(numbers)} after step {step}" for step, numbers in _ends(found))
        lines.append(f"evaluation {name} on {found[0][1]['tasks']:.0f} unseen tasks: {shown}")
    return lines


def _ends(found: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    return found if len(found) < 2 else [found[0], found[-1]]


def _interval(numbers: Mapping[str, Any]) -> str:
    low, high = numbers.get("low"), numbers.get("high")
    known = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    return f"{numbers['reward']:.2f}{known}"


def _tokens(steps: list[dict[str, float]]) -> list[str]:
    """How many tokens the gates dropped, and in which direction."""
    tokens = sum(one.get("tokens", 0.0) for one in steps)
    if not tokens:
        return []
    low, high = (
        sum(one.get("tokens", 0.0) * one.get(name, 0.0) for one in steps) / tokens
        for name in ("is_masked_low", "is_masked_high")
    )
    ages = sum(one.get("tokens", 0.0) * one.get("staleness", 0.0) for one in steps) / tokens
    return [
        f"tokens     {tokens:.0f} trainable; gates dropped {100 * low:.2f} % low, {100 * high:.2f} % high;"
        f" {ages:.2f} versions old in the mean"
    ]
