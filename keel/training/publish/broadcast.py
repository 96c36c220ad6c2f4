"""All weights to servers by torch.distributed, without a disk between them.

The weights of a version are copied once and held until the next version is live, so a server that restarts or joins
later can receive them too. Servers that ask at about the same time share one round: they and the trainer form a
process group while the tensors are sent (`keel.inference.tensor_broadcast`). A server that fails in a round either
fails alone or fails the round; in both cases it keeps the weights it had and asks again.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from keel.config import PublishSettings
from keel.inference.protocol import BroadcastClient, BroadcastSlot, Engine, EngineError, WeightSource
from keel.inference.tensor_broadcast import BroadcastSender
from keel.training.model.model import Model
from keel.training.model.weights_io import full_state_dict
from keel.training.publish.transport import WeightTransport

GATHER_SECONDS = 0.2
"""How long a round waits for more servers; a pool tells all of its members concurrently."""


@dataclass(eq=False)
class BroadcastRound:
    """Servers that receive a version together."""

    version: int
    sender: "asyncio.Future[BroadcastSender]"
    num_receivers: int = 0
    absent_ranks: set[int] = field(default_factory=set)
    """Ranks that were counted and then failed."""

    def mark_absent(self, rank: int) -> None:
        self.absent_ranks.add(rank)
        if self.sender.done() and self.sender.exception() is None:
            self.sender.result().mark_absent(rank)


class BroadcastTransport(WeightTransport):
    """Holds the newest weights and sends them to every server that asks."""

    def __init__(self, model: Model, address: str) -> None:
        self._model, self._address = model, address
        self._device: torch.device = model.device
        self._held_weights: dict[int, Mapping[str, Tensor]] = {}
        self._open_round: BroadcastRound | None = None
        self._round_tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def from_settings(cls, model: Model, settings: PublishSettings, folder: Path) -> Self:
        del folder
        return cls(model, settings.bind_address)

    def snapshot(self, version: int) -> None:
        # tied weights are sent once, under their first name
        state = reversed(full_state_dict(self._model).items())
        unique = {tensor.data_ptr() or name: (name, tensor) for name, tensor in state}
        self._held_weights[version] = dict(reversed(unique.values()))

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        await engine.load_weights(WeightSource("broadcast", sender=self), version, drain=drain)
        # released only now: until this version is live on a member, a pool may return to the version before it
        self._held_weights = {version: self._held_weights[version]}

    async def send_to(self, engine: BroadcastClient, version: int, *, drain: bool) -> None:
        """Send a version to one server, in the same round as other servers that ask for it now."""
        if version not in self._held_weights:
            raise self._not_held_error(version)
        current = self._open_round
        if current is None or current.version != version:
            current = self._open_round = BroadcastRound(version, asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._run_round(current), name=f"broadcast of version {version}")
            self._round_tasks.add(task)
            task.add_done_callback(self._round_tasks.discard)
        current.num_receivers += 1
        rank = current.num_receivers
        try:
            sender = await asyncio.shield(current.sender)
            await engine.receive_weights(BroadcastSlot(sender.port, rank), version, drain=drain)
        except BaseException:
            current.mark_absent(rank)
            raise

    async def _run_round(self, broadcast_round: BroadcastRound) -> None:
        """Wait for more servers, then send from a thread; failures are reported by the servers themselves."""
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
        # RuntimeError: the process group broke, and every receiver has seen that too
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(sender.send, broadcast_round.num_receivers)

    def _not_held_error(self, version: int) -> EngineError:
        return EngineError(f"the weights of version {version} are no longer held: a newer version is live")
