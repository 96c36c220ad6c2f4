"""Pass rates of the tasks of a run, from its ledger: a histogram for each environment and its hardest tasks."""

import sqlite3
from typing import Any

BINS = 10
"""Bins of the histogram, of equal width; a pass rate of 1 is in the last one."""
MAX_ENVIRONMENTS = 20
MAX_TASKS = 10
"""Tasks that are listed for each environment, the lowest pass rate first."""


def read_task_rates(db: sqlite3.Connection) -> dict[str, Any]:
    """Return pass rates by environment; none for a run of a version without them."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'tasks'").fetchone():
        return {"environments": []}
    totals = db.execute(
        "SELECT environment, count(*), avg(pass_rate), sum(state = 'retired'), sum(state = 'failed') FROM tasks"
        " GROUP BY environment ORDER BY environment LIMIT ?",
        (MAX_ENVIRONMENTS,),
    ).fetchall()
    return {
        "environments": [
            {
                "environment": str(name),
                "tasks": int(count),
                "pass_rate": _number(rate),
                "retired": int(retired),
                "failed": int(failed),
                "histogram": _histogram(db, name),
                "lowest": _lowest(db, name),
            }
            for name, count, rate, retired, failed in totals
        ]
    }


def _histogram(db: sqlite3.Connection, environment: Any) -> list[int]:
    counts = [0] * BINS
    rows = db.execute(
        "SELECT min(max(CAST(pass_rate * ? AS INTEGER), 0), ?), count(*) FROM tasks"
        " WHERE environment = ? AND pass_rate IS NOT NULL GROUP BY 1",
        (BINS, BINS - 1, environment),
    )
    for position, count in rows:
        counts[int(position)] = int(count)
    return counts


def _lowest(db: sqlite3.Connection, environment: Any) -> list[dict[str, Any]]:
    rows = db.execute(
        "SELECT task_id, pass_rate, groups, state, last_step FROM tasks WHERE environment = ?"
        " ORDER BY pass_rate IS NULL, pass_rate, task_index LIMIT ?",
        (environment, MAX_TASKS),
    )
    return [
        {"task": str(task)[:200], "pass_rate": _number(rate), "groups": int(groups), "state": str(state)[:20],
         "step": int(step)}
        for task, rate, groups, state, step in rows
    ]  # fmt: skip


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
