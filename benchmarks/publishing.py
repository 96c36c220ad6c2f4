"""Time to publish new weights with each transport, and the number of completions sampled meanwhile.

The servers are `keel serve` processes on the loopback interface, each with the complete model; requests are sent
continuously. Prints, for each transport, the median over publications of the time until the trainer may continue
(snapshot), the time until every server has the weights (live), the completions that ended in between, and the bytes of
one publication. --vllm also measures a single vLLM server. Trainer and servers share one machine.

    python benchmarks/publishing.py                    # two servers with SmolLM2-135M, some minutes on two cores
    python benchmarks/publishing.py --model tiny       # as a smoke test
    python benchmarks/publishing.py --vllm .venv-vllm/bin/python
"""

import argparse
import os
import sys
from dataclasses import dataclass

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from keel.config import ModelSettings, PoolSettings, Sampling
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.pool.pool import Pool
from keel.inference.pool.vllm_engine import start_vllm
from keel.inference.protocol import Engine
from keel.training import load_model
from keel.training.model.model import Model
from keel.training.publish import (
    AdapterTransport,
    BroadcastTransport,
    FolderTransport,
    Publisher,
    WeightTransport,
)

CLIENTS = 4
"""Concurrent requests."""
MAX_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """Result of one transport."""

    transport: str
    servers: str
    bytes: int
    snapshot: float
    live: float
    completions: float

    def __str__(self) -> str:
        times = f"{self.snapshot:>8.2f} s {self.live:>8.2f} s"
        return f"{self.transport:<10} {self.servers:<14} {self.bytes / 1e6:>7.1f} MB {times} {self.completions:>11.0f}"


@contextmanager
def serving(count: int, model: str, folder: Path) -> Iterator[list[str]]:
    """Start `count` servers and yield their URLs."""
    command = [sys.executable, "-m", "keel.cli", "serve", model, "--port", "0", "--weights-from", str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [str(process.stdout and process.stdout.readline()).split()[-1] for process in processes]
    finally:
        for process in processes:
            process.terminate()
            process.wait()


async def measure(
    name: str, servers: str, engine: Engine, transport: WeightTransport, model: Model, rounds: int
) -> Row:
    """Publish several times in sequence while requests are sent."""
    publisher = Publisher(engine, transport, overlap=True)
    stop, completed = asyncio.Event(), 0

    async def request(number: int) -> None:
        nonlocal completed
        prompt = model.tokenizer.encode(f"Which is larger, {number} or {number + 3}?")
        while not stop.is_set():
            await engine.generate(prompt, Sampling(max_tokens=MAX_TOKENS), group=str(number))
            completed += 1

    measurements: list[tuple[float, float, float]] = []
    await publisher.publish(100)
    await publisher.wait_live()
    while isinstance(engine, Pool) and {row.state for row in engine.status()} != {"ready"}:
        await asyncio.sleep(0.1)  # a pool needs only one ready server, but all are to be measured
    clients = [asyncio.create_task(request(number)) for number in range(CLIENTS)]
    for number in range(rounds):
        change_weights(model)
        await asyncio.sleep(1.0)
        start, before = time.monotonic(), completed
        await publisher.publish(101 + number)
        await publisher.snapshot_done()
        snapshot = time.monotonic()
        await publisher.wait_live()
        measurements.append((snapshot - start, time.monotonic() - start, float(completed - before)))
    stop.set()
    await asyncio.gather(*clients)
    medians = (statistics.median(column) for column in zip(*measurements, strict=True))
    return Row(name, servers, published_bytes(model), *medians)


@torch.no_grad()
def change_weights(model: Model) -> None:
    """Change all trainable weights slightly, as a training step would."""
    for parameter in model.network.parameters():
        if parameter.requires_grad:
            parameter.add_(1e-6 * torch.randn_like(parameter))


def published_bytes(model: Model) -> int:
    """Return the bytes of one publication."""
    published = [p for p in model.network.parameters() if p.requires_grad or model.peft is None]
    return sum(parameter.numel() * parameter.element_size() for parameter in published)


async def run(args: argparse.Namespace, folder: Path) -> list[Row]:
    full = load_model(ModelSettings(name=args.model))
    adapted = load_model(ModelSettings.model_validate({"name": args.model, "lora": {"rank": 8}}))
    rows = []
    with serving(args.servers, args.model, folder) as urls:
        transports: list[tuple[str, Model, WeightTransport]] = [
            ("folder", full, FolderTransport(full, folder / "folder")),
            ("broadcast", full, BroadcastTransport(full, "127.0.0.1")),
            ("adapter", adapted, AdapterTransport(adapted, folder / "adapter")),
        ]
        for name, model, transport in transports:
            # wait for slow servers, because here `live` means every server
            settings = PoolSettings(urls=urls, poll_interval=60.0)
            pool = Pool(settings, HttpEngine)
            rows.append(await measure(name, f"{args.servers} keel serve", pool, transport, model, args.rounds))
            show(rows[-1])
            await pool.close()
    if args.vllm:
        engine = await start_vllm(
            args.vllm, str(full.source.folder), dtype="float32", max_lora_rank=8, max_model_len=512
        )
        try:
            for name, model in (("folder", full), ("adapter", adapted)):
                transport = (FolderTransport if model is full else AdapterTransport)(model, folder / f"vllm-{name}")
                rows.append(await measure(name, "vLLM", engine, transport, model, args.rounds))
                show(rows[-1])
        finally:
            await engine.close()
    return rows


def show(row: Row) -> None:
    print(row, flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM")
    args = parser.parse_args(argv)
    print(f"{args.model}, float32, {CLIENTS} concurrent requests of {MAX_TOKENS} tokens, median of {args.rounds}")
    print(f"{'transport':<10} {'servers':<14} {'size':>10} {'snapshot':>10} {'live':>10} {'completions':>11}")
    with tempfile.TemporaryDirectory(prefix="keel-publishing-") as folder:
        rows = asyncio.run(run(args, Path(folder)))
    # sampling must continue during a publication
    return 0 if all(row.completions > 0 or row.live < 1.0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
