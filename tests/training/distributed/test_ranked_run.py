"""`keel train` on two ranks: to its end, after kills, under torchrun, and when a rank is lost; all on one machine."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from keel.cli import main
from keel.config.trainer import TrainerSettings
from keel.errors import ConfigError
from keel.training.distributed.rank_processes import RankProcesses
from keel.training.distributed.world import RankInfo
from keel.training.model.optimizer_state import read_tensors
from tests.support.tiny_runs import RECIPE, resume, train

PATIENCE = 240
STEPS = 3
RANKED = ("--trainer.ranks", "2")
SYNCHRONOUS = ("--steps", str(STEPS), "--scheduler.max_off_policy_steps", "0", "--evaluation.when", "never")
BITS = ("model.safetensors", "training/rates.json", "training/shards/*")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run on two ranks that nobody interrupted."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    watcher = train(folder, trainer__ranks=2, steps=STEPS, scheduler__max_off_policy_steps=0, evaluation__when="never")
    assert list(watcher.steps) == list(range(1, STEPS + 1))
    return folder


@contextmanager
def running(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    """A `keel train` process that is ended whatever happens."""
    file = folder.parent / "recipe.toml"
    file.write_text(RECIPE)
    command = [sys.executable, *(launcher or ("-m",)), "keel.cli", "train", str(file), "--run", str(folder), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


def until_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("event") == "step" and json.loads(line)["step"] == step:
            return
    assert process.stderr is not None
    pytest.fail(f"the run ended before step {step}: {process.stderr.read()}")


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """The other ranks that a process has started."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return [int(child) for child in children if b"keel.cli\0train" in Path(f"/proc/{child}/cmdline").read_bytes()]


def gone(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def assert_same_bits(one: Path, other: Path) -> None:
    for pattern in BITS:
        names = [{path.name for path in run.glob(f"checkpoints/step_{STEPS}/{pattern}")} for run in (one, other)]
        assert names[0] == names[1] != set()
        for path in one.glob(f"checkpoints/step_{STEPS}/{pattern}"):
            twin = other / path.relative_to(one)
            if path.suffix == ".safetensors":
                # not the files' bytes: torch puts what it says of each shard in an order of its own
                found, wanted = read_tensors(path)[0], read_tensors(twin)[0]
                assert found.keys() == wanted.keys()
                assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items()), path
            else:
                assert path.read_bytes() == twin.read_bytes(), path


def test_a_run_on_two_ranks_learns_what_one_on_one_rank_does(straight: Path, tmp_path: Path) -> None:
    assert len(list(straight.glob(f"checkpoints/step_{STEPS}/training/shards/*.safetensors"))) == 2
    assert main(["export", str(straight), str(tmp_path / "out")]) == 0
    # the first step is sampled from the same weights: its numbers are those of one process
    alone = train(tmp_path / "run", steps=1, scheduler__max_off_policy_steps=0).steps[1]
    rows = json.loads(_first_step(straight))
    for name in ("loss", "grad_norm", "reward", "tokens", "samples"):
        assert rows[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-7), name


def _first_step(folder: Path) -> str:
    with sqlite3.connect(folder / "run.db") as db:
        return str(db.execute("SELECT metrics FROM steps WHERE step = 1").fetchone()[0])


def test_a_run_whose_rank_0_was_killed_leaves_no_process_and_goes_on_to_the_same_bits(
    straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with running(folder, *RANKED, *SYNCHRONOUS) as process:
        until_step(process, 2)
        (other,) = ranks_of(process)
        process.kill()
        process.wait()
        assert gone(other)
    watcher = resume(folder)
    assert list(watcher.steps)[-1] == STEPS
    assert_same_bits(straight, folder)


def test_under_torchrun_the_run_is_the_same(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")
    with running(folder, *SYNCHRONOUS, launcher=launcher) as process:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert_same_bits(straight, folder)


def test_a_rank_that_is_killed_ends_the_run_with_its_name_and_the_remedy(tmp_path: Path) -> None:
    with running(tmp_path / "run", *RANKED, "--steps", "1000", "--evaluation.when", "never") as process:
        until_step(process, 1)
        (other,) = ranks_of(process)
        os.kill(other, signal.SIGKILL)
        killed = time.monotonic()
        _, said = process.communicate()
        assert process.returncode == 2
        assert time.monotonic() - killed < 20
    assert "rank 1 of the trainer ended by SIGKILL; go on with --resume" in said
    assert "Traceback" not in said


def test_a_rank_that_hangs_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    with running(tmp_path / "run", *RANKED, "--steps", "1000", "--trainer.rank_timeout", "8") as process:
        until_step(process, 1)
        (other,) = ranks_of(process)
        os.kill(other, signal.SIGSTOP)
        try:
            _, said = process.communicate()
            assert process.returncode == 2
        finally:
            gone(other, 1.0) or os.kill(other, signal.SIGKILL)
    assert "did not answer within trainer.rank_timeout = 8 s" in said


def test_with_lora_references_and_asynchronous_sampling(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    watcher = train(folder, trainer__ranks=2, steps=3, model__lora__rank=4, objective__kl_penalty_coef=0.05)
    assert list(watcher.steps) == [1, 2, 3] and "kl_ref/base" in watcher.steps[3]
    assert (folder / "checkpoints" / "step_3" / "adapter_model.safetensors").is_file()


def test_a_launcher_and_the_settings_must_agree() -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    place = RankInfo.from_environment(launched)
    assert place is not None and RankProcesses(TrainerSettings(), place).size == 4
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 2, and the launcher started 4"):
        RankProcesses(TrainerSettings(ranks=2), place)
    with pytest.raises(ConfigError, match="RANK = 4 must be from 0 to WORLD_SIZE - 1 = 3"):
        RankInfo.from_environment({**launched, "RANK": "4"})
