"""Publishing: when training may continue, what engines see meanwhile, and what a failure does."""

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


class ControlledTransport(WeightTransport):
    """A transport that proceeds when the test allows it, and records what it did."""

    def __init__(self) -> None:
        self.may_snapshot, self.may_send = threading.Event(), asyncio.Event()
        self.calls: list[str] = []
        self.error: Exception | None = None

    @classmethod
    def from_settings(cls, model: Model, settings: PublishSettings, folder: Path) -> Self:
        raise NotImplementedError

    def snapshot(self, version: int) -> None:
        assert self.may_snapshot.wait(10)
        self.calls.append(f"snapshot {version}")

    async def send(self, engine: Engine, version: int, *, drain: bool) -> None:
        await self.may_send.wait()
        if self.error is not None:
            raise self.error
        await engine.load_weights(WeightSource("in_memory"), version, drain=drain)
        self.calls.append(f"sent {version}")


def run_scene(scene: Any, **options: Any) -> None:
    async def with_publisher() -> None:
        transport, engine = ControlledTransport(), FakeEngine()
        publisher = Publisher(engine, transport, **options)
        try:
            await asyncio.wait_for(scene(publisher, transport, engine), 20)
        finally:
            transport.may_snapshot.set()
            await publisher.close()

    asyncio.run(with_publisher())


async def start(coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Return a task that has had time to finish if it can."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0.05)
    return task


# -- the publisher ----------------------------------------------------------------------------------------------------


def test_training_waits_for_the_snapshot_and_not_until_the_weights_are_live() -> None:
    async def scene(publisher: Publisher, transport: ControlledTransport, engine: FakeEngine) -> None:
        await publisher.publish(5)
        assert publisher.snapshotting
        training = await start(publisher.snapshot_done())
        assert not training.done()
        transport.may_snapshot.set()
        await training
        assert not publisher.snapshotting
        live = await start(publisher.wait_live())
        assert not live.done() and engine.live == 3  # the version before
        transport.may_send.set()
        await live
        assert engine.live == 5

    run_scene(scene, overlap=True)


def test_publications_run_one_at_a_time_and_in_order() -> None:
    async def scene(publisher: Publisher, transport: ControlledTransport, engine: FakeEngine) -> None:
        transport.may_snapshot.set()
        await publisher.publish(1)
        second = await start(publisher.publish(2))
        assert not second.done() and transport.calls == ["snapshot 1"]
        transport.may_send.set()
        await second
        await publisher.wait_live()
        assert transport.calls == ["snapshot 1", "sent 1", "snapshot 2", "sent 2"]

    run_scene(scene, overlap=True)


def test_without_overlap_publish_returns_when_the_weights_are_live() -> None:
    async def scene(publisher: Publisher, transport: ControlledTransport, engine: FakeEngine) -> None:
        transport.may_snapshot.set()
        publish = await start(publisher.publish(1))
        assert not publish.done()
        transport.may_send.set()
        await publish
        assert engine.live == 1

    run_scene(scene, overlap=False)


def test_a_failure_cancels_the_wait_alongside_it_and_is_raised_by_later_waits() -> None:
    async def scene(publisher: Publisher, transport: ControlledTransport, engine: FakeEngine) -> None:
        transport.may_snapshot.set()
        transport.error = EngineError("no member loaded it")
        await publisher.publish(1)
        batch = asyncio.get_running_loop().create_future()
        waiting = await start(publisher.run_alongside(batch))
        assert not waiting.done()
        transport.may_send.set()
        with pytest.raises(EngineError, match="no member loaded it"):
            await waiting
        assert batch.cancelled()
        for later in (publisher.wait_live(), publisher.publish(2)):
            with pytest.raises(EngineError, match="no member loaded it"):
                await later
        assert engine.live == 3

    run_scene(scene, overlap=True)


def test_a_finished_batch_is_not_lost_to_a_failed_publication() -> None:
    async def scene(publisher: Publisher, transport: ControlledTransport, engine: FakeEngine) -> None:
        transport.may_snapshot.set()
        transport.error = EngineError("no member loaded it")
        transport.may_send.set()
        await publisher.publish(1)

        async def finished() -> str:
            return "batch"

        assert await publisher.run_alongside(finished()) == "batch"
        with pytest.raises(EngineError):
            await publisher.wait_live()

    run_scene(scene, overlap=True)


def test_cancelling_a_wait_does_not_cancel_the_publication() -> None:
    async def scene(publisher: Publisher, transport: ControlledTransport, engine: FakeEngine) -> None:
        transport.may_snapshot.set()
        await publisher.publish(1)
        for waiting in [
            await start(publisher.wait_live()),
            await start(publisher.snapshot_done()),
            await start(publisher.publish(2)),
        ]:
            waiting.cancel()
        await asyncio.sleep(0.01)
        transport.may_send.set()
        await publisher.wait_live()
        assert engine.live == 1

    run_scene(scene, overlap=True)


def test_the_engine_is_told_whether_to_drain() -> None:
    class RecordingEngine(FakeEngine):
        drained: bool | None = None

        async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
            self.drained = drain

    async def scene() -> list[bool | None]:
        drained = []
        for drain in (True, False):
            transport, engine = ControlledTransport(), RecordingEngine()
            transport.may_snapshot.set()
            transport.may_send.set()
            await Publisher(engine, transport, drain=drain).publish(1)
            drained.append(engine.drained)
        return drained

    assert asyncio.run(scene()) == [True, False]


# -- transports -------------------------------------------------------------------------------------------------------


def test_an_in_memory_snapshot_is_a_copy_and_is_released_after_sending() -> None:
    model, own = tiny(seed=5), tiny(seed=6)
    expected = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}

    async def scene() -> None:
        transport = InMemoryTransport(model)
        engine = LocalEngine(own.network, own.tokenizer)
        try:
            transport.snapshot(1)
            with torch.no_grad():
                for weight in model.network.parameters():
                    weight.zero_()  # as the next training step would
            await transport.send(engine, 1, drain=False)
            assert await engine.version() == 1
            assert not transport._snapshot
        finally:
            await engine.close()

    asyncio.run(scene())
    assert all(torch.equal(expected[name], tensor) for name, tensor in own.network.state_dict().items())


