"""`keel.train` is `keel train` as a function: the same settings, folder and resume, from a program or a notebook."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import keel
from keel.cli import main
from keel.errors import ConfigError, KeelError
from tests.support.parity_reward import even
from tests.support.paths import ROOT

ROWS = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(200)]
BASE: dict[str, Any] = {
    "model": "tiny",
    "sampling": {"max_tokens": 4},
    "scheduler": {"groups_per_step": 2, "group_size": 4, "max_off_policy_steps": 0},
    "evaluation": {"num_tasks": 2},
    "trainer.optimizer.lr": 1e-3,
}
FACTOR = 0.5


def train(run: Path | str, **settings: Any) -> keel.RunResult:
    return keel.train(run=run, **(BASE | settings))


@pytest.mark.process
def test_rows_and_functions_train_and_the_result_has_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def local(completion: str) -> float:
        return FACTOR * (len(completion.encode()) % 3)

    rewards = [even, {"name": local, "weight": 0.1}, lambda completion: float("a" in completion)]
    result = train(tmp_path / "run", dataset=ROWS, rewards=rewards, objective="dapo", steps=2)
    assert (result.status, result.path) == ("finished", tmp_path / "run")
    assert [row["step"] for row in result.metrics] == [1, 2] and "reward" in result.metrics[0]
    components = {name for name in result.metrics[0] if name.startswith("reward_components/dataset/")}
    assert components == {f"reward_components/dataset/{name}" for name in ("even", "local", "lambda_reward")}
    before, after = result.evaluation["dataset"]
    assert before is not None and after is not None and 0 <= after["reward"] <= 3
    printed = capsys.readouterr().out
    assert "step 2/2" in printed and f"view       keel lens {tmp_path / 'run'}" in printed
    assert repr(result) == f"RunResult('{tmp_path / 'run'}', finished after 2 steps)"
    model, tokenizer = result.model()
    weights = keel.load_model(keel.ModelSettings(name=str(tmp_path / "run/checkpoints/step_2"))).network.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert model.generate(**tokenizer("hi", return_tensors="pt"), max_new_tokens=2).shape[1] > 2
    figure = result.plot()
    assert [axis.get_title() for axis in figure.axes] == ["reward", "loss"]
    with pytest.raises(KeelError, match=r"no step has the metric rewrd; there are .*reward"):
        result.plot("rewrd")


@pytest.mark.process
def test_a_run_resumes_with_its_inputs_also_from_the_command_line_and_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reward(completion: str) -> float:
        return float(len(completion.encode()) % 2)

    def other(completion: str) -> float:
        return float(len(completion.encode()) % 3)

    monkeypatch.setattr(sys, "path", list(sys.path))
    train(tmp_path / "run", dataset=ROWS, rewards=[reward], steps=1, progress=False)
    again = train(tmp_path / "run", dataset=ROWS, rewards=[reward], steps=1, progress=False, resume=True)
    assert len(again.metrics) == 1
    for changed in ({"dataset": ROWS[1:]}, {"rewards": [other]}, {"steps": 2}):
        with pytest.raises(ConfigError, match="allow_changes=True"):
            keel.train(run=tmp_path / "run", resume=True, **changed)
    with pytest.raises(ConfigError, match=r"already holds a run; .*resume=True"):
        train(tmp_path / "run", dataset=ROWS, rewards=[reward])
    assert len(keel.train(run=tmp_path / "run", resume=True, steps=2, allow_changes=True).metrics) == 2
    (tmp_path / "run").rename(tmp_path / "moved")
    arguments = ["-m", "keel.cli", "train", "--resume", str(tmp_path / "moved"), "--steps", "3", "--allow-changes"]
    done = subprocess.run(
        [sys.executable, *arguments], cwd="/", env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "step 3/3" in done.stdout, done.stderr


@pytest.mark.process
def test_it_runs_where_an_event_loop_is_running_and_silently_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def cell() -> keel.RunResult:
        return train(tmp_path / "run", dataset=ROWS, rewards=["number", even], steps=1, progress=False)

    assert asyncio.run(cell()).status == "finished"
    assert capsys.readouterr().out == ""


@pytest.mark.process
def test_a_function_that_hangs_is_killed_and_its_rollouts_fail(tmp_path: Path) -> None:
    def hangs(completion: str) -> float:
        while sum(completion.encode()) % 4 == 0:
            time.sleep(0.1)
        return float(sum(completion.encode()) % 4)

    rewards = [{"name": hangs, "timeout": 1.0}]
    options = {"max_reward_failure_fraction": 1.0}
    result = train(
        tmp_path / "run",
        dataset=ROWS,
        rewards=rewards,
        steps=1,
        progress=False,
        environments={"dataset": options},
        evaluation={"when": "never"},
    )
    assert result.status == "finished"
    assert "reward hangs_" in result.summary and "took longer than 1 s" in result.summary


@pytest.mark.process
def test_a_run_in_which_every_rollout_fails_raises_the_reason(tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        raise ValueError("no judge")

    with pytest.raises(KeelError, match="no judge"):
        train(
            tmp_path / "run",
            dataset=ROWS,
            rewards=[broken],
            steps=1,
            progress=False,
            evaluation={"when": "never"},
            **{"scheduler.max_error_reschedule_attempts": 0},
        )


@pytest.mark.process
def test_a_recipe_is_changed_by_the_arguments_and_an_adapter_is_merged(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        'steps = 9\n[model]\nname = "tiny"\nlora = {rank = 4, alpha = 8}\n[environments.larger_number]\n'
        "[sampling]\nmax_tokens = 4\n[scheduler]\ngroups_per_step = 2\ngroup_size = 8\n[evaluation]\nwhen = 'never'\n"
    )
    result = keel.train(recipe=tmp_path / "base.toml", steps=1, run=tmp_path / "run", progress=False)
    assert len(result.metrics) == 1 and result.evaluation == {}
    model, _ = result.model()
    assert isinstance(model, type(keel.load_model(keel.ModelSettings(name="tiny")).network))


GIVEN: dict[str, Any] = {"dataset": ROWS, "rewards": ["exact"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass dataset and rewards, a recipe, environments, or resume=True"),
        (GIVEN | {"trainer": {"batch_tokens": 3}}, "trainer.batch_tokens is not a setting"),
        (GIVEN | {"stepz": 3}, "stepz is not a setting; did you mean steps"),
        (GIVEN | {"rewards": ["exakt"]}, '"exakt" is not a built-in reward; did you mean exact'),
        ({"dataset": ROWS}, "rewards"),
        (GIVEN | {"dataset": {"train": ROWS}}, 'dataset has the keys train and no "path"'),
        (GIVEN | {"dataset": "missing.jsonl"}, 'dataset.path = "missing.jsonl" does not exist'),
        (GIVEN | {"objective": "icepopp"}, '"icepopp" is not a preset; did you mean icepop'),
        (GIVEN | {"objective": max}, "objective is a builtin_function_or_method; it must"),
        (GIVEN | {"allow_changes": True}, "no effect without resume=True"),
        ({"resume": True}, "resume=True needs run"),
    ],
)
def test_what_cannot_be_used_is_an_error_and_leaves_nothing_behind(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        keel.train(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_plotting_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    result = keel.RunResult(
        tmp_path, "finished", [{"step": 1, "reward": 1.0}], {}, "", keel.load_settings().settings, []
    )
    with pytest.raises(KeelError, match="pip install matplotlib"):
        result.plot()


SCRIPT = """
import keel

