"""Property tests of pools: members fail, return with old weights, come and go while requests are in flight.

Each history is a list of events in virtual time. The pool's guarantees are checked against the true state of the
servers, which the pool itself sees only through requests.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.inference.protocol import EngineError, Generation, WeightSource
from tests.support.pool_fakes import PoolHarness, Server, now, run_scenario

SERVERS = 4
RECOVERY_SECONDS = 400.0
"""Seconds after its last trouble in which a member may still be unavailable: back-off, probes, a load."""

servers = st.integers(0, SERVERS - 1)
events = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([None, "a", "b", "c", "d"])),
    st.tuples(st.just("many"), st.integers(2, 8)),
    st.tuples(st.just("many"), st.integers(2, 8)),
    st.tuples(st.just("load"), st.sampled_from(["weights", "adapter"])),
    st.tuples(st.just("stop"), servers),
    st.tuples(st.just("restart"), servers),
    st.tuples(st.just("restart"), servers),
    st.tuples(st.just("hang"), servers),
    st.tuples(st.just("heal"), servers),
    st.tuples(st.just("loads_fail"), servers),
    st.tuples(st.just("all_loads_fail"), st.booleans()),
    st.tuples(st.just("slow"), servers),
    st.tuples(st.just("errors"), servers),
    st.tuples(st.just("bad_requests"), servers),
    st.tuples(st.just("members"), st.sets(servers)),
    st.tuples(st.just("no_list"), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
)
pauses = st.sampled_from([0.0, 0.005, 0.3, 1.0, 2.0, 4.0, 25.0, 90.0])
histories = st.lists(st.tuples(pauses, events), min_size=8, max_size=30)


@dataclass
class History:
    """Applies the events of one history."""

    harness: PoolHarness
    requests: list["asyncio.Task[Generation]"] = field(default_factory=list)
    updates: list["asyncio.Task[None]"] = field(default_factory=list)
    versions: int = 0
    failed_versions: set[int] = field(default_factory=set)
    """Versions of updates that failed."""

    def note_trouble(self, server: Server) -> Server:
        server.troubles.append(now())
        return server

    def apply(self, kind: str, value: Any) -> None:
        harness = self.harness
        if kind == "ask":
            self.requests.append(asyncio.create_task(harness.generate(value)))
        elif kind == "many":
            self.requests.extend(
                asyncio.create_task(harness.generate(f"many{i % 2}" if i < 4 else None)) for i in range(value)
            )
        elif kind == "load":
            self.versions += 1
            self.updates.append(asyncio.create_task(self.update(value, self.versions)))
        elif kind == "members":
            for index in range(SERVERS):
                if (harness[index].url in harness.listed) != (index in value):
                    self.note_trouble(harness[index])
            harness.listed = [harness[index].url for index in sorted(value)]
        elif kind == "all_loads_fail":
            for index in range(SERVERS):
                self.note_trouble(harness[index]).loads_fail = value
        elif kind == "no_list":
            harness.list_error = "no list" if value else ""
        elif kind == "cancel" and self.requests:
            self.requests[-1 - value % len(self.requests)].cancel()
        elif kind != "cancel":
            self.apply_to_server(self.note_trouble(harness[value]), kind)

    def apply_to_server(self, server: Server, kind: str) -> None:
        if kind == "stop":
            server.stop()
        elif kind == "restart":
            server.restart()
        elif kind == "hang":
            server.hangs = True
        elif kind == "loads_fail":
            server.loads_fail = True
        elif kind == "slow":
            server.load_seconds = 45.0
        elif kind == "errors":
            server.error = EngineError("overloaded")
        elif kind == "bad_requests":
            server.error = EngineError("the prompt is too long", retryable=False)
        else:
            server.up, server.hangs, server.loads_fail = True, False, False
            server.load_seconds, server.error = 0.5, None

    async def update(self, kind: str, version: int) -> None:
        pool = self.harness.pool
        try:
            source = WeightSource.folder if kind == "weights" else WeightSource.adapter
            await pool.load_weights(source(f"/{version}"), version)
        except EngineError:
            self.failed_versions.add(version)
        else:
            assert any(version == loads[-1].version for loads in self.harness.live if loads)

    async def watch(self) -> None:
        """Check repeatedly that the version was live on a server and is that of every ready member."""
        pool = self.harness.pool
        while True:
            version = await pool.version()
            assert version not in self.failed_versions
            assert pool._live_weights.loads in self.harness.live
            assert version == (pool._live_weights.loads[-1].version if pool._live_weights.loads else 0)
            for row in pool.status():
                assert row.state != "ready" or row.retiring or row.version == version == pool._target_weights.version
            await asyncio.sleep(0.5)


def check_requests(history: History) -> None:
    """Every request has ended, and each completion is from a member that held the right weights when it was sent."""
    harness = history.harness
    for task in history.requests:
        assert task.done()
        if task.cancelled():
            continue
        if (error := task.exception()) is not None:
            assert isinstance(error, EngineError), error
        else:
            *_, held = harness.sent_requests[task.result().token_ids[0]]
            assert held


def check_groups(harness: PoolHarness) -> None:
    """A group changes its member only if that member had trouble."""
    last: dict[str, tuple[Server, float]] = {}
    for server, group, time, _ in harness.sent_requests:
        if group is None:
            continue
        previous, since = last.get(group, (server, time))
        troubled = any(since - RECOVERY_SECONDS <= trouble <= time for trouble in previous.troubles)
        assert previous is server or troubled, (group, previous.url, server.url, time)
        last[group] = server, time


@pytest.mark.fuzz
@settings(max_examples=60)
@given(histories, st.sampled_from(["weights", "adapter", None]))
def test_the_guarantees_hold_for_any_history(history: list[tuple[float, tuple[str, Any]]], loaded: str | None) -> None:
    async def scenario(harness: PoolHarness) -> None:
        played = History(harness)
        watcher = asyncio.create_task(played.watch())
        if loaded:
            played.apply("load", loaded)
            await asyncio.sleep(2)
        for pause, (kind, value) in history:
            if pause:
                await asyncio.sleep(pause)
            played.apply(kind, value)
        # three attempts, each with the wait for a member and the request timeout
        await asyncio.wait([*played.requests, asyncio.create_task(asyncio.sleep(0))], timeout=3 * (60 + 120) + 60)
        check_requests(played)
        check_groups(harness)
        await asyncio.gather(*played.updates)
        await recover(harness, played.versions + 1)
        assert not watcher.done(), watcher.result()
        watcher.cancel()

    run_scenario(scenario, SERVERS, ready_timeout=60.0, load_timeout=60.0)


async def recover(harness: PoolHarness, version: int) -> None:
    """Check that after all trouble ends every server is a ready member with the same weights."""
    harness.listed, harness.list_error = list(harness.servers), ""
    for server in harness.servers.values():
        server.restart()
        server.error, server.loads_fail, server.load_seconds = None, False, 0.5
    await asyncio.sleep(200)
    await harness.pool.load_weights(WeightSource.folder("/last"), version)
    await asyncio.sleep(100)
    assert harness.states() == ["ready"] * SERVERS
    assert {server.version for server in harness.servers.values()} == {version}
    sent = len(harness.sent_requests)
    generations = await asyncio.gather(*(harness.generate() for _ in range(SERVERS)))
    assert {generation.versions for generation in generations} == {(version, version)}
    assert len(harness.sent_requests) == sent + SERVERS


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.1, 0.5, 3.0, 20.0, 60.0]), min_size=SERVERS, max_size=SERVERS),
    st.lists(st.sampled_from([0.0, 0.2, 1.0, 5.0, 30.0]), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.7, 4.0]), st.sampled_from([None, "a", "b"])), max_size=30),
)
def test_updates_never_stop_sampling_and_completions_are_never_older_than_the_version_seen_before(
    loads: list[float], updates: list[float], asks: list[tuple[float, str | None]]
) -> None:
    """However long loads take, a request waits at most one poll interval for its member to catch up."""

    async def scenario(harness: PoolHarness) -> None:
        for server, seconds in zip(harness.servers.values(), loads, strict=True):
            server.load_seconds = seconds

        async def update() -> None:
            for version, pause in enumerate(updates, 1):
                await asyncio.sleep(pause)
                await harness.pool.load_weights(WeightSource.folder(f"/{version}"), version)

        async def request(group: str | None) -> None:
            seen, start = await harness.pool.version(), now()
            generation = await harness.generate(group)
            assert now() - start < harness.settings.poll_interval + 1.1
            assert min(generation.versions) >= seen

        await harness.pool.wait_until_probed()
        update_task = asyncio.create_task(update())
        requests = []
        for pause, group in asks:
            await asyncio.sleep(pause)
            requests.append(asyncio.create_task(request(group)))
        await asyncio.gather(update_task, *requests)
        assert await harness.pool.version() == len(updates)
        assert all(held for *_, held in harness.sent_requests)

    run_scenario(scenario, SERVERS, poll_interval=2.0, load_timeout=100.0)
