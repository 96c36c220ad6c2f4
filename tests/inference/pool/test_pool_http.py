"""Pools of real servers on sockets, which are killed and restart with their initial weights."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from keel.config import PoolSettings, Sampling
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.pool.pool import Pool
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.inference.server.app import build_app
from tests.support.engine_fakes import ANYWHERE, TOKENIZER, FakeEngine, serving

QUICK = {"poll_interval": 0.2, "health_timeout": 2.0, "ready_timeout": 20.0, "load_timeout": 5.0}


class Box:
    """A port on which a server can be started and killed; each start has the state of a fresh process."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = FakeEngine()
        self._running: ExitStack | None = None

    def start(self) -> None:
        self.engine = FakeEngine()
        self.engine.live = 0
        self._running = ExitStack()
        app = build_app(self.engine, TOKENIZER, model="tiny", api_key="key", allowed_folders=ANYWHERE)
        self._running.enter_context(serving(app, port=self.port, timeout_graceful_shutdown=0))

    def kill(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


@contextmanager
def boxes(count: int) -> Iterator[list[Box]]:
    """Run some servers."""
    machines = [Box() for _ in range(count)]
    try:
        for box in machines:
            box.start()
        yield machines
    finally:
        for box in machines:
            box.kill()


@asynccontextmanager
async def pool_of(**settings: object) -> AsyncIterator[Pool]:
    pool_settings = PoolSettings.model_validate({**QUICK, **settings})
    pool = Pool(pool_settings, lambda url: HttpEngine(url, api_key="key"))
    try:
        yield pool
    finally:
        await pool.close()


def generate(pool: Pool, group: str | None = None) -> "asyncio.Task[Generation]":
    return asyncio.create_task(pool.generate([5, 6, 7], Sampling(max_tokens=8), group=group))


async def until_all_are(pool: Pool, state: str) -> None:
    async with asyncio.timeout(20):
        while [row.state for row in pool.status()] != [state] * len(pool.status()):
            await asyncio.sleep(0.02)


@pytest.mark.faults
def test_killed_servers_that_restart_at_version_0_are_synced_before_use(tmp_path: Path) -> None:
    async def scene(machines: list[Box]) -> None:
        async with pool_of(urls=[box.url for box in machines]) as pool:
            await pool.load_weights(WeightSource.folder(str(tmp_path)), 5)
            await until_all_are(pool, "ready")
            assert [box.engine.live for box in machines] == [5, 5, 5]
            for box in machines:
                await asyncio.to_thread(box.kill)
                generations = await asyncio.gather(*(generate(pool, f"g{i}") for i in range(12)))
                assert {generation.versions for generation in generations} == {(5, 5, 5, 5)}
                box.start()
                generations = await asyncio.gather(*(generate(pool, f"g{i}") for i in range(12)))
                assert {generation.versions for generation in generations} == {(5, 5, 5, 5)}
                await until_all_are(pool, "ready")
                assert box.engine.loaded == [("weights", str(tmp_path), 5)]
            assert await pool.version() == 5

    with boxes(3) as machines:
        asyncio.run(scene(machines))


def test_a_quick_restart_is_detected_by_the_versions_of_the_tokens(tmp_path: Path) -> None:
    async def scene(machines: list[Box]) -> None:
        # no probe between the kill and the request
        async with pool_of(urls=[box.url for box in machines], poll_interval=60.0) as pool:
            await pool.load_weights(WeightSource.adapter(str(tmp_path)), 5)
            await generate(pool, "g")
            box = next(box for box in machines if box.engine.calls)
            await asyncio.to_thread(box.kill)
            box.start()
            generation = await generate(pool, "g")
            assert set(generation.versions) == {5}
            await until_all_are(pool, "ready")
            assert box.engine.live == 5

    with boxes(2) as machines:
        asyncio.run(scene(machines))


@pytest.mark.faults
def test_requests_in_flight_on_a_killed_server_are_retried_on_another() -> None:
    async def scene(machines: list[Box]) -> None:
        async with pool_of(urls=[box.url for box in machines]) as pool:
            await pool.wait_until_probed()
            for box in machines:
                box.engine.delay = 1.0
            requests = [generate(pool) for _ in range(8)]
            await asyncio.sleep(0.4)
            assert [len(box.engine.calls) for box in machines] == [4, 4]
            await asyncio.to_thread(machines[0].kill)
            generations = await asyncio.gather(*requests)
            assert len(generations) == 8
            assert len(machines[1].engine.calls) == 8

    with boxes(2) as machines:
        asyncio.run(scene(machines))


def test_a_cancelled_request_is_cancelled_on_the_server() -> None:
    async def scene(machines: list[Box]) -> None:
        async with pool_of(urls=[machines[0].url]) as pool:
            await pool.wait_until_probed()
            machines[0].engine.delay = 30.0
            request = generate(pool)
            async with asyncio.timeout(10):
                while not machines[0].engine.running:
                    await asyncio.sleep(0.01)
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
                while not machines[0].engine.cancelled:
                    await asyncio.sleep(0.01)

    with boxes(1) as machines:
        asyncio.run(scene(machines))


def test_a_watched_file_adds_and_removes_servers(tmp_path: Path) -> None:
    file = tmp_path / "members"

    def write(*members: Box) -> None:
        file.with_suffix(".new").write_text("".join(f"{box.url}\n" for box in members))
        file.with_suffix(".new").rename(file)

    async def scene(first: Box, second: Box) -> None:
        write(first)
        async with pool_of(file=str(file)) as pool:
            await pool.load_weights(WeightSource.folder(str(tmp_path)), 2)
            first.engine.delay = 1.0
            slow = generate(pool)
            await asyncio.sleep(0.1)
            write(second)
            async with asyncio.timeout(10):
                while second.url not in [row.url for row in pool.status() if row.state == "ready"]:
                    await asyncio.sleep(0.02)
            assert second.engine.live == 2
            assert (await generate(pool)).versions == (2, 2, 2, 2)
            assert len(second.engine.calls) == 1
            file.write_text("not a url\n")
            await slow
            async with asyncio.timeout(10):
                while not pool.discovery_error:
                    await asyncio.sleep(0.02)
            assert '"not a url" is not a URL' in pool.discovery_error
            assert (await generate(pool)).versions == (2, 2, 2, 2)
            assert len(first.engine.calls) == 1

    with boxes(2) as (first, second):
        asyncio.run(scene(first, second))


@pytest.mark.faults
def test_errors_of_servers_are_listed_if_none_is_ready(tmp_path: Path) -> None:
    async def scene(machines: list[Box]) -> None:
        await asyncio.to_thread(machines[0].kill)
        machines[1].engine.closed = True
        async with pool_of(urls=[box.url for box in machines], ready_timeout=1.0) as pool:
            with pytest.raises(EngineError) as error:
                await generate(pool)
            assert [line.split(",")[0] for line in str(error.value).splitlines()[1:]] == [
                f"{box.url}: unhealthy" for box in machines
            ]
            assert "cannot be reached" in str(error.value)
            with pytest.raises(EngineError, match="no member loaded version 1"):
                await pool.load_weights(WeightSource.folder(str(tmp_path)), 1)
            assert await pool.version() == 0

    with boxes(2) as machines:
        asyncio.run(scene(machines))


def test_loading_a_missing_folder_changes_nothing(tmp_path: Path) -> None:
    async def scene(machines: list[Box]) -> None:
        async with pool_of(urls=[box.url for box in machines]) as pool:
            await pool.load_weights(WeightSource.folder(str(tmp_path)), 1)
            with pytest.raises(EngineError, match=r"(?s)no member loaded version 2 .* is not a folder"):
                await pool.load_weights(WeightSource.folder(str(tmp_path / "missing")), 2)
            assert await pool.version() == 1
            assert set((await generate(pool)).versions) == {1}

    with boxes(2) as machines:
        asyncio.run(scene(machines))
    assert threading.active_count() < 20
