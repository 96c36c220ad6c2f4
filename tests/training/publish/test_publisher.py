"""Weights on their way to the engines: when training may go on, what is seen meanwhile, and what a failure does."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from keel.common.manifest import verify_manifest
from keel.config import PoolSettings, PublishSettings, Sampling, load_settings
from keel.errors import ConfigError
from keel.inference.local.local_engine import LocalEngine
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.pool.pool import Pool
from keel.inference.protocol import Engine, EngineError, WeightSource
from keel.inference.server.app import build_app
from keel.training import Trainer
from keel.training.model.model import Model
from keel.training.publish import (
    AdapterTransport,
    FolderTransport,
    InMemoryTransport,
    Publisher,
    WeightTransport,
)
from tests.support.engine_fakes import ANYWHERE, TOKENIZER, FakeEngine, serving
from tests.support.policy_strategies import LORA, tiny
from tests.support.tiny_runs import train


class Told(WeightTransport):
    """A way that takes and gives when it is told to, and writes down what it did."""

    def __init__(self) -> None:
        self.may_take, self.may_give = threading.Event(), asyncio.Event()
        self.did: list[str] = []
        self.error: Exception | None = None

    @classmethod
    def from_settings(cls, model: Model, settings: PublishSettings, folder: Path) -> Self:
        raise NotImplementedError

    def snapshot(self, version: int) -> None:
        assert self.may_take.wait(10)
        self.did.append(f"took {version}")

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        await self.may_give.wait()
        if self.error is not None:
            raise self.error
        await engine.load_weights(WeightSource("in_memory"), version, drain=drain)
        self.did.append(f"gave {version}")


def publishing(scene: Any, **options: Any) -> None:
    async def whole() -> None:
        way, engine = Told(), FakeEngine()
        publisher = Publisher(engine, way, **options)
        try:
            await asyncio.wait_for(scene(publisher, way, engine), 20)
        finally:
            way.may_take.set()
            await publisher.close()

    asyncio.run(whole())


async def soon(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """A task that has had every chance to end."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0.05)
    return task


# -- the publisher ----------------------------------------------------------------------------------------------------


def test_training_waits_until_its_weights_were_read_and_not_until_they_are_live() -> None:
    async def scene(publisher: Publisher, way: Told, engine: FakeEngine) -> None:
        await publisher.publish(5)
        assert publisher.snapshotting
        training = await soon(publisher.snapshot_done())
        assert not training.done()
        way.may_take.set()
        await training
        assert not publisher.snapshotting
        live = await soon(publisher.wait_live())
        assert not live.done() and engine.live == 3  # what the engine had before
        way.may_give.set()
        await live
        assert engine.live == 5

    publishing(scene, overlap=True)


def test_publications_are_one_at_a_time_and_in_order() -> None:
    async def scene(publisher: Publisher, way: Told, engine: FakeEngine) -> None:
        way.may_take.set()
        await publisher.publish(1)
        second = await soon(publisher.publish(2))
        assert not second.done() and way.did == ["took 1"]
        way.may_give.set()
        await second
        await publisher.wait_live()
        assert way.did == ["took 1", "gave 1", "took 2", "gave 2"]

    publishing(scene, overlap=True)


def test_without_overlap_nothing_is_sampled_by_older_weights_after_publish() -> None:
    async def scene(publisher: Publisher, way: Told, engine: FakeEngine) -> None:
        way.may_take.set()
        publish = await soon(publisher.publish(1))
        assert not publish.done()
        way.may_give.set()
        await publish
        assert engine.live == 1

    publishing(scene, overlap=False)


def test_a_failure_ends_what_waits_beside_it_and_is_raised_to_who_waits_later() -> None:
    async def scene(publisher: Publisher, way: Told, engine: FakeEngine) -> None:
        way.may_take.set()
        way.error = EngineError("no member loaded it")
        await publisher.publish(1)
        batch = asyncio.get_running_loop().create_future()
        waiting = await soon(publisher.run_alongside(batch))
        assert not waiting.done()
        way.may_give.set()
        with pytest.raises(EngineError, match="no member loaded it"):
            await waiting
        assert batch.cancelled()
        for later in (publisher.wait_live(), publisher.publish(2)):
            with pytest.raises(EngineError, match="no member loaded it"):
                await later
        assert engine.live == 3

    publishing(scene, overlap=True)


