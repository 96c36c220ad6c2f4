"""Pass rates of tasks in the lens: the numbers of the ledger, and an empty panel for runs without them."""

import json
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from keel.rollout.scheduler.pass_rates import TaskRecord
from keel.run.ledger import Ledger
from keel.tools.lens.queries import Lens
from keel.tools.lens.report import write_report
from keel.tools.lens.server import build_app
from keel.tools.lens.task_rates import MAX_TASKS
from tests.support.lens_browser import browser, missing
from tests.support.lens_runs import make_run

HOSTILE = "<script>document.title='owned'</script>\u202egnp.exe"


def record(index: int, rate: float | None, *, environment: str = "sums", state: str = "active") -> TaskRecord:
    task_id = HOSTILE if index == 0 else f"task{index}"
    return TaskRecord(environment, index, task_id, 0 if rate is None else 3, 24, rate, rate, 0, state, 4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with 30 tasks of one environment, and one of another without a result."""
    path = make_run(tmp_path / "run")
    records = [record(index, index / 29, state="retired" if index > 27 else "active") for index in range(30)]
    with closing(Ledger(path / "run.db")) as ledger:
        ledger.write_dropped(4, [], {}, [*records, record(7, None, environment="letters", state="failed")])
    return path


def task_rates(run: Path) -> list[dict[str, Any]]:
    lens = Lens(run)
    try:
        result = lens.query("tasks", {"run": run.name})
    finally:
        lens.close()
    environments: list[dict[str, Any]] = json.loads(json.dumps(result, allow_nan=False))["environments"]
    return environments


def test_pass_rates_are_those_of_the_ledger(run: Path) -> None:
    letters, sums = task_rates(run)
    assert (sums["environment"], sums["tasks"], sums["retired"], sums["failed"]) == ("sums", 30, 2, 0)
    assert sums["pass_rate"] == pytest.approx(0.5)
    assert sums["histogram"] == [3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    assert [task["task"] for task in sums["lowest"]] == [HOSTILE, *(f"task{index}" for index in range(1, MAX_TASKS))]
    assert (letters["pass_rate"], letters["failed"], sum(letters["histogram"])) == (None, 1, 0)


def test_a_run_of_a_version_without_pass_rates_has_none(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute("DROP TABLE tasks")
    assert task_rates(run) == []


def test_a_report_contains_the_pass_rates(run: Path, tmp_path: Path) -> None:
    write_report(run, tmp_path / "report.html", 2_000_000)
    text = (tmp_path / "report.html").read_text()
    assert '"tasks|run=run"' in text
    assert f"task{MAX_TASKS - 1}" in text and "<script>document.title" not in text


@pytest.mark.browser
@pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")
def test_the_overview_shows_the_pass_rates_as_text(run: Path) -> None:
    server = uvicorn.Server(uvicorn.Config(build_app(run), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        with browser() as window:
            window.open(f"http://127.0.0.1:{port}/")
            window.wait(
                "return document.querySelectorAll('.tasks .lowest-tasks tbody tr').length === arguments[0]",
                MAX_TASKS + 1,
            )
            shown = window.run("return document.querySelector('.tasks').textContent")
            title = window.run("return document.title")
    finally:
        server.should_exit = True
        thread.join(10)
    assert "Tasks of sums (30 sampled)" in shown and "mean pass rate 0.5, 2 retired" in shown
    assert "<script>document.title='owned'</script>U+202Egnp.exe" in shown and title == "keel lens"
