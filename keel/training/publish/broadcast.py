"""Weights to the engines by torch.distributed: no disk between the trainer and the servers.

The weights of a version are copied once and kept until the next one is live, so that a server which comes back or
joins later gets them too. Servers that ask at about the same time are one round: they and the trainer form a process
group for as long as the tensors travel (`keel.inference.tensor_broadcast`). A server that fails in a round fails
alone or fails the round; what it sampled with before is what it still samples with, and it asks again.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keel.inference.pool.http_engine import HttpEngine
from keel.inference.protocol import Engine, EngineError, Seat
from keel.inference.tensor_broadcast import Sender
from keel.training.model.model import Model
from keel.training.model.weights_io import full_state

GATHER = 0.2
"""Seconds in which a round waits for further servers: a pool tells all of its members at once."""


@dataclass(eq=False)
class Round:
    """Servers that receive together."""

    version: int
    sender: "asyncio.Future[Sender]"
    members: int = 0
    absent: set[int] = field(default_factory=set)
    """Ranks of those that were counted and will not come."""

    def leave(self, rank: int) -> None:
        self.absent.add(rank)
        if self.sender.done() and self.sender.exception() is None:
            self.sender.result().absent(rank)


class Broadcast:
    """A way of weights to servers that `connect` makes; see `keel.training.publish.publisher`."""

    def __init__(self, model: Model, address: str) -> None:
        self._model, self._address = model, address
        self._device: torch.device = model.device
        self._held: dict[int, Mapping[str, Tensor]] = {}
        self._gathering: Round | None = None
        self._rounds: set[asyncio.Task[None]] = set()

    def take(self, version: int) -> None:
        # tied weights travel once, under their first name
        once = {tensor.data_ptr() or name: (name, tensor) for name, tensor in reversed(full_state(self._model).items())}
        self._held[version] = dict(reversed(once.values()))

    async def give(self, engine: Engine, version: int, *, drain: bool) -> None:
        await engine.load_weights(f"the broadcast of version {version}", version, drain=drain)
        # only now: until it is live somewhere, a pool may have to go back to the one before it
        self._held = {version: self._held[version]}

    def connect(self, url: str, api_key: str | None) -> "Receiving":
        """A server at this address that gets its weights by this way."""
        engine = Receiving(url, api_key=api_key)
        engine.broadcast = self
        return engine

    async def send(self, engine: HttpEngine, version: int, drain: bool) -> None:
        """Send a version that was taken to one server, together with others that ask for it now."""
        if version not in self._held:
            raise self._gone(version)
        meeting = self._gathering
        if meeting is None or meeting.version != version:
            meeting = self._gathering = Round(version, asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._run(meeting), name=f"broadcast of version {version}")
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)
        meeting.members += 1
        rank = meeting.members
        try:
            sender = await asyncio.shield(meeting.sender)
            await engine.receive_weights(Seat(sender.port, rank), version, drain=drain)
        except BaseException:
            meeting.leave(rank)
            raise

    async def _run(self, meeting: Round) -> None:
        """One round: wait for others, then send from a thread; who failed is told by the servers themselves."""
        await asyncio.sleep(GATHER)
        if self._gathering is meeting:
            self._gathering = None
        held = self._held.get(meeting.version)
        try:
            if held is None:
                raise self._gone(meeting.version)
            sender = Sender(self._address, held, self._device)
        except EngineError as error:
            meeting.sender.set_exception(error)
            return
        for rank in meeting.absent:
            sender.absent(rank)
        meeting.sender.set_result(sender)
        # RuntimeError: the group broke, which every receiver has seen too
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(sender.send, meeting.members)

    def _gone(self, version: int) -> EngineError:
        return EngineError(f"version {version} is no longer held to be sent: a newer one is live")


class Receiving(HttpEngine):
    """A server that gets all weights by broadcast."""

    broadcast: Broadcast

    async def load_weights(self, folder: str, version: int, *, drain: bool = False) -> None:
        """Take the version from the trainer; `folder` only names it."""
        del folder
        await self.broadcast.send(self, version, drain)