def test_a_batch_that_was_cut_is_not_lost_to_a_failure() -> None:
    async def scene(publisher: Publisher, way: Told, engine: FakeEngine) -> None:
        way.may_take.set()
        way.error = EngineError("no member loaded it")
        way.may_give.set()
        await publisher.publish(1)

        async def cut() -> str:
            return "batch"

        assert await publisher.run_alongside(cut()) == "batch"
        with pytest.raises(EngineError):
            await publisher.wait_live()

    publishing(scene, overlap=True)


def test_who_stops_waiting_does_not_end_the_publication() -> None:
    async def scene(publisher: Publisher, way: Told, engine: FakeEngine) -> None:
        way.may_take.set()
        await publisher.publish(1)
        for waiting in [
            await soon(publisher.wait_live()),
            await soon(publisher.snapshot_done()),
            await soon(publisher.publish(2)),
        ]:
            waiting.cancel()
        await asyncio.sleep(0.01)
        way.may_give.set()
        await publisher.wait_live()
        assert engine.live == 1

    publishing(scene, overlap=True)


def test_a_drained_publication_says_so_to_the_engine() -> None:
    class Noting(FakeEngine):
        drained: bool | None = None

        async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
            self.drained = drain

    async def scene() -> list[bool | None]:
        found = []
        for drain in (True, False):
            way, engine = Told(), Noting()
            way.may_take.set()
            way.may_give.set()
            await Publisher(engine, way, drain=drain).publish(1)
            found.append(engine.drained)
        return found

    assert asyncio.run(scene()) == [True, False]


# -- the ways ---------------------------------------------------------------------------------------------------------


def test_a_copy_is_of_the_moment_it_was_taken_and_is_not_kept() -> None:
    model, own = tiny(seed=5), tiny(seed=6)
    taken = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}

    async def scene() -> None:
        way = InMemoryTransport(model)
        engine = LocalEngine(own.network, own.tokenizer)
        try:
            way.snapshot(1)
            with torch.no_grad():
                for weight in model.network.parameters():
                    weight.zero_()  # the next step of training
            await way.send(engine, 1, drain=False)
            assert await engine.version() == 1
            assert not way._snapshot
        finally:
            await engine.close()

    asyncio.run(scene())
    assert all(torch.equal(taken[name], tensor) for name, tensor in own.network.state_dict().items())


@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_is_sealed_and_the_last_two_stay(lora: bool, tmp_path: Path) -> None:
    way = AdapterTransport(tiny(lora=LORA), tmp_path) if lora else FolderTransport(tiny(), tmp_path)
    engine = FakeEngine()
    left = tmp_path / "version_4"  # by an earlier life of the run: half of it, and not what is trained now
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"old")

    async def scene() -> None:
        for version in (2, 3, 4):
            way.snapshot(version)
            await way.send(engine, version, drain=False)
            verify_manifest(way.version_path(version))

    asyncio.run(scene())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_4"]
    kind = "adapter" if lora else "weights"
    assert engine.loaded == [(kind, str(way.version_path(version).resolve()), version) for version in (2, 3, 4)]
    assert (left / ("adapter_model.safetensors" if lora else "model.safetensors")).stat().st_size > 1000


# -- beside the rollouts ----------------------------------------------------------------------------------------------


class Slow(LocalEngine):
    """Reads weights when it is let, as a large model on a shared disk does."""

    may_load: threading.Event

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        await asyncio.to_thread(self.may_load.wait, 60)
        await super().load_weights(source, version, drain=drain)


