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
from keel.inference.protocol import BroadcastSlot, Engine, EngineError
from keel.inference.tensor_broadcast import BroadcastSender
from keel.training.model.model import Model
from keel.training.model.weights_io import full_state_dict

GATHER_SECONDS = 0.2
"""Seconds in which a round waits for further servers: a pool tells all of its members at once."""


@dataclass(eq=False)
class BroadcastRound:
    """Servers that receive together."""

    version: int
    sender: "asyncio.Future[BroadcastSender]"
    num_receivers: int = 0
    absent_ranks: set[int] = field(default_factory=set)
    """Ranks of those that were counted and will not come."""

    def mark_absent(self, rank: int) -> None:
        self.absent_ranks.add(rank)
        if self.sender.done() and self.sender.exception() is None:
            self.sender.result().mark_absent(rank)


class BroadcastTransport:
    """A way of weights to servers that `connect` makes; see `keel.training.publish.publisher`."""

    def __init__(self, model: Model, address: str) -> None:
        self._model, self._address = model, address
        self._device: torch.device = model.device
        self._held_weights: dict[int, Mapping[str, Tensor]] = {}
        self._open_round: BroadcastRound | None = None
        self._round_tasks: set[asyncio.Task[None]] = set()

    def snapshot(self, version: int) -> None:
        # tied weights travel once, under their first name
        once = {
            tensor.data_ptr() or name: (name, tensor) for name, tensor in reversed(full_state_dict(self._model).items())
        }
        self._held_weights[version] = dict(reversed(once.values()))

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        await engine.load_weights(f"the broadcast of version {version}", version, drain=drain)
        # only now: until it is live somewhere, a pool may have to go back to the one before it
        self._held_weights = {version: self._held_weights[version]}

    def connect(self, url: str, api_key: str | None) -> "BroadcastEngine":
        """A server at this address that gets its weights by this way."""
        engine = BroadcastEngine(url, api_key=api_key)
        engine.transport = self
        return engine

    async def send_to_server(self, engine: HttpEngine, version: int, drain: bool) -> None:
        """Send a version that was taken to one server, together with others that ask for it now."""
        if version not in self._held_weights:
            raise self._not_held_error(version)
        meeting = self._open_round
        if meeting is None or meeting.version != version:
            meeting = self._open_round = BroadcastRound(version, asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._run_round(meeting), name=f"broadcast of version {version}")
            self._round_tasks.add(task)
            task.add_done_callback(self._round_tasks.discard)
        meeting.num_receivers += 1
        rank = meeting.num_receivers
        try:
            sender = await asyncio.shield(meeting.sender)
            await engine.receive_weights(BroadcastSlot(sender.port, rank), version, drain=drain)
        except BaseException:
            meeting.mark_absent(rank)
            raise

    async def _run_round(self, broadcast_round: BroadcastRound) -> None:
        """One round: wait for others, then send from a thread; who failed is told by the servers themselves."""
        await asyncio.sleep(GATHER_SECONDS)
        if self._open_round is broadcast_round:
            self._open_round = None
        held = self._held_weights.get(broadcast_round.version)
        try:
            if held is None:
                raise self._not_held_error(broadcast_round.version)
            sender = BroadcastSender(self._address, held, self._device)
        except EngineError as error:
            broadcast_round.sender.set_exception(error)
            return
        for rank in broadcast_round.absent_ranks:
            sender.mark_absent(rank)
        broadcast_round.sender.set_result(sender)
        # RuntimeError: the group broke, which every receiver has seen too
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(sender.send, broadcast_round.num_receivers)

    def _not_held_error(self, version: int) -> EngineError:
        return EngineError(f"version {version} is no longer held to be sent: a newer one is live")


class BroadcastEngine(HttpEngine):
    """A server that gets all weights by broadcast."""

    transport: BroadcastTransport

    async def load_weights(self, folder: str, version: int, *, drain: bool = False) -> None:
        """Take the version from the trainer; `folder` only names it."""
        del folder
        await self.transport.send_to_server(self, version, drain)
