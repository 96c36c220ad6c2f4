"""Publishing to real `keel serve` processes on loopback: by folder, by adapter and by broadcast, through deaths."""

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
from tests.support.serve_processes import PROMPT, Serving, expected, sampled, servers
from tests.support.tiny_runs import train

QUICK = {"poll_interval": 0.3, "health_timeout": 20.0, "ready_timeout": 60.0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers, of the model that the runs begin with."""
    place = tmp_path_factory.mktemp("servers")
    with servers(2, "tiny", place.parent) as found:
        yield found


def pooled(pair: list[Serving], **settings: Any) -> PoolSettings:
    return PoolSettings(urls=[one.url for one in pair], **(QUICK | settings))


async def all_ready(pool: Pool) -> None:
    async with asyncio.timeout(60):
        while {row.state for row in pool.status()} != {"ready"}:
            await asyncio.sleep(0.05)


def same(found: Any, wanted: Any) -> bool:
    return bool(found.token_ids == wanted.token_ids and found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5))


@pytest.mark.parametrize("way", ["folder", "broadcast"])
def test_a_run_ends_with_its_weights_in_every_server(way: str, pair: list[Serving], tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"steps": 3, "evaluation__when": "never"}
    chosen |= {f"pool__{name}": value for name, value in {"urls": [one.url for one in pair], **QUICK}.items()}
    if way == "folder":
        chosen["publish__path"] = str(tmp_path / "shared")
    watcher = train(tmp_path / "run", engine__kind="pool", publish__transport=way, **chosen)
    assert list(watcher.steps) == [1, 2, 3]
    wanted = expected(tmp_path / "run" / "checkpoints" / "step_3")
    versions = set()
    for one in pair:
        found = sampled(one.url)
        assert same(found, wanted)
        versions |= set(found.versions)
    assert len(versions) == 1 and versions <= {1, 2, 3}
    assert not (tmp_path / "run" / "weights").exists() or not any((tmp_path / "run" / "weights").iterdir())
    assert (way == "folder") == bool(list((tmp_path / "shared").glob("run-*/version_*/manifest.json")))


def test_a_server_that_died_and_came_back_gets_the_newest_broadcast_before_it_answers(
    pair: list[Serving], tmp_path: Path
) -> None:
    model = tiny(seed=11)

    async def scene() -> None:
        way = BroadcastTransport(model, "127.0.0.1")
        pool = Pool(pooled(pair), HttpEngine)
        publisher = Publisher(pool, way)
        try:
            await publisher.publish(21)
            await all_ready(pool)
            assert [row.version for row in pool.status()] == [21, 21]
            pair[1].kill()
            await publisher.publish(22)
            assert await pool.version() == 22
            answers = await asyncio.gather(*(pool.generate(PROMPT, Sampling(max_tokens=4)) for _ in range(6)))
            assert {version for answer in answers for version in answer.versions} == {22}
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
    assert all(same(sampled(one.url), wanted) for one in pair)


@pytest.mark.parametrize("drain", [True, False])
def test_answers_under_way_are_drained_or_go_on_by_setting(drain: bool, pair: list[Serving]) -> None:
    model, version = tiny(seed=12), 31 + drain

    async def scene() -> list[set[int]]:
        way = BroadcastTransport(model, "127.0.0.1")
        pool = Pool(pooled(pair), HttpEngine)
        publisher = Publisher(pool, way, drain=drain)
        over = asyncio.Event()
        found: list[set[int]] = []

        async def roll(seed: int) -> None:
            # no end of turn: answers are as long as they may be, and some are under way at any moment
            sampling = Sampling(max_tokens=100, seed=seed, temperature=1.0)
            while not over.is_set():
                found.append(set((await pool.generate(PROMPT, sampling)).versions))

        try:
            await publisher.publish(30)
            await all_ready(pool)
            rolling = [asyncio.create_task(roll(seed)) for seed in range(8)]
            async with asyncio.timeout(60):
                for number in range(4):
                    await asyncio.sleep(0.1)
                    await publisher.publish(version + 10 * number)
                over.set()
                await asyncio.gather(*rolling)
        finally:
            await publisher.close()
            await pool.close()
        return found

    found = asyncio.run(scene())
    assert set.union(*found) >= {30, version + 20}
    assert drain == all(len(versions) == 1 for versions in found)


def test_a_server_refuses_a_folder_that_was_changed_on_the_way(pair: list[Serving], tmp_path: Path) -> None:
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
            with pytest.raises(EngineError, match=r"model\.safetensors was changed") as refused:
                await engine.load_weights(WeightSource.folder(str(tmp_path / "bad")), 99)
            assert not refused.value.retryable
            assert await engine.version() == before
        finally:
            await engine.close()

    asyncio.run(scene())


def test_an_adapter_reaches_a_server_of_the_runs_own_and_answers_are_drained(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"model__lora__rank": 4, "steps": 2, "evaluation__when": "never"}
    chosen |= {"publish__transport": "adapter", "publish__in_flight": "drain"}
    train(tmp_path / "run", engine__kind="process", **chosen)
    published = list((tmp_path / "run" / "weights").glob("version_*"))
    assert published and all((folder / "adapter_model.safetensors").is_file() for folder in published)
    rows = [row for step in (1, 2) for row in pq.read_table(step_path(tmp_path / "run" / "rollouts", step)).to_pylist()]
    assert all(len(set(row["versions"]) - {-1}) <= 1 for row in rows if row["versions"])


def test_how_the_settings_sample_is_how_a_server_of_the_runs_own_is_started(tmp_path: Path) -> None:
    """The server's own parser reads the words, so that none is one that it does not know."""
    model = tiny()
    asked = EngineSettings(kind="process", max_batch=7, native_kernels="off", int8=True, dtype="bfloat16")
    given = build_parser().parse_args(server_argv(asked, model, tmp_path)[1:])
    assert (given.max_batch, given.native_kernels, given.int8, given.dtype) == (7, "off", True, "bfloat16")
    assert given.weights_from == [tmp_path]
    usual = build_parser().parse_args(server_argv(EngineSettings(kind="process"), model, tmp_path)[1:])
    assert (usual.native_kernels, usual.int8, usual.dtype) == ("auto", False, "float32")
