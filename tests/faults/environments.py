"""Environments for runs with faults: rewards are arbitrary, and episodes fail on request.

The reward and the failures depend only on the sampled tokens, so that groups have reward variance without any training,
and a synchronous run is the same each time.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterable
from typing import Literal

from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.policy_client import PolicyClient

Failure = Literal["raise", "nan", "exit", "wait", "ignore_cancel", "block"]


class Tokens:
    """Any completion is accepted; a hash of its tokens decides the reward and whether the episode fails."""

    name = "tokens"

    def __init__(self, share: float = 0.0, failure: Failure | list[Failure] = "raise", clock: bool = False) -> None:
        """A fraction `share` of the episodes fails in one of these ways; with `clock` the time of day jumps."""
        self.share, self.failures = share, [failure] if isinstance(failure, str) else list(failure)
        if clock:
            _make_clock_jump()

    def tasks(self, split: Split) -> Iterable[Task]:
        return [Task(f"{split}{number}", {}) for number in range(40 if split == "train" else 4)]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        reply = await client.chat([{"role": "user", "content": f"{task.id}:"}])
        number = int.from_bytes(
            hashlib.sha256(repr((task.id, reply.generation.token_ids)).encode()).digest()[:4], "big"
        )
        if number % 1000 < 1000 * self.share:
            return await self._fail(self.failures[number // 1000 % len(self.failures)])
        return EpisodeResult(number % 7 / 7)

    async def _fail(self, failure: Failure) -> EpisodeResult:
        if failure == "raise":
            raise LookupError("no such completion")
        if failure == "exit":
            raise SystemExit(3)
        if failure == "nan":
            return EpisodeResult(float("nan"))
        if failure == "wait":
            await asyncio.sleep(1e6)
        while failure == "ignore_cancel":  # continues after every cancellation
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue
        while failure == "block":  # blocks the event loop
            time.sleep(0.1)
        return EpisodeResult(0.0)


def _make_clock_jump() -> None:
    """Make the time of day in this process jump by a day or a year several times a second."""
    real_time, steps = time.time, (0.0, -86_400.0, 3.2e7, -3.2e7)
    if getattr(time, "clock_jumps", False):
        return
    setattr(time, "clock_jumps", True)  # noqa: B010 - marks the module as patched
    time.time = lambda: real_time() + steps[int(time.monotonic() * 5) % len(steps)]
