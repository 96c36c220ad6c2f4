"""Fakes for tests of servers and their clients: a controllable engine, and a server in a thread."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from keel.config import Sampling
from keel.inference.protocol import EngineError, Generation, Health, WeightSource
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.openai_responses import TokenChunk
from keel.training.model import tiny_models

TOKENIZER = tiny_models.build_tokenizer()
END = tiny_models.SPECIAL_TOKENS[tiny_models.IM_END]
ANYWHERE = AllowedFolders([Path("/")])
"""For tests that are not about the allowed folders."""


class FakeEngine:
    """Completes each prompt with its tokens reversed and the end of turn; every log-prob is -0.5."""

    def __init__(self) -> None:
        self.live = 3
        self.calls: list[tuple[tuple[int, ...], Sampling, str | None]] = []
        self.cancelled = 0
        self.running = 0
        self.closed = False
        self.delay = 0.0
        self.fail: Callable[[], Exception] | None = None
        self.answer: Callable[[Sequence[int], Sampling], Generation] | None = None
        self.loaded: list[tuple[str, str, int]] = []

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        self.calls.append((tuple(prompt), sampling, group))
        self.running += 1
        try:
            await asyncio.sleep(self.delay)
            if self.fail is not None:
                raise self.fail()
            return self._answer(prompt, sampling)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _answer(self, prompt: Sequence[int], sampling: Sampling) -> Generation:
        if self.answer is not None:
            return self.answer(prompt, sampling)
        ids = (*reversed(prompt), END)
        finish = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        return Generation(ids, (-0.5,) * len(ids), (self.live,) * len(ids), finish, sampling.temperature)

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        if self.fail is not None:
            raise self.fail()
        self.loaded.append(("adapter" if source.kind == "adapter" else "weights", str(source.path), version))
        self.live = version

    async def version(self) -> int:
        return self.live

    async def health(self) -> Health:
        return Health(not self.closed, self.live, running=self.running)

    async def close(self) -> None:
        self.closed = True


class FakeStreamingEngine(FakeEngine):
    """A FakeEngine that streams token by token and fails after `break_after` tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pause = 0.0
        self.break_after: int | None = None
        self.sent = 0

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
        generation = await self.generate(prompt, sampling, group=group)
        count = len(generation.token_ids)
        try:
            for index in range(count):
                if index == self.break_after:
                    raise EngineError("the engine broke")
                await asyncio.sleep(self.pause)
                self.sent += 1
                finish = generation.finish_reason if index == count - 1 else None
                part = slice(index, index + 1)
                yield TokenChunk(
                    generation.token_ids[part], generation.logprobs[part], generation.versions[part], finish
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Serve an application on a free port and yield its URL."""
    defaults: dict[str, Any] = {"port": 0, "log_level": "critical", "lifespan": "on", "ws": "none", "loop": "asyncio"}
    config = uvicorn.Config(app, **(defaults | options))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition that another thread makes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)
