"""Attacks on the sandbox, with real processes, under both isolations."""

import logging
import os
import shutil
import subprocess
import sys
import time

import pytest

from keel.rollout.environments.rewards import sandbox
from keel.rollout.environments.rewards.sandbox import SandboxError, SandboxLimits, SandboxResult
from keel.rollout.environments.rewards.sandbox_bootstrap import AUDIT_ARCH, build_filter


def run(program: str, stdin: bytes = b"", **limits: float) -> SandboxResult:
    settings = SandboxLimits(**limits)  # type: ignore[arg-type]
    return sandbox.run_script(program, settings, stdin=stdin)


def attempt(statement: str) -> str:
    """Return a program that prints "done" if a statement succeeds and the exception class if it does not."""
    indented = statement.replace("\n", "\n    ")
    return f"try:\n    {indented}\n    print('done')\nexcept BaseException as error:\n    print(type(error).__name__)\n"


def outcome(statement: str, **limits: float) -> str:
    return run(attempt(statement), **limits).output.decode().strip()


def processes_with(marker: str) -> list[int]:
    """Return the ids of processes of this machine whose command line or environment holds the marker."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if marker.encode() in file.read():
                    found.append(int(name))
        except (OSError, ValueError):
            continue
    return found


pytestmark = pytest.mark.process


def test_a_program_reads_input_and_writes_output(either_isolation):
    result = run("print(int(input()) * 2)\nexit()", stdin=b"21\n")
    assert (result.output, result.exit_code, result.problem) == (b"42\n", 0, "")


def test_a_program_runs_with_the_smallest_memory_limit(either_isolation):
    assert run("print('fits')", memory_mb=64).output == b"fits\n"


def test_an_exception_is_a_nonzero_exit_code(either_isolation):
    assert run("raise ValueError('wrong')").exit_code == 1


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/cmdline", __file__])
def test_files_of_the_machine_cannot_be_read(bubblewrap, path):
    assert outcome(f"open({path!r}).read()") == "FileNotFoundError"


def test_only_the_python_installation_is_visible(bubblewrap):
    shown = run("import os; print(sorted(os.listdir('/')), os.listdir('.'), dict(os.environ).keys())").output.decode()
    top_level = shown.partition("]")[0]
    assert "etc" not in top_level or run("import os; print(os.listdir('/etc'))").output.strip() == b"['ld.so.cache']"
    assert "home" not in top_level or sys.base_prefix.startswith("/home")
    assert "[] dict_keys(['PATH', 'HOME', 'LANG', 'PWD'" in shown


def test_the_installation_and_the_root_are_read_only(bubblewrap):
    assert outcome(f"open({os.path.dirname(os.__file__) + '/planted.py'!r}, 'w')") == "OSError"
    assert outcome("open('/planted', 'w')") == "OSError"
    assert outcome("open('/dev/planted', 'w')") == "OSError"


def test_a_socket_cannot_be_opened(either_isolation):
    assert outcome("import socket; socket.socket().connect(('127.0.0.1', 22))") == "PermissionError"


def test_the_network_namespace_is_empty_even_without_the_filter(bubblewrap):
    command = [*sandbox.bubblewrap_command(1 << 20), *sandbox.python_command(), "-c"]
    program = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9))"
    done = subprocess.run([*command, program], capture_output=True, check=False)
    assert b"Network is unreachable" in done.stderr


def test_a_fork_bomb_does_not_start(either_isolation):
    assert outcome("import os\nwhile True: os.fork()", timeout=5) in ("PermissionError", "BlockingIOError")


def test_threads_work(either_isolation):
    program = "import threading\nt = threading.Thread(target=print, args=('thread',))\nt.start()\nt.join()"
    assert run(program).output == b"thread\n"


def test_background_processes_cannot_be_left_behind(either_isolation):
    marker = f"left-behind-{os.getpid()}"
    command = f"[sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}]"
    run(f"import subprocess, sys\nsubprocess.Popen({command}, start_new_session=True)")
    assert processes_with(marker) == []


def test_a_daemon_dies_with_the_sandbox_even_without_the_filter(bubblewrap):
    marker = f"daemon-{os.getpid()}"
    daemon = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}], "
    )
    daemon += "start_new_session=True)\nprint('started')"
    command = [*sandbox.bubblewrap_command(1 << 20), *sandbox.python_command(), "-c", daemon]
    assert subprocess.run(command, capture_output=True, check=False).stdout == b"started\n"
    deadline = time.monotonic() + 5
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(marker) == []


def test_other_processes_cannot_be_signalled(either_isolation):
    assert outcome("import os; os.kill(os.getppid(), 9)") == "PermissionError"
    assert outcome("import os; os.kill(-1, 9)") == "PermissionError"
    assert outcome("import os, signal; os.kill(os.getpid(), 0)") == "done"


def test_the_disk_cannot_be_filled(bubblewrap):
    fill = "for n in range(1000):\n    with open(f'file{n}', 'wb') as file: file.write(bytes(1 << 20))"
    assert outcome(fill) == "OSError"


def test_a_file_cannot_grow_without_limit(either_isolation):
    assert outcome("file = open('big', 'wb')\nfor n in range(1000): file.write(bytes(1 << 20))") == "OSError"


def test_memory_outside_the_address_space_cannot_be_taken(either_isolation):
    assert outcome("import os; os.memfd_create('hidden')") == "PermissionError"


def test_limits_cannot_be_raised(either_isolation):
    raise_limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert outcome(raise_limit) in ("ValueError", "PermissionError")


def test_a_gigabyte_of_output_is_cut_off(either_isolation):
    started = time.monotonic()
    result = run("while True: print('x' * 1000000)", max_output=1000)
    assert (len(result.output), result.exit_code, result.problem) == (1000, None, "output limit")
    assert time.monotonic() - started < 5


def test_ten_gigabytes_cannot_be_allocated(either_isolation):
    assert outcome("bytearray(10 << 30)") == "MemoryError"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        "import time; time.sleep(60)",
        "import os, time\nos.close(1)\ntime.sleep(60)",
    ],
    ids=["loop", "ignores SIGTERM", "sleep", "closed output"],
)
def test_a_program_is_killed_when_its_time_is_over(either_isolation, program):
    started = time.monotonic()
    result = run(program, timeout=1.0)
    assert (result.exit_code, result.problem) == (None, "timeout")
    assert time.monotonic() - started < 4


def test_the_sandbox_dies_with_the_process_that_started_it(either_isolation, tmp_path):
    """A reward worker that is killed must not leave its programs running."""
    marker = f"orphan-{os.getpid()}-{either_isolation}"
    source = (
        "from keel.rollout.environments.rewards import sandbox\n"
        f"sandbox.isolation = lambda: {either_isolation!r}\n"
        f"command = sandbox.python_command()\nsandbox.python_command = lambda: [*command, '-X', 'marker={marker}']\n"
        "sandbox.run_script('import time; time.sleep(60)', sandbox.SandboxLimits(timeout=60))\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", source], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 10
    while not processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(marker)
    time.sleep(0.3)  # the process asks for the signal when its limits are set
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 5
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(marker) == []


def test_isolation_is_logged_once(bubblewrap, caplog):
    sandbox._probe.cache_clear()
    with caplog.at_level(logging.INFO, "keel.sandbox"):
        assert [sandbox.isolation(), sandbox.isolation()] == ["bubblewrap", "bubblewrap"]
    assert [record.message for record in caplog.records] == ["sandbox isolation: bubblewrap"]


def test_without_bubblewrap_limits_are_used_and_required_isolation_is_an_error(monkeypatch, caplog):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox._probe.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "keel.sandbox"):
            assert sandbox.isolation() == "rlimits"
        assert "bwrap is not installed" in caplog.text
        with pytest.raises(SandboxError, match=r"require_isolation = True needs bubblewrap.*bwrap is not installed"):
            sandbox.check_isolation()
    finally:
        sandbox._probe.cache_clear()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_bubblewrap_that_fails_is_not_used(monkeypatch):
    monkeypatch.setattr(sandbox, "bubblewrap_command", lambda size: ["bwrap", "--no-such-option"])
    assert "no-such-option" in sandbox._try_isolation("bubblewrap")


@pytest.mark.parametrize(("name", "value"), [("timeout", 0), ("timeout", float("inf")), ("memory_mb", 63)])
def test_a_limit_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        SandboxLimits(**{name: value})


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_jumps_of_the_filter_stay_inside_it(machine):
    code = build_filter(machine, pid=1234)
    count = len(code) // 8
    assert len(code) % 8 == 0
    for number in range(count):
        operation, if_true, if_false = code[8 * number], code[8 * number + 2], code[8 * number + 3]
        if operation in (0x15, 0x35, 0x45):
            assert number + 1 + max(if_true, if_false) < count
