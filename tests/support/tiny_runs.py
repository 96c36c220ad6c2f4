"""Training runs with the tiny model, in this process and in forked processes that may be killed.

Processes are forked from one that has only done the slow imports; it has no threads, so that a fork is safe.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from keel.config import LoadedSettings, load_settings
from keel.config.load import set_dotted
from keel.config.toml_writer import to_toml
from keel.run.evaluation.evaluate import EvaluationResult
from keel.run.folder import RunFolder
from keel.run.loop import TrainingRun
from keel.run.monitor.callbacks import NullCallback
from tests.support.paths import ROOT

RECIPE = """
steps = 6
[model]
name = "tiny"
sft_warmup_steps = 300
[environments.larger_number]
options = { shots = 0, digits = 1 }
[sampling]
max_tokens = 4
[scheduler]
groups_per_step = 4
group_size = 4
max_off_policy_steps = 1
[trainer.optimizer]
lr = 1e-3
[checkpoints]
every = 3
[evaluation]
num_tasks = 4
every = 3
"""


def tiny(**changes: Any) -> str:
    """Return the recipe as TOML with changes; `scheduler__groups_per_step=2` sets scheduler.groups_per_step."""
    tree = tomllib.loads(RECIPE)
    for name, value in changes.items():
        set_dotted(tree, name.replace("__", "."), value)
    return "".join(f"{name} = {to_toml(value)}\n" for name, value in tree.items())


class Watcher(NullCallback):
    """Records the steps, evaluations and notices of a run."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.evaluations: dict[int, EvaluationResult] = {}
        self.notices: list[str] = []
        self.failures: list[tuple[int, str]] = []

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.steps[step] = dict(numbers)

    def rollouts_failed(self, count: int, last_error: str) -> None:
        self.failures.append((count, last_error))

    def evaluated(self, step: int, evaluation: EvaluationResult) -> None:
        self.evaluations[step] = evaluation

    def notice(self, text: str) -> None:
        self.notices.append(text)


def loaded(folder: Path, **changes: Any) -> LoadedSettings:
    """Load the recipe with changes; `scheduler__groups_per_step=2` sets scheduler.groups_per_step."""
    file = folder.parent / f"{folder.name}.toml"
    file.write_text(RECIPE)
    return load_settings(file, [f"--{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()])


def go(folder: RunFolder, *, stop_after: int | None = None) -> Watcher:
    """Train to the end, or stop after a step."""
    watcher = Watcher()
    try:
        run = TrainingRun(folder, watcher)
    except BaseException:
        folder.close()
        raise
    if stop_after is not None:
        watched = watcher.step

        def step(number: int, numbers: Mapping[str, float]) -> None:
            watched(number, numbers)
            if number == stop_after:
                run.stop()

        watcher.step = step  # type: ignore[method-assign]
    try:
        asyncio.run(run.train())
    finally:
        folder.close()
    return watcher


def train(folder: Path, *, stop_after: int | None = None, **changes: Any) -> Watcher:
    return go(RunFolder.create(folder, loaded(folder, **changes)), stop_after=stop_after)


def resume(folder: Path) -> Watcher:
    return go(RunFolder.open(folder))


class Lives:
    """Runs training in forked processes that may be killed."""

    def __init__(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import tiny_runs; tiny_runs.serve()"
        self._server = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def live(self, folder: Path, kill_after: float | None = None, **changes: Any) -> bool:
        """Train until the end or a kill after `kill_after` seconds; return whether the end was reached."""
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps([str(folder), kill_after, changes]) + "\n")
        self._server.stdin.flush()
        status, output = json.loads(self._server.stdout.readline())
        assert status in ("ended", "killed"), output
        return bool(status == "ended")

    def close(self) -> None:
        self._server.communicate(timeout=60)


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, kill_after, changes = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _run_forked(Path(folder), changes, writer)
        os.close(writer)
        deadline = None if kill_after is None else time.monotonic() + kill_after
        status = None
        while status is None:
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                status = "ended" if code == 0 else "failed"
            elif deadline is not None and time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                status = "killed"
            else:
                time.sleep(0.002)
        with os.fdopen(reader) as pipe:
            sys.stdout.write(json.dumps([status, pipe.read()]) + "\n")
        sys.stdout.flush()


def _run_forked(folder: Path, changes: dict[str, Any], error_pipe: int) -> None:
    code = 1
    try:
        if (folder / "run.db").exists():
            resume(folder)
        else:
            train(folder, **changes)
        code = 0
    except BaseException:  # noqa: BLE001 - reported to the test
        os.write(error_pipe, traceback.format_exc().encode())
    finally:
        os._exit(code)
