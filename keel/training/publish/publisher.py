"""Publish new weights to an engine while it keeps sampling.

A publication has two parts. The snapshot copies the trainer's weights, which must not change meanwhile: training waits
for `snapshot_done`. The send lasts until the weights are live in the engine. Neither stops sampling or the next batch.
Guarantees: publications run one at a time and in order; an engine's version advances only after its weights are live;
a failure is raised by the next call that waits, and immediately by `run_alongside`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from keel.inference.protocol import Engine
from keel.training.publish.transport import WeightTransport

ResultT = TypeVar("ResultT")


class Publisher:
    """Publishes versions to one engine, one at a time.

    Without `overlap`, `publish` returns when the weights are live: nothing is sampled with older weights afterwards.
    """

    def __init__(
        self, engine: Engine, transport: WeightTransport, *, drain: bool = False, overlap: bool = False
    ) -> None:
        self.engine = engine
        self.seconds = 0.0
        """Duration of the last publication, until its weights were live."""
        self.on_live: Callable[[int], None] | None = None
        """Called with each version when it is live."""
        self._transport, self._drain, self._overlap = transport, drain, overlap
        self._snapshot_task: asyncio.Future[None] | None = None
        self._send_task: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        """Start publishing the trainer's weights as this version, after the previous publication has finished."""
        await self.wait_live()
        self._snapshot_task = asyncio.ensure_future(asyncio.to_thread(self._transport.snapshot, version))
        self._send_task = asyncio.create_task(
            self._send(self._snapshot_task, version), name=f"publishing version {version}"
        )
        if not self._overlap:
            await self.wait_live()

    @property
    def snapshotting(self) -> bool:
        """Whether the trainer's weights must not change yet."""
        return self._snapshot_task is not None and not self._snapshot_task.done()

    async def snapshot_done(self) -> None:
        """Wait until the trainer's weights may change."""
        await _wait_for(self._snapshot_task)

    async def wait_live(self) -> None:
        """Wait until the last published version is live."""
        await _wait_for(self._send_task)

    async def run_alongside(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Await and return the result; if the publication in flight fails first, cancel and raise its error."""
        task, sending = asyncio.ensure_future(awaitable), self._send_task
        try:
            if sending is not None and not sending.done():
                await asyncio.wait({task, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending is not None and sending.done() and not task.done():
                sending.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def close(self) -> None:
        """Cancel the publication in flight; the engine keeps the old weights or already has the new ones."""
        if self._send_task is not None:
            self._send_task.cancel()
        for task in (self._send_task, self._snapshot_task):
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)

    async def _send(self, snapshot_task: "asyncio.Future[None]", version: int) -> None:
        start = time.monotonic()
        await asyncio.shield(snapshot_task)
        await self._transport.send(self.engine, version, drain=self._drain)
        self.seconds = time.monotonic() - start
        if self.on_live is not None:
            self.on_live(version)


async def _wait_for(task: "asyncio.Future[None] | None") -> None:
    """Wait for a task that others wait for too: cancelling this wait does not cancel the task."""
    if task is not None:
        await asyncio.wait({task})
        task.result()
