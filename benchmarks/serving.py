"""Tokens per second with 32 concurrent unrelated requests: `keel serve` compared with the vLLM server.

Both servers may use all cores and get the same prompts and sampling settings over HTTP from one client, in turns, one
idle while the other works. All prompts differ, so no prefix is shared; completions may end early, and only sampled
tokens are counted. Requires vLLM (scripts/install_vllm.sh). Exits with 1 if `keel serve` is slower. SmolLM2-135M,
float32, CPU.

    python benchmarks/serving.py [--python .venv-vllm/bin/python] [--rounds 4]
"""

import argparse
import os
import sys

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import asyncio
import time

import numpy as np

from benchmarks.measure import ratio, verdict
from keel.config import Sampling
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.pool.managed_server import run_managed_server
from keel.inference.pool.vllm_engine import start_vllm
from keel.inference.protocol import Engine
from keel.training.model.model_source import resolve_model

MODEL = "smollm2-135m"
REQUESTS, PROMPT_TOKENS, MAX_TOKENS = 32, 60, 64


async def tokens_per_second(engine: Engine, turn: int) -> float:
    """Run one round and return its tokens per second."""
    prompts = np.random.default_rng(turn).integers(100, 40000, (REQUESTS, PROMPT_TOKENS)).tolist()
    start = time.perf_counter()
    generations = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(max_tokens=MAX_TOKENS, seed=turn * REQUESTS + number))
            for number, prompt in enumerate(prompts)
        )
    )
    return sum(len(generation.token_ids) for generation in generations) / (time.perf_counter() - start)


async def compare(python: str, rounds: int) -> bool:
    vllm = await start_vllm(python, str(resolve_model(MODEL).folder), dtype="float32")
    try:
        argv = [sys.executable, "-m", "keel.cli", "serve", MODEL, "--port", "0", "--with-parent"]
        async with run_managed_server(argv) as server:
            keel = HttpEngine((await server.fetch_urls())[0])
            sides: dict[str, Engine] = {"vLLM": vllm, "keel serve": keel}
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(rounds + 1):
                for name, engine in sides.items():
                    rates[name].append(await tokens_per_second(engine, turn))
            await keel.close()
    finally:
        await vllm.close()
    rates = {name: values[1:] for name, values in rates.items()}  # the first round is a warm-up
    middle, low, high = ratio(rates, "keel serve", "vLLM")
    sizes = f"prompts of {PROMPT_TOKENS} tokens, completions of up to {MAX_TOKENS}"
    print(f"{REQUESTS} concurrent unrelated requests, {sizes}, over HTTP")
    for name, values in rates.items():
        print(f"  {name:12} {max(values):6.1f} tokens a second at best")
    passed = middle >= 1
    print(f"  {middle:.2f} times as many ({low:.2f} to {high:.2f})   {verdict(passed)}: at least 1x")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    return int(not asyncio.run(compare(args.python, args.rounds)))


if __name__ == "__main__":
    sys.exit(main())
