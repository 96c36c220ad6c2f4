"""A local Ray cluster and `keel launch` as a process on it; both end with the test."""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.support.tiny_runs import tiny

TIMEOUT = 300
"""Seconds after which a launch that has not ended is killed."""

RECIPE = tiny(
    steps=4,
    evaluation={"when": "never"},
    pool__poll_interval=0.3,
    launch={"engines": 2, "backoff": 0.2} | {name: {"cpus": 0.5} for name in ("engine", "trainer", "orchestrator")},
)

HEAD = """
import sys, ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         object_store_memory=80_000_000)
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


class Ray:
    """A cluster with four logical CPUs and token authentication."""

    def __init__(self) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_urlsafe(32)}
        self.environment = {
            **os.environ,
            **token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._head = subprocess.Popen(
            [sys.executable, "-c", HEAD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )
        assert self._head.stdout is not None
        self.address = ""
        for line in self._head.stdout:
            if line.startswith("address"):
                self.address = line.split()[1]
                break

    def close(self) -> None:
        self._head.communicate(timeout=60)


class Launch:
    """A running `keel launch`."""

    def __init__(self, process: "subprocess.Popen[str]", run: Path) -> None:
        self.process, self.run = process, run
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, pattern: str, times: int = 1) -> list[str]:
        """Wait until `times` lines match; return their first group or the match."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            matches = [match for line in list(self.said) if (match := re.search(pattern, line))]
            if len(matches) >= times:
                return [match.group(1) if match.groups() else match.group(0) for match in matches]
            assert not ended, f"the launch ended without {pattern!r}:\n{''.join(self.said)}"
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} was never printed:\n{''.join(self.said)}")

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(TIMEOUT)
        self._reader.join(10)
        return code, "".join(self.said)

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes with the run folder in them, except the launch itself, by pid."""
        return {pid: command for pid, command in _commands() if str(self.run) in command and pid != self.process.pid}

    def part(self, word: str) -> int:
        """Return the pid of the first component with `word` in its command; its process guard is another process."""
        return next(pid for pid, command in self.processes().items() if word in command and "guard" not in command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def launched(ray: Ray, run: Path, *args: str) -> Iterator[Launch]:
    """Run `keel launch` on the cluster for the duration of the block; `run` is its folder."""
    command = [sys.executable, "-m", "keel.cli", "launch", "--cluster", ray.address, *args]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ray.environment,
        start_new_session=True,
    )
    timer = threading.Timer(TIMEOUT, process.kill)
    timer.start()
    try:
        with Launch(process, run) as launch:
            yield launch
    finally:
        timer.cancel()


def gone(launch: Launch, seconds: float = 20.0) -> bool:
    """Return whether all components end within `seconds`."""
    deadline = time.monotonic() + seconds
    while launch.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not launch.processes()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _commands() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
