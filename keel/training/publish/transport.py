"""The interface of a weight transport: how the weights of one version reach the engines.

A transport belongs to one model. It never decides when to publish; that is `keel.training.publish.publisher`.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from keel.config import PublishSettings
from keel.inference.protocol import Engine
from keel.training.model.model import Model


class WeightTransport(ABC):
    """Copies the trainer's weights, then makes the copy live in an engine."""

    @classmethod
    @abstractmethod
    def from_settings(cls, model: Model, settings: PublishSettings, folder: Path) -> Self:
        """Return a transport for the model; `folder` is where a transport that uses files may write them."""

    @abstractmethod
    def snapshot(self, version: int) -> None:
        """Copy the trainer's weights. Runs in a thread; the weights do not change until it returns."""

    @abstractmethod
    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        """Make the snapshot of this version live in the engine."""
