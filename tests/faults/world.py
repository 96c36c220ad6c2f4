"""A run and its engines as processes, to be put into trouble: how they are started, and how the trouble is told.

A world owns one run folder. Its trainer is `keel train`, in one life after the other; with a pool, its engines are
`keel serve` on fixed ports, started again when they are gone, as whoever runs a cluster would.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .lives import Life, Lives

RECIPE = """
steps = {steps}
stall_timeout = 60
[model]
name = "tiny"
[environments.tokens]
name = "tests.faults.environments:Tokens"
limits = {{ seconds = 20, tokens = 256 }}
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
POOL = {"interval": 0.25, "health_timeout": 10.0, "load_timeout": 20.0, "wait": 60.0}
"""A pool that notices things soon."""
ENDS = 120.0
"""Seconds after which a life that was left alone and has not ended hangs: its own watchdog takes half as long."""


@dataclass
class Result:
    """What came of one fault, in all the runs that it was put into."""

    fault: str
    injected: int = 0
    runs: int = 0
    continued: int = 0
    """Runs that went on to their end, by themselves or after a restart."""
    stopped: int = 0
    """Runs that ended with an error which names its cause."""
    violations: list[str] = field(default_factory=list)
    recovery: float = 0.0
    """The longest time from a fault to the next step on record, in seconds."""

    def add(self, other: "Result") -> None:
        self.injected += other.injected
        self.runs += other.runs
        self.continued += other.continued
        self.stopped += other.stopped
        self.violations += other.violations
        self.recovery = max(self.recovery, other.recovery)


class World:
    """One run. `changes` are settings by their dotted names."""

    def __init__(self, lives: Lives, folder: Path, *, steps: int = 12, **changes: Any) -> None:
        self.lives, self.folder, self.steps = lives, folder, steps
        self.run = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(RECIPE.format(steps=steps))
        self.words = [f"--{name.replace('__', '.')}={_toml(value)}" for name, value in changes.items()]
        self.engines: list[Engine] = []
        self._count = 0

    def with_engines(self, count: int) -> list[str]:
        """Servers for a pool; what they listen on."""
        self.engines = [Engine(self.lives, self.folder, number) for number in range(count)]
        return [engine.url for engine in self.engines]

    def use_pool(self, urls: Sequence[str], **changes: Any) -> None:
        """Sample by the servers at these addresses."""
        self.words += ['--engine.kind="pool"', f"--pool.urls={_toml(list(urls))}"]
        self.words += [f"--pool.{name}={_toml(value)}" for name, value in {**POOL, **changes}.items()]

    def start(self, *more: str, largest_file: int | None = None, again: bool = False) -> Life:
        """The next life of the trainer: a new run, or the same one again."""
        self._count += 1
        words = [str(self.recipe), "--run", str(self.run), *self.words]
        if again or (self.run / "run.db").exists():
            words = ["--resume", str(self.run)]
        log = self.folder / f"life_{self._count}.log"
        return self.lives.start(["train", *words, *more, "--json"], log, largest_file=largest_file)

    def recorded(self) -> int:
        """Steps whose record is there."""
        try:
            return sum(name.startswith("step_") for name in os.listdir(self.run / "rollouts"))
        except OSError:
            return 0

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()


class Engine:
    """A `keel serve` at a port of its own, which may be killed and started again there."""

    def __init__(self, lives: Lives, folder: Path, number: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._lives, self._folder, self._number = lives, folder, number
        self.life: Life | None = None
        self.start()

    def start(self) -> None:
        words = ["serve", "tiny", "--port", str(self.port), "--weights-from", str(self._folder), "--patience", "1"]
        self.life = self._lives.start(words, self._folder / f"engine_{self._number}.log")

    def keep(self) -> None:
        """Start it again if it is gone."""
        if self.life is not None and self.life.poll() is not None:
            self.start()

    def kill(self) -> None:
        if self.life is not None:
            self.life.kill()


def _toml(value: Any) -> str:
    return json.dumps(value)
