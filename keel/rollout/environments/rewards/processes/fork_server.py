"""The process that reward workers are forked from: `python -m keel...rewards.processes.fork_server FD`.

A fresh interpreter with its imports costs tenths of a second, a fork of this process a few milliseconds. It is started
as a new program, so it holds nothing of the run's memory, and it stays single-threaded, so forking it is safe: the run
stops a server in which loading a reward function has started a thread, and loads that function in every worker instead.

One JSON request per line on a Unix socket, each with one reply:

    {"load": 0, "name": "module:function", ...}   {"loaded": true, "threads": 1}   load a function for later workers
    {"fork": true}, with a socket                 {"pid": 123}                     fork a worker that serves the socket
    {"reap": 123}                                 {"status": -9}                   exit status, or null while it runs

A worker that has ended stays a zombie until it is reaped, so its process id cannot be reused while the run may still
kill its process group.
"""

import contextlib
import gc
import json
import os
import socket
import sys
from typing import Any

from keel.rollout.environments.rewards.processes.worker_main import Reward, die_with_parent, load_function, serve

CHUNK = 2**16


def main() -> None:
    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    functions: dict[int, Reward] = {}
    while True:
        request, descriptors = _receive(control)
        if request is None:
            return
        if "load" in request:
            reply = _load(request, functions)
        elif "fork" in request:
            reply = {"pid": _fork(control, descriptors[0], functions)}
        else:
            reply = {"status": _reap(request["reap"])}
        control.sendall(json.dumps(reply).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next request and its descriptors, or None when the run has closed the connection."""
    received, descriptors = b"", list[int]()
    while not received.endswith(b"\n"):
        chunk, passed, _, _ = socket.recv_fds(control, CHUNK, 1)
        if not chunk:
            return None, descriptors
        received += chunk
        descriptors += passed
    request: dict[str, Any] = json.loads(received)
    return request, descriptors


def _load(request: dict[str, Any], functions: dict[int, Reward]) -> dict[str, Any]:
    try:
        functions[request["load"]] = load_function(request)
        loaded = True
    except BaseException:  # noqa: BLE001  user code; the worker that loads it again reports the error
        loaded = False
    return {"loaded": loaded, "threads": _count_threads()}


def _count_threads() -> int:
    """Return the threads of this process, those of native libraries included; 2 where they cannot be counted."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 2


def _fork(control: socket.socket, descriptor: int, functions: dict[int, Reward]) -> int:
    gc.freeze()  # a collection in the child would copy the pages of every object
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        with contextlib.suppress(OSError):  # it may have done so itself, or ended
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        control.close()
        die_with_parent()
        if os.getppid() != server:  # it died before the request
            os._exit(1)
        with socket.socket(fileno=descriptor) as connection:
            requests = connection.makefile(encoding="utf-8")
            replies = connection.makefile("w", encoding="utf-8")
            serve(requests, replies, functions)
        code = 0
    finally:
        os._exit(code)  # never return into the server's loop


def _reap(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    main()
