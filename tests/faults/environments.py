"""Environments for runs with faults: what is learned is nonsense, and what goes wrong is by request.

The reward is a function of the sampled tokens alone, so that every group has a signal, nothing has to be learned first,
and a synchronous run is the same each time. So is what fails: by the tokens, never by chance.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterable
from typing import Literal

from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.policy_client import PolicyClient

Way = Literal["raise", "nan", "exit", "wait", "deaf", "hold"]


class Tokens:
    """Say anything; the tokens decide what it is worth, and whether the episode goes wrong."""

    name = "tokens"

    def __init__(self, share: float = 0.0, way: Way | list[Way] = "raise", clock: bool = False) -> None:
        """`share` of the episodes goes wrong, in one of the ways; `clock`: the time of day jumps all the while."""
        self.share, self.ways = share, [way] if isinstance(way, str) else list(way)
        if clock:
            _unsettle()

    def tasks(self, split: Split) -> Iterable[Task]:
        return [Task(f"{split}{number}", {}) for number in range(40 if split == "train" else 4)]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        reply = await client.chat([{"role": "user", "content": f"{task.id}:"}])
        number = int.from_bytes(
            hashlib.sha256(repr((task.id, reply.generation.token_ids)).encode()).digest()[:4], "big"
        )
        if number % 1000 < 1000 * self.share:
            return await self._wrong(self.ways[number // 1000 % len(self.ways)])
        return EpisodeResult(number % 7 / 7)

    async def _wrong(self, way: Way) -> EpisodeResult:
        if way == "raise":
            raise LookupError("no such answer")
        if way == "exit":
            raise SystemExit(3)
        if way == "nan":
            return EpisodeResult(float("nan"))
        if way == "wait":
            await asyncio.sleep(1e6)
        while way == "deaf":  # goes on after it was told to stop, again and again
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue
        while way == "hold":  # never lets the event loop go on
            time.sleep(0.1)
        return EpisodeResult(0.0)


def _unsettle() -> None:
    """Set the time of day back by a day and forward by a year, several times a second, in this process."""
    true, steps = time.time, (0.0, -86_400.0, 3.2e7, -3.2e7)
    if getattr(time, "unsettled", False):
        return
    setattr(time, "unsettled", True)  # noqa: B010 - a mark on the module
    time.time = lambda: true() + steps[int(time.monotonic() * 5) % len(steps)]
