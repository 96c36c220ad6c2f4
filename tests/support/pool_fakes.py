"""A world of engine servers that fail, restart and hang, in virtual time: an hour of it takes milliseconds."""

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
    """Never waits: the time that would have passed has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("everybody waits for somebody, and nothing can happen any more")
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def virtually(scene: Coroutine[Any, Any, T]) -> T:
    """Run a scene in virtual time. Fails if it leaves tasks behind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def whole() -> T:
            result = await scene
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"left behind: {left}"
            return result

        return runner.run(whole())


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class Server:
    """A server as it really is, which the pool can only ask."""

    url: str
    up: bool = True
    black_hole: bool = False
    """Takes connections and never answers."""
    loads_fail: bool = False
    load_seconds: float = 0.5
    answer_seconds: float = 1.0
    error: EngineError | None = None
    """What every request ends with."""
    not_ready: str = ""
    health_seconds: float = 0.0
    """How long what it says about itself is under way."""
    version: int = 0
    loads: tuple[WeightLoad, ...] = ()
    """What a fresh server was given since it started: all weights, then an adapter."""
    life: int = 0
    running: int = 0
    health_calls: list[float] = field(default_factory=list)
    asked: list[tuple[str | None, float]] = field(default_factory=list)
    cancelled: int = 0
    troubles: list[float] = field(default_factory=list)
    connections: int = 0
    closed: int = 0

    def stop(self) -> None:
        self.up = False
        self.life += 1
        self.version, self.loads = 0, ()

    def restart(self) -> None:
        """At once, so that nobody may notice: with the weights it began with."""
        self.stop()
        self.up = True
        self.black_hole = False


class World:
    """The servers, the list of members, and who was handed what."""

    def __init__(self, count: int = 3, **settings: Any) -> None:
        self.servers = {f"http://s{i}:1": Server(f"http://s{i}:1") for i in range(count)}
        self.listed = list(self.servers)
        self.list_error = ""
        self.dynamic = True
        self.live: set[tuple[WeightLoad, ...]] = {()}
        """Everything that was ever live on a server."""
        self.hand_outs: list[tuple[Server, str | None, float, bool]] = []
        """Server, group, time, and whether the server held what the pool said or, already, what it desired."""
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

    async def ask(self, group: str | None = None, **sampling: Any) -> Generation:
        return await self.pool.generate([1, 2], Sampling(**sampling), group=group)

    def states(self) -> list[str]:
        return [row.state for row in self.pool.status()]


class FakeEngine:
    """The client side. Its request limit is 120 s."""

    def __init__(self, world: World, server: Server) -> None:
        self.world, self.server = world, server

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if not self.server.up:
            raise EngineError(f"{self.server.url} refused the connection")
        if self.server.black_hole:
            await asyncio.sleep(120)
            raise EngineError(f"{self.server.url} did not answer in 120 s")

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        server, pool = self.server, self.world.pool
        held = pool._target_weights.version is None or any(
            (server.version, server.loads) == (weights.version, weights.loads)
            for weights in (pool._live_weights, pool._target_weights)
        )
        number = len(self.world.hand_outs)
        self.world.hand_outs.append((server, group, now(), held))
        server.asked.append((group, now()))
        life, first = server.life, server.version
        server.running += 1
        try:
            await self._reach()
            await asyncio.sleep(server.answer_seconds / 2)
            await self._reach()
            if server.error is not None:
                raise server.error
            await asyncio.sleep(server.answer_seconds / 2)
            if server.life != life:
                raise EngineError(f"{server.url} broke the connection")
        except asyncio.CancelledError:
            server.cancelled += 1
            raise
        finally:
            server.running -= 1
        return Generation((number, 0), (-0.1, -0.2), (first, server.version), "stop", 1.0)

    async def _load(self, load: WeightLoad) -> None:
        await self._reach()
        life = self.server.life
        await asyncio.sleep(self.server.load_seconds)
        await self._reach()
        if self.server.life != life:
            raise EngineError(f"{self.server.url} broke the connection")
        if self.server.loads_fail:
            raise EngineError(f"{self.server.url} has no folder {load.source.path}", retryable=False)
        below = tuple(each for each in self.server.loads if not each.is_adapter)
        self.server.loads = (*below, load) if load.is_adapter else (load,)
        self.server.version = load.version
        self.world.live.add(self.server.loads)

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        await self._load(WeightLoad(source, version))

    async def version(self) -> int:
        await self._reach()
        return self.server.version

    async def health(self) -> Health:
        self.server.health_calls.append(now())
        await self._reach()
        server = self.server
        said = Health(not server.not_ready, server.version, server.running, 0, server.not_ready)
        await asyncio.sleep(server.health_seconds)
        return said

    async def close(self) -> None:
        self.server.closed += 1


def play(scene: Callable[[World], Coroutine[Any, Any, None]], count: int = 3, **settings: Any) -> World:
    """Run a scene in a world; the pool is closed afterwards and must have let go of everything."""

    async def whole() -> World:
        world = World(count, **settings)
        try:
            await scene(world)
        finally:
            await world.pool.close()
        for server in world.servers.values():
            assert server.running == 0
            assert server.connections == server.closed
        return world

    return virtually(whole())
