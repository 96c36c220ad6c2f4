<<<<<<< HEAD
"""Fakes for tests of servers and their clients: a controllable engine, and a server in a thread."""
=======
"""Stand-ins for the tests of servers and their clients: an engine that does as it is told, and a server in a thread."""
>>>>>>> h4

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
<<<<<<< HEAD
"""For tests that are not about the allowed folders."""


class FakeEngine:
    """Completes each prompt with its tokens reversed and the end of turn; every log-prob is -0.5."""
=======
"""For tests of something else than where weights may come from."""


class FakeEngine:
    """Answers each prompt with its own tokens reversed, one log-prob of -0.5 a token, and the end of turn."""
>>>>>>> h4

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
<<<<<<< HEAD
    """A FakeEngine that streams token by token and fails after `break_after` tokens."""
=======
    """The same, token by token; `break_after` tokens it fails."""
>>>>>>> h4

    def __init__(self) -> None:
        super().__init__()
        self.pause = 0.0
        self.break_after: int | None = None
        self.sent = 0

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None
    ) -> AsyncIterator[TokenChunk]:
<<<<<<< HEAD
        generation = await self.generate(prompt, sampling, group=group)
        count = len(generation.token_ids)
=======
        whole = await self.generate(prompt, sampling, group=group)
        count = len(whole.token_ids)
>>>>>>> h4
        try:
            for index in range(count):
                if index == self.break_after:
                    raise EngineError("the engine broke")
                await asyncio.sleep(self.pause)
                self.sent += 1
<<<<<<< HEAD
                finish = generation.finish_reason if index == count - 1 else None
                part = slice(index, index + 1)
                yield TokenChunk(
                    generation.token_ids[part], generation.logprobs[part], generation.versions[part], finish
                )
=======
                finish = whole.finish_reason if at == count - 1 else None
                part = slice(at, at + 1)
                yield TokenChunk(whole.token_ids[part], whole.logprobs[part], whole.versions[part], finish)
>>>>>>> h4
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
<<<<<<< HEAD
    """Serve an application on a free port and yield its URL."""
    defaults: dict[str, Any] = {"port": 0, "log_level": "critical", "lifespan": "on", "ws": "none", "loop": "asyncio"}
    config = uvicorn.Config(app, **(defaults | options))
=======
    """The application on a real server with a port of its own."""
    plain: dict[str, Any] = {"port": 0, "log_level": "critical", "lifespan": "on", "ws": "none", "loop": "asyncio"}
    config = uvicorn.Config(app, **(plain | options))
>>>>>>> h4
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


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that happens in another thread."""
    deadline = time.monotonic() + seconds
<<<<<<< HEAD
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
=======
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
>>>>>>> h4
        time.sleep(0.005)
