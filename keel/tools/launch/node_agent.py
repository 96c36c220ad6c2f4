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

ANSWER = 2.0
"""Seconds in which a server has to say that it is there."""
MARK = "mark"
"""A file in the launch's folder by which a node shows that it sees the same folder."""


@dataclass(frozen=True)
class Command:
    """How a part is started."""

    words: tuple[str, ...]
    python: str | None = None
    """The interpreter; not given: the one that the node runs Keel by."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secret: tuple[str, str] | None = None
    """The variable that a key goes into, and the file that holds it."""
    health: str | None = None
    """What to ask whether it answers; not given: a process that runs is up."""


@dataclass(frozen=True)
class Where:
    """A node, as its holder sees it."""

    address: str
    host: str
    mark: str
    """What it reads in the launch's folder; empty: it does not see it."""
    keel: str
    python: str


@dataclass(frozen=True)
class Look:
    """A part at one moment."""

    code: int | None = None
    """Its exit code; none: it runs."""
    answers: bool = True
    lost: str = ""
    """Why its holder cannot be asked, if it cannot."""


class Holder:
    """Holds one part on this node. `address` tells the node's own, once it is there."""

    def __init__(self, folder: str, name: str, address: Callable[[], str]) -> None:
        self._folder, self._name, self._address = Path(folder), name, address()
        self._process: subprocess.Popen[bytes] | None = None
        self._health: str | None = None

    def where(self) -> Where:
        mark = self._folder / MARK
        return Where(
            address=self._address,
            host=socket.gethostname(),
            mark=mark.read_text() if mark.is_file() else "",
            keel=importlib.metadata.version("keel-rl"),
            python=platform.python_version(),
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
        words = [command.python or sys.executable, *command.words]
        # the token of the cluster is not the parts' business
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        with (self._folder / f"{self._name}.log").open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                process_guard.words_of(sys.executable, words, command.secret),
                env={**inherited, "PYTHONUNBUFFERED": "1", **command.environment},
                cwd=directory if Path(directory).is_dir() else self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._health = command.health

    def look(self) -> Look:
        if self._process is None:
            return Look(lost="it was not started")
        code = self._process.poll()
        code = None if code is None else process_guard.code_of(code)  # a warden that was killed too
        return Look(code, answers=code is None and (self._health is None or _answers(self._health)))

    def end(self) -> None:
        """Ask the part to end in order."""
        self._say(process_guard.END)

    def kill(self) -> None:
        """End the part and all that it started. Returns when it is gone."""
        if self._process is None:
            return
        self._say(process_guard.KILL)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _say(self, word: bytes) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):  # it has ended, and listens no more
            self._process.stdin.write(word)
            self._process.stdin.flush()


def _answers(url: str) -> bool:
    # no proxy: it is this very machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False
