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

from keel.common.atomic_files import discard, new_folder, seal
from keel.errors import ModelError
from keel.inference.protocol import Engine
from keel.training.model.model import Model
from keel.training.model.weights_io import full_state, gather, write_taken

Done = TypeVar("Done")


class Way(Protocol):
    """How weights travel."""

    def take(self, version: int) -> None:
        """Read the trainer's weights, in a thread; they do not change until it returns."""

    async def give(self, engine: Engine, version: int, *, drain: bool) -> None:
        """Make what was taken live in the engine."""


class Copied:
    """In this process: a copy of all weights, which the engine takes over between two decode steps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._state: Mapping[str, Tensor] = {}

    def read(self, _folder: str) -> Mapping[str, Tensor]:
        """What was taken last: how the engine reads weights."""
        return self._state

    def take(self, version: int) -> None:
        del version
        self._state = full_state(self._model)

    async def give(self, engine: Engine, version: int, *, drain: bool) -> None:
        try:
            await engine.load_weights("", version, drain=drain)
        finally:
            self._state = {}


class Folder:
    """By a folder on a path that both sides see: the adapter alone with LoRA, all weights otherwise.

    The weights are copied, so that training need not wait for the disk. The folder is written under a temporary name,
    synced, sealed by a manifest and renamed; engines check the manifest before they load. The one before the newest
    stays, because a slow engine may still be reading it.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._taken: dict[str, Tensor] = {}
        self._before: int | None = None

    def take(self, version: int) -> None:
        del version
        self._taken = gather(self._model, adapter=self._model.peft is not None)

    async def give(self, engine: Engine, version: int, *, drain: bool) -> None:
        await asyncio.to_thread(self._write, version)
        load = engine.load_weights if self._model.peft is None else engine.load_adapter
        await load(str(self.path(version).resolve()), version, drain=drain)
        await asyncio.to_thread(self._clear, {version, self._before})
        self._before = version

    def _write(self, version: int) -> None:
        target = self.path(version)
        if target.is_dir():
            # of an earlier life of the run, which may have been trained otherwise
            discard(target)
        with new_folder(target) as folder:
            write_taken(folder, self._model, self._taken)
            seal(folder)
        self._taken = {}

    def path(self, version: int) -> Path:
        return self._folder / f"version_{version}"

    def _clear(self, kept: set[int | None]) -> None:
        names = {f"version_{version}" for version in kept}
        for old in self._folder.glob("version_*"):
            if old.name not in names:
                with contextlib.suppress(OSError, ModelError):
                    discard(old)


class Publisher:
    """Publications to one engine, one at a time.

    Without `overlap` a publication is over when `publish` returns: nothing is sampled with older weights afterwards.
    """

    def __init__(self, engine: Engine, way: Way, *, drain: bool = False, overlap: bool = False) -> None:
        self.engine = engine
        self.seconds = 0.0
        """How long the last one took until it was live."""
        self.told: Callable[[int], None] | None = None
        """Who hears of each version when it is live."""
        self._way, self._drain, self._overlap = way, drain, overlap
        self._taking: asyncio.Future[None] | None = None
        self._giving: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        """Begin with the trainer's weights as this version, after the publication before it is over."""
        await self.live()
        self._taking = asyncio.ensure_future(asyncio.to_thread(self._way.take, version))
        self._giving = asyncio.create_task(self._give(self._taking, version), name=f"publishing version {version}")
        if not self._overlap:
            await self.live()

    @property
    def reading(self) -> bool:
        """Whether the trainer's weights must not change yet."""
        return self._taking is not None and not self._taking.done()

    async def taken(self) -> None:
        """Wait until the trainer's weights may change."""
        await _over(self._taking)

    async def live(self) -> None:
        """Wait until what was published last is live."""
        await _over(self._giving)

    async def beside(self, work: Awaitable[Done]) -> Done:
        """What `work` returns; a publication that fails first is raised, and the work is ended."""
        task, giving = asyncio.ensure_future(work), self._giving
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
        if self._giving is not None:
            self._giving.cancel()
        for task in (self._giving, self._taking):
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)

    async def _give(self, taking: "asyncio.Future[None]", version: int) -> None:
        began = time.monotonic()
        await asyncio.shield(taking)
        await self._way.give(self.engine, version, drain=self._drain)
        self.seconds = time.monotonic() - began
        if self.told is not None:
            self.told(version)


async def _over(task: "asyncio.Future[None] | None") -> None:
    """Wait for something that others wait for too: to be cancelled here does not end it."""
    if task is not None:
        await asyncio.wait({task})
        task.result()
