"""Tokens a second at 32 unrelated requests at once: `keel serve` against the vLLM server, on the real 135M model.

Both are servers of their own with all cores, asked over HTTP by the same client for the same prompts with the same
sampling, in turns, one idle while the other works. Each prompt is another one, so that nothing is shared; answers may
end early, and the tokens that were really sampled are counted. Needs vLLM (scripts/install_vllm.sh). Exits 1 when
`keel serve` is slower. SmolLM2-135M, float32, on CPU.

    python benchmarks/serving.py [--python .venv-vllm/bin/python] [--rounds 4]
"""

import argparse
import os
import sys

# the repository in place of this folder, whose signal.py is not the standard library's
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
REQUESTS, PROMPT, ANSWER = 32, 60, 64


async def answered(engine: Engine, turn: int) -> float:
    """Tokens a second of one round."""
    chance = np.random.default_rng(turn)
    prompts = chance.integers(100, 40000, (REQUESTS, PROMPT)).tolist()
    began = time.perf_counter()
    found = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(max_tokens=ANSWER, seed=turn * REQUESTS + number))
            for number, prompt in enumerate(prompts)
        )
    )
    return sum(len(one.token_ids) for one in found) / (time.perf_counter() - began)


async def compare(python: str, rounds: int) -> bool:
    vllm = await start_vllm(python, str(resolve_model(MODEL).folder), dtype="float32")
    try:
        words = [sys.executable, "-m", "keel.cli", "serve", MODEL, "--port", "0", "--with-parent"]
        async with run_managed_server(words) as server:
            keel = HttpEngine((await server.fetch_urls())[0])
            sides: dict[str, Engine] = {"vLLM": vllm, "keel serve": keel}
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(rounds + 1):
                for name, engine in sides.items():
                    rates[name].append(await answered(engine, turn))
            await keel.close()
    finally:
        await vllm.close()
    rates = {name: values[1:] for name, values in rates.items()}  # the first round warms both up
    middle, low, high = ratio(rates, "keel serve", "vLLM")
    print(f"{REQUESTS} unrelated requests at once, prompts of {PROMPT} tokens, answers of up to {ANSWER}, over HTTP")
    for name, values in rates.items():
        print(f"  {name:12} {max(values):6.1f} tokens a second at best")
    held = middle >= 1
    print(f"  {middle:.2f} times as many ({low:.2f} to {high:.2f})   {verdict(held)}: at least 1x")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    return int(not asyncio.run(compare(args.python, args.rounds)))


if __name__ == "__main__":
    sys.exit(main())