@pytest.mark.parametrize("slow", [1, 2])
def test_rollouts_finish_while_weights_are_loaded_whoever_is_slow(slow: int, tmp_path: Path) -> None:
    """Two real servers of which one or both do not get on with loading: answers come all the while."""
    trained, may_load = tiny(seed=7), threading.Event()

    async def scene(urls: list[str]) -> None:
        pool = Pool(PoolSettings(urls=urls, poll_interval=0.2, ready_timeout=30.0), HttpEngine)
        publisher = Publisher(pool, FolderTransport(trained, tmp_path), overlap=True)
        await pool.wait_until_probed()
        ended: list[tuple[int, ...]] = []
        over = asyncio.Event()

        async def roll(number: int) -> None:
            while not over.is_set():
                answer = await pool.generate([*b"Hello", number], Sampling(max_tokens=6), group=str(number))
                ended.append(answer.versions)

        async def come(count: int, version: int) -> None:
            """So many more answers, all sampled by this version."""
            here = len(ended)
            while sum(set(versions) == {version} for versions in ended[here:]) < count:
                await asyncio.sleep(0.01)

        rolling = [asyncio.create_task(roll(number)) for number in range(4)]
        async with asyncio.timeout(60):
            await publisher.publish(1)
            await publisher.snapshot_done()
            live = asyncio.create_task(publisher.wait_live())
            if slow == 2:
                await come(20, version=0)
                assert not live.done() and await pool.version() == 0
            else:
                # the other one is enough, and the one that waits is not used until it has caught up
                await come(20, version=1)
                assert sorted(row.version or 0 for row in pool.status()) == [0, 1]
            may_load.set()
            await live
            await come(20, version=1)
            while {row.state for row in pool.status()} != {"ready"}:
                await asyncio.sleep(0.01)
            assert {row.version for row in pool.status()} == {1}
        over.set()
        await asyncio.gather(*rolling)
        await publisher.close()
        await pool.close()
        assert all(tuple(sorted(versions)) == versions for versions in ended)

    with ExitStack() as stack:
        urls = []
        for number in range(2):
            model = tiny(seed=1)
            engine = Slow(model.network, model.tokenizer)
            engine.may_load = may_load if number < slow else _always()
            urls.append(
                stack.enter_context(serving(build_app(engine, TOKENIZER, model="tiny", allowed_folders=ANYWHERE)))
            )
        asyncio.run(scene(urls))


def test_a_run_trains_on_while_weights_travel_and_never_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real run and its ways, slowed down: giving lasts until the next update of the trainer has begun."""
    take, give, step = FolderTransport.snapshot, FolderTransport.send, Trainer.step
    reading, begun = threading.Event(), threading.Event()
    trained_on: list[int] = []

    def slow_take(way: FolderTransport, version: int) -> None:
        begun.clear()
        reading.set()
        time.sleep(0.2)
        take(way, version)
        reading.clear()

    async def slow_give(way: FolderTransport, engine: Engine, version: int, *, drain: bool) -> None:
        assert not reading.is_set()
        if version < 3 and await asyncio.to_thread(begun.wait, 20):
            trained_on.append(version)
        await give(way, engine, version, drain=drain)

    def watched_step(trainer: Trainer, *given: Any, **more: Any) -> Any:
        assert not reading.is_set(), "weights that are being read were trained"
        begun.set()
        return step(trainer, *given, **more)

    monkeypatch.setattr(FolderTransport, "snapshot", slow_take)
    monkeypatch.setattr(FolderTransport, "send", slow_give)
    monkeypatch.setattr(Trainer, "step", watched_step)
    watcher = train(tmp_path / "run", steps=4, publish__transport="folder", evaluation__when="never")
    assert list(watcher.steps) == [1, 2, 3, 4]
    assert trained_on, "the next step was trained before the weights of this one were live"


def _always() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--publish.transport=adapter"], 'publish.transport = "adapter" has no effect: without model.lora'),
        (
            ["--publish.transport=folder", "--model.lora.rank=4"],
            'publish.transport = "folder" has no effect: with model.lora',
        ),
        (["--publish.transport=broadcast"], 'publish.transport = "broadcast" has no effect with engine.kind = "local"'),
        (
            ["--publish.transport=broadcast", "--engine.kind=vllm"],
            'publish.transport = "broadcast" has no effect with vLLM',
        ),
        (["--publish.path=/tmp"], 'publish.path = "/tmp" has no effect: weights are copied in memory'),
        (["--publish.path=/tmp", "--publish.transport=broadcast", "--engine.kind=process"], "writes no files"),
        (
            ["--publish.bind_address=10.0.0.1"],
            'publish.bind_address = "10.0.0.1" has no effect: it belongs to transport = "broadcast"',
        ),
        (["--publish.in_flight=wait"], "publish.in_flight"),
    ],
)
def test_a_way_that_cannot_act_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, words)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--publish.transport=adapter", "--model.lora.rank=4"],
        ["--publish.transport=folder", "--publish.path=/shared"],
        ["--publish.transport=broadcast", "--engine.kind=process", "--publish.bind_address=10.0.0.1"],
        ["--publish.in_flight=drain"],
    ],
)
def test_a_way_that_can_act_is_taken(words: list[str]) -> None:
    assert load_settings(None, words).settings.publish
