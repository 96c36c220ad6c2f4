"""Compare two stored evaluations task by task: which tasks are solved now that were not before, and the reverse."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.errors import ConfigError
from keel.run.evaluation.evaluation_records import read_evaluation
from keel.run.records import step_path


@dataclass(frozen=True)
class TaskChange:
    """One task in both evaluations."""

    environment: str
    task_id: str
    answer: str | None
    before: Sequence[dict[str, Any]]
    """The episodes of the first evaluation, as stored."""
    after: Sequence[dict[str, Any]]

    @property
    def pass_rates(self) -> tuple[float, float]:
        """The fractions of episodes that passed, before and after."""
        first, second = (sum(row["passed"] for row in rows) / len(rows) for rows in (self.before, self.after))
        return first, second

    @property
    def changed(self) -> int:
        """1: solved more often after than before; -1: less often; 0: as often."""
        before, after = self.pass_rates
        return (after > before) - (after < before)


def compare_steps(run: Path, first: int, second: int) -> list[TaskChange]:
    """Return the tasks that the evaluations after both steps of a run have, in their order."""
    folder = run / "evaluations"
    steps = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.parquet"))
    for step in (first, second):
        if step not in steps:
            stored = ", ".join(map(str, steps)) or "none"
            raise ConfigError(f"{folder} has no evaluation after step {step}; evaluations that are stored: {stored}")
    before, after = (_by_task(read_evaluation(step_path(folder, step))) for step in (first, second))
    return [
        TaskChange(*task, rows[0]["answer"], rows, after[task])  # the answer of a task never changes
        for task, rows in before.items()
        if task in after
    ]


def _by_task(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tasks.setdefault((row["environment"], row["task_id"]), []).append(row)
    return tasks