@pytest.mark.parametrize("lora", [False, True])
def test_folders_have_a_manifest_and_the_last_two_are_kept(lora: bool, tmp_path: Path) -> None:
    transport = AdapterTransport(tiny(lora=LORA), tmp_path) if lora else FolderTransport(tiny(), tmp_path)
    engine = FakeEngine()
    stale = tmp_path / "version_4"  # an incomplete folder from before the run was resumed
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"old")

    async def scene() -> None:
        for version in (2, 3, 4):
            transport.snapshot(version)
            await transport.send(engine, version, drain=False)
            verify_manifest(transport.version_path(version))

    asyncio.run(scene())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_4"]
    kind = "adapter" if lora else "weights"
    assert engine.loaded == [(kind, str(transport.version_path(version).resolve()), version) for version in (2, 3, 4)]
    assert (stale / ("adapter_model.safetensors" if lora else "model.safetensors")).stat().st_size > 1000


# -- during rollouts ---------------------------------------------------------------------------------------------------


class SlowEngine(LocalEngine):
    """Loads weights when the test allows it, like a large model on a shared disk."""

    may_load: threading.Event

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        await asyncio.to_thread(self.may_load.wait, 60)
        await super().load_weights(source, version, drain=drain)


@pytest.mark.parametrize("slow", [1, 2])
def test_rollouts_finish_while_one_or_both_servers_are_slow_to_load(slow: int, tmp_path: Path) -> None:
    """Two real servers, one or both of which are slow to load: completions continue meanwhile."""
    trained, may_load = tiny(seed=7), threading.Event()

    async def scene(urls: list[str]) -> None:
        pool = Pool(PoolSettings(urls=urls, poll_interval=0.2, ready_timeout=30.0), HttpEngine)
        publisher = Publisher(pool, FolderTransport(trained, tmp_path), overlap=True)
        await pool.wait_until_probed()
        finished: list[tuple[int, ...]] = []
        stop = asyncio.Event()

        async def generate(index: int) -> None:
            while not stop.is_set():
                generation = await pool.generate([*b"Hello", index], Sampling(max_tokens=6), group=str(index))
                finished.append(generation.versions)

        async def wait_for_completions(count: int, version: int) -> None:
            """Wait for that many more completions sampled entirely with this version."""
            seen = len(finished)
            while sum(set(versions) == {version} for versions in finished[seen:]) < count:
                await asyncio.sleep(0.01)

        generating = [asyncio.create_task(generate(index)) for index in range(4)]
        async with asyncio.timeout(60):
            await publisher.publish(1)
            await publisher.snapshot_done()
            live = asyncio.create_task(publisher.wait_live())
            if slow == 2:
                await wait_for_completions(20, version=0)
                assert not live.done() and await pool.version() == 0
            else:
                # the fast server suffices, and the slow one is not used until it has caught up
                await wait_for_completions(20, version=1)
                assert sorted(row.version or 0 for row in pool.status()) == [0, 1]
            may_load.set()
            await live
            await wait_for_completions(20, version=1)
            while {row.state for row in pool.status()} != {"ready"}:
                await asyncio.sleep(0.01)
            assert {row.version for row in pool.status()} == {1}
        stop.set()
        await asyncio.gather(*generating)
        await publisher.close()
        await pool.close()
        assert all(tuple(sorted(versions)) == versions for versions in finished)

    with ExitStack() as stack:
        urls = []
        for index in range(2):
            model = tiny(seed=1)
            engine = SlowEngine(model.network, model.tokenizer)
            engine.may_load = may_load if index < slow else _set_event()
            urls.append(
                stack.enter_context(serving(build_app(engine, TOKENIZER, model="tiny", allowed_folders=ANYWHERE)))
            )
        asyncio.run(scene(urls))


