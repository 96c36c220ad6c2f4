"""`keel launch` on a local Ray cluster: engines and ranks as processes that are killed, restarted and shut down.

All processes run on one machine; networks and several nodes are not tested.
"""

import json
import re
import signal
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.ray_launch import RECIPE, Ray, gone, kill, launched

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    cluster = Ray()
    yield cluster
    cluster.close()


def write_recipe(folder: Path) -> str:
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    return str(file)


def assert_accounted_for(run: Path, steps: int) -> None:
    """Assert that every step is recorded once, every rollout has one outcome, and none is trained twice."""
    with sqlite3.connect(run / "run.db") as db:
        assert [row[0] for row in db.execute("SELECT step FROM steps ORDER BY step")] == list(range(1, steps + 1))
        names = db.execute('SELECT "group", member, attempt FROM rollouts').fetchall()
        assert len(set(names)) == len(names)
        trained = db.execute(
            "SELECT step, count(*) FROM rollouts WHERE outcome = 'trained' OR reason = 'zero_variance' GROUP BY step"
        ).fetchall()
        metrics = [json.loads(row[0]) for row in db.execute("SELECT metrics FROM steps ORDER BY step")]
        assert trained == [(step, 16 + 4 * row["refilled_groups"]) for step, row in enumerate(metrics, start=1)]


def sampled_tokens(url: str, key: str) -> float:
    """Return the tokens that a server has sampled since it was started."""
    page = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"}).text
    match = re.search(r"^keel_tokens_sampled_total (\S+)$", page, re.MULTILINE)
    return float(match.group(1)) if match else 0.0


@dataclass
class InterruptedLaunch:
    """A launch of two engines in which one engine, then the trainer was killed, and which was then interrupted."""

    run: Path
    key: str
    exit_code: int
    output: str
    last_step: int
    processes_left: bool


@pytest.fixture(scope="module")
def interrupted(ray: Ray, tmp_path_factory: pytest.TempPathFactory) -> InterruptedLaunch:
    folder = tmp_path_factory.mktemp("interrupted")
    run = folder / "run"
    with launched(ray, run, write_recipe(folder), "--run", str(run), "--steps", "100000") as launch:
        launch.wait_for(r"^step +3/")
        key = (run / "launch" / "key").read_text()
        assert stat.S_IMODE((run / "launch" / "key").stat().st_mode) == 0o600
        assert not any(key in argv for argv in launch.processes().values()), "the key is in no command line"

        kill(launch.part("keel.cli serve"))
        launch.wait_for(r"engine-\d was killed by SIGKILL .*; restart 1 of 3 in 0.2 s")
        url = launch.wait_for(r"engine-\d is up at (\S+)", times=3)[-1]
        while sampled_tokens(url, key) == 0:  # the new server joins the pool, loads the weights and gets requests
            assert launch.process.poll() is None
            time.sleep(0.2)
        assert httpx.get(f"{url}/v1/models").status_code == 401, "requests without the key are rejected"

        kill(launch.part("keel.cli train"))
        launch.wait_for(r"trainer-0 was killed by SIGKILL .*; restart 1 of 3")
        launch.wait_for("restarted the trainer")
        steps = len(launch.wait_for(r"^step +\d+/"))
        launch.wait_for(r"^step +\d+/", times=steps + 2)

        launch.process.send_signal(signal.SIGINT)
        exit_code, output = launch.wait()
        processes_left = not gone(launch, 2.0)
    with sqlite3.connect(run / "run.db") as db:
        (last_step,) = db.execute("SELECT max(step) FROM steps").fetchone()
    return InterruptedLaunch(run, key, exit_code, output, last_step, processes_left)


def test_a_run_continues_while_components_are_killed_and_trains_nothing_twice(interrupted: InterruptedLaunch) -> None:
    assert_accounted_for(interrupted.run, interrupted.last_step)


def test_ctrl_c_shuts_all_components_down_and_prints_how_to_resume(interrupted: InterruptedLaunch) -> None:
    assert interrupted.exit_code == 0
    hint = f"stopped after step {interrupted.last_step}; resume with: keel launch --resume {interrupted.run}"
    assert hint in interrupted.output
    assert not interrupted.processes_left


def test_the_key_is_deleted_with_the_launch_and_is_in_no_log(interrupted: InterruptedLaunch) -> None:
    assert not (interrupted.run / "launch" / "key").exists()
    logs = [*(interrupted.run / "launch").glob("*.log"), interrupted.run / "config.toml"]
    assert len(logs) == 4
    assert all(interrupted.key not in log.read_text() for log in logs)


def test_a_run_is_resumed_with_one_engine_and_two_ranks(ray: Ray, interrupted: InterruptedLaunch) -> None:
    run, steps = interrupted.run, interrupted.last_step + 2
    argv = ["--resume", str(run), "--allow-changes", f"--steps={steps}", "--trainer.ranks=2", "--engines", "1"]
    with launched(ray, run, *argv) as launch:
        exit_code, output = launch.wait()
        assert exit_code == 0, output
        assert f"finished: {run}" in output and "started the trainer on 2 ranks" in output
        assert gone(launch, 2.0)
    assert_accounted_for(run, steps)


def test_components_end_when_the_launcher_is_killed(ray: Ray, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(ray, run, write_recipe(tmp_path), "--run", str(run), "--engines", "1") as launch:
        launch.wait_for(r"engine-0 is up at")
        assert launch.processes()
        launch.process.kill()
        assert gone(launch)


def test_a_launch_larger_than_the_cluster_is_an_error_and_leaves_no_folder(ray: Ray, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(ray, run, write_recipe(tmp_path), "--run", str(run), "--launch.engine.cpus", "3") as launch:
        exit_code, output = launch.wait()
    assert exit_code == 2
    assert "3 components need 7 CPUs in total, and the cluster has 4 CPUs" in output
    assert not run.exists()
