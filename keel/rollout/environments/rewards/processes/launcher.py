"""Launch reward workers through a fork server, and restart the server when it dies."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keel.errors import KeelError

MAX_LINE = 64 * 2**20
"""Bytes of a request or reply."""
KILL_SECONDS = 5.0
"""Seconds to wait for a killed process; the kernel needs none unless the machine is overloaded."""
REAP_INTERVAL = 0.01
START_SECONDS = 60.0
"""Seconds that a fork server may take to start or to answer, on an overloaded machine."""
MODULE = "keel.rollout.environments.rewards.processes.fork_server"


class WorkerLauncher:
    """Starts worker processes, with the given functions loaded where that is safe."""

    def __init__(self, load_timeout: float) -> None:
        """A function that takes longer than `load_timeout` seconds to load is loaded by each worker instead."""
        self._load_timeout = load_timeout
        self._server: _ForkServer | None = None
        self._starting = asyncio.Lock()
        self._not_preloaded: set[int] = set()
        self._closed = False

    async def launch(self, load_requests: Sequence[Mapping[str, Any]]) -> "WorkerProcess":
        """Return a new worker process."""
        launching = asyncio.ensure_future(self._launch(load_requests))
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            launching.add_done_callback(_end_unused)
            raise

    async def close(self) -> None:
        """Kill the server; its workers die with it."""
        self._closed = True
        if self._server is not None:
            await self._discard(self._server)

    async def _launch(self, load_requests: Sequence[Mapping[str, Any]]) -> "WorkerProcess":
        for attempts_left in (1, 0):  # a server that died is replaced once
            server = None
            try:
                server = await self._open_server(load_requests)
                return await _fork(server)
            except (OSError, EOFError, TimeoutError) as error:
                if server is not None:
                    await self._discard(server)
                if self._closed or not attempts_left:
                    raise KeelError(f"reward workers cannot be started: {error or type(error).__name__}") from error
        raise AssertionError

    async def _open_server(self, load_requests: Sequence[Mapping[str, Any]]) -> "_ForkServer":
        async with self._starting:
            while self._server is None:
                self._server = await self._start_server(load_requests)
            return self._server

    async def _start_server(self, load_requests: Sequence[Mapping[str, Any]]) -> "_ForkServer | None":
        """Return a server that has loaded the functions, or None after one of them turned out to be unsafe to load."""
        server = _ForkServer()
        try:
            await server.start()
            for number, request in enumerate(load_requests):
                if number in self._not_preloaded:
                    continue
                self._not_preloaded.add(number)  # until it is known to be safe
                async with asyncio.timeout(self._load_timeout):
                    reply = await server.ask({"load": number, **request})
                if reply["threads"] > 1:
                    await server.kill()
                    return None
                if reply["loaded"]:
                    self._not_preloaded.discard(number)
                    server.preloaded.add(number)
        except (OSError, EOFError, TimeoutError):
            await server.kill()
            if not load_requests or len(self._not_preloaded) == len(load_requests):
                raise
            return None
        except BaseException:
            await server.kill()
            raise
        return server

    async def _discard(self, server: "_ForkServer") -> None:
        if self._server is server:
            self._server = None
        await server.kill()


async def _fork(server: "_ForkServer") -> "WorkerProcess":
    own, other = socket.socketpair()
    with other:
        try:
            reply = await server.ask({"fork": True}, other.fileno())
        except BaseException:
            own.close()
            raise
    own.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=own, limit=MAX_LINE)
    return WorkerProcess(server, reply["pid"], reader, writer)


def _end_unused(launching: "asyncio.Future[WorkerProcess]") -> None:
    """End a worker that was launched for a call that was cancelled meanwhile."""
    if not launching.cancelled() and launching.exception() is None:
        launching.result().kill()


class _ForkServer:
    """The run's side of `fork_server.py`. Requests are sent one at a time."""

    def __init__(self) -> None:
        self.preloaded: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        # OpenBLAS starts threads when numpy is imported, which would make a fork unsafe; workers already use all cores
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        with other:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE, str(other.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                env=environment,
                start_new_session=True,
            )

    async def ask(self, request: Mapping[str, Any], descriptor: int | None = None) -> dict[str, Any]:
        """Return the server's reply; raise OSError or EOFError if it has died, TimeoutError if it does not answer."""
        exchange = asyncio.ensure_future(self._exchange(request, descriptor))
        exchange.add_done_callback(lambda future: future.cancelled() or future.exception())
        return await asyncio.shield(exchange)  # a reply that nobody reads would be taken for the next one

    async def _exchange(self, request: Mapping[str, Any], descriptor: int | None) -> dict[str, Any]:
        async with self._asking, asyncio.timeout(START_SECONDS):
            line = json.dumps(request).encode() + b"\n"
            if descriptor is None:
                self._writer.write(line)
                await self._writer.drain()
            else:  # nothing is buffered: every earlier request has its reply
                socket.send_fds(self._socket, [line], [descriptor])
            reply = await self._reader.readline()
        if not reply.endswith(b"\n"):
            raise EOFError("the fork server of the reward workers ended")
        answer: dict[str, Any] = json.loads(reply)
        return answer

    async def kill(self) -> None:
        self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), KILL_SECONDS)


class WorkerProcess:
    """One worker process and the connection to it."""

    def __init__(
        self, server: _ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader, self.writer = reader, writer
        self.loaded = set(server.preloaded)
        """Numbers of the functions that it has loaded."""
        self._server, self._pid = server, pid
        self._reaped = False

    def cpu_times(self) -> tuple[float, float]:
        """Return the seconds that the process has run on a processor, and those that it has waited for one.

        Both are 0 where the system does not tell.
        """
        try:
            with open(f"/proc/{self._pid}/schedstat") as file:
                running, waiting, _ = file.read().split()
        except (OSError, ValueError):
            return 0.0, 0.0
        return int(running) / 1e9, int(waiting) / 1e9

    def lower_priority(self) -> None:
        """Give the process, and what it started, the lowest priority. This cannot be undone."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self._pid, 19)

    def kill(self) -> None:
        """Kill the process and everything it started, immediately."""
        if not self._reaped:  # from then on the number may belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self.writer.close()

    async def wait(self) -> int | None:
        """Return the exit status of a killed process, negative for a signal, or None if it is unknown."""
        deadline = time.monotonic() + KILL_SECONDS
        while not self._reaped and time.monotonic() < deadline:
            try:
                status: int | None = (await self._server.ask({"reap": self._pid}))["status"]
            except (OSError, EOFError, TimeoutError):  # the server has died, and its workers with it
                return None
            if status is not None:
                self._reaped = True
                return status
            await asyncio.sleep(REAP_INTERVAL)
        return None
