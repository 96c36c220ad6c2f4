"""The engine of a run, whatever it is, with the way that new weights take to it.

In this process weights are copied from the trainer's network; to servers they travel as a folder on a path that both
see (the adapter alone with LoRA, all weights otherwise) or by broadcast. `keel.training.publish.publisher` says when.
"""

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from keel.config import EngineSettings, ModelSettings, RunSettings
from keel.inference.local.local_engine import LocalEngine
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.pool.managed_server import POOL_SETTINGS, run_managed_server
from keel.inference.pool.pool import Pool
from keel.inference.pool.vllm_engine import VllmEngine, start_vllm
from keel.inference.protocol import Engine
from keel.inference.server.api_key import read_api_key
from keel.training import load_model
from keel.training.model.model import Model
from keel.training.model.weights_io import dtype_name
from keel.training.publish import Publisher, make_transport
from keel.training.step.core_sharing import share_cores


class PublishingEngine(Publisher):
    """An engine and the publications to it."""

    async def clear_prefix_cache(self) -> None:
        """Compute every prompt anew: what was computed beside others before differs in the last bit."""
        if isinstance(self.engine, LocalEngine):
            await self.engine.clear_prefix_cache()


@asynccontextmanager
async def open_engine(settings: RunSettings, model: Model, folder: Path) -> AsyncIterator[PublishingEngine]:
    """The engine that the settings name, for as long as the block lasts. It holds version 0, the model as loaded."""
    kind, publish = settings.engine.kind, settings.publish
    if publish.path is not None:
        # two runs may share a path, and their names
        which = blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()
        folder = Path(publish.path) / f"{folder.parent.name}-{which}"
    transport = make_transport(settings, model, folder)
    async with contextlib.AsyncExitStack() as stack:
        engine: Engine
        if kind == "local":
            engine, threads = _make_local_engine(settings, model)
            if threads is not None:
                stack.enter_context(
                    share_cores(model.network, partial(_trainer_threads, torch.get_num_threads(), threads, engine))
                )
        elif kind == "process":
            engine = await stack.enter_async_context(_run_server(settings, model, folder))
        elif kind == "vllm":
            rank = settings.model.lora.rank if settings.model.lora else None
            dtype = settings.engine.dtype if settings.engine.dtype != "auto" else dtype_name(model.dtype)
            engine = await start_vllm(
                settings.engine.vllm_python, str(model.source.folder), dtype=dtype, max_lora_rank=rank
            )
        else:
            engine = _make_pool(settings)
        stack.push_async_callback(engine.close)
        # while a publication is under way the engine is one further behind: not where no batch may be that old
        overlap = 2 * settings.publish.every - 1 <= settings.scheduler.max_off_policy_steps
        found = PublishingEngine(engine, transport, drain=publish.in_flight == "drain", overlap=overlap)
        stack.push_async_callback(found.close)
        yield found


def _trainer_threads(cores: int, engine_threads: int, engine: LocalEngine) -> int:
    """What the trainer may use of the cores."""
    return max(1, cores - engine_threads) if engine.busy else cores


def _make_local_engine(settings: RunSettings, model: Model) -> tuple[LocalEngine, int | None]:
    """The engine, and how many threads it computes with beside the trainer."""
    dtype = dtype_name(model.dtype) if settings.engine.dtype == "auto" else settings.engine.dtype
    plain = {"lora": None, "gradient_checkpointing": False, "dtype": dtype}
    own = load_model(ModelSettings.model_validate(settings.model.model_dump() | plain), settings.seed)
    # a synchronous run is the same each time; an asynchronous one need not wait for that
    lockstep = settings.scheduler.max_off_policy_steps == 0
    # beside a trainer, which has the other cores while both compute: decoding takes about a third of a step's work
    threads = None if lockstep or own.device.type != "cpu" else max(1, (os.cpu_count() or 1) // 4)
    engine = LocalEngine(own.network, own.tokenizer, settings.engine, lockstep=lockstep, threads=threads)
    return engine, threads


def _make_pool(settings: RunSettings) -> Pool:
    given = settings.pool
    assert given is not None
    key = None if given.api_key_file is None else read_api_key("pool.api_key_file", given.api_key_file)
    engine_class = VllmEngine if given.backend == "vllm" else HttpEngine
    return Pool(given, partial(engine_class, api_key=key))


@asynccontextmanager
async def _run_server(settings: RunSettings, model: Model, folder: Path) -> AsyncIterator[Pool]:
    """`keel serve` in a process of its own, on loopback behind a key; it ends with this process, however that ends.

    One that dies is started again: as a pool of one, it gets its weights before its requests.
    """
    key = secrets.token_urlsafe(24)
    with tempfile.NamedTemporaryFile("w", prefix="keel-key-") as file:
        file.write(key)
        file.flush()
        words = server_argv(settings.engine, model, folder)
        async with run_managed_server([sys.executable, "-m", *words, "--api-key-file", file.name]) as server:
            yield Pool(POOL_SETTINGS, partial(HttpEngine, api_key=key), source=server)


def server_argv(engine: EngineSettings, model: Model, folder: Path) -> list[str]:
    """What makes a server compute as the settings say, with weights from below the folder."""
    words = ["keel.cli", "serve", str(model.source.folder), "--name", "policy", "--port", "0", "--with-parent"]
    words += [
        "--max-batch",
        str(engine.max_batch),
        "--native-kernels",
        engine.native_kernels,
        "--weights-from",
        str(folder),
    ]
    words += ["--dtype", engine.dtype if engine.dtype != "auto" else dtype_name(model.dtype)]
    return [*words, "--int8"] if engine.int8 else words
