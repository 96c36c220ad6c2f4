"""New weights on their way to whatever samples: one interface, whichever way they take, beside the next rollouts.

A publication has two parts. Taking reads the trainer's weights, which must not change meanwhile: whoever trains waits
for `taken`. Giving lasts until the weights are live in the engines. Neither stops the sampling or the taking of the
next batch. Guarantees: publications happen one at a time and in order; an engine's version advances only after its
weights are live; what failed is raised to whoever waits next, and at once to a wait `beside` it.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from keel.common.atomic_files import atomic_folder, remove_folder, write_manifest
from keel.errors import ModelError
from keel.inference.protocol import Engine
from keel.training.model.model import Model
from keel.training.model.weights_io import full_state_dict, gather_weights, write_gathered

ResultT = TypeVar("ResultT")


class WeightTransport(Protocol):
    """How weights travel."""

    def snapshot(self, version: int) -> None:
        """Read the trainer's weights, in a thread; they do not change until it returns."""

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        """Make what was taken live in the engine."""


class InMemoryTransport:
    """In this process: a copy of all weights, which the engine takes over between two decode steps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._snapshot: Mapping[str, Tensor] = {}

    def read_snapshot(self, _folder: str) -> Mapping[str, Tensor]:
        """What was taken last: how the engine reads weights."""
        return self._snapshot

    def snapshot(self, version: int) -> None:
        del version
        self._snapshot = full_state_dict(self._model)

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        try:
            await engine.load_weights("", version, drain=drain)
        finally:
            self._snapshot = {}


class FolderTransport:
    """By a folder on a path that both sides see: the adapter alone with LoRA, all weights otherwise.

    The weights are copied, so that training need not wait for the disk. The folder is written under a temporary name,
    synced, sealed by a manifest and renamed; engines check the manifest before they load. The one before the newest
    stays, because a slow engine may still be reading it.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._snapshot: dict[str, Tensor] = {}
        self._previous_version: int | None = None

    def snapshot(self, version: int) -> None:
        del version
        self._snapshot = gather_weights(self._model, adapter=self._model.peft is not None)

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        await asyncio.to_thread(self._write, version)
        load = engine.load_weights if self._model.peft is None else engine.load_adapter
        await load(str(self.version_path(version).resolve()), version, drain=drain)
        await asyncio.to_thread(self._remove_old_versions, {version, self._previous_version})
        self._previous_version = version

    def _write(self, version: int) -> None:
        target = self.version_path(version)
        if target.is_dir():
            # of an earlier life of the run, which may have been trained otherwise
            remove_folder(target)
        with atomic_folder(target) as folder:
            write_gathered(folder, self._model, self._snapshot)
            write_manifest(folder)
        self._snapshot = {}

    def version_path(self, version: int) -> Path:
        return self._folder / f"version_{version}"

    def _remove_old_versions(self, versions: set[int | None]) -> None:
        names = {f"version_{version}" for version in versions}
        for old in self._folder.glob("version_*"):
            if old.name not in names:
                with contextlib.suppress(OSError, ModelError):
                    remove_folder(old)


class Publisher:
    """Publications to one engine, one at a time.

    Without `overlap` a publication is over when `publish` returns: nothing is sampled with older weights afterwards.
    """

    def __init__(
        self, engine: Engine, transport: WeightTransport, *, drain: bool = False, overlap: bool = False
    ) -> None:
        self.engine = engine
        self.seconds = 0.0
        """How long the last one took until it was live."""
        self.on_live: Callable[[int], None] | None = None
        """Who hears of each version when it is live."""
        self._transport, self._drain, self._overlap = transport, drain, overlap
        self._snapshot_task: asyncio.Future[None] | None = None
        self._send_task: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        """Begin with the trainer's weights as this version, after the publication before it is over."""
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
        """Wait until what was published last is live."""
        await _wait_for(self._send_task)

    async def run_alongside(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """What `work` returns; a publication that fails first is raised, and the work is ended."""
        task, giving = asyncio.ensure_future(awaitable), self._send_task
        try:
            if giving is not None and not giving.done():
                await asyncio.wait({task, giving}, return_when=asyncio.FIRST_COMPLETED)
            if giving is not None and giving.done() and not task.done():
                giving.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def close(self) -> None:
        """End what is under way; the engine is as it was before it, or as it would be after it."""
        if self._send_task is not None:
            self._send_task.cancel()
        for task in (self._send_task, self._snapshot_task):
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)

    async def _send(self, snapshot_task: "asyncio.Future[None]", version: int) -> None:
        began = time.monotonic()
        await asyncio.shield(snapshot_task)
        await self._transport.send(self.engine, version, drain=self._drain)
        self.seconds = time.monotonic() - began
        if self.on_live is not None:
            self.on_live(version)


async def _wait_for(task: "asyncio.Future[None] | None") -> None:
    """Wait for something that others wait for too: to be cancelled here does not end it."""
    if task is not None:
        await asyncio.wait({task})
        task.result()
