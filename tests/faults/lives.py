"""Processes that are cheap to start and may be killed: `keel` commands, forked from one that has done the imports.

The fork server has no threads, so that a fork is safe; each life has a session and a log of its own. All imports take
six seconds and a fork none, which is what makes hundreds of kills affordable.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
MODULES = (
    "keel.cli.run.serve",
    "keel.inference.server.app",
    "keel.training.model.tiny_models",
    "keel.rollout.environments.registry",
    "keel.rollout.environments.builtin",
    "keel.run.loop",
    "keel.run.monitor.sinks",
    "transformers.models.llama.modeling_llama",
    "uvicorn",
)
"""What a trainer or a server would import when it starts."""


class Awake:
    """Seconds in which this process ran: what a machine that was stopped for a while does to a run is no finding."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._seconds, self._last = self._seconds + min(now - self._last, 2.0), now
        return self._seconds


awake = Awake()


class Life:
    """One process."""

    def __init__(self, server: "Lives", pid: int, log: Path) -> None:
        self._server, self.pid, self.log = server, pid, log
        self._handle = os.pidfd_open(pid)
        self.code: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """Its exit code; none while it lives, after waiting for its end for so long."""
        if self.code is None and select.select([self._handle], [], [], seconds)[0]:
            self.code = self._server.ask({"poll": self.pid})
            os.close(self._handle)
        return self.code

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it ended, which is True, or something else happened, or the time is over."""
        deadline = awake() + seconds
        while self.poll(0.004) is None:
            if until() or awake() > deadline:
                return False
        return True

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.poll(1.0) is None:
            pass

    def kill_child(self, word: str) -> int:
        """SIGKILL of the processes that it started and that have this word in their command; how many there were."""
        killed = 0
        # a child is listed with the thread that started it
        lists = [path.read_text().split() for path in Path(f"/proc/{self.pid}/task").glob("*/children")]
        for child in [child for found in lists for child in found]:
            if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                os.kill(int(child), signal.SIGKILL)
                killed += 1
        return killed

    def said(self) -> str:
        """All that it wrote."""
        return self.log.read_text(errors="replace")


class Lives:
    """The process that lives are forked from."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.faults.lives import serve; serve()"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lives: list[Life] = []

    def ask(self, what: Mapping[str, Any]) -> Any:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(what) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, words: Sequence[str], log: Path, *, largest_file: int | None = None) -> Life:
        """`keel WORDS` in a process of its own; with `largest_file`, one that may write no longer ones."""
        life = Life(self, self.ask({"start": list(words), "log": str(log), "largest_file": largest_file}), log)
        self._lives.append(life)
        return life

    def close(self) -> None:
        """End all that still lives."""
        for life in self._lives:
            if life.poll() is None:
                life.kill()
        self._server.communicate(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """Fork on demand, and tell how lives ended."""
    for name in MODULES:
        importlib.import_module(name)
    main = importlib.import_module("keel.cli").main
    importlib.import_module("torch").set_num_threads(1)
    ended: dict[int, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        answer: int | None
        if "poll" in asked:
            answer = _ended(asked["poll"], ended)
        elif (answer := os.fork()) == 0:
            _live(main, asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _ended(pid: int, ended: dict[int, int]) -> int:
    if pid not in ended:
        ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # asked for only when it has ended
    return ended[pid]


def _live(main: Callable[[list[str]], int], asked: Mapping[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (log, 1), (log, 2)):
            os.dup2(here, there)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        if asked["largest_file"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["largest_file"], asked["largest_file"]))
        code = main(asked["start"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is, whoever waits is told
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
