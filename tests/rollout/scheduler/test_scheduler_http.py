"""The scheduler over real episodes and a real HTTP server that fails, hangs, answers nothing, and is killed.

The whole way of a rollout: an environment's episode, the client's tokens, requests over a socket, and back. Time is
real here, so that what is checked holds for every timing: each rollout once, staleness kept, the run goes on.
"""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from keel.config import EnvironmentSettings, EpisodeLimits, Sampling, SchedulerSettings
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.inference.server.app import build_app
from keel.rollout.environments.environment import Environment, EpisodeResult, Task, run_episode
from keel.rollout.environments.registry import load_environment
from keel.rollout.policy_client import PolicyClient
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout import Rollout
from keel.rollout.scheduler.groups import RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource
from tests.support.engine_fakes import ANYWHERE, TOKENIZER, FakeEngine, serving
from tests.support.scheduler_fakes import Ledger, name_of

LIMITS = EpisodeLimits(max_turns=2, max_sequence_tokens=400, timeout=0.8)


class FaultyEngine(FakeEngine):
    """Some requests fail, some take for ever, some are answered with nothing; the rest with chance."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.live = 0
        self.chance = random.Random(seed)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        fate = self.chance.random()
        if fate < 0.1:
            raise EngineError("out of memory", retryable=fate < 0.05)
        await asyncio.sleep(30.0 if fate < 0.13 else self.chance.random() * 0.02)
        if fate < 0.25:
            return Generation((), (), (), "stop", sampling.temperature)
        return self._answer(prompt, sampling)


class Machine:
    """A port on which a server can be started and killed."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._running = ExitStack()

    def start(self, seed: int, version: int) -> None:
        self.engine = FaultyEngine(seed)
        self.engine.live = version
        app = build_app(self.engine, TOKENIZER, model="tiny", allowed_folders=ANYWHERE)
        self._running.enter_context(serving(app, port=self.port, timeout_graceful_shutdown=0))

    def kill(self) -> None:
        self._running.close()


@contextmanager
def machine() -> Iterator[Machine]:
    made = Machine()
    made.start(0, 0)
    try:
        yield made
    finally:
        made.kill()


class Rude:
    """An environment that now and then raises, for reasons of its own."""

    name = "rude"

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"rude{number}", {}) for number in range(10)]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        reply = await client.chat([{"role": "user", "content": task.id}])
        if len(reply.generation.token_ids) and random.random() < 0.2:
            raise LookupError("no such answer")
        return EpisodeResult(1.0)


class Episodes:
    """The runner of a real run: one episode for each dispatch."""

    def __init__(self, engine: HttpEngine, environments: Sequence[Environment]) -> None:
        self._engine, self._renderer = engine, Renderer(TOKENIZER)
        self._environments = {environment.name: environment for environment in environments}
        self.dispatched: list[tuple[str, int, int]] = []

    def __call__(self, dispatch: RolloutRequest) -> Coroutine[Any, Any, Rollout]:
        # counted here: what is cancelled before its task has begun was dispatched too
        self.dispatched.append(name_of(dispatch))
        return self._episode(dispatch)

    async def _episode(self, dispatch: RolloutRequest) -> Rollout:
        client = PolicyClient(self._engine, self._renderer, Sampling(max_tokens=8), LIMITS, group=dispatch.group)
        environment = self._environments[dispatch.environment]
        return await run_episode(environment, dispatch.task, client, LIMITS, attempt=dispatch.attempt)


class RealLedger(Ledger):
    """Rollouts of episodes know their group and attempt, and not their number in it."""

    def batch(self, batch):  # type: ignore[no-untyped-def]
        self.batches.append(batch)
        for group in batch.groups:
            for member in group.members:
                assert member.rollout is None or member.rollout.group == group.id
                self.note((group.id, member.member, member.attempt), "trained")
        self.refused(batch.dropped)

    def refused(self, refusals):  # type: ignore[no-untyped-def]
        for refusal in refusals:
            self.note(name_of(refusal), refusal.reason)


@pytest.mark.parametrize("off_policy", [0, 2])
def test_over_a_server_that_fails_and_is_killed_every_rollout_is_emitted_once(off_policy: int, tmp_path: Path) -> None:
    chosen = SchedulerSettings(
        groups_per_step=3,
        group_size=3,
        max_in_flight=12,
        max_error_reschedule_attempts=2,
        min_group_size=2,
        max_off_policy_steps=off_policy,
        max_empty_steps=None,
    )
    environments = [load_environment(EnvironmentSettings(name="larger_number")), Rude()]
    ledger = RealLedger()

    async def restart(box: Machine, engine: HttpEngine, version: int) -> None:
        """While a batch is waited for, the server dies, comes back with the weights it had, and then gets the new."""
        await asyncio.sleep(0.05)
        await asyncio.to_thread(box.kill)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(box.start, version, version - 1)
        await engine.load_weights(WeightSource.folder(str(tmp_path)), version)

    async def run(box: Machine) -> Episodes:
        engine = HttpEngine(box.url, timeout=5.0)
        runner = Episodes(engine, environments)
        listed = [TaskSource(environment.name, environment.tasks("train")) for environment in environments]
        made = Scheduler(runner, listed, chosen)
        try:
            async with asyncio.timeout(60):
                for version in range(8):
                    if version not in (3, 6):
                        await engine.load_weights(WeightSource.folder(str(tmp_path)), version)
                        ledger.batch(await made.next_batch(version))
                        continue
                    outage = asyncio.ensure_future(restart(box, engine, version))
                    ledger.batch(await made.next_batch(version))
                    await outage
            ledger.refused(await made.close())
        finally:
            await made.close()
            await engine.close()
        return runner

    with machine() as box:
        runner = asyncio.run(run(box))
    assert max(Counter(runner.dispatched).values()) == 1
    ledger.check_against(runner.dispatched)
    trained = [group for batch in ledger.batches for group in batch.groups]
    assert trained
    for batch in ledger.batches:
        for group in batch.groups:
            assert 2 <= len(group.rollouts) <= 3
            assert batch.version - min(rollout.oldest_version for rollout in group.rollouts) <= off_policy
    assert {"engine", "timeout", "empty", "exception"} & set(ledger.emitted.values())
