"""Publishing: moving the trainer's weights to the engines.

To add a transport, write one file with a `WeightTransport` and name it in `TRANSPORTS` and in `PublishSettings`.
"""

from pathlib import Path

from keel.config import RunSettings
from keel.training.model.model import Model
from keel.training.publish.adapter import AdapterTransport
from keel.training.publish.broadcast import BroadcastTransport
from keel.training.publish.folder import FolderTransport
from keel.training.publish.in_memory import InMemoryTransport
from keel.training.publish.publisher import Publisher
from keel.training.publish.transport import WeightTransport

TRANSPORTS: dict[str, type[WeightTransport]] = {
    "in_memory": InMemoryTransport,
    "folder": FolderTransport,
    "adapter": AdapterTransport,
    "broadcast": BroadcastTransport,
}
"""Weight transports by the name in `publish.transport`."""


def make_transport(settings: RunSettings, model: Model, folder: Path) -> WeightTransport:
    """Return the transport that `publish.transport` names; "auto" chooses by the model and the engine."""
    name: str = settings.publish.transport
    if name == "auto":
        name = "adapter" if model.peft is not None else "in_memory" if settings.engine.kind == "local" else "folder"
    return TRANSPORTS[name].from_settings(model, settings.publish, folder)


__all__ = [
    "TRANSPORTS",
    "AdapterTransport",
    "BroadcastTransport",
    "FolderTransport",
    "InMemoryTransport",
    "Publisher",
    "WeightTransport",
    "make_transport",
]
