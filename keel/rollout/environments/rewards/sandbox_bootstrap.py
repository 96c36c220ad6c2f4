"""First code of a sandboxed process: set resource limits, install a system-call filter, then call the given function.

The file is passed to `python -c` as source, because Keel is not visible inside the sandbox. It must import only the
standard library. A limit that cannot be set is an error before any untrusted code runs; only the system-call filter may
be missing (unknown machine, no ctypes), and RLIMIT_NPROC takes its place.
"""

import builtins
import importlib
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

DENIED_CALLS = {
    # new processes (with one process RLIMIT_AS limits the memory of the whole sandbox), and memory outside RLIMIT_AS
    "x86_64": [57, 58, 29, 68, 319],  # fork, vfork, shmget, msgget, memfd_create
    "aarch64": [194, 186, 279],  # shmget, msgget, memfd_create
}
"""System calls that fail with EPERM, besides those of `DENIED_ACCESS`."""

DENIED_ACCESS = {
    # socket, ptrace, process_vm_readv, process_vm_writev, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal,
    # pidfd_open, pidfd_getfd, io_uring_setup, io_uring_enter, io_uring_register, unshare, setns, mount, bpf,
    # userfaultfd, keyctl, add_key, request_key, perf_event_open
    "x86_64": [
        *(41, 101, 310, 311, 200, 129, 297, 424, 434, 438, 425, 426, 427, 272, 308, 165, 321, 323, 250, 248, 249, 298),
    ],
    "aarch64": [
        *(198, 117, 270, 271, 130, 138, 240, 424, 434, 438, 425, 426, 427, 97, 268, 40, 280, 282, 219, 217, 218, 241),
    ],
}
"""System calls that reach the network, other processes or the kernel's wider interfaces."""

CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
OWN_PROCESS_CALLS = {"x86_64": [62, 234], "aarch64": [129, 131]}
"""kill and tgkill: allowed only for the process itself, so that a program cannot kill the trainer."""
PRLIMIT = {"x86_64": 302, "aarch64": 261}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARGUMENT_0 = 0, 4, 16
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, EAGAIN, ENOSYS = 1, 11, 38
CLONE_THREAD = 0x00010000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38


def build_filter(machine: str, pid: int) -> bytes:
    """Return the seccomp program (classic BPF) for a machine, with `pid` as the only process that may be signalled."""
    code = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":  # the x32 interface numbers the same calls differently
        code += [(JUMP_AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, ERROR | ENOSYS)]
    for number in DENIED_CALLS[machine] + DENIED_ACCESS[machine]:
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | EPERM)]
    # the C library falls back from clone3 to clone, whose flags a filter can read
    code += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERROR | ENOSYS)]
    conditions = [(CLONE[machine], JUMP_IF_SET, CLONE_THREAD, EAGAIN), (PRLIMIT[machine], JUMP_EQUAL, 0, EPERM)]
    conditions += [(number, JUMP_EQUAL, pid, EPERM) for number in OWN_PROCESS_CALLS[machine]]
    for number, test, value, error in conditions:
        code += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENT_0), (test, 0, 1, value)]
        code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | error)]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install_filter() -> bool:
    """Install the system-call filter for this process and what it executes; return whether it is in force."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in AUDIT_ARCH or sys.maxsize < 2**32:
        return False
    try:
        import ctypes
    except ImportError:
        return False

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *([ctypes.c_ulong] * 4)]
    # not dumpable: processes of the same user cannot open this one's memory in /proc
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    code = build_filter(machine, os.getpid())
    program = Program(len(code) // 8, code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0) == 0)


def set_limit(kind: int, value: int) -> None:
    """Set a resource limit that the process cannot raise again; a lower limit of the parent stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def apply_limits(limits: dict[str, int]) -> None:
    """Set all limits of this process; the filter comes last because it forbids changing those of other processes."""
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    set_limit(resource.RLIMIT_FSIZE, limits["disk_bytes"])
    set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
    set_limit(resource.RLIMIT_AS, limits["memory_bytes"])
    if not install_filter():
        set_limit(resource.RLIMIT_NPROC, limits["processes"])


def load_modules(sources: dict[str, str]) -> None:
    """Create the given modules, in order, with empty parent packages, so that they can import each other."""
    for name, source in sources.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = types.ModuleType(".".join(parts[:end]))
            parent.__path__ = []
            sys.modules.setdefault(parent.__name__, parent)
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)


def run_script(program: str) -> None:
    """Run a program as a script that reads standard input and writes standard output."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    exec(compile(program, "program.py", "exec"), module.__dict__)


def main() -> None:
    """Read the job from the file descriptor in argv, close it, and run the job under its limits."""
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        job: dict[str, Any] = json.load(file)
    quitter = importlib.import_module("_sitebuiltins").Quitter  # `python -S` leaves out exit() and quit()
    for name in ("exit", "quit"):
        setattr(builtins, name, quitter(name, "Ctrl-D"))
    load_modules(job["modules"])
    module, _, function = job["entry"].partition(":")
    entry = getattr(sys.modules[module], function) if module else run_script
    apply_limits(job["limits"])
    entry(**job["arguments"])


if __name__ == "__main__":
    main()
