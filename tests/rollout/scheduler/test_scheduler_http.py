"""The scheduler over real episodes and a real HTTP server that fails, hangs, returns empty completions and is killed.

Covers the full path of a rollout: episode, client, requests over a socket, and back. Time is real, so the checks hold
for any timing: each rollout is emitted once, staleness is bounded, the run continues.
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
from tests.support.scheduler_fakes import EmissionLog, name_of

LIMITS = EpisodeLimits(max_turns=2, max_sequence_tokens=400, timeout=0.8)


class FaultyEngine(FakeEngine):
    """An engine where some requests fail, hang or return an empty completion."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.live = 0
        self.rng = random.Random(seed)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        draw = self.rng.random()
        if draw < 0.1:
            raise EngineError("out of memory", retryable=draw < 0.05)
        await asyncio.sleep(30.0 if draw < 0.13 else self.rng.random() * 0.02)
        if draw < 0.25:
            return Generation((), (), (), "stop", sampling.temperature)
        return self._answer(prompt, sampling)


class ServerPort:
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
def running_server() -> Iterator[ServerPort]:
    server = ServerPort()
    server.start(0, 0)
    try:
        yield server
    finally:
        server.kill()


class RaisingEnvironment:
    """An environment that sometimes raises."""

    name = "raising"

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"raising{number}", {}) for number in range(10)]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        reply = await client.chat([{"role": "user", "content": task.id}])
        if len(reply.generation.token_ids) and random.random() < 0.2:
            raise LookupError("no such reply")
        return EpisodeResult(1.0)


class RecordingRunner:
    """Runs one episode per request and records the dispatched names."""

    def __init__(self, engine: HttpEngine, environments: Sequence[Environment]) -> None:
        self._engine, self._renderer = engine, Renderer(TOKENIZER)
        self._environments = {environment.name: environment for environment in environments}
        self.dispatched: list[tuple[str, int, int]] = []

    def __call__(self, request: RolloutRequest) -> Coroutine[Any, Any, Rollout]:
        # recorded here, so that rollouts cancelled before their task starts are included
        self.dispatched.append(name_of(request))
        return self._episode(request)

    async def _episode(self, request: RolloutRequest) -> Rollout:
        client = PolicyClient(self._engine, self._renderer, Sampling(max_tokens=8), LIMITS, group=request.group)
        environment = self._environments[request.environment]
        return await run_episode(environment, request.task, client, LIMITS, attempt=request.attempt)


class EpisodeLog(EmissionLog):
    """Rollouts of episodes have a group and an attempt, but no member index."""

    def add_batch(self, batch):  # type: ignore[no-untyped-def]
        self.batches.append(batch)
        for group in batch.groups:
            for member in group.members:
                assert member.rollout is None or member.rollout.group == group.id
                self.note((group.id, member.member, member.attempt), "trained")
        self.add_dropped(batch.dropped)

    def add_dropped(self, dropped):  # type: ignore[no-untyped-def]
        for rollout in dropped:
            self.note(name_of(rollout), rollout.reason)


@pytest.mark.process
@pytest.mark.parametrize("off_policy", [0, 2])
def test_every_rollout_is_emitted_once_over_a_failing_and_killed_server(off_policy: int, tmp_path: Path) -> None:
    settings = SchedulerSettings(
        groups_per_step=3,
        group_size=3,
        max_in_flight=12,
        max_error_reschedule_attempts=2,
        min_group_size=2,
        max_off_policy_steps=off_policy,
        max_empty_steps=None,
    )
    environments = [load_environment(EnvironmentSettings(name="larger_number")), RaisingEnvironment()]
    log = EpisodeLog()

    async def restart(server: ServerPort, engine: HttpEngine, version: int) -> None:
        """Kill the server during a batch, restart it with the old weights, then load the new ones."""
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.start, version, version - 1)
        await engine.load_weights(WeightSource.folder(str(tmp_path)), version)

    async def run(server: ServerPort) -> RecordingRunner:
        engine = HttpEngine(server.url, timeout=5.0)
        runner = RecordingRunner(engine, environments)
        sources = [TaskSource(environment.name, environment.tasks("train")) for environment in environments]
        scheduler = Scheduler(runner, sources, settings)
        try:
            async with asyncio.timeout(60):
                for version in range(8):
                    if version not in (3, 6):
                        await engine.load_weights(WeightSource.folder(str(tmp_path)), version)
                        log.add_batch(await scheduler.next_batch(version))
                        continue
                    outage = asyncio.ensure_future(restart(server, engine, version))
                    log.add_batch(await scheduler.next_batch(version))
                    await outage
            log.add_dropped(await scheduler.close())
        finally:
            await scheduler.close()
            await engine.close()
        return runner

    with running_server() as server:
        runner = asyncio.run(run(server))
    assert max(Counter(runner.dispatched).values()) == 1
    log.check_against(runner.dispatched)
    trained = [group for batch in log.batches for group in batch.groups]
    assert trained
    for batch in log.batches:
        for group in batch.groups:
            assert 2 <= len(group.rollouts) <= 3
            assert batch.version - min(rollout.oldest_version for rollout in group.rollouts) <= off_policy
    assert {"engine", "timeout", "empty", "exception"} & set(log.emitted.values())
