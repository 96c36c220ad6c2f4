"""Read the stored completions of evaluations: a grid of tasks by evaluations, and the episodes of one task and step.

Long texts are truncated, with their length; escaping them is the task of the page.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from keel.errors import KeelError
from keel.tools.lens.database import Database
from keel.tools.lens.run_reader import replace_non_finite

PAGE_TASKS = 200
"""Tasks of one page of the grid."""
MAX_EVALUATIONS = 40
"""Evaluations in the grid, the newest ones and the first."""
MAX_TASK_ID = 1000
"""Characters of a task id that are returned and compared."""
MAX_CHARACTERS = 100_000
"""Characters of a prompt or a completion that are returned."""

GRID_ORDERS = ("flips", "id", "reward")
"""Orders of tasks: most changes between passed and failed first, by id, lowest mean reward first."""

GRID_QUERY = f"""
SELECT environment, left(task_id, {MAX_TASK_ID}) AS task_id, step, count(*) AS episodes,
    count(*) FILTER (passed) AS passed, avg(reward) AS reward, count(error) AS errors
FROM {{files}} GROUP BY ALL ORDER BY step
"""

EPISODES_QUERY = f"""
SELECT sample, left(prompt, {MAX_CHARACTERS}) AS prompt, left(completion, {MAX_CHARACTERS}) AS completion,
    length(completion) AS characters, finish_reason, reward, passed, reward_components, environment_metrics,
    left(answer, 2000) AS answer, completion_tokens, turns, seconds, left(error, 2000) AS error
FROM {{files}} WHERE environment = ? AND left(task_id, {MAX_TASK_ID}) = ? ORDER BY sample LIMIT 64
"""


def evaluation_grid(
    database: Database, files: Sequence[Path], environment: str = "", order: str = "flips", offset: int = 0
) -> dict[str, Any]:
    """Return the tasks of an environment (default: the first) with their results in each evaluation."""
    shown = [*files[:1], *files[1:][-(MAX_EVALUATIONS - 1) :]]
    rows = [replace_non_finite(row) for row in database.query_rows(GRID_QUERY, shown)] if shown else []
    environments = sorted({row["environment"] for row in rows})
    chosen = environment or (environments[0] if environments else "")
    if environment and environment not in environments:
        raise KeelError(f"environment = {environment[:80]!r} has no stored evaluation")
    steps = sorted({row["step"] for row in rows})
    tasks: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["environment"] == chosen:
            cell = {name: row[name] for name in ("episodes", "passed", "reward", "errors")}
            tasks.setdefault(row["task_id"], {})[row["step"]] = cell
    listed = [
        {"task_id": task, "flips": count_flips(cells, steps), "cells": [cells.get(step) for step in steps]}
        for task, cells in tasks.items()
    ]
    keys = {
        "id": lambda task: (len(task["task_id"]), task["task_id"]),
        "flips": lambda task: (-task["flips"], len(task["task_id"]), task["task_id"]),
        "reward": lambda task: (_mean_reward(task["cells"]), task["task_id"]),
    }
    return {
        "environments": environments,
        "environment": chosen,
        "steps": steps,
        "omitted": len(files) - len(shown),
        "total": len(listed),
        "tasks": sorted(listed, key=keys[order])[offset : offset + PAGE_TASKS],
    }


def count_flips(cells: dict[int, dict[str, Any]], steps: Sequence[int]) -> int:
    """Return how often the task changed between passed in most episodes and failed in most, over the evaluations."""
    outcomes = [2 * cells[step]["passed"] > cells[step]["episodes"] for step in steps if step in cells]
    return sum(before != after for before, after in pairwise(outcomes))


def _mean_reward(cells: Sequence[dict[str, Any] | None]) -> float:
    rewards = [cell["reward"] for cell in cells if cell is not None and cell["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0


def evaluated_episodes(database: Database, file: Path, environment: str, task_id: str) -> dict[str, Any]:
    """Return the episodes of one task in one evaluation."""
    rows = database.query_rows(EPISODES_QUERY, [file], [environment, task_id])
    return {"episodes": [replace_non_finite(row) for row in rows]}
