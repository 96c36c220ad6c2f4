"""Test `keel train` on two ranks of one machine: complete runs, kills, torchrun, and lost ranks."""

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from keel.cli import main
from keel.training.model.optimizer_state import read_tensors
from tests.support.tiny_runs import RECIPE, resume, train
from tests.support.train_process import train_process

STEPS = 3
RANKED = ("--trainer.ranks", "2")
SYNCHRONOUS = ("--steps", str(STEPS), "--scheduler.max_off_policy_steps", "0", "--evaluation.when", "never")
COMPARED_FILES = ("model.safetensors", "training/rates.json", "training/shards/*")

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run synchronously on two ranks without interruption and return the run's folder."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    watcher = train(folder, trainer__ranks=2, steps=STEPS, scheduler__max_off_policy_steps=0, evaluation__when="never")
    assert list(watcher.steps) == list(range(1, STEPS + 1))
    return folder


@contextmanager
def running(folder: Path, *args: str, launcher: tuple[str, ...] = ("-m",)) -> Iterator["subprocess.Popen[str]"]:
    """Start a `keel train` process and kill it at the end of the block."""
    file = folder.parent / "recipe.toml"
    file.write_text(RECIPE)
    arguments = (str(file), "--run", str(folder), "--json", *args)
    with train_process(*arguments, launcher=launcher, stderr=subprocess.PIPE) as process:
        yield process


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("event") == "step" and json.loads(line)["step"] == step:
            return
    assert process.stderr is not None
    pytest.fail(f"the run ended before step {step}: {process.stderr.read()}")


def rank_pids(process: "subprocess.Popen[str]") -> list[int]:
    """Return the process ids of the ranks that a process has started."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [int(child) for child in children if b"keel.cli\0train" in Path(f"/proc/{child}/cmdline").read_bytes()]


def has_exited(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def assert_same_bits(first: Path, second: Path) -> None:
    for pattern in COMPARED_FILES:
        names = [{path.name for path in run.glob(f"checkpoints/step_{STEPS}/{pattern}")} for run in (first, second)]
        assert names[0] == names[1] != set()
        for path in first.glob(f"checkpoints/step_{STEPS}/{pattern}"):
            other_path = second / path.relative_to(first)
            if path.suffix == ".safetensors":
                # compare tensors, not bytes: torch writes the metadata of shards in arbitrary order
                tensors, other_tensors = read_tensors(path)[0], read_tensors(other_path)[0]
                assert tensors.keys() == other_tensors.keys()
                assert all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items()), path
            else:
                assert path.read_bytes() == other_path.read_bytes(), path


def test_the_first_step_on_two_ranks_has_the_metrics_of_one_rank(uninterrupted: Path, tmp_path: Path) -> None:
    assert len(list(uninterrupted.glob(f"checkpoints/step_{STEPS}/training/shards/*.safetensors"))) == 2
    assert main(["export", str(uninterrupted), str(tmp_path / "out")]) == 0
    # the first step is sampled from the same weights, so its metrics equal those of one process
    single = train(tmp_path / "run", steps=1, scheduler__max_off_policy_steps=0).steps[1]
    metrics = json.loads(_first_step(uninterrupted))
    for name in ("loss", "grad_norm", "reward", "trainable_tokens", "samples"):
        # on policy the centred advantages cancel: what is left of the loss is the rounding of float32 sums
        assert metrics[name] == pytest.approx(single[name], rel=1e-4, abs=1e-6), name


def _first_step(folder: Path) -> str:
    with sqlite3.connect(folder / "run.db") as db:
        return str(db.execute("SELECT metrics FROM steps WHERE step = 1").fetchone()[0])


def test_after_rank_0_is_killed_no_process_remains_and_the_resumed_run_is_bit_identical(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with running(folder, *RANKED, *SYNCHRONOUS) as process:
        wait_for_step(process, 2)
        (other,) = rank_pids(process)
        process.kill()
        process.wait()
        assert has_exited(other)
    watcher = resume(folder)
    assert list(watcher.steps)[-1] == STEPS
    assert_same_bits(uninterrupted, folder)


def test_a_run_under_torchrun_is_bit_identical(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")
    with running(folder, *SYNCHRONOUS, launcher=launcher) as process:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
    assert_same_bits(uninterrupted, folder)


def test_a_killed_rank_ends_the_run_with_an_error_that_names_it_and_the_remedy(tmp_path: Path) -> None:
    with running(tmp_path / "run", *RANKED, "--steps", "1000", "--evaluation.when", "never") as process:
        wait_for_step(process, 1)
        (other,) = rank_pids(process)
        os.kill(other, signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = process.communicate()
        assert process.returncode == 2
        assert time.monotonic() - killed < 20
    assert "rank 1 of the trainer exited after SIGKILL; rerun with --resume" in stderr
    assert "Traceback" not in stderr


def test_a_hanging_rank_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    with running(tmp_path / "run", *RANKED, "--steps", "1000", "--trainer.rank_timeout", "8") as process:
        wait_for_step(process, 1)
        (other,) = rank_pids(process)
        os.kill(other, signal.SIGSTOP)
        try:
            _, stderr = process.communicate()
            assert process.returncode == 2
        finally:
            has_exited(other, 1.0) or os.kill(other, signal.SIGKILL)
    assert "did not respond within trainer.rank_timeout = 8 s" in stderr


def test_two_ranks_train_with_lora_references_and_asynchronous_sampling(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    watcher = train(folder, trainer__ranks=2, steps=3, model__lora__rank=4, objective__kl_penalty_coef=0.05)
    assert list(watcher.steps) == [1, 2, 3] and "kl_ref/base" in watcher.steps[3]
    assert (folder / "checkpoints" / "step_3" / "adapter_model.safetensors").is_file()
