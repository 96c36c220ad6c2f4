"""The engine of a run, whatever it is, and how new weights reach it.

`Sampler.publish` returns when the weights are live, and only then does the engine's version advance. In this process
weights are copied from the trainer's network; to any other engine they travel as a folder on a path that both see,
written under a temporary name and renamed: the adapter alone with LoRA, all weights otherwise. Older folders are
removed once nobody can ask for them.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from torch import Tensor

from keel.config import ModelSettings, RunSettings
from keel.engine.client import HttpEngine
from keel.engine.key import read_key
from keel.engine.local import LocalEngine
from keel.engine.vllm import VllmEngine, start_vllm
from keel.errors import KeelError
from keel.policy import load_model
from keel.policy.files import discard, new_folder
from keel.policy.model import Model
from keel.policy.weights import name_of, write_weights
from keel.rollout.pool import Pool
from keel.wire import Engine, EngineError

START = 300.0
"""Seconds that a server may take to load its model."""


class Sampler:
    """An engine and the way of weights to it."""

    def __init__(self, engine: Engine, model: Model, folder: Path, *, in_process: bool) -> None:
        self.engine = engine
        self._model, self._folder, self._in_process = model, folder, in_process

    async def publish(self, version: int) -> None:
        """Give the engine the trainer's weights, which must not change meanwhile, as this version."""
        if self._in_process and self._model.peft is None:
            # the engine's reader takes them from the trainer's network
            await self.engine.load_weights("", version)
            return
        target = self._folder / f"version_{version}"
        if not target.is_dir():
            await asyncio.to_thread(self._write, target)
        load = self.engine.load_weights if self._model.peft is None else self.engine.load_adapter
        await load(str(target.resolve()), version)
        for old in sorted(self._folder.glob("version_*")):
            # a member of a pool that comes back asks for the newest; the one before it may still be being read
            if int(old.name.removeprefix("version_")) < version - 1:
                with contextlib.suppress(OSError):
                    discard(old)

    async def forget(self) -> None:
        """Compute every prompt anew: what was computed beside others before differs in the last bit."""
        if isinstance(self.engine, LocalEngine):
            await self.engine.forget_prompts()

    def _write(self, target: Path) -> None:
        with new_folder(target) as folder:
            write_weights(folder, self._model)


@asynccontextmanager
async def sampler(settings: RunSettings, model: Model, folder: Path) -> AsyncIterator[Sampler]:
    """The engine that the settings name, for as long as the block lasts. It holds version 0, the model as loaded."""
    kind = settings.engine.kind
    async with contextlib.AsyncExitStack() as stack:
        engine: Engine
        if kind == "local":
            engine = _local(settings, model)
        elif kind == "process":
            engine = await stack.enter_async_context(_server(settings, model, folder))
        elif kind == "vllm":
            rank = settings.model.lora.rank if settings.model.lora else None
            dtype = settings.engine.dtype if settings.engine.dtype != "auto" else name_of(model.dtype)
            engine = await start_vllm(settings.engine.python, str(model.source.folder), dtype=dtype, max_lora_rank=rank)
        else:
            engine = _pool(settings)
        stack.push_async_callback(engine.close)
        yield Sampler(engine, model, folder, in_process=kind == "local")


def _local(settings: RunSettings, model: Model) -> LocalEngine:
    dtype = name_of(model.dtype) if settings.engine.dtype == "auto" else settings.engine.dtype
    plain = {"lora": None, "gradient_checkpointing": False, "dtype": dtype}
    own = load_model(ModelSettings.model_validate(settings.model.model_dump() | plain), settings.seed)

    def weights(_folder: str) -> Mapping[str, Tensor]:
        state: Mapping[str, Tensor] = model.network.state_dict()
        return state

    read = weights if model.peft is None else None
    # a synchronous run is the same each time; an asynchronous one need not wait for that
    lockstep = settings.scheduler.max_off_policy_steps == 0
    # beside a trainer that computes with all cores: small steps gain nothing by more threads, and they would only
    # wait for each other (a step of training and sampling on two cores: 8.9 s in place of 10.6)
    threads = None if lockstep or own.device.type != "cpu" else max(1, (os.cpu_count() or 1) // 4)
    return LocalEngine(own.network, own.tokenizer, settings.engine, load=read, lockstep=lockstep, threads=threads)


def _pool(settings: RunSettings) -> Pool:
    given = settings.pool
    assert given is not None
    server = VllmEngine if given.server == "vllm" else HttpEngine
    key = None if given.api_key_file is None else read_key("pool.api_key_file", given.api_key_file)
    return Pool(given, lambda url: server(url, api_key=key))


@asynccontextmanager
async def _server(settings: RunSettings, model: Model, folder: Path) -> AsyncIterator[HttpEngine]:
    """`keel serve` in a process of its own, on loopback behind a key; it ends with this process, however that ends."""
    key = secrets.token_urlsafe(24)
    with tempfile.NamedTemporaryFile("w", prefix="keel-key-") as file:
        file.write(key)
        file.flush()
        words = [sys.executable, "-m", "keel.cli", "serve", str(model.source.folder), "--name", "policy", "--port", "0"]
        words += ["--api-key-file", file.name, "--with-parent", "--max-batch", str(settings.engine.max_batch)]
        words += ["--dtype", settings.engine.dtype if settings.engine.dtype != "auto" else name_of(model.dtype)]
        words += ["--weights-from", str(folder)]
        words += ["--int8"] if settings.engine.int8 else []
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            url = await _address(process)
            yield HttpEngine(url, api_key=key)
        finally:
            await _end(process)


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), START)).decode()
    except TimeoutError:
        raise EngineError(f"the engine's server did not start within {START:.0f} s", retryable=False) from None
    if "http://" not in line:
        raise KeelError(f"the engine's server did not start (exit code {await process.wait()}); see its message above")
    return line.split()[-1]


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
