"""`keel serve` as real processes, and their greedy completions."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keel.config import ModelSettings, Sampling
from keel.inference.local.local_engine import LocalEngine
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.protocol import Generation
from keel.training import load_model

PROMPT = [257, *b"user\nWhich is larger, 3 or 5?"]


class Serving:
    """One server process, which can be killed and restarted on its port with its initial weights."""

    def __init__(self, model: str, weights: Path) -> None:
        self.command = [sys.executable, "-m", "keel.cli", "serve", model, "--weights-from", str(weights)]
        self.command += ["--max-batch", "16", "--patience", "1", "--port"]
        self.process, self.url = self._start("0")

    def _start(self, port: str) -> tuple["subprocess.Popen[str]", str]:
        process = subprocess.Popen([*self.command, port], stdout=subprocess.PIPE, text=True)
        return process, ""

    def ready(self) -> str:
        """Wait until the server listens; return its URL."""
        assert self.process.stdout is not None
        if not self.url:
            line = self.process.stdout.readline()
            assert "http://" in line, line
            self.url = line.split()[-1].removesuffix("/v1")
        return self.url

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.end()

    def start_again(self) -> None:
        port = self.url.rpartition(":")[2]
        self.process, _ = self._start(port)
        assert self.process.stdout is not None
        assert "http://" in self.process.stdout.readline()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def servers(count: int, model: str, weights: Path) -> Iterator[list[Serving]]:
    """Start several servers concurrently, for the duration of the block."""
    started = [Serving(model, weights) for _ in range(count)]
    try:
        for server in started:
            server.ready()
        yield started
    finally:
        for server in started:
            server.end()


def sampled(url: str) -> Generation:
    """Return a server's greedy completion of the prompt."""

    async def ask() -> Generation:
        engine = HttpEngine(url)
        try:
            return await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=8))
        finally:
            await engine.close()

    return asyncio.run(ask())


def expected(folder: Path) -> Generation:
    """Return the greedy completion of the prompt with the weights in a folder."""
    model = load_model(ModelSettings(name=str(folder)))

    async def ask() -> Generation:
        engine = LocalEngine(model.network, model.tokenizer)
        try:
            return await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=8))
        finally:
            await engine.close()

    return asyncio.run(ask())
