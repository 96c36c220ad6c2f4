"""Processes that run untrusted Python: isolated by bubblewrap where it works, by resource limits elsewhere.

Under bubblewrap a process has no network, its own process and IPC namespaces, and a file system of the Python
installation (read-only), a few devices and an empty, size-limited `/tmp`. Everywhere it has limits on memory, CPU time,
open files, file size and output, and on Linux (x86-64, ARM64) a system-call filter forbids new processes, sockets and
signals to other processes. Under plain resource limits it can still read and write the user's files. Every process is
killed when its time is over or its `with` block ends. Imports only the standard library.
"""

import contextlib
import functools
import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger("keel.sandbox")

Isolation = Literal["bubblewrap", "rlimits"]

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIBRARIES = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store")
PROBE_TIMEOUT = 20.0
_probe_lock = threading.Lock()


class SandboxError(RuntimeError):
    """The sandbox cannot give the isolation that was asked for, or cannot start a process."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one sandboxed process may use."""

    timeout: float = 10.0
    """Seconds of wall time; CPU time is limited to the next full second after it."""
    memory_mb: int = 512
    """Address space of the process."""
    max_output: int = 65536
    """Bytes of standard output; a process that writes more is killed."""
    disk_mb: int = 64
    """Size of the working directory under bubblewrap, and of each file everywhere."""
    open_files: int = 64
    processes: int = 64
    """Processes and threads of the user (RLIMIT_NPROC), only where the system-call filter is not available."""

    def __post_init__(self) -> None:
        for name, least in (("timeout", 0.0), ("memory_mb", 63), ("max_output", 0), ("disk_mb", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > least):
                raise ValueError(f"{name} = {value!r} must be a number greater than {least:g}")

    def for_process(self) -> dict[str, int]:
        """Return the limits that the process sets for itself."""
        return {
            "cpu_seconds": math.ceil(self.timeout) + 1,
            "memory_bytes": self.memory_mb << 20,
            "disk_bytes": self.disk_mb << 20,
            "open_files": self.open_files,
            "processes": self.processes,
        }


@dataclass(frozen=True)
class SandboxResult:
    """How a sandboxed process ended."""

    output: bytes
    exit_code: int | None
    """None if the process was killed at a limit."""
    problem: Literal["", "timeout", "output limit"] = ""


def python_command() -> list[str]:
    """Return the interpreter of the installation, without virtual environment, variables and site-packages."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return [executable, "-I", "-S", "-B", "-X", "utf8"]


def _read_only_paths() -> list[str]:
    """Return the files and folders that the interpreter needs."""
    executable = python_command()[0]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(sys.base_prefix, "lib")
    paths = [executable, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(library / version)]
    paths += [str(path) for path in library.glob("*.so*")] if sys.base_prefix != "/usr" else []
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def bubblewrap_command(disk_bytes: int) -> list[str]:
    """Return the bubblewrap command, up to the program to run, for a sandbox with a working directory of this size."""
    command = ["bwrap", "--unshare-user", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    for path in LIBRARIES:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    for path in ["/etc/ld.so.cache", *_read_only_paths()]:
        command += ["--ro-bind-try", path, path]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    # the root is a tmpfs without a size limit: read-only, so that /tmp is the only place to write to
    return [*command, "--size", str(disk_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _try_isolation(kind: Isolation) -> str:
    """Run a job with all limits once; return an empty string, or why it does not work."""
    if kind == "bubblewrap" and (sys.platform != "linux" or shutil.which("bwrap") is None):
        return "bwrap is not installed"
    limits = SandboxLimits(timeout=PROBE_TIMEOUT)
    arguments = {"program": "print('works')"}
    try:
        with _start(kind, "", arguments, limits, (), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate(timeout=PROBE_TIMEOUT)
    except (SandboxError, subprocess.TimeoutExpired) as error:
        return str(error)
    if output.strip() == b"works":
        return ""
    return errors.decode(errors="replace").strip()[-500:] or f"exit code {process.returncode}"


@functools.cache
def _probe() -> tuple[Isolation, str]:
    problem = _try_isolation("bubblewrap")
    if not problem:
        log.info("sandbox isolation: bubblewrap")
        return "bubblewrap", ""
    rlimits_problem = _try_isolation("rlimits")
    if rlimits_problem:
        raise SandboxError(
            f"no sandbox works on this machine. bubblewrap: {problem}. Resource limits: {rlimits_problem}"
        )
    log.warning(
        "sandbox isolation: rlimits (bubblewrap does not work: %s). Programs can read and write this user's files; "
        "see docs/code_execution.md",
        problem,
    )
    return "rlimits", problem


def isolation() -> Isolation:
    """Return the isolation in force on this machine. The first call runs bubblewrap once and logs the result."""
    with _probe_lock:
        return _probe()[0]


def check_isolation() -> None:
    """Raise SandboxError unless bubblewrap works."""
    if isolation() != "bubblewrap":
        raise SandboxError(
            f"require_isolation = True needs bubblewrap, which does not work here: {_probe()[1]}. Install bubblewrap "
            "and allow unprivileged user namespaces, or set require_isolation = False to run programs under resource "
            "limits only"
        )


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/tmp", "LANG": "C.UTF-8"}


def read_only_file(content: bytes) -> int:
    """Return a file descriptor that reads the content; the file has no name and cannot be written to."""
    descriptor, path = tempfile.mkstemp(prefix="keel-sandbox-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.unlink(path)


@functools.cache
def module_source(name: str) -> str:
    """Return the source of a module next to this one."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process group; under bubblewrap this ends the process namespace and everything in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def start(
    entry: str,
    arguments: Mapping[str, Any],
    limits: SandboxLimits,
    *,
    modules: Sequence[str] = (),
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
    """Start `entry` ("module:function", or "" for a script) in a sandbox; kill it when the `with` block ends.

    `arguments` are JSON data. `modules` are modules of this package, in the order of their imports. File descriptors
    keep their numbers.
    """
    return _start(isolation(), entry, arguments, limits, modules, stdin=stdin, stdout=stdout, pass_fds=pass_fds)


@contextlib.contextmanager
def _start(
    kind: Isolation,
    entry: str,
    arguments: Mapping[str, Any],
    limits: SandboxLimits,
    modules: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> "Iterator[subprocess.Popen[bytes]]":
    package = __name__.rpartition(".")[0]
    sources = {f"{package}.{name}": module_source(name) for name in modules}
    job = {
        "modules": sources,
        "entry": entry and f"{package}.{entry}",
        "arguments": arguments,
        "limits": limits.for_process(),
    }
    with contextlib.ExitStack() as stack:
        job_file = read_only_file(json.dumps(job).encode())
        stack.callback(os.close, job_file)
        command = [*python_command(), "-c", module_source("sandbox_bootstrap"), str(job_file)]
        folder = None
        if kind == "bubblewrap":
            command = bubblewrap_command(limits.disk_mb << 20) + command
        else:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="keel-sandbox-", ignore_cleanup_errors=True)
            )
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(job_file, *pass_fds),
                env=_environment(),
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"cannot start a sandboxed process: {error}") from error
        stack.callback(_kill, process)
        yield process


def read_until(
    descriptor: int, deadline: float, max_bytes: int
) -> tuple[bytes, Literal["", "timeout", "output limit"]]:
    """Read until end of file, the deadline (of `time.monotonic`) or more than `max_bytes`; return what came and why."""
    chunks: list[bytes] = []
    size = 0
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            return b"".join(chunks), "timeout"
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return b"".join(chunks), ""
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            return b"".join(chunks)[:max_bytes], "output limit"


def run_script(program: str, limits: SandboxLimits, *, stdin: bytes = b"") -> SandboxResult:
    """Run a program as a script to its end or to a limit, with `stdin` as its input, and return its standard output."""
    deadline = time.monotonic() + limits.timeout
    input_file = read_only_file(stdin)
    try:
        with start("", {"program": program}, limits, stdin=input_file, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            with process.stdout:
                output, problem = read_until(process.stdout.fileno(), deadline, limits.max_output)
            if problem:
                return SandboxResult(output, None, problem)
            try:
                # a process may close its output and run on
                return SandboxResult(output, process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                return SandboxResult(output, None, "timeout")
    finally:
        os.close(input_file)
