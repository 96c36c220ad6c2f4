"""Weights for an engine in the same process: a copy of the state dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch import Tensor

from keel.config import PublishSettings
from keel.inference.protocol import Engine, WeightSource
from keel.training.model.model import Model
from keel.training.model.weights_io import full_state_dict
from keel.training.publish.transport import WeightTransport


class InMemoryTransport(WeightTransport):
    """Hands a copy of all weights to the engine, which switches to it between two decode steps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._snapshot: Mapping[str, Tensor] = {}

    @classmethod
    def from_settings(cls, model: Model, settings: PublishSettings, folder: Path) -> Self:
        del settings, folder
        return cls(model)

    def snapshot(self, version: int) -> None:
        del version
        self._snapshot = full_state_dict(self._model)

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        try:
            await engine.load_weights(WeightSource("in_memory", tensors=self._snapshot), version, drain=drain)
        finally:
            self._snapshot = {}
