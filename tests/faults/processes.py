"""`keel` commands as processes that start quickly and may be killed, forked from a process that has done the imports.

The fork server has no threads, so that a fork is safe; each process has its own session and log. Imports take six
seconds and a fork almost none, which makes hundreds of kills affordable.
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
"""Modules that trainers and servers import at startup."""


class AwakeClock:
    """Counts seconds in which this process ran, so that a suspended machine does not cause false timeouts."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._seconds, self._last = self._seconds + min(now - self._last, 2.0), now
        return self._seconds


awake_seconds = AwakeClock()


class KeelProcess:
    """One `keel` process."""

    def __init__(self, server: "ForkServer", pid: int, log: Path) -> None:
        self._server, self.pid, self.log = server, pid, log
        self._handle = os.pidfd_open(pid)
        self.code: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """Wait up to `seconds` for the end; return the exit code, or None while it runs."""
        if self.code is None and select.select([self._handle], [], [], seconds)[0]:
            self.code = self._server.ask({"poll": self.pid})
            os.close(self._handle)
        return self.code

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end, `until` or the timeout; return whether the process ended."""
        deadline = awake_seconds() + seconds
        while self.poll(0.004) is None:
            if until() or awake_seconds() > deadline:
                return False
        return True

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.poll(1.0) is None:
            pass

    def kill_child(self, argument: str) -> int:
        """Send SIGKILL to child processes with this argument in their command line; return how many there were."""
        killed = 0
        # children are listed per thread that started them
        lists = [path.read_text().split() for path in Path(f"/proc/{self.pid}/task").glob("*/children")]
        for child in [child for children in lists for child in children]:
            if argument.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                os.kill(int(child), signal.SIGKILL)
                killed += 1
        return killed

    def output(self) -> str:
        """Return the contents of the log."""
        return self.log.read_text(errors="replace")


class ForkServer:
    """The process that all others are forked from."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.faults.processes import serve; serve()"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes: list[KeelProcess] = []

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, argv: Sequence[str], log: Path, *, max_file_bytes: int | None = None) -> KeelProcess:
        """Start `keel ARGV` as a process; with `max_file_bytes` it cannot write larger files."""
        process = KeelProcess(
            self, self.ask({"start": list(argv), "log": str(log), "max_file_bytes": max_file_bytes}), log
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill all running processes and stop the fork server."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._server.communicate(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """Fork on request, and report exit codes."""
    for name in MODULES:
        importlib.import_module(name)
    main = importlib.import_module("keel.cli").main
    importlib.import_module("torch").set_num_threads(1)
    exit_codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        response: int | None
        if "poll" in request:
            response = _exit_code(request["poll"], exit_codes)
        elif (response := os.fork()) == 0:
            _run_forked(main, request)
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


def _exit_code(pid: int, exit_codes: dict[int, int]) -> int:
    if pid not in exit_codes:
        exit_codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # requested only after the process has ended
    return exit_codes[pid]


def _run_forked(main: Callable[[list[str]], int], request: Mapping[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        if request["max_file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["max_file_bytes"], request["max_file_bytes"]))
        code = main(request["start"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - any failure must reach the log and the exit code
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
