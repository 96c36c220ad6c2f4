"""Parent process of a launched process; kills it when the launcher dies.

Run as `python -m keel.tools.launch.process_guard [--secret NAME=FILE] -- COMMAND...`.
Guarantees that a component and all processes it started end when its node agent ends, however that happens: the agent's
end of the pipe on standard input closes, and the kernel kills the component if this process itself is killed. A secret
is read from its file here, so it never appears in a command line. It restarts nothing and imports nothing heavy.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

TERMINATE_COMMAND, KILL_COMMAND = b"end\n", b"kill\n"
"""Commands of the node agent: shut down, or kill."""
SIGNAL_EXIT_BASE = 128
"""Exit codes above this stand for signals, as in a shell."""
RUN_FAILED_EXIT = 3
"""Exit code of a launched trainer that a restart cannot help: every rollout of its run failed. `keel train` alone exits
with 1, which is also the code of an uncaught exception."""

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run the command until it ends and return its exit code."""
    options, command = _split_argv(argv)
    environment = dict(os.environ)
    for name, _, file in (option.partition("=") for option in options):
        environment[name] = Path(file).read_text().strip()
    # Ray blocks SIGINT in its workers, and the signal mask is inherited
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent()
    )
    threading.Thread(target=_handle_commands, args=(child,), daemon=True).start()
    code = child.wait()
    _kill_group(child)  # processes that it started and left running
    return shell_exit_code(code)


def shell_exit_code(code: int) -> int:
    """Return an exit code as a shell would, with signals above `SIGNAL_EXIT_BASE`."""
    return code if code >= 0 else SIGNAL_EXIT_BASE - code


def guard_argv(python: str, command: Sequence[str], secret: tuple[str, str] | None) -> list[str]:
    """Return the argv that runs `command` under a process guard."""
    options = ["--secret", f"{secret[0]}={secret[1]}"] if secret is not None else []
    return [python, "-m", "keel.tools.launch.process_guard", *options, "--", *command]


def _split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    separator = argv.index("--")
    return [arg for arg in argv[:separator] if arg != "--secret"], list(argv[separator + 1 :])


def _handle_commands(child: "subprocess.Popen[bytes]") -> None:
    """Execute the agent's commands; end of file means that the agent is gone."""
    # os.read instead of sys.stdin: a thread that waits in sys.stdin's buffer keeps the interpreter from exiting
    while data := os.read(0, 64):
        if KILL_COMMAND in data:
            _kill_group(child)
        elif TERMINATE_COMMAND in data:
            child.terminate()  # only the component: it stops its own processes
    _kill_group(child)


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _die_with_parent() -> Callable[[], None] | None:
    """Return a function for the child to call before exec: the kernel then kills it with this process. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: loading a library after it is not safe

    def set_parent_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return set_parent_death_signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
