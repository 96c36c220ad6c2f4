"""The run under test and its engine servers as real processes, and the result of a fault scenario.

A `TargetRun` owns one run folder. Its trainer is `keel train`, restarted after each kill; with a pool, its engines are
`keel serve` on fixed ports, restarted when they end, as a cluster manager would.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import ForkServer, KeelProcess

RECIPE = """
steps = {steps}
stall_timeout = 60
[model]
name = "tiny"
[environments.tokens]
name = "tests.faults.environments:Tokens"
limits = {{ timeout = 20, max_sequence_tokens = 256 }}
[sampling]
max_tokens = 4
[scheduler]
groups_per_step = 2
group_size = 4
[trainer.optimizer]
lr = 1e-3
[checkpoints]
every = 3
[evaluation]
when = "never"
"""
POOL = {"poll_interval": 0.25, "health_timeout": 10.0, "load_timeout": 20.0, "ready_timeout": 60.0}
"""Pool settings that detect changes quickly."""
RUN_TIMEOUT = 120.0
"""Seconds after which an undisturbed process counts as hanging; its own watchdog takes half as long."""


@dataclass
class Result:
    """The result of one fault scenario over all its runs."""

    fault: str
    injected: int = 0
    runs: int = 0
    continued: int = 0
    """Runs that completed, with or without a restart."""
    stopped: int = 0
    """Runs that ended with an error that names the cause."""
    violations: list[str] = field(default_factory=list)
    recovery: float = 0.0
    """The longest time from a fault to the next recorded step, in seconds."""

    def add(self, other: "Result") -> None:
        self.injected += other.injected
        self.runs += other.runs
        self.continued += other.continued
        self.stopped += other.stopped
        self.violations += other.violations
        self.recovery = max(self.recovery, other.recovery)


class TargetRun:
    """One run. `changes` are settings by their dotted names, with `__` for the dots."""

    def __init__(self, fork_server: ForkServer, folder: Path, *, steps: int = 12, **changes: Any) -> None:
        self.fork_server, self.folder, self.steps = fork_server, folder, steps
        self.run_folder = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(RECIPE.format(steps=steps))
        self.args = [f"--{name.replace('__', '.')}={_toml(value)}" for name, value in changes.items()]
        self.engines: list[ServerProcess] = []
        self._count = 0

    def with_engines(self, count: int) -> list[str]:
        """Start servers for a pool and return their URLs."""
        self.engines = [ServerProcess(self.fork_server, self.folder, number) for number in range(count)]
        return [engine.url for engine in self.engines]

    def use_pool(self, urls: Sequence[str], **changes: Any) -> None:
        """Sample with the servers at these URLs."""
        self.args += ['--engine.kind="pool"', f"--pool.urls={_toml(list(urls))}"]
        self.args += [f"--pool.{name}={_toml(value)}" for name, value in {**POOL, **changes}.items()]

    def start(self, *more: str, max_file_bytes: int | None = None, resume: bool = False) -> KeelProcess:
        """Start the trainer: a new run, or resume the existing one."""
        self._count += 1
        args = [str(self.recipe), "--run", str(self.run_folder), *self.args]
        if resume or (self.run_folder / "run.db").exists():
            args = ["--resume", str(self.run_folder)]
        log = self.folder / f"trainer_{self._count}.log"
        return self.fork_server.start(["train", *args, *more, "--json"], log, max_file_bytes=max_file_bytes)

    def recorded_steps(self) -> int:
        """Return the number of steps with a record."""
        try:
            return sum(name.startswith("step_") for name in os.listdir(self.run_folder / "rollouts"))
        except OSError:
            return 0

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()


class ServerProcess:
    """A `keel serve` on a fixed port, which may be killed and restarted."""

    def __init__(self, fork_server: ForkServer, folder: Path, number: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._lives, self._folder, self._number = fork_server, folder, number
        self.process: KeelProcess | None = None
        self.start()

    def start(self) -> None:
        args = ["serve", "tiny", "--port", str(self.port), "--weights-from", str(self._folder), "--patience", "1"]
        self.process = self._lives.start(args, self._folder / f"engine_{self._number}.log")

    def ensure_running(self) -> None:
        """Restart the server if it has ended."""
        if self.process is not None and self.process.poll() is not None:
            self.start()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def _toml(value: Any) -> str:
    return json.dumps(value)
