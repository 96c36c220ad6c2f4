"""Sampling speed of the local engine compared with `generate` of transformers (SmolLM2-135M, float32, CPU).

Both sides sample the same prompts with the same settings, 8 prompts x 8 completions of up to 16 tokens that may end
earlier, interleaved in one process with an allocator that retains memory. Each side releases its OpenMP threads after a
round, because with the threads of both, either would wait for sleeping ones. `generate` gets all rows in one padded
batch. The engine clears its prefix cache before each round, as after a weight update, and this is timed. The recorded
log-probs are compared with a full forward pass. Exits with 1 if a threshold is missed.

    python benchmarks/engine.py            # prompts of about 50 and 110 tokens, some minutes on two cores
    python benchmarks/engine.py --cpu      # measure CPU seconds, for a machine with other load
    python benchmarks/engine.py --quick    # two prompts, one round, as a smoke test
    python benchmarks/engine.py --int8     # speed and mismatch of int8
"""

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import asyncio
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.measure import ratio, verdict
from keel.common.openmp import release_openmp_threads
from keel.config import EngineSettings, ModelSettings, Sampling
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import Generation
from keel.training import load_model
from keel.training.model.model import Model
from keel.training.step.malloc import retain_freed_memory

THRESHOLDS = {50: 2.5, 110: 4.0}
"""Prompt length -> least speed-up over `generate`, in wall time and per sampled token."""
MAX_TOKENS = 16
Clock = Callable[[], float]
WORDS = ["time", "water", "number", "people", "word", "day", "part", "sound", "work", "place", "year", "light"]


@dataclass(frozen=True)
class Case:
    """Chat prompts of about `size` tokens with `group` completions each."""

    size: int
    prompts: int = 8
    group: int = 8

    def ids(self, model: Model) -> list[list[int]]:
        rng, prompts = np.random.default_rng(0), []
        for _ in range(self.prompts):
            filler = " ".join(rng.choice(WORDS, max(self.size - 44, 1)))
            question = f"{filler}. Which is larger, {rng.integers(100)} or {rng.integers(100)}?"
            turn = [{"role": "user", "content": question}]
            ids = model.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
            assert isinstance(ids, list)
            prompts.append([int(token) for token in ids])  # type: ignore[arg-type]
        return prompts


class EngineSide:
    """The local engine with its own event loop."""

    def __init__(self, model: Model, prompts: list[list[int]], group: int, **options: Any) -> None:
        self.prompts = [prompt for prompt in prompts for _ in range(group)]
        self.loop = asyncio.new_event_loop()
        settings = EngineSettings(max_batch=len(self.prompts), **options)
        self.engine = LocalEngine(model.network, model.tokenizer, settings)
        self.generations: list[Generation] = []
        self.sampled: list[int] = []
        self.round = 0

    def __call__(self) -> None:
        self.generations = self.loop.run_until_complete(self._generate())
        self.sampled.append(sum(len(generation.token_ids) for generation in self.generations))
        self.round += 1

    async def _generate(self) -> list[Generation]:
        await self.engine.clear_prefix_cache()
        requests = (
            self.engine.generate(prompt, Sampling(max_tokens=MAX_TOKENS, seed=1000 * self.round + number))
            for number, prompt in enumerate(self.prompts)
        )
        return list(await asyncio.gather(*requests))

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class GenerateSide:
    """`generate` of transformers on all rows in one batch, with prompts padded on the left."""

    def __init__(self, model: Model, prompts: list[list[int]], group: int) -> None:
        self.network: Any = model.network
        longest = max(map(len, prompts))
        rows = [prompt for prompt in prompts for _ in range(group)]
        self.ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        self.attention_mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        self.eos_id = int(model.tokenizer.eos_token_id)
        self.sampled: list[int] = []

    def __call__(self) -> None:
        torch.manual_seed(len(self.sampled))
        tokens = self.network.generate(
            input_ids=self.ids,
            attention_mask=self.attention_mask,
            max_new_tokens=MAX_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            pad_token_id=self.eos_id,
        )[:, self.ids.shape[1] :]
        release_openmp_threads()
        is_end = tokens == self.eos_id
        ended = is_end.int().cumsum(1)
        # tokens up to and including the first end token
        self.sampled.append(int(((ended == 0) | ((ended == 1) & is_end)).sum()))