def test_a_run_trains_during_the_send_and_never_during_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run with a slowed transport: the send lasts until the next training step has started."""
    snapshot, send, step = FolderTransport.snapshot, FolderTransport.send, Trainer.step
    snapshotting, training = threading.Event(), threading.Event()
    overlapped: list[int] = []

    def slow_snapshot(transport: FolderTransport, version: int) -> None:
        training.clear()
        snapshotting.set()
        time.sleep(0.2)
        snapshot(transport, version)
        snapshotting.clear()

    async def slow_send(transport: FolderTransport, engine: Engine, version: int, *, drain: bool) -> None:
        assert not snapshotting.is_set()
        if version < 3 and await asyncio.to_thread(training.wait, 20):
            overlapped.append(version)
        await send(transport, engine, version, drain=drain)

    def checked_step(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        assert not snapshotting.is_set(), "weights were trained during their snapshot"
        training.set()
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(FolderTransport, "snapshot", slow_snapshot)
    monkeypatch.setattr(FolderTransport, "send", slow_send)
    monkeypatch.setattr(Trainer, "step", checked_step)
    watcher = train(tmp_path / "run", steps=4, publish__transport="folder", evaluation__when="never")
    assert list(watcher.steps) == [1, 2, 3, 4]
    assert overlapped, "the next step trained before the weights of this one were live"


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
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
def test_publish_settings_without_effect_are_errors(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(None, args)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "args",
    [
        ["--publish.transport=adapter", "--model.lora.rank=4"],
        ["--publish.transport=folder", "--publish.path=/shared"],
        ["--publish.transport=broadcast", "--engine.kind=process", "--publish.bind_address=10.0.0.1"],
        ["--publish.in_flight=drain"],
    ],
)
def test_valid_publish_settings_are_accepted(args: list[str]) -> None:
    assert load_settings(None, args).settings.publish
