"""What it takes to bring new weights to the engines, by each way, and how much is sampled meanwhile.

The servers are `keel serve` processes on this machine's loopback, each with the whole model; rollouts are asked for
all the while. For each way, the median of some publications: until the trainer may go on (taken), until every server
holds the weights (live), the answers that ended in between, and the bytes of one publication. With --vllm, a vLLM
server by itself too. One machine, shared by trainer, servers and whoever else is on it.

    python benchmarks/publishing.py                    # two servers with SmolLM2-135M, some minutes on two cores
    python benchmarks/publishing.py --model tiny       # to see that it works
    python benchmarks/publishing.py --vllm .venv-vllm/bin/python
"""

import argparse
import os
import sys
from dataclasses import dataclass

# the repository in place of this folder, whose signal.py is not the standard library's
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

ASKERS = 4
TOKENS = 16


@dataclass(frozen=True)
class Row:
    """One way, measured."""

    way: str
    servers: str
    bytes: int
    taken: float
    live: float
    answers: float

    def __str__(self) -> str:
        times = f"{self.taken:>8.2f} s {self.live:>8.2f} s"
        return f"{self.way:<10} {self.servers:<14} {self.bytes / 1e6:>7.1f} MB {times} {self.answers:>8.0f}"


@contextmanager
def serving(count: int, model: str, folder: Path) -> Iterator[list[str]]:
    """So many servers, and their addresses."""
    command = [sys.executable, "-m", "keel.cli", "serve", model, "--port", "0", "--weights-from", str(folder)]
    made = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [str(one.stdout and one.stdout.readline()).split()[-1] for one in made]
    finally:
        for one in made:
            one.terminate()
            one.wait()


async def measured(name: str, servers: str, engine: Engine, way: WeightTransport, model: Model, rounds: int) -> Row:
    """Publications one after another, with rollouts beside them."""
    publisher = Publisher(engine, way, overlap=True)
    over, ended = asyncio.Event(), 0

    async def ask(number: int) -> None:
        nonlocal ended
        prompt = model.tokenizer.encode(f"Which is larger, {number} or {number + 3}?")
        while not over.is_set():
            await engine.generate(prompt, Sampling(max_tokens=TOKENS), group=str(number))
            ended += 1

    found: list[tuple[float, float, float]] = []
    await publisher.publish(100)
    await publisher.wait_live()
    while isinstance(engine, Pool) and {row.state for row in engine.status()} != {"ready"}:
        await asyncio.sleep(0.1)  # one is enough for a pool to go on; here all are to be measured
    asking = [asyncio.create_task(ask(number)) for number in range(ASKERS)]
    for number in range(rounds):
        changed(model)
        await asyncio.sleep(1.0)
        began, before = time.monotonic(), ended
        await publisher.publish(101 + number)
        await publisher.snapshot_done()
        taken = time.monotonic()
        await publisher.wait_live()
        found.append((taken - began, time.monotonic() - began, float(ended - before)))
    over.set()
    await asyncio.gather(*asking)
    return Row(name, servers, sizes(model), *(statistics.median(column) for column in zip(*found, strict=True)))


@torch.no_grad()
def changed(model: Model) -> None:
    """As a step of training would."""
    for parameter in model.network.parameters():
        if parameter.requires_grad:
            parameter.add_(1e-6 * torch.randn_like(parameter))


def sizes(model: Model) -> int:
    trained = [p for p in model.network.parameters() if p.requires_grad or model.peft is None]
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)


async def run(args: argparse.Namespace, folder: Path) -> list[Row]:
    whole = load_model(ModelSettings(name=args.model))
    adapted = load_model(ModelSettings.model_validate({"name": args.model, "lora": {"rank": 8}}))
    rows = []
    with serving(args.members, args.model, folder) as urls:
        ways: list[tuple[str, Model, WeightTransport]] = [
            ("folder", whole, FolderTransport(whole, folder / "folder")),
            ("broadcast", whole, BroadcastTransport(whole, "127.0.0.1")),
            ("adapter", adapted, AdapterTransport(adapted, folder / "adapter")),
        ]
        for name, model, way in ways:
            # straggling servers are waited for, because live is to mean every server here
            settings = PoolSettings(urls=urls, poll_interval=60.0)
            pool = Pool(settings, HttpEngine)
            rows.append(await measured(name, f"{args.members} keel serve", pool, way, model, args.rounds))
            show(rows[-1])
            await pool.close()
    if args.vllm:
        engine = await start_vllm(
            args.vllm, str(whole.source.folder), dtype="float32", max_lora_rank=8, max_model_len=512
        )
        try:
            for name, model in (("folder", whole), ("adapter", adapted)):
                way = (FolderTransport if model is whole else AdapterTransport)(model, folder / f"vllm-{name}")
                rows.append(await measured(name, "vLLM", engine, way, model, args.rounds))
                show(rows[-1])
        finally:
            await engine.close()
    return rows


def show(row: Row) -> None:
    print(row, flush=True)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="the interpreter of an environment with vLLM")
    args = parser.parse_args(words)
    print(f"{args.model}, float32, {ASKERS} rollouts of {TOKENS} tokens at a time, median of {args.rounds}")
    print(f"{'way':<10} {'servers':<14} {'size':>10} {'taken':>10} {'live':>10} {'answers':>8}")
    with tempfile.TemporaryDirectory(prefix="keel-publishing-") as folder:
        rows = asyncio.run(run(args, Path(folder)))
    # the claim: sampling goes on beside a publication
    return 0 if all(row.answers > 0 or row.live < 1.0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
