"""The agent of one component on its node: starts the component's process, probes it, and stops it.

Invariant: at most one process of the component runs at a time, and none outlives the agent (`process_guard.py`). It
runs inside a Ray actor but does not depend on Ray and imports nothing heavy, since a node may have many agents. All
decisions, when to start and how to handle a crash, are made by the supervisor.
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
"""Seconds in which a server must answer a health check."""
MARK_FILE = "mark"
"""A file in the launch folder whose content shows that a node sees the same folder."""


@dataclass(frozen=True)
class Command:
    """How a component is started."""

    argv: tuple[str, ...]
    python: str | None = None
    """The interpreter; None: the one that runs Keel on the node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secret_env: tuple[str, str] | None = None
    """An environment variable to set, and the file that holds its secret value."""
    health_url: str | None = None
    """URL of the health check; None: a running process is healthy."""


@dataclass(frozen=True)
class NodeInfo:
    """A node, as its agent reports it."""

    address: str
    host: str
    mark: str
    """Content of the marker file in the launch folder; empty if the node does not see the folder."""
    keel_version: str
    python_version: str


@dataclass(frozen=True)
class Probe:
    """The state of a component at one moment."""

    exit_code: int | None = None
    """Exit code of the process; None while it runs."""
    healthy: bool = True
    lost_reason: str = ""
    """Why the agent cannot be reached; empty if it can."""


class NodeAgent:
    """Runs one component on this node. `get_address` returns the node's address and is called on the node."""

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
        """Return a port that is currently free."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            return port

    def start(self, command: Command, directory: str) -> None:
        """Start the component; a process that still runs is killed first. Its output goes to its log."""
        self.kill()
        argv = [command.python or sys.executable, *command.argv]
        # components must not see the authentication token of the cluster
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        with (self._folder / f"{self._name}.log").open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                process_guard.guard_argv(sys.executable, argv, command.secret_env),
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
            return Probe(lost_reason="was not started")
        code = self._process.poll()
        code = None if code is None else process_guard.shell_exit_code(code)  # the guard itself may have been killed
        return Probe(code, healthy=code is None and (self._health_url is None or _is_healthy(self._health_url)))

    def terminate(self) -> None:
        """Ask the component to shut down."""
        self._send_command(process_guard.TERMINATE_COMMAND)

    def kill(self) -> None:
        """Kill the component and all processes that it started. Returns when they are gone."""
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
        with contextlib.suppress(OSError):  # the process has ended
            self._process.stdin.write(command)
            self._process.stdin.flush()


def _is_healthy(url: str) -> bool:
    # no proxy: the server is on this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HEALTH_TIMEOUT) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
