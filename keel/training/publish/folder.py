"""All weights as a Hugging Face folder on a path that the trainer and the engines share.

The weights are copied first, so training does not wait for the disk. The folder is written under a temporary name,
synced, given a manifest and renamed; engines check the manifest before they load. The last two versions are kept,
because a slow engine may still be reading the older one.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Self

from torch import Tensor

from keel.common.atomic_files import atomic_folder, remove_folder, write_manifest
from keel.config import PublishSettings
from keel.errors import ModelError
from keel.inference.protocol import Engine, WeightSource
from keel.training.model.model import Model
from keel.training.model.weights_io import gather_weights, write_gathered
from keel.training.publish.transport import WeightTransport


class FolderTransport(WeightTransport):
    """Writes `version_N` folders and tells the engine to load the newest."""

    adapter_only = False
    """Whether the folder holds only the adapter."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._snapshot: dict[str, Tensor] = {}
        self._previous_version: int | None = None

    @classmethod
    def from_settings(cls, model: Model, settings: PublishSettings, folder: Path) -> Self:
        del settings
        return cls(model, folder)

    def snapshot(self, version: int) -> None:
        del version
        self._snapshot = gather_weights(self._model, adapter=self.adapter_only)

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        await asyncio.to_thread(self._write, version)
        await engine.load_weights(self._source(self.version_path(version).resolve()), version, drain=drain)
        await asyncio.to_thread(self._remove_old_versions, {version, self._previous_version})
        self._previous_version = version

    def version_path(self, version: int) -> Path:
        """Return the folder of a version."""
        return self._folder / f"version_{version}"

    def _source(self, path: Path) -> WeightSource:
        return WeightSource.folder(path)

    def _write(self, version: int) -> None:
        target = self.version_path(version)
        if target.is_dir():
            # written before the run was resumed, possibly from a different training history
            remove_folder(target)
        with atomic_folder(target) as folder:
            write_gathered(folder, self._model, self._snapshot)
            write_manifest(folder)
        self._snapshot = {}

    def _remove_old_versions(self, kept: set[int | None]) -> None:
        names = {f"version_{version}" for version in kept}
        for old in self._folder.glob("version_*"):
            if old.name not in names:
                with contextlib.suppress(OSError, ModelError):
                    remove_folder(old)
