"""Kill the remaining processes of a local Ray cluster when the launcher that started it is killed.

Most of Ray's processes end with their parent; some wait minutes for a head that is gone. This process waits on a pipe
from the launcher, and when the pipe closes it kills every process that has the launch's token in its environment, which
no other process has. It needs /proc (Linux); elsewhere nothing is cleaned up.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

TOKEN_PREFIX = b"RAY_AUTH_TOKEN="


def start(token: str) -> "subprocess.Popen[bytes]":
    """Start a cleanup process for a token. It cleans up when `close` is called or when this process ends in any way."""
    # the token goes through the pipe: the cleanup process must not have it in its own environment
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
    """Clean up now; processes that have already ended are not affected."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def kill_processes_with_token(token: bytes) -> None:
    """Kill every process whose environment has the token, until none is left."""
    for _ in range(10):
        pids = [pid for pid in _list_pids() if TOKEN_PREFIX + token in _read_environ(pid)]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def _list_pids() -> list[int]:
    folder = Path("/proc")
    if not folder.is_dir():
        return []
    return [int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and int(entry.name) != os.getpid()]


def _read_environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


if __name__ == "__main__":
    launch_token = sys.stdin.buffer.readline().strip()
    while sys.stdin.buffer.read(64):
        pass
    if launch_token:
        kill_processes_with_token(launch_token)
