"""A server process that a run starts itself and restarts when it exits, as the single member of a pool.

Guarantees that the server listens before the block begins, that a killed server is replaced, and that no process is
left when the block ends. A replacement has a new address, so to the pool it is a new member that gets the weights
before any request. A server that exits before it listens ends the run; if it was killed, starting is retried a few
times. A server that dies later is restarted until the run's watchdog gives up.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from keel.config import PoolSettings
from keel.errors import KeelError
from keel.inference.pool.discovery import DiscoveryError
from keel.inference.protocol import EngineError

logger = logging.getLogger("keel")

START_TIMEOUT = 300.0
"""Seconds for a server to load its model."""
MAX_START_ATTEMPTS = 3
"""Starts tried at the beginning of a run if the server is killed while it starts."""
RESTART_BACKOFF, MAX_RESTART_BACKOFF = 0.5, 30.0
"""Seconds before a restart; doubled each time, and reset once the server ran longer than the maximum."""

POOL_SETTINGS = PoolSettings(
    urls=["http://127.0.0.1:1"], poll_interval=1.0, health_timeout=60.0, ready_timeout=START_TIMEOUT
)
"""Settings of the pool; the URL is a placeholder, since `ManagedServer` is the member source."""


class ManagedServer:
    """The server process and its current URL; the member source of a pool."""

    dynamic = True

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None
        self._unavailable_reason = "the engine server has not started yet"
        self.restarts = 0

    async def fetch_urls(self) -> list[str]:
        if self._url is None:
            raise DiscoveryError(self._unavailable_reason)
        return [self._url]

    async def start(self) -> None:
        """Start the process and wait until it listens."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._argv, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT)).decode()
        except TimeoutError:
            _signal_process_group(process, signal.SIGKILL)
            raise EngineError(
                f"the engine server did not start within {START_TIMEOUT:.0f} s", retryable=False
            ) from None
        if "http://" not in line:
            code = await process.wait()
            raise KeelError(f"the engine server did not start (exit code {code}); see its message above")
        self._url = line.split()[-1]

    async def start_with_retries(self) -> None:
        """Start for the first time; retry only if the process was killed, since invalid settings would fail again."""
        for attempts_left in reversed(range(MAX_START_ATTEMPTS)):
            try:
                await self.start()
                return
            except KeelError as error:
                killed = self._process is not None and (self._process.returncode or 0) < 0
                if not (killed and attempts_left):
                    raise
                logger.warning("%s; it was killed, retrying", error)

    async def restart_on_exit(self) -> None:
        """Restart the server whenever it exits."""
        loop = asyncio.get_running_loop()
        pause, started_at = RESTART_BACKOFF, loop.time()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            uptime = loop.time() - started_at
            pause = RESTART_BACKOFF if uptime > MAX_RESTART_BACKOFF else min(pause * 2, MAX_RESTART_BACKOFF)
            self._url, self._unavailable_reason = (
                None,
                f"the engine server exited with code {code} and is being restarted",
            )
            self.restarts += 1
            logger.warning("%s (restart %d)", self._unavailable_reason, self.restarts)
            await asyncio.sleep(pause)
            try:
                started_at = loop.time()
                await self.start()
            except (KeelError, OSError) as error:
                self._unavailable_reason = str(error)

    async def stop(self) -> None:
        """Stop the server: SIGTERM first, SIGKILL after 10 s."""
        process = self._process
        if process is None:
            return
        _signal_process_group(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            _signal_process_group(process, signal.SIGKILL)
            await process.wait()


@asynccontextmanager
async def run_managed_server(argv: Sequence[str]) -> AsyncIterator[ManagedServer]:
    """Run a server with this command for the duration of the block."""
    server = ManagedServer(argv)
    restarter: asyncio.Task[None] | None = None
    try:
        await server.start_with_retries()
        restarter = asyncio.create_task(server.restart_on_exit(), name="engine server")
        yield server
    finally:
        if restarter is not None:
            restarter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await restarter
        await server.stop()


def _signal_process_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
