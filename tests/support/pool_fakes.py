"""Fake engine servers that fail, restart and hang, in virtual time: an hour takes milliseconds."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from keel.config.engine import PoolSettings
from keel.config.rollout import Sampling
from keel.inference.pool.discovery import DiscoveryError
from keel.inference.pool.pool import Pool
from keel.inference.pool.target_weights import WeightLoad
from keel.inference.protocol import EngineError, Generation, Health, WeightSource

T = TypeVar("T")


class VirtualSelector(selectors.DefaultSelector):
    """A selector that never waits but advances the virtual clock by the timeout."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("deadlock: every task waits and no timer is set")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time. Fails if it leaves tasks behind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def run() -> T:
            result = await work
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left behind: {left}"
            return result

        return runner.run(run())


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class Server:
    """The true state of a server, which the pool sees only through requests."""

    url: str
    up: bool = True
    hangs: bool = False
    """Accepts connections and never responds."""
    loads_fail: bool = False
    load_seconds: float = 0.5
    sampling_seconds: float = 1.0
    error: EngineError | None = None
    """Error of every request."""
    not_ready: str = ""
    health_seconds: float = 0.0
    """Delay of a health response."""
    version: int = 0
    loads: tuple[WeightLoad, ...] = ()
    """Loads since the server started: full weights, then an adapter."""
    incarnation: int = 0
    running: int = 0
    health_calls: list[float] = field(default_factory=list)
    requests: list[tuple[str | None, float]] = field(default_factory=list)
    cancelled: int = 0
    troubles: list[float] = field(default_factory=list)
    connections: int = 0
    closed: int = 0

    def stop(self) -> None:
        self.up = False
        self.incarnation += 1
        self.version, self.loads = 0, ()

    def restart(self) -> None:
        """Restart immediately, with the initial weights; the pool may not notice."""
        self.stop()
        self.up = True
        self.hangs = False


class PoolHarness:
    """A pool with fake servers, its member list, and a record of the requests."""

    def __init__(self, count: int = 3, **settings: Any) -> None:
        self.servers = {f"http://s{i}:1": Server(f"http://s{i}:1") for i in range(count)}
        self.listed = list(self.servers)
        self.list_error = ""
        self.dynamic = True
        self.live: set[tuple[WeightLoad, ...]] = {()}
        """All weights that were ever live on a server."""
        self.sent_requests: list[tuple[Server, str | None, float, bool]] = []
        """Server, group, time, and whether the server held the pool's live or target weights."""
        self.settings = PoolSettings.model_validate({"file": "unused", "poll_interval": 10.0, **settings})
        self.pool = Pool(self.settings, self.connect, source=self)

    def __getitem__(self, index: int) -> Server:
        return list(self.servers.values())[index]

    async def fetch_urls(self) -> list[str]:
        if self.list_error:
            raise DiscoveryError(self.list_error)
        return list(self.listed)

    def connect(self, url: str) -> "FakeEngine":
        self.servers[url].connections += 1
        return FakeEngine(self, self.servers[url])

    async def generate(self, group: str | None = None, **sampling: Any) -> Generation:
        return await self.pool.generate([1, 2], Sampling(**sampling), group=group)

    def states(self) -> list[str]:
        return [row.state for row in self.pool.status()]


class FakeEngine:
    """The client of a fake server, with a request timeout of 120 s."""

    def __init__(self, harness: PoolHarness, server: Server) -> None:
        self.harness, self.server = harness, server

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if not self.server.up:
            raise EngineError(f"{self.server.url} refused the connection")
        if self.server.hangs:
            await asyncio.sleep(120)
            raise EngineError(f"{self.server.url} did not respond within 120 s")

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        server, pool = self.server, self.harness.pool
        held = pool._target_weights.version is None or any(
            (server.version, server.loads) == (weights.version, weights.loads)
            for weights in (pool._live_weights, pool._target_weights)
        )
        number = len(self.harness.sent_requests)
        self.harness.sent_requests.append((server, group, now(), held))
        server.requests.append((group, now()))
        incarnation, first = server.incarnation, server.version
        server.running += 1
        try:
            await self._reach()
            await asyncio.sleep(server.sampling_seconds / 2)
            await self._reach()
            if server.error is not None:
                raise server.error
            await asyncio.sleep(server.sampling_seconds / 2)
            if server.incarnation != incarnation:
                raise EngineError(f"{server.url} broke the connection")
        except asyncio.CancelledError:
            server.cancelled += 1
            raise
        finally:
            server.running -= 1
        return Generation((number, 0), (-0.1, -0.2), (first, server.version), "stop", 1.0)

    async def _load(self, load: WeightLoad) -> None:
        await self._reach()
        incarnation = self.server.incarnation
        await asyncio.sleep(self.server.load_seconds)
        await self._reach()
        if self.server.incarnation != incarnation:
            raise EngineError(f"{self.server.url} broke the connection")
        if self.server.loads_fail:
            raise EngineError(f"{self.server.url} has no folder {load.source.path}", retryable=False)
        base = tuple(item for item in self.server.loads if not item.is_adapter)
        self.server.loads = (*base, load) if load.is_adapter else (load,)
        self.server.version = load.version
        self.harness.live.add(self.server.loads)

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        await self._load(WeightLoad(source, version))

    async def version(self) -> int:
        await self._reach()
        return self.server.version

    async def health(self) -> Health:
        self.server.health_calls.append(now())
        await self._reach()
        server = self.server
        health = Health(not server.not_ready, server.version, server.running, 0, server.not_ready)
        await asyncio.sleep(server.health_seconds)
        return health

    async def close(self) -> None:
        self.server.closed += 1


def run_scenario(
    scenario: Callable[[PoolHarness], Coroutine[Any, Any, None]], count: int = 3, **settings: Any
) -> PoolHarness:
    """Run a scenario, close the pool, and check that it released everything."""

    async def run() -> PoolHarness:
        harness = PoolHarness(count, **settings)
        try:
            await scenario(harness)
        finally:
            await harness.pool.close()
        for server in harness.servers.values():
            assert server.running == 0
            assert server.connections == server.closed
        return harness

    return run_in_virtual_time(run())
