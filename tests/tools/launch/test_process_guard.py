"""Component, process guard and node agent as real processes: no process outlives its parent."""

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

pytestmark = pytest.mark.process

COMPONENT = """
import os, subprocess, time
subprocess.Popen(['sleep', '600'])
print(os.getpid(), flush=True)
time.sleep(600)
"""
"""A component that starts a child process and never exits."""


@contextmanager
def guarded(code: str, secret: tuple[str, str] | None = None) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Run code under a process guard and yield the guard and the component's process id."""
    command = process_guard.guard_argv(sys.executable, [sys.executable, "-c", code], secret)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        component_pid = int(process.stdout.readline())
        try:
            yield process, component_pid
        finally:
            process.kill()


def gone(group: int) -> bool:
    """Return whether a process group ends within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        (process_guard.TERMINATE_COMMAND, 128 + signal.SIGTERM),
        (process_guard.KILL_COMMAND, 128 + signal.SIGKILL),
        (b"", 128 + signal.SIGKILL),
    ],
)
def test_a_component_and_its_children_end_on_command_and_when_the_pipe_closes(command: bytes, exit_code: int) -> None:
    with guarded(COMPONENT) as (process, component_pid):
        assert process.stdin is not None
        if command:
            process.stdin.write(command)
            process.stdin.flush()
        else:
            process.stdin.close()
        assert process.wait(10) == exit_code
        assert gone(component_pid)


def test_a_component_ends_when_its_guard_is_killed() -> None:
    with guarded("import os, time; print(os.getpid(), flush=True); time.sleep(600)") as (process, component_pid):
        process.kill()
        assert gone(component_pid)


def test_a_secret_is_passed_in_the_environment_and_never_in_a_command_line(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-value\n")
    code = "import os, time; print(os.getpid(), flush=True); print(os.environ['KEY'], flush=True); time.sleep(600)"
    with guarded(code, secret=("KEY", str(key))) as (process, component_pid):
        assert process.stdout is not None and process.stdout.readline() == b"secret-value\n"
        for pid in (process.pid, component_pid):
            assert b"secret-value" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_agent_runs_one_process_at_a_time_and_logs_its_output(tmp_path: Path) -> None:
    (tmp_path / MARK_FILE).write_text("seen")
    agent = NodeAgent(str(tmp_path), "engine-0", lambda: "10.0.0.1")
    assert (agent.node_info().mark, agent.node_info().address) == ("seen", "10.0.0.1")
    agent.start(Command(("-c", COMPONENT)), str(tmp_path))
    first = _pid(tmp_path / "engine-0.log", 1)
    assert agent.probe().exit_code is None and agent.probe().healthy
    agent.start(
        Command(("-c", COMPONENT), health_url=f"http://127.0.0.1:{agent.free_port('127.0.0.1')}/health"), str(tmp_path)
    )
    assert gone(first)
    second = _pid(tmp_path / "engine-0.log", 2)
    assert not agent.probe().healthy, "it runs, but nothing listens at its health URL"
    agent.kill()
    assert gone(second)
    assert agent.probe().exit_code == 128 + signal.SIGKILL


def _pid(log: Path, number: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        lines = [line for line in log.read_text().splitlines() if line.isdecimal()]
        if len(lines) >= number:
            return int(lines[number - 1])
        time.sleep(0.02)
    raise AssertionError(log.read_text())


def test_cleanup_kills_exactly_the_processes_with_the_token_of_the_launch() -> None:
    sleeper = ["sleep", "600"]
    with (
        subprocess.Popen(sleeper, env={**os.environ, "RAY_AUTH_TOKEN": "token-of-this-test"}) as ours,
        subprocess.Popen(sleeper, env={**os.environ, "RAY_AUTH_TOKEN": "token-of-this-test-not"}) as other,
    ):
        cleanup = ray_cleanup.start("token-of-this-test")
        try:
            ray_cleanup.close(cleanup)
            assert ours.wait(10) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()
