"""A server of the run's own as a process that is started again when it ends, for a pool of one.

Guarantees that it listens before the block begins, that one that was killed is replaced, and that none is left when the
block ends. What a new one holds is the pool's business: it is another member, under another address, and gets the
weights before it gets a request. A server that ends by itself before it listens ends the run; one that is killed then
has a few tries, and one that dies later is started again for as long as the run's own watchdog waits.
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
"""Seconds that a server may take to load its model."""
MAX_START_ATTEMPTS = 3
"""How often one that is killed while it starts is started at the beginning of a run."""
RESTART_BACKOFF, MAX_RESTART_BACKOFF = 0.5, 30.0
"""Seconds before it is started again, doubled each time it ended before it had answered for as long."""

POOL_SETTINGS = PoolSettings(
    urls=["http://127.0.0.1:1"], poll_interval=1.0, health_timeout=60.0, ready_timeout=START_TIMEOUT
)
"""Of the pool; its one URL is never asked, because members are found by `Served`."""


class ManagedServer:
    """Where the server is at present; a source of the members of a pool."""

    dynamic = True

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None
        self._unavailable_reason = "the engine's server has not started yet"
        self.restarts = 0

    async def fetch_urls(self) -> list[str]:
        if self._url is None:
            raise DiscoveryError(self._unavailable_reason)
        return [self._url]

    async def start(self) -> None:
        """Start it and wait until it listens."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._argv, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT)).decode()
        except TimeoutError:
            _signal_process_group(process, signal.SIGKILL)
            raise EngineError(
                f"the engine's server did not start within {START_TIMEOUT:.0f} s", retryable=False
            ) from None
        if "http://" not in line:
            code = await process.wait()
            raise KeelError(f"the engine's server did not start (exit code {code}); see its message above")
        self._url = line.split()[-1]

    async def start_with_retries(self) -> None:
        """Start it for the first time: what is wrong with its settings would be wrong again, a kill need not be."""
        for left in reversed(range(MAX_START_ATTEMPTS)):
            try:
                await self.start()
                return
            except KeelError as error:
                killed = self._process is not None and (self._process.returncode or 0) < 0
                if not (killed and left):
                    raise
                logger.warning("%s; it was killed, and is started again", error)

    async def restart_on_exit(self) -> None:
        """Start it again whenever it has ended."""
        loop = asyncio.get_running_loop()
        pause, began = RESTART_BACKOFF, loop.time()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            lived = loop.time() - began
            pause = RESTART_BACKOFF if lived > MAX_RESTART_BACKOFF else min(pause * 2, MAX_RESTART_BACKOFF)
            self._url, self._unavailable_reason = (
                None,
                f"the engine's server ended with exit code {code} and is being started again",
            )
            self.restarts += 1
            logger.warning("%s (restart %d)", self._unavailable_reason, self.restarts)
            await asyncio.sleep(pause)
            try:
                began = loop.time()
                await self.start()
            except (KeelError, OSError) as error:
                self._unavailable_reason = str(error)

    async def stop(self) -> None:
        """Ask the server to end, and see that it does."""
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
    """The server of this command, for as long as the block lasts."""
    server = ManagedServer(argv)
    keeper: asyncio.Task[None] | None = None
    try:
        await server.start_with_retries()
        keeper = asyncio.create_task(server.restart_on_exit(), name="engine server")
        yield server
    finally:
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        await server.stop()


def _signal_process_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
