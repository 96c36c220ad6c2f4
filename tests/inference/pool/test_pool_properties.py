"""Pools through generated histories: members fail, return with old weights, come and go, while requests are running.

Each history is a list of events in virtual time. What is checked is what the pool promises, against what the servers
really held, which the pool itself can only ask.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keel.inference.protocol import EngineError, Generation, WeightSource
from tests.support.pool_fakes import Server, World, now, play

SERVERS = 4
FORGIVEN = 400.0
"""Seconds after its last trouble in which a member may still be away: back-off, looks, a load."""

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
    """One history being played."""

    world: World
    asked: list["asyncio.Task[Generation]"] = field(default_factory=list)
    updates: list["asyncio.Task[None]"] = field(default_factory=list)
    versions: int = 0
    refused: set[int] = field(default_factory=set)
    """Versions of updates that failed."""

    def trouble(self, server: Server) -> Server:
        server.troubles.append(now())
        return server

    def happen(self, kind: str, what: Any) -> None:
        world = self.world
        if kind == "ask":
            self.asked.append(asyncio.create_task(world.ask(what)))
        elif kind == "many":
            self.asked.extend(asyncio.create_task(world.ask(f"many{i % 2}" if i < 4 else None)) for i in range(what))
        elif kind == "load":
            self.versions += 1
            self.updates.append(asyncio.create_task(self.update(what, self.versions)))
        elif kind == "members":
            for index in range(SERVERS):
                if (world[index].url in world.listed) != (index in what):
                    self.trouble(world[index])
            world.listed = [world[index].url for index in sorted(what)]
        elif kind == "all_loads_fail":
            for index in range(SERVERS):
                self.trouble(world[index]).loads_fail = what
        elif kind == "no_list":
            world.list_error = "no list" if what else ""
        elif kind == "cancel" and self.asked:
            self.asked[-1 - what % len(self.asked)].cancel()
        elif kind != "cancel":
            self.befall(self.trouble(world[what]), kind)

    def befall(self, server: Server, kind: str) -> None:
        if kind == "stop":
            server.stop()
        elif kind == "restart":
            server.restart()
        elif kind == "hang":
            server.black_hole = True
        elif kind == "loads_fail":
            server.loads_fail = True
        elif kind == "slow":
            server.load_seconds = 45.0
        elif kind == "errors":
            server.error = EngineError("overloaded")
        elif kind == "bad_requests":
            server.error = EngineError("the prompt is too long", retryable=False)
        else:
            server.up, server.black_hole, server.loads_fail = True, False, False
            server.load_seconds, server.error = 0.5, None

    async def update(self, kind: str, version: int) -> None:
        pool = self.world.pool
        try:
            source = WeightSource.folder if kind == "weights" else WeightSource.adapter
            await pool.load_weights(source(f"/{version}"), version)
        except EngineError:
            self.refused.add(version)
        else:
            assert any(version == loads[-1].version for loads in self.world.live if loads)

    async def watch(self) -> None:
        """The version is at all times one that was live on a server, and the one of every member that is ready."""
        pool = self.world.pool
        while True:
            version = await pool.version()
            assert version not in self.refused
            assert pool._live_weights.loads in self.world.live
            assert version == (pool._live_weights.loads[-1].version if pool._live_weights.loads else 0)
            for row in pool.status():
                assert row.state != "ready" or row.retiring or row.version == version == pool._target_weights.version
            await asyncio.sleep(0.5)


def check_answers(history: History) -> None:
    """Every request has ended, and each answer is by a member that held the desired weights when it was handed out."""
    world = history.world
    for task in history.asked:
        assert task.done()
        if task.cancelled():
            continue
        if (error := task.exception()) is not None:
            assert isinstance(error, EngineError), error
        else:
            *_, held = world.hand_outs[task.result().token_ids[0]]
            assert held


def check_groups(world: World) -> None:
    """A group changes its member only when that has been in trouble."""
    last: dict[str, tuple[Server, float]] = {}
    for server, group, time, _ in world.hand_outs:
        if group is None:
            continue
        before, since = last.get(group, (server, time))
        troubled = any(since - FORGIVEN <= trouble <= time for trouble in before.troubles)
        assert before is server or troubled, (group, before.url, server.url, time)
        last[group] = server, time


@settings(max_examples=60)
@given(histories, st.sampled_from(["weights", "adapter", None]))
def test_whatever_happens_the_promises_hold(history: list[tuple[float, tuple[str, Any]]], loaded: str | None) -> None:
    async def scene(world: World) -> None:
        played = History(world)
        watching = asyncio.create_task(played.watch())
        if loaded:
            played.happen("load", loaded)
            await asyncio.sleep(2)
        for pause, (kind, what) in history:
            if pause:
                await asyncio.sleep(pause)
            played.happen(kind, what)
        # three attempts, each after waiting for a member and until the engine's own limit
        await asyncio.wait([*played.asked, asyncio.create_task(asyncio.sleep(0))], timeout=3 * (60 + 120) + 60)
        check_answers(played)
        check_groups(world)
        await asyncio.gather(*played.updates)
        await recover(world, played.versions + 1)
        assert not watching.done(), watching.result()
        watching.cancel()

    play(scene, SERVERS, ready_timeout=60.0, load_timeout=60.0)


async def recover(world: World, version: int) -> None:
    """When all trouble is over, everybody is a member, everybody is ready, and everybody holds the same."""
    world.listed, world.list_error = list(world.servers), ""
    for server in world.servers.values():
        server.restart()
        server.error, server.loads_fail, server.load_seconds = None, False, 0.5
    await asyncio.sleep(200)
    await world.pool.load_weights(WeightSource.folder("/last"), version)
    await asyncio.sleep(100)
    assert world.states() == ["ready"] * SERVERS
    assert {server.version for server in world.servers.values()} == {version}
    before = len(world.hand_outs)
    answers = await asyncio.gather(*(world.ask() for _ in range(SERVERS)))
    assert {answer.versions for answer in answers} == {(version, version)}
    assert len(world.hand_outs) == before + SERVERS


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.1, 0.5, 3.0, 20.0, 60.0]), min_size=SERVERS, max_size=SERVERS),
    st.lists(st.sampled_from([0.0, 0.2, 1.0, 5.0, 30.0]), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.7, 4.0]), st.sampled_from([None, "a", "b"])), max_size=30),
)
def test_new_weights_never_stop_the_sampling_and_an_answer_is_never_older_than_the_version_seen_before_it(
    loads: list[float], updates: list[float], asks: list[tuple[float, str | None]]
) -> None:
    """Whatever the members take to load: a request waits at most for a member of its own to catch up, one interval."""

    async def scene(world: World) -> None:
        for server, seconds in zip(world.servers.values(), loads, strict=True):
            server.load_seconds = seconds

        async def update() -> None:
            for version, pause in enumerate(updates, 1):
                await asyncio.sleep(pause)
                await world.pool.load_weights(WeightSource.folder(f"/{version}"), version)

        async def ask(group: str | None) -> None:
            seen, began = await world.pool.version(), now()
            answer = await world.ask(group)
            assert now() - began < world.settings.poll_interval + 1.1
            assert min(answer.versions) >= seen

        await world.pool.wait_until_probed()
        updating = asyncio.create_task(update())
        asking = []
        for pause, group in asks:
            await asyncio.sleep(pause)
            asking.append(asyncio.create_task(ask(group)))
        await asyncio.gather(updating, *asking)
        assert await world.pool.version() == len(updates)
        assert all(held for *_, held in world.hand_outs)

    play(scene, SERVERS, poll_interval=2.0, load_timeout=100.0)
