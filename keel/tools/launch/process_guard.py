"""Parent process of a launched process; kills it when the launcher dies.

Run as `python -m keel.tools.launch.process_guard [--secret NAME=FILE] -- COMMAND...`.
Guarantees that a part and all it started are gone when its holder is, however that died: the holder's end of the pipe
on standard input closes, and the kernel ends the part when this process itself is killed. A secret is read from its
file here, so that it is in no command line. It restarts nothing and imports nothing heavy.
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
"""What a holder may say: finish in order, or now."""
SIGNAL_EXIT_BASE = 128
"""Exit codes above it are signals, as a shell has them."""

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run the command until it ends; its exit code."""
    options, words = _split_argv(argv)
    environment = dict(os.environ)
    for name, _, file in (option.partition("=") for option in options):
        environment[name] = Path(file).read_text().strip()
    # Ray blocks SIGINT in what it starts, and a mask is inherited
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    child = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent()
    )
    threading.Thread(target=_handle_commands, args=(child,), daemon=True).start()
    code = child.wait()
    _kill_group(child)  # what it started and left behind
    return shell_exit_code(code)


def shell_exit_code(code: int) -> int:
    """An exit code as a shell has it, with signals above `KILLED`."""
    return code if code >= 0 else SIGNAL_EXIT_BASE - code


def guard_argv(python: str, command: Sequence[str], secret: tuple[str, str] | None) -> list[str]:
    """The command line that runs `words` under a warden."""
    told = ["--secret", f"{secret[0]}={secret[1]}"] if secret is not None else []
    return [python, "-m", "keel.tools.launch.process_guard", *told, "--", *command]


def _split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--")
    return [word for word in argv[:at] if word != "--secret"], list(argv[at + 1 :])


def _handle_commands(child: "subprocess.Popen[bytes]") -> None:
    """Do what the holder says; when it says nothing any more, it is gone."""
    # not by sys.stdin: a thread that waits in its buffer cannot be ended with the interpreter
    while said := os.read(0, 64):
        if KILL_COMMAND in said:
            _kill_group(child)
        elif TERMINATE_COMMAND in said:
            child.terminate()  # the part alone: it tells its own processes
    _kill_group(child)


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _die_with_parent() -> Callable[[], None] | None:
    """For the child, before it becomes the part: ask the kernel to end it with this process. Linux alone can."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: nothing may be loaded after it

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return ask


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
