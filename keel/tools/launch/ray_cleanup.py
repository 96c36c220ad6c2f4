"""Ends what a Ray cluster of this machine leaves behind when the launcher that started it is killed.

Most of Ray's processes end with the one that started them; some wait minutes for a head that is gone. This one waits on
a pipe from the launcher, and when that breaks it ends every process that carries the launch's own token in its
environment: nobody else has it. It needs /proc, as Linux has it; elsewhere Ray is left to itself.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

TOKEN_PREFIX = b"RAY_AUTH_TOKEN="


def start(token: str) -> "subprocess.Popen[bytes]":
    """A sweeper for this token, to be closed by `close`; however this process ends, it sweeps."""
    # the token goes by the pipe: the sweeper must not carry what it looks for
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    process = subprocess.Popen(
        [sys.executable, "-m", "keel.tools.launch.ray_cleanup"],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(f"{token}\n".encode())
    process.stdin.flush()
    return process


def close(process: "subprocess.Popen[bytes]") -> None:
    """Sweep now; what has ended in order is not there any more."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def kill_processes_with_token(token: bytes) -> None:
    """End every process whose environment holds the token, until there is none."""
    for _ in range(10):
        found = [pid for pid in _list_pids() if TOKEN_PREFIX + token in _read_environ(pid)]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def _list_pids() -> list[int]:
    folder = Path("/proc")
    if not folder.is_dir():
        return []
    return [int(one.name) for one in folder.iterdir() if one.name.isdecimal() and int(one.name) != os.getpid()]


def _read_environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


if __name__ == "__main__":
    first = sys.stdin.buffer.readline().strip()
    while sys.stdin.buffer.read(64):
        pass
    if first:
        kill_processes_with_token(first)