def logprob_error(model: Model, prompts: list[list[int]], generations: list[Generation]) -> float:
    """Return the mean difference between recorded log-probs and those of the model's own forward pass."""
    differences = []
    with torch.inference_mode():
        for prompt, generation in list(zip(prompts, generations, strict=True))[::4]:
            ids = torch.tensor([[*prompt, *generation.token_ids]])
            logits = model.network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            # float32 would lose a digit in the sum over the vocabulary
            expected = logits.double().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            differences.append((expected - torch.tensor(generation.logprobs)).abs())
    release_openmp_threads()
    return float(torch.cat(differences).mean())


def compare(case: Case, rounds: int, threshold: float | None, clock: Clock) -> bool:
    """Compare time and time per sampled token for one prompt length; return whether the thresholds were met."""
    # separate networks, because the engine changes the attention implementation of its network
    model, reference = load_model(ModelSettings()), load_model(ModelSettings())
    prompts = case.ids(model)
    engine, generate = EngineSide(model, prompts, case.group), GenerateSide(reference, prompts, case.group)
    # no warm-up: one more round of `generate` would be a third of the benchmark, and medians are compared
    times = time_sides({"generate": generate, "engine": engine}, rounds, clock)
    token_times = per_token(times, {"generate": generate.sampled, "engine": engine.sampled})
    error = logprob_error(reference, engine.prompts, engine.generations)
    engine.close()
    length = round(float(np.mean([len(prompt) for prompt in prompts])))
    print(f"\n{case.prompts} prompts of about {length} tokens x {case.group} completions of up to {MAX_TOKENS} tokens")
    passed = True
    total = "wall time" if clock is time.perf_counter else "CPU time"
    for name, values, scale, unit in ((total, times, 1.0, "s"), ("per sampled token", token_times, 1000.0, "ms")):
        middle, low, high = ratio(values, "generate", "engine")
        fast = threshold is None or middle >= threshold
        passed &= fast
        best = {side: scale * min(values[side]) for side in values}
        sides = f"generate {best['generate']:6.2f} {unit:2}  engine {best['engine']:6.2f} {unit:2}"
        judged = f"   {verdict(fast)}: at least {threshold}x" if threshold else ""
        print(f"  {name:18} {sides}  {middle:.2f} times faster ({low:.2f} to {high:.2f}){judged}")
    print(f"  tokens of a round  generate {generate.sampled[-rounds:]}  engine {engine.sampled[-rounds:]}")
    print(f"  log-probs          {error:.1e} from a full forward pass   {verdict(error < 1e-5)}", flush=True)
    return passed and error < 1e-5


def time_sides(sides: Mapping[str, Callable[[], None]], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Return the seconds of each side, run in turn in each round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return times


def per_token(times: Mapping[str, list[float]], sampled: Mapping[str, list[int]]) -> dict[str, list[float]]:
    return {
        name: [second / count for second, count in zip(values, sampled[name][-len(values) :], strict=True)]
        for name, values in times.items()
    }


def int8(case: Case, rounds: int, clock: Clock) -> None:
    """Compare int8 with float32, with native kernels and with torch, and report its log-prob mismatch."""
    variants: dict[str, dict[str, Any]] = {
        "float32": {},
        "float32 with torch": {"native_kernels": "off"},
        "int8": {"int8": True},
    }
    reference = load_model(ModelSettings())
    prompts = case.ids(reference)
    sides = {
        name: EngineSide(load_model(ModelSettings()), prompts, case.group, **options)
        for name, options in variants.items()
    }
    times = time_sides(dict(sides), rounds + 1, clock)
    times = {name: values[1:] for name, values in times.items()}
    token_times = per_token(times, {name: side.sampled for name, side in sides.items()})
    error = logprob_error(reference, sides["int8"].prompts, sides["int8"].generations)
    for side in sides.values():
        side.close()
    for name in list(variants)[:-1]:
        middle, low, high = ratio(token_times, name, "int8")
        print(f"int8 against {name}: {middle:.2f} times as fast per token ({low:.2f} to {high:.2f})")
    print(f"log-probs {error:.3f} off on average")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    clock: Clock = time.process_time if args.cpu else time.perf_counter
    retain_freed_memory()
    print(f"SmolLM2-135M, float32, {torch.get_num_threads()} threads")
    if args.quick:
        return int(not compare(Case(50, prompts=2, group=4), 1, None, clock))
    if args.int8:
        int8(Case(50), args.rounds, clock)
        return 0
    passed = [compare(Case(size), args.rounds, threshold, clock) for size, threshold in THRESHOLDS.items()]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
