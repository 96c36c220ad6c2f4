"""A part, its warden and its holder as real processes: nothing outlives the one above it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keel.tools.launch import process_guard, ray_cleanup
from keel.tools.launch.node_agent import MARK_FILE, Command, NodeAgent

PART = """
import os, subprocess, time
subprocess.Popen(['sleep', '600'])
print(os.getpid(), flush=True)
time.sleep(600)
"""
"""A part that starts a process of its own, and would never end."""


@contextmanager
def guarded(*words: str, secret: tuple[str, str] | None = None) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A warden with its part, and the part's process id."""
    command = process_guard.guard_argv(sys.executable, [sys.executable, "-c", *words], secret)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        part = int(process.stdout.readline())
        try:
            yield process, part
        finally:
            process.kill()


def gone(group: int) -> bool:
    """Whether a process group ends within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (process_guard.TERMINATE_COMMAND, 128 + signal.SIGTERM),
        (process_guard.KILL_COMMAND, 128 + signal.SIGKILL),
        (b"", 128 + signal.SIGKILL),
    ],
)
def test_a_part_and_what_it_started_end_when_told_and_when_nobody_holds_them_any_more(told: bytes, code: int) -> None:
    with guarded(PART) as (process, part):
        assert process.stdin is not None
        if told:
            process.stdin.write(told)
            process.stdin.flush()
        else:
            process.stdin.close()
        assert process.wait(10) == code
        assert gone(part)


def test_a_part_ends_with_a_warden_that_is_killed() -> None:
    with guarded("import os, time; print(os.getpid(), flush=True); time.sleep(600)") as (process, part):
        process.kill()
        assert gone(part)


def test_a_secret_reaches_the_part_by_its_environment_and_no_command_line(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("word\n")
    code = "import os, time; print(os.getpid(), flush=True); print(os.environ['KEY'], flush=True); time.sleep(600)"
    with guarded(code, secret=("KEY", str(key))) as (process, part):
        assert process.stdout is not None and process.stdout.readline() == b"word\n"
        for pid in (process.pid, part):
            assert b"word" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_holder_starts_one_process_at_a_time_and_writes_down_what_it_says(tmp_path: Path) -> None:
    (tmp_path / MARK_FILE).write_text("seen")
    holder = NodeAgent(str(tmp_path), "engine-0", lambda: "10.0.0.1")
    assert (holder.node_info().mark, holder.node_info().address) == ("seen", "10.0.0.1")
    holder.start(Command(("-c", PART)), str(tmp_path))
    first = _pid(tmp_path / "engine-0.log", 1)
    assert holder.probe().exit_code is None and holder.probe().healthy
    holder.start(
        Command(("-c", PART), health_url=f"http://127.0.0.1:{holder.free_port('127.0.0.1')}/health"), str(tmp_path)
    )
    assert gone(first)
    second = _pid(tmp_path / "engine-0.log", 2)
    assert not holder.probe().healthy, "it runs, and nothing listens"
    holder.kill()
    assert gone(second)
    assert holder.probe().exit_code == 128 + signal.SIGKILL


def _pid(log: Path, number: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        lines = [line for line in log.read_text().splitlines() if line.isdecimal()]
        if len(lines) >= number:
            return int(lines[number - 1])
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def test_what_carries_the_token_of_a_launch_ends_with_it_and_nothing_else_does() -> None:
    sleeper = ["sleep", "600"]
    with (
        subprocess.Popen(sleeper, env={**os.environ, "RAY_AUTH_TOKEN": "word-of-this-test"}) as ours,
        subprocess.Popen(sleeper, env={**os.environ, "RAY_AUTH_TOKEN": "word-of-this-test-not"}) as other,
    ):
        sweeping = ray_cleanup.start("word-of-this-test")
        try:
            ray_cleanup.close(sweeping)
            assert ours.wait(10) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()
