"""Simulate publishing weights to the engines, overlapping the next rollouts where a real run would.

The order of operations is that of `keel/training/publish/publisher.py`: a snapshot is taken while the trainer must not
change the weights, then sent to the engines, one publication at a time. A folder is written once and read by every
engine; a broadcast is pipelined from engine to engine and takes as long as one link; an in-memory copy takes its fixed
time. Engines keep sampling until the new weights are live, which happens in all of them at the same moment, or are
drained first.
"""

import asyncio
from collections.abc import Callable

from keel.config import RunSettings
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.simulated_pool import SimulatedPool


class SimulatedPublisher:
    """Publishes weights to all simulated engines."""

    def __init__(
        self, settings: RunSettings, assumed: SimulateSettings, pool: SimulatedPool, on_live: Callable[[int], None]
    ) -> None:
        self._assumed, self._pool, self._on_live = assumed, pool, on_live
        self._broadcast = settings.publish.transport == "broadcast"
        self._drain = settings.publish.in_flight == "drain"
        # weights that arrive during the next batch make its tokens staler, which max_off_policy_steps must allow
        self._overlap = 2 * settings.publish.every - 1 <= settings.scheduler.max_off_policy_steps
        self._snapshot_task: asyncio.Task[None] | None = None
        self._send_task: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        """Start publishing after the previous publication has ended; without overlap, also wait for the end."""
        await _wait_if_running(self._send_task)
        self._snapshot_task = asyncio.create_task(self._snapshot())
        self._send_task = asyncio.create_task(self._send(self._snapshot_task, version))
        if not self._overlap:
            await self._send_task

    async def snapshot_done(self) -> None:
        """Wait until the trainer's weights may change."""
        await _wait_if_running(self._snapshot_task)

    async def wait_live(self) -> None:
        await _wait_if_running(self._send_task)

    async def _snapshot(self) -> None:
        written = 0.0 if self._broadcast else self._assumed.publish_gigabytes / self._assumed.bandwidth
        await asyncio.sleep(self._assumed.publish_seconds + written)

    async def _send(self, snapshot_task: "asyncio.Task[None]", version: int) -> None:
        await snapshot_task
        up = [engine for engine in self._pool.engines if engine.up]
        if self._drain:
            for engine in up:
                engine.set_accepting(False)
            await asyncio.gather(*(engine.wait_drained() for engine in up))
        await asyncio.sleep(self._pool.transfer_seconds(len(up)))
        self._pool.version = version
        for engine in self._pool.engines:
            if not engine.up:
                continue  # it loads these weights when it restarts
            if self._assumed.load_seconds:
                engine.stall(self._assumed.load_seconds)
            engine.set_version(version)
            engine.set_accepting(True)
        self._on_live(version)


async def _wait_if_running(task: "asyncio.Task[None] | None") -> None:
    if task is not None and not task.done():
        await asyncio.wait({task})