FACTOR = 0.5

def reward(completion, answer):
    return FACTOR * (len(completion.encode()) % 2)

rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(40)]
result = keel.train(model="tiny", dataset=rows, rewards=[reward], steps=100000, run="run", sampling={"max_tokens": 4},
                    evaluation={"when": "never"}, scheduler={"groups_per_step": 2, "group_size": 4})
print("status", result.status, len(result.metrics))
"""


@contextmanager
def script_process(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that Ctrl-C interrupts."""
    (folder / "script.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "-u", "script.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupt_at(process: subprocess.Popen[str], start: str) -> None:
    """Interrupt the process when it prints a line that starts with this text."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            process.send_signal(signal.SIGINT)
            return
    raise AssertionError(f"no line starts with {start}")


@pytest.mark.process
def test_an_interrupt_stops_a_script_after_the_step_and_it_resumes(tmp_path: Path) -> None:
    with script_process(tmp_path, SCRIPT) as process:
        interrupt_at(process, "step ")
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait(60) == 0, rest
    assert "interrupt again to stop immediately" in rest and "status stopped" in rest
    steps = int(rest.rpartition("status stopped ")[2])
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", str(steps + 1), "--allow-changes"]) == 0


@pytest.mark.process
def test_a_second_interrupt_stops_immediately_and_the_folder_is_free_again(tmp_path: Path) -> None:
    text = SCRIPT.replace("    return FACTOR", "    while True: pass\n    return FACTOR")
    text = text.replace("result = keel.train(", "try:\n  keel.train(").partition("print(")[0]
    text += "except KeyboardInterrupt:\n  print('ended', keel.run.folder.RunFolder.open(pathlib.Path('run')).path)\n"
    with script_process(tmp_path, f"import pathlib\nimport keel.run.folder\n{text}") as process:
        interrupt_at(process, "run: 100000 steps")
        interrupt_at(process, "finishing step 1; interrupt again")
        assert process.stdout is not None
        rest = process.stdout.read()
    assert "ended run" in rest
