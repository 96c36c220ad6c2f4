"""Create the engine of a run, with the publisher that moves new weights to it.

An engine in this process gets a copy of the trainer's weights; servers get them as a folder on a path that both sides
can read (only the adapter with LoRA) or by broadcast. See `keel.training.publish`.
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
    """An engine and the publisher of its weights."""

    async def clear_prefix_cache(self) -> None:
        """Recompute every prompt: a prefix computed in another batch differs in the last bit."""
        if isinstance(self.engine, LocalEngine):
            await self.engine.clear_prefix_cache()


@asynccontextmanager
async def open_engine(settings: RunSettings, model: Model, folder: Path) -> AsyncIterator[PublishingEngine]:
    """Open the engine of the settings for the duration of the block. It holds version 0, the model as loaded."""
    kind, publish = settings.engine.kind, settings.publish
    if publish.path is not None:
        # two runs with the same name may share publish.path
        digest = blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()
        folder = Path(publish.path) / f"{folder.parent.name}-{digest}"
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
        # during an overlapped publication the engine is one more version behind, which max_off_policy_steps must allow
        overlap = 2 * settings.publish.every - 1 <= settings.scheduler.max_off_policy_steps
        publishing_engine = PublishingEngine(engine, transport, drain=publish.in_flight == "drain", overlap=overlap)
        stack.push_async_callback(publishing_engine.close)
        yield publishing_engine


def _trainer_threads(cores: int, engine_threads: int, engine: LocalEngine) -> int:
    """Return how many cores the trainer may use now."""
    return max(1, cores - engine_threads) if engine.busy else cores


def _make_local_engine(settings: RunSettings, model: Model) -> tuple[LocalEngine, int | None]:
    """Return the engine and the number of threads it uses while the trainer computes."""
    dtype = dtype_name(model.dtype) if settings.engine.dtype == "auto" else settings.engine.dtype
    overrides = {"lora": None, "gradient_checkpointing": False, "dtype": dtype}
    own = load_model(ModelSettings.model_validate(settings.model.model_dump() | overrides), settings.seed)
    # a synchronous run is reproducible; an asynchronous one does not pay for lockstep
    lockstep = settings.scheduler.max_off_policy_steps == 0
    # the trainer has the other cores while both compute: decoding takes about a third of a step's work
    threads = None if lockstep or own.device.type != "cpu" else max(1, (os.cpu_count() or 1) // 4)
    engine = LocalEngine(own.network, own.tokenizer, settings.engine, lockstep=lockstep, threads=threads)
    return engine, threads


def _make_pool(settings: RunSettings) -> Pool:
    pool = settings.pool
    assert pool is not None
    key = None if pool.api_key_file is None else read_api_key("pool.api_key_file", pool.api_key_file)
    engine_class = VllmEngine if pool.backend == "vllm" else HttpEngine
    return Pool(pool, partial(engine_class, api_key=key))


@asynccontextmanager
async def _run_server(settings: RunSettings, model: Model, folder: Path) -> AsyncIterator[Pool]:
    """Run `keel serve` in a separate process, on loopback behind a key; it ends whenever this process ends.

    A server that dies is restarted: as a pool of one, it gets its weights before its requests.
    """
    key = secrets.token_urlsafe(24)
    with tempfile.NamedTemporaryFile("w", prefix="keel-key-") as file:
        file.write(key)
        file.flush()
        argv = server_argv(settings.engine, model, folder)
        async with run_managed_server([sys.executable, "-m", *argv, "--api-key-file", file.name]) as server:
            yield Pool(POOL_SETTINGS, partial(HttpEngine, api_key=key), source=server)


def server_argv(engine: EngineSettings, model: Model, folder: Path) -> list[str]:
    """Return the arguments of a server that computes as the settings say and may load weights from the folder."""
    argv = ["keel.cli", "serve", str(model.source.folder), "--name", "policy", "--port", "0", "--with-parent"]
    argv += [
        "--max-batch",
        str(engine.max_batch),
        "--native-kernels",
        engine.native_kernels,
        "--weights-from",
        str(folder),
    ]
    argv += ["--dtype", engine.dtype if engine.dtype != "auto" else dtype_name(model.dtype)]
    return [*argv, "--int8"] if engine.int8 else argv
