"""What lives on a node for one part: it starts the part's process there, looks at it, and ends it.

Invariant: at most one process of the part lives at a time, and none outlives the holder (`warden.py`). It runs inside a
Ray actor but knows nothing of Ray and imports nothing heavy, since a node may hold many. It decides nothing: when to
start, and what a death means, is the supervisor's.
"""

import contextlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keel.tools.launch import process_guard

HEALTH_TIMEOUT = 2.0
"""Seconds in which a server has to say that it is there."""
MARK_FILE = "mark"
"""A file in the launch's folder by which a node shows that it sees the same folder."""


@dataclass(frozen=True)
class Command:
    """How a part is started."""

    argv: tuple[str, ...]
    python: str | None = None
    """The interpreter; not given: the one that the node runs Keel by."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secret_env: tuple[str, str] | None = None
    """The variable that a key goes into, and the file that holds it."""
    health_url: str | None = None
    """What to ask whether it answers; not given: a process that runs is up."""


@dataclass(frozen=True)
class NodeInfo:
    """A node, as its holder sees it."""

    address: str
    host: str
    mark: str
    """What it reads in the launch's folder; empty: it does not see it."""
    keel_version: str
    python_version: str


@dataclass(frozen=True)
class Probe:
    """A part at one moment."""

    exit_code: int | None = None
    """Its exit code; none: it runs."""
    healthy: bool = True
    lost_reason: str = ""
    """Why its holder cannot be asked, if it cannot."""


class NodeAgent:
    """Holds one part on this node. `address` tells the node's own, once it is there."""

    def __init__(self, folder: str, name: str, get_address: Callable[[], str]) -> None:
        self._folder, self._name, self._address = Path(folder), name, get_address()
        self._process: subprocess.Popen[bytes] | None = None
        self._health_url: str | None = None

    def node_info(self) -> NodeInfo:
        mark = self._folder / MARK_FILE
        return NodeInfo(
            address=self._address,
            host=socket.gethostname(),
            mark=mark.read_text() if mark.is_file() else "",
            keel_version=importlib.metadata.version("keel-rl"),
            python_version=platform.python_version(),
        )

    def free_port(self, host: str) -> int:
        """A port that nothing listens on at the moment."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            return port

    def start(self, command: Command, directory: str) -> None:
        """Start the part; one that still runs is ended first. What it says goes to its log."""
        self.kill()
        words = [command.python or sys.executable, *command.argv]
        # the token of the cluster is not the parts' business
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        with (self._folder / f"{self._name}.log").open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                process_guard.guard_argv(sys.executable, words, command.secret_env),
                env={**inherited, "PYTHONUNBUFFERED": "1", **command.environment},
                cwd=directory if Path(directory).is_dir() else self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._health_url = command.health_url

    def probe(self) -> Probe:
        if self._process is None:
            return Probe(lost_reason="it was not started")
        code = self._process.poll()
        code = None if code is None else process_guard.shell_exit_code(code)  # a warden that was killed too
        return Probe(code, healthy=code is None and (self._health_url is None or _is_healthy(self._health_url)))

    def terminate(self) -> None:
        """Ask the part to end in order."""
        self._send_command(process_guard.TERMINATE_COMMAND)

    def kill(self) -> None:
        """End the part and all that it started. Returns when it is gone."""
        if self._process is None:
            return
        self._send_command(process_guard.KILL_COMMAND)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _send_command(self, command: bytes) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):  # it has ended, and listens no more
            self._process.stdin.write(command)
            self._process.stdin.flush()


def _is_healthy(url: str) -> bool:
    # no proxy: it is this very machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HEALTH_TIMEOUT) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
