"""`keel launch` on a real Ray of this machine: engines and ranks as processes, killed, started again, ended.

One machine and several processes; nothing here says anything about networks or other nodes.
"""

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


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    made = Ray()
    yield made
    made.close()


def recipe_in(folder: Path) -> str:
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    return str(file)


def assert_accounted_for(run: Path, steps: int) -> None:
    """Every step once, every rollout with one fate, and none trained twice."""
    with sqlite3.connect(run / "run.db") as db:
        assert [row[0] for row in db.execute("SELECT step FROM steps ORDER BY step")] == list(range(1, steps + 1))
        names = db.execute('SELECT "group", member, attempt FROM rollouts').fetchall()
        assert len(set(names)) == len(names)
        trained = db.execute(
            "SELECT step, count(*) FROM rollouts WHERE outcome = 'trained' OR reason = 'zero_variance' GROUP BY step"
        ).fetchall()
        assert trained == [(step, 16) for step in range(1, steps + 1)]


def sampled(url: str, key: str) -> float:
    """Tokens that a server has sampled since it was started."""
    page = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"}).text
    found = re.search(r"^keel_tokens_sampled_total (\S+)$", page, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


@dataclass
class Survived:
    """A launch of two engines of which one was killed, then the trainer, and which was then interrupted."""

    run: Path
    key: str
    code: int
    said: str
    last: int
    """The last step."""
    left: bool
    """Whether a process was left."""


@pytest.fixture(scope="module")
def survived(ray: Ray, tmp_path_factory: pytest.TempPathFactory) -> Survived:
    folder = tmp_path_factory.mktemp("survived")
    run = folder / "run"
    with launched(ray, run, recipe_in(folder), "--run", str(run), "--steps", "100000") as launch:
        launch.wait_for(r"^step +3/")
        key = (run / "launch" / "key").read_text()
        assert stat.S_IMODE((run / "launch" / "key").stat().st_mode) == 0o600
        assert not any(key in words for words in launch.processes().values()), "a key in a command line is no secret"

        kill(launch.part("keel.cli serve"))
        launch.wait_for(r"engine-\d was killed by SIGKILL .*; restart 1 of 3 in 0.2 s")
        url = launch.wait_for(r"engine-\d serves at (\S+)", times=3)[-1]
        while sampled(url, key) == 0:  # the new server was found, given the weights, and is asked
            assert launch.process.poll() is None
            time.sleep(0.2)
        assert httpx.get(f"{url}/v1/models").status_code == 401, "without the key nobody is answered"

        kill(launch.part("keel.cli train"))
        launch.wait_for(r"trainer-0 was killed by SIGKILL .*; restart 1 of 3")
        launch.wait_for("the trainer is started again")
        steps = len(launch.wait_for(r"^step +\d+/"))
        launch.wait_for(r"^step +\d+/", times=steps + 2)

        launch.process.send_signal(signal.SIGINT)
        code, said = launch.wait()
        left = not gone(launch, 2.0)
    with sqlite3.connect(run / "run.db") as db:
        (last,) = db.execute("SELECT max(step) FROM steps").fetchone()
    return Survived(run, key, code, said, last, left)


def test_a_run_with_two_engines_goes_on_while_its_parts_are_killed_and_trains_nothing_twice(survived: Survived) -> None:
    assert_accounted_for(survived.run, survived.last)


def test_ctrl_c_ends_all_parts_in_order_and_says_how_to_go_on(survived: Survived) -> None:
    assert survived.code == 0
    assert f"stopped after step {survived.last}; go on with: keel launch --resume {survived.run}" in survived.said
    assert not survived.left


def test_the_key_ends_with_the_launch_and_is_in_no_log(survived: Survived) -> None:
    assert not (survived.run / "launch" / "key").exists()
    logs = [*(survived.run / "launch").glob("*.log"), survived.run / "config.toml"]
    assert len(logs) == 4
    assert all(survived.key not in log.read_text() for log in logs)


def test_a_run_goes_on_with_one_engine_and_two_ranks_to_its_end(ray: Ray, survived: Survived) -> None:
    run, steps = survived.run, survived.last + 2
    words = ["--resume", str(run), "--allow-changes", f"--steps={steps}", "--trainer.ranks=2", "--engines", "1"]
    with launched(ray, run, *words) as launch:
        code, said = launch.wait()
        assert code == 0, said
        assert f"finished: {run}" in said and "the trainer is started on 2 ranks" in said
        assert gone(launch, 2.0)
    assert_accounted_for(run, steps)


def test_when_the_launcher_is_killed_its_parts_end(ray: Ray, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(ray, run, recipe_in(tmp_path), "--run", str(run), "--engines", "1") as launch:
        launch.wait_for(r"engine-0 serves at")
        assert launch.processes()
        launch.process.kill()
        assert gone(launch)


def test_what_the_cluster_does_not_have_is_refused_and_leaves_nothing(ray: Ray, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with launched(ray, run, recipe_in(tmp_path), "--run", str(run), "--launch.engine.cpus", "3") as launch:
        code, said = launch.wait()
    assert code == 2
    assert "3 parts ask for 7 CPUs in all, and the cluster has 4 CPUs" in said
    assert not run.exists()
