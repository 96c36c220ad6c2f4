"""`keel train` as a user meets it: a terminal's signals, going on, refusals, and engines on other servers."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keel.cli import main
from keel.config import EngineSettings, ModelSettings
from keel.inference.local.local_engine import LocalEngine
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.app import build_app
from keel.training import load_model
from tests.support.engine_fakes import serving
from tests.support.tiny_runs import RECIPE, train

PATIENCE = 240


@contextmanager
def running(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """A `keel train` process that is ended whatever happens."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "keel.cli", "train", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        # a line that never comes must not be waited for
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def recipe(folder: Path) -> str:
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    return str(file)


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(recipe(tmp_path), "--run", str(folder), "--steps", "10000", "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if '"step"' in line and json.loads(line).get("event") == "step":
                process.send_signal(signal.SIGINT)
                break
        said = process.stdout.read()
        assert process.wait(60) == 0
    assert f"go on with: keel train --resume {folder}" in said
    with sqlite3.connect(folder / "run.db") as db:
        (last,) = db.execute("SELECT max(step) FROM steps").fetchone()
        assert db.execute("SELECT value FROM meta WHERE key = 'status'").fetchone() == ("stopped",)
    assert last < 10000
    assert (folder / "checkpoints" / f"step_{last}" / "model.safetensors").is_file()


def test_a_table_for_the_launcher_is_said_to_be_left_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", recipe(tmp_path), "--run", str(tmp_path / "run"), "--steps", "1", "--evaluation.when", "never"]
    assert main([*words, "--launch.engines", "2"]) == 0
    assert "the table launch is for `keel launch`" in capsys.readouterr().out


def test_a_run_that_was_stopped_goes_on_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(folder, stop_after=2)
    assert main(["train", "--resume", str(folder)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"evaluation larger_number on 4 held-out tasks: .* after step 0 -> .* after step 6", said)
    assert "rollouts   " in said and "tokens     " in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "give a RECIPE, or --resume RUN"),
        (["train", "no.toml"], "no.toml does not exist"),
        (["train", "recipe.toml", "--allow-changes"], "--allow-changes cannot act without --resume"),
        (["train", "--resume", "nothing"], "nothing does not hold a run"),
        (["train", "recipe.toml", "--scheduler.gruops", "3"], "scheduler.gruops is not a setting; did you mean groups"),
        (["train", "recipe.toml", "--sampling.top_p", "0.5"], "sampling.top_p = 0.5 truncates the distribution"),
        (["train", "recipe.toml", "--environments.larger_number.options.shots", "99"], "shots = 99"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_same_loop_with_a_pool_of_servers(tmp_path: Path) -> None:
    own = load_model(ModelSettings(name="tiny", sft_warmup_steps=300))
    apps = []
    for _ in range(2):
        other = load_model(ModelSettings(name="tiny", sft_warmup_steps=300))
        engine = LocalEngine(other.network, other.tokenizer, EngineSettings())
        apps.append(build_app(engine, own.tokenizer, model="m", allowed_folders=AllowedFolders([tmp_path])))
    with serving(apps[0]) as first, serving(apps[1]) as second:
        watcher = train(
            tmp_path / "run", steps=3, engine__kind="pool", pool__urls=[first, second], evaluation__when="start_and_end"
        )
    assert list(watcher.steps) == [1, 2, 3]
    assert all(numbers["dropped"] == numbers.get("dropped/zero_variance", 0) for numbers in watcher.steps.values())
