"""`keel train` as a user runs it: signals, resuming, errors, and engines on other servers."""

import contextlib
import json
import re
import signal
import socket
import sqlite3
from pathlib import Path

import pytest

from keel.cli import main
from keel.config import EngineSettings, ModelSettings
from keel.inference.local.local_engine import LocalEngine
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.app import build_app
from keel.run.watchdog import RunStalled
from keel.tools.launch.plan import LAUNCHED_VARIABLE
from keel.tools.launch.process_guard import RUN_FAILED_EXIT
from keel.training import load_model
from tests.support.engine_fakes import serving
from tests.support.tiny_runs import RECIPE, train
from tests.support.train_process import train_process


def write_recipe(folder: Path) -> str:
    file = folder / "recipe.toml"
    file.write_text(RECIPE)
    return str(file)


@pytest.mark.process
def test_ctrl_c_finishes_the_step_saves_and_prints_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with train_process(write_recipe(tmp_path), "--run", str(folder), "--steps", "10000", "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if '"step"' in line and json.loads(line).get("event") == "step":
                process.send_signal(signal.SIGINT)
                break
        output = process.stdout.read()
        assert process.wait(60) == 0
    assert f"resume with: keel train --resume {folder}" in output
    with sqlite3.connect(folder / "run.db") as db:
        (last,) = db.execute("SELECT max(step) FROM steps").fetchone()
        assert db.execute("SELECT value FROM meta WHERE key = 'status'").fetchone() == ("stopped",)
    assert last < 10000
    assert (folder / "checkpoints" / f"step_{last}" / "model.safetensors").is_file()


FAILING_ENVIRONMENT = """
from itertools import count

from keel.rollout.environments.environment import EpisodeResult, Task

attempts = count()


class Failing:
    name = "failing"

    def __init__(self, failing, same_error):
        self.failing, self.same_error = failing, same_error

    def tasks(self, split):
        return [Task(f"{split}{number}", {"number": number}) for number in range(8)]

    async def episode(self, task, client):
        reply = await client.chat([{"role": "user", "content": str(task.data["number"])}])
        if task.data["number"] < self.failing:
            raise ValueError("no such file" if self.same_error else f"failure {next(attempts)}")
        return EpisodeResult(reply.generation.token_ids[0] % 2)
"""

FAILING_RECIPE = """
steps = 4
stall_timeout = 60
[model]
name = "tiny"
[environments.failing]
name = "failing_environment:Failing"
options = { failing = 8, same_error = true }
[sampling]
max_tokens = 4
[scheduler]
groups_per_step = 4
group_size = 2
[evaluation]
when = "never"
"""


def write_failing_recipe(folder: Path) -> str:
    (folder / "failing_environment.py").write_text(FAILING_ENVIRONMENT)
    file = folder / "failing.toml"
    file.write_text(FAILING_RECIPE)
    return str(file)


@pytest.mark.process
@pytest.mark.parametrize("same_error", ["true", "false"])
def test_a_task_that_always_raises_does_not_hold_up_the_others(tmp_path: Path, same_error: str) -> None:
    folder, options = tmp_path / "run", "--environments.failing.options"
    arguments = [write_failing_recipe(tmp_path), "--run", str(folder)]
    arguments += [f"{options}.failing", "1", f"{options}.same_error", same_error]
    with train_process(*arguments) as process:
        output = process.communicate(timeout=100)[0]
        assert process.returncode == 0, output
    with sqlite3.connect(folder / "run.db") as db:
        assert db.execute("SELECT max(step) FROM steps").fetchone() == (4,)
        failed = dict(db.execute("SELECT task_id, max(attempt) FROM rollouts WHERE reason = 'exception' GROUP BY 1"))
        trained = db.execute("SELECT count(*) FROM rollouts WHERE outcome = 'trained'").fetchone()[0]
    assert failed == {"train0": 1 if same_error == "true" else 3}
    assert trained > 0


@pytest.mark.process
def test_a_run_whose_rollouts_all_fail_ends_with_their_error(tmp_path: Path) -> None:
    arguments = [write_failing_recipe(tmp_path), "--run", str(tmp_path / "run"), "--steps", "100"]
    with train_process(*arguments) as process:
        output = process.communicate(timeout=100)[0]
    assert process.returncode == 2
    assert re.search(
        r"10 consecutive batches had nothing to train on \(scheduler.max_empty_steps = 10\); dropped: .*exception"
        r".*the last error: ValueError: no such file \(failing_environment.py:\d+\)",
        output,
    )


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_whose_rollouts_are_retried_indefinitely(tmp_path: Path, signum: signal.Signals) -> None:
    folder = tmp_path / "run"
    arguments = [write_failing_recipe(tmp_path), "--run", str(folder), "--environments.failing.options.same_error"]
    arguments += ["false", "--scheduler.max_error_reschedule_attempts", "1000000", "--json"]
    with train_process(*arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "the last error: ValueError: failure" in line:
                process.send_signal(signum)
                break
        output = process.stdout.read()
        assert process.wait(30) == 0, output
    assert "stopping without step 1: no rollout succeeded for 5 s; the last error: ValueError: failure" in output
    assert f"resume with: keel train --resume {folder}" in output
    with sqlite3.connect(folder / "run.db") as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'status'").fetchone() == ("stopped",)


@pytest.mark.model
def test_a_launch_table_is_reported_to_have_no_effect_unless_the_run_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "train",
        write_recipe(tmp_path),
        "--run",
        str(tmp_path / "run"),
        "--steps",
        "1",
        "--evaluation.when",
        "never",
    ]
    assert main([*argv, "--launch.engines", "2"]) == 0
    assert "the [launch] table has no effect with `keel train`" in capsys.readouterr().out
    monkeypatch.setenv("KEEL_LAUNCHED", "1")
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert "the [launch] table" not in capsys.readouterr().out


@pytest.mark.model
def test_a_stopped_run_is_resumed_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(folder, stop_after=2)
    assert main(["train", "--resume", str(folder)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"evaluation larger_number on 4 held-out tasks: .* after step 0 -> .* after step 6", output)
    assert "rollouts   " in output and "tokens     " in output and f"view       keel lens {folder}\n" in output


@pytest.mark.model
def test_a_run_whose_rollouts_all_failed_exits_with_1_and_prints_the_last_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["train", write_recipe(tmp_path), "--run", str(tmp_path / "run"), "--steps", "2", "--evaluation.when=never"]
    argv += ["--environments.larger_number.name=tests.run.test_scoring:Broken"]
    assert main([*argv, "--scheduler.max_error_reschedule_attempts", "0"]) == 1
    printed = capsys.readouterr()
    error = r"LookupError: no judge for train \(test_scoring\.py:\d+\)"
    assert re.search(rf"^\d+ rollouts failed; the last error: {error}$", printed.out, re.MULTILINE)
    assert re.search(
        rf"^errors     \d+ rollouts failed; the last error \(\d+ times\): {error}$", printed.out, re.MULTILINE
    )
    assert re.match(rf"keel: no optimizer step was taken: \d+ rollouts failed; .*{error}; fix the cause", printed.err)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 1
    monkeypatch.setenv(LAUNCHED_VARIABLE, "1")
    assert main(["train", "--resume", str(tmp_path / "run")]) == RUN_FAILED_EXIT, "a launcher does not restart it"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "pass a RECIPE, --dataset FILE with --reward NAME, or --resume RUN"),
        (["train", "no.toml"], "no.toml does not exist"),
        (["train", "recipe.toml", "--allow-changes"], "--allow-changes has no effect without --resume"),
        (["train", "--resume", "nothing"], "nothing does not hold a run"),
        (
            ["train", "recipe.toml", "--scheduler.gruops_per_step", "3"],
            "scheduler.gruops_per_step is not a setting; did you mean groups_per_step?",
        ),
        (["train", "recipe.toml", "--sampling.top_p", "0.5"], "sampling.top_p = 0.5 truncates the distribution"),
        (["train", "recipe.toml", "--environments.larger_number.options.shots", "99"], "shots = 99"),
    ],
)
def test_invalid_arguments_are_one_line_errors(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


BROKEN_ENVIRONMENT = """
class Broken:
    name = "broken"

    def tasks(self, split):
        raise FileNotFoundError("no dataset")

    async def episode(self, task, client):
        raise NotImplementedError
"""
FAILING_STARTS = {
    "model": ["--model.name", "./no-such-model"],
    "import": ["--environments.other.name", "no_such_module:Environment"],
    "dataset": ["--environments.other.name", "broken_environment:Broken"],
    "engine": ["--engine.kind", "vllm", "--engine.vllm_python", "no-such-python"],
    "reference": ["--objective.reference_kl_coef", "0.1", "--references.a.source", "adapter:/no-such-adapter"],
    "pool": ["--engine.kind", "pool", "--pool.urls", "['http://127.0.0.1:9']", "--pool.ready_timeout", "1"],
}


@pytest.mark.model
@pytest.mark.parametrize("overrides", FAILING_STARTS.values(), ids=FAILING_STARTS)
def test_a_failed_start_leaves_no_folder_behind(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    (tmp_path / "broken_environment.py").write_text(BROKEN_ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with contextlib.suppress(FileNotFoundError):  # the environment's own error
        assert main(["train", "recipe.toml", "--run", "new/run", *overrides]) == 2
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


def test_a_port_in_use_leaves_no_folder_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = ["train", write_recipe(tmp_path), "--run", str(tmp_path / "run"), "--metrics-port", port]
        assert main(argv) == 2
    assert f"--metrics-port {port}: cannot listen" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.model
def test_a_failed_start_leaves_an_existing_folder_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text(RECIPE)
    (folder / "notes.txt").write_text("mine")
    recipe = str(folder / "config.toml")
    assert main(["train", recipe, "--run", str(folder), "--model.name", "./no-such-model"]) == 2
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoints", "config.toml", "notes.txt"]
    assert (folder / "config.toml").read_text() == RECIPE
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_error_that_says_to_resume_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stall(*_: object) -> None:
        raise RunStalled("no progress; fix the cause and rerun with --resume")

    monkeypatch.setattr("keel.run.loop.TrainingRun._load", stall)
    assert main(["train", write_recipe(tmp_path), "--run", str(tmp_path / "run")]) == 2
    assert "rerun with --resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.db").is_file()


@pytest.mark.model
def test_a_run_that_fails_after_it_has_sampled_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("keel.run.loop.TrainingRun._train_once", fail)
    argv = ["train", write_recipe(tmp_path), "--run", str(tmp_path / "run"), "--evaluation.when", "never"]
    with pytest.raises(RuntimeError, match="out of memory"):
        main(argv)
    assert (tmp_path / "run" / "run.db").is_file()


@pytest.mark.model
def test_a_run_trains_with_a_pool_of_servers(tmp_path: Path) -> None:
    apps = []
    for _ in range(2):
        model = load_model(ModelSettings(name="tiny", sft_warmup_steps=300))
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings())
        apps.append(build_app(engine, model.tokenizer, model="m", allowed_folders=AllowedFolders([tmp_path])))
    with serving(apps[0]) as first, serving(apps[1]) as second:
        watcher = train(
            tmp_path / "run", steps=3, engine__kind="pool", pool__urls=[first, second], evaluation__when="start_and_end"
        )
    assert list(watcher.steps) == [1, 2, 3]
    assert all(metrics["dropped"] == metrics.get("dropped/zero_variance", 0) for metrics in watcher.steps.values())
