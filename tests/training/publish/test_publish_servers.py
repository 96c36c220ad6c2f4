"""Publish to real `keel serve` processes on loopback: by folder, adapter and broadcast, through server crashes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from keel.cli import build_parser
from keel.common.atomic_files import atomic_folder, write_manifest
from keel.config import EngineSettings, PoolSettings, Sampling
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.pool.pool import Pool
from keel.inference.protocol import EngineError, WeightSource
from keel.run.engine_factory import server_argv
from keel.run.records import step_path
from keel.training.model.weights_io import write_weights
from keel.training.publish import BroadcastTransport, Publisher
from tests.support.policy_strategies import tiny
from tests.support.publishing_world import PROMPT, Serving, expected, sampled, servers
from tests.support.run_world import train

pytestmark = pytest.mark.process

FAST = {"poll_interval": 0.3, "health_timeout": 20.0, "ready_timeout": 60.0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers of the model that the runs start from."""
    folder = tmp_path_factory.mktemp("servers")
    with servers(2, "tiny", folder.parent) as running:
        yield running


def pool_settings(pair: list[Serving], **settings: Any) -> PoolSettings:
    return PoolSettings(urls=[server.url for server in pair], **(FAST | settings))


async def all_ready(pool: Pool) -> None:
    async with asyncio.timeout(60):
        while {row.state for row in pool.status()} != {"ready"}:
            await asyncio.sleep(0.05)


def same(actual: Any, expected: Any) -> bool:
    equal_tokens = actual.token_ids == expected.token_ids
    return bool(equal_tokens and actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5))


@pytest.mark.parametrize("transport", ["folder", "broadcast"])
def test_a_run_ends_with_its_weights_in_every_server(transport: str, pair: list[Serving], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 3, "evaluation__when": "never"}
    settings |= {f"pool__{name}": value for name, value in {"urls": [server.url for server in pair], **FAST}.items()}
    if transport == "folder":
        settings["publish__path"] = str(tmp_path / "shared")
    watcher = train(tmp_path / "run", engine__kind="pool", publish__transport=transport, **settings)
    assert list(watcher.steps) == [1, 2, 3]
    wanted = expected(tmp_path / "run" / "checkpoints" / "step_3")
    versions = set()
    for server in pair:
        generation = sampled(server.url)
        assert same(generation, wanted)
        versions |= set(generation.versions)
    assert len(versions) == 1 and versions <= {1, 2, 3}
    assert not (tmp_path / "run" / "weights").exists() or not any((tmp_path / "run" / "weights").iterdir())
    assert (transport == "folder") == bool(list((tmp_path / "shared").glob("run-*/version_*/manifest.json")))


def test_a_restarted_server_receives_the_newest_broadcast_before_it_gets_requests(
    pair: list[Serving], tmp_path: Path
) -> None:
    model = tiny(seed=11)

    async def scene() -> None:
        transport = BroadcastTransport(model, "127.0.0.1")
        pool = Pool(pool_settings(pair), HttpEngine)
        publisher = Publisher(pool, transport)
        try:
            await publisher.publish(21)
            await all_ready(pool)
            assert [row.version for row in pool.status()] == [21, 21]
            pair[1].kill()
            await publisher.publish(22)
            assert await pool.version() == 22
            generations = await asyncio.gather(*(pool.generate(PROMPT, Sampling(max_tokens=4)) for _ in range(6)))
            assert {version for generation in generations for version in generation.versions} == {22}
            await asyncio.to_thread(pair[1].start_again)
            await all_ready(pool)
            assert [row.version for row in pool.status()] == [22, 22]
        finally:
            await publisher.close()
            await pool.close()

    asyncio.run(scene())
    with atomic_folder(tmp_path / "now") as folder:
        write_weights(folder, model)
    wanted = expected(tmp_path / "now")
    assert all(same(sampled(server.url), wanted) for server in pair)


@pytest.mark.parametrize("drain", [True, False])
def test_completions_in_flight_are_drained_or_continue_by_setting(drain: bool, pair: list[Serving]) -> None:
    model, version = tiny(seed=12), 31 + drain

    async def scene() -> list[set[int]]:
        transport = BroadcastTransport(model, "127.0.0.1")
        pool = Pool(pool_settings(pair), HttpEngine)
        publisher = Publisher(pool, transport, drain=drain)
        stop = asyncio.Event()
        versions: list[set[int]] = []

        async def generate(seed: int) -> None:
            # no stop tokens: completions have full length, so some are always in flight
            sampling = Sampling(max_tokens=100, seed=seed, temperature=1.0)
            while not stop.is_set():
                versions.append(set((await pool.generate(PROMPT, sampling)).versions))

        try:
            await publisher.publish(30)
            await all_ready(pool)
            generating = [asyncio.create_task(generate(seed)) for seed in range(8)]
            async with asyncio.timeout(60):
                for index in range(4):
                    await asyncio.sleep(0.1)
                    await publisher.publish(version + 10 * index)
                stop.set()
                await asyncio.gather(*generating)
        finally:
            await publisher.close()
            await pool.close()
        return versions

    versions = asyncio.run(scene())
    assert set.union(*versions) >= {30, version + 20}
    assert drain == all(len(of_completion) == 1 for of_completion in versions)


def test_a_server_does_not_load_a_folder_that_was_changed(pair: list[Serving], tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "bad") as folder:
        write_weights(folder, tiny(seed=13))
        write_manifest(folder)
    file = tmp_path / "bad" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    async def scene() -> None:
        engine = HttpEngine(pair[0].url)
        try:
            before = await engine.version()
            with pytest.raises(EngineError, match=r"model\.safetensors was changed") as error:
                await engine.load_weights(WeightSource.folder(str(tmp_path / "bad")), 99)
            assert not error.value.retryable
            assert await engine.version() == before
        finally:
            await engine.close()

    asyncio.run(scene())


def test_an_adapter_reaches_a_managed_server_and_completions_are_drained(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model__lora__rank": 4, "steps": 2, "evaluation__when": "never"}
    settings |= {"publish__transport": "adapter", "publish__in_flight": "drain"}
    train(tmp_path / "run", engine__kind="process", **settings)
    published = list((tmp_path / "run" / "weights").glob("version_*"))
    assert published and all((folder / "adapter_model.safetensors").is_file() for folder in published)
    rows = [row for step in (1, 2) for row in pq.read_table(step_path(tmp_path / "run" / "rollouts", step)).to_pylist()]
    assert all(len(set(row["versions"]) - {-1}) <= 1 for row in rows if row["versions"])


def test_a_managed_server_is_started_with_the_engine_settings(tmp_path: Path) -> None:
    """The server's own parser reads the arguments, so an unknown one would fail."""
    model = tiny()
    settings = EngineSettings(kind="process", max_batch=7, native_kernels="off", int8=True, dtype="bfloat16")
    args = build_parser().parse_args(server_argv(settings, model, tmp_path)[1:])
    assert (args.max_batch, args.native_kernels, args.int8, args.dtype) == (7, "off", True, "bfloat16")
    assert args.weights_from == [tmp_path]
    defaults = build_parser().parse_args(server_argv(EngineSettings(kind="process"), model, tmp_path)[1:])
    assert (defaults.native_kernels, defaults.int8, defaults.dtype) == ("auto", False, "float32")
