"""The LoRA adapter alone, as a PEFT folder on a path that the trainer and the engines share."""

from pathlib import Path

from keel.inference.protocol import WeightSource
from keel.training.publish.folder import FolderTransport


class AdapterTransport(FolderTransport):
    """Writes the adapter of each version to a folder; engines apply it to the base weights they hold."""

    adapter_only = True

    def _source(self, path: Path) -> WeightSource:
        return WeightSource.adapter(path)
