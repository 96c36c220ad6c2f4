"""`keel serve` as real processes on loopback, and what they sample with."""

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
    """One server process; it can be killed, and started again on its port with the weights it began with."""

    def __init__(self, model: str, weights: Path) -> None:
        self.command = [sys.executable, "-m", "keel.cli", "serve", model, "--weights-from", str(weights)]
        self.command += ["--max-batch", "16", "--patience", "1", "--port"]
        self.process, self.url = self._begin("0")

    def _begin(self, port: str) -> tuple["subprocess.Popen[str]", str]:
        process = subprocess.Popen([*self.command, port], stdout=subprocess.PIPE, text=True)
        return process, ""

    def ready(self) -> str:
        """Its address, as soon as it listens."""
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
        self.process, _ = self._begin(port)
        assert self.process.stdout is not None
        assert "http://" in self.process.stdout.readline()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def servers(count: int, model: str, weights: Path) -> Iterator[list[Serving]]:
    """Several, started at once."""
    made = [Serving(model, weights) for _ in range(count)]
    try:
        for one in made:
            one.ready()
        yield made
    finally:
        for one in made:
            one.end()


def sampled(url: str) -> Generation:
    """What a server answers to the prompt, greedily."""

    async def ask() -> Generation:
        engine = HttpEngine(url)
        try:
            return await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=8))
        finally:
            await engine.close()

    return asyncio.run(ask())


def expected(folder: Path) -> Generation:
    """What the weights in a folder answer to the prompt, greedily."""
    model = load_model(ModelSettings(name=str(folder)))

    async def ask() -> Generation:
        engine = LocalEngine(model.network, model.tokenizer)
        try:
            return await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=8))
        finally:
            await engine.close()

    return asyncio.run(ask())
