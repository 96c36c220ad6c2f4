"""What sampling costs in the local engine, against `generate` of transformers, on the real 135M model.

Both sides answer the same prompts with the same sampling, 8 prompts x 8 answers of up to 16 tokens that may end
earlier, in one process and interleaved, with the allocator told to keep its memory; each gives its helper threads back
when it is done, for with those of both at once either would wait for sleeping threads. `generate` gets all rows in one
padded batch, as is usual. The engine forgets its prompts before each round, as it does when new weights come, and the
time for that counts. The log-probs that it records are compared with a full forward pass. Exits 1 when a bar is missed.
SmolLM2-135M, float32, on CPU.

    python benchmarks/engine.py            # prompts of about 50 and 110 tokens, some minutes on two cores
    python benchmarks/engine.py --cpu      # the same by CPU seconds, for a machine that others use too
    python benchmarks/engine.py --quick    # two prompts, one round, to see that it works
    python benchmarks/engine.py --int8     # what int8 brings, and how far it is from the policy
"""

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

# the repository in place of this folder, whose signal.py is not the standard library's
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

BARS = {50: 2.5, 110: 4.0}
"""By prompt length: how many times faster than `generate`, in wall time and per sampled token."""
LONGEST = 16
Clock = Callable[[], float]
WORDS = ["time", "water", "number", "people", "word", "day", "part", "sound", "work", "place", "year", "light"]


@dataclass(frozen=True)
class Case:
    """Chat questions of about `size` tokens, each answered `group` times."""

    size: int
    prompts: int = 8
    group: int = 8

    def ids(self, model: Model) -> list[list[int]]:
        chance, found = np.random.default_rng(0), []
        for _ in range(self.prompts):
            few = " ".join(chance.choice(WORDS, max(self.size - 44, 1)))
            question = f"{few}. Which is larger, {chance.integers(100)} or {chance.integers(100)}?"
            turn = [{"role": "user", "content": question}]
            ids = model.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
            assert isinstance(ids, list)
            found.append([int(token) for token in ids])  # type: ignore[arg-type]
        return found


class Ours:
    """The local engine, from an event loop that lasts as long as it does."""

    def __init__(self, model: Model, prompts: list[list[int]], group: int, **given: Any) -> None:
        self.prompts = [prompt for prompt in prompts for _ in range(group)]
        self.loop = asyncio.new_event_loop()
        settings = EngineSettings(max_batch=len(self.prompts), **given)
        self.engine = LocalEngine(model.network, model.tokenizer, settings)
        self.found: list[Generation] = []
        self.sampled: list[int] = []
        self.round = 0

    def __call__(self) -> None:
        self.found = self.loop.run_until_complete(self._answers())
        self.sampled.append(sum(len(one.token_ids) for one in self.found))
        self.round += 1

    async def _answers(self) -> list[Generation]:
        await self.engine.clear_prefix_cache()
        asked = (
            self.engine.generate(prompt, Sampling(max_tokens=LONGEST, seed=1000 * self.round + number))
            for number, prompt in enumerate(self.prompts)
        )
        return list(await asyncio.gather(*asked))

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class Theirs:
    """`generate` on all rows at once, prompts padded on the left."""

    def __init__(self, model: Model, prompts: list[list[int]], group: int) -> None:
        self.network: Any = model.network
        longest = max(map(len, prompts))
        rows = [prompt for prompt in prompts for _ in range(group)]
        self.ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        self.seen = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        self.end = int(model.tokenizer.eos_token_id)
        self.sampled: list[int] = []

    def __call__(self) -> None:
        torch.manual_seed(len(self.sampled))
        found = self.network.generate(
            input_ids=self.ids,
            attention_mask=self.seen,
            max_new_tokens=LONGEST,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            pad_token_id=self.end,
        )[:, self.ids.shape[1] :]
        release_openmp_threads()
        ended = (found == self.end).int().cumsum(1)
        # up to the first end, that one included
        self.sampled.append(int(((ended == 0) | ((ended == 1) & (found == self.end))).sum()))


def off_full_forward(model: Model, prompts: list[list[int]], found: list[Generation]) -> float:
    """Mean difference between recorded log-probs and those of the model's own forward pass."""
    differences = []
    with torch.inference_mode():
        for prompt, one in list(zip(prompts, found, strict=True))[::4]:
            ids = torch.tensor([[*prompt, *one.token_ids]])
            logits = model.network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            # float32 would lose a digit in the sum over all words
            truth = logits.double().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            differences.append((truth - torch.tensor(one.logprobs)).abs())
    release_openmp_threads()
    return float(torch.cat(differences).mean())


def compare(case: Case, rounds: int, bar: float | None, clock: Clock) -> bool:
    """One prompt length: wall time and time per sampled token of both sides. Whether the bars held."""
    # a network each: the engine sets the attention of its own
    model, plain = load_model(ModelSettings()), load_model(ModelSettings())
    prompts = case.ids(model)
    ours, theirs = Ours(model, prompts, case.group), Theirs(plain, prompts, case.group)
    # neither side is warmed up: a round more of `generate` would be a third of the benchmark, and medians are compared
    times = timed({"generate": theirs, "engine": ours}, rounds, clock)
    each = per_token(times, {"generate": theirs.sampled, "engine": ours.sampled})
    off = off_full_forward(plain, ours.prompts, ours.found)
    ours.close()
    length = round(float(np.mean([len(prompt) for prompt in prompts])))
    print(f"\n{case.prompts} prompts of about {length} tokens x {case.group} answers of up to {LONGEST} tokens")
    held = True
    whole = "wall time" if clock is time.perf_counter else "CPU time"
    for name, values, scale, unit in ((whole, times, 1.0, "s"), ("per sampled token", each, 1000.0, "ms")):
        middle, low, high = ratio(values, "generate", "engine")
        fast = bar is None or middle >= bar
        held &= fast
        best = {side: scale * min(values[side]) for side in values}
        shown = f"generate {best['generate']:6.2f} {unit:2}  engine {best['engine']:6.2f} {unit:2}"
        wanted = f"   {verdict(fast)}: at least {bar}x" if bar else ""
        print(f"  {name:18} {shown}  {middle:.2f} times faster ({low:.2f} to {high:.2f}){wanted}")
    print(f"  tokens of a round  generate {theirs.sampled[-rounds:]}  engine {ours.sampled[-rounds:]}")
    print(f"  log-probs          {off:.1e} from a full forward pass   {verdict(off < 1e-5)}", flush=True)
    return held and off < 1e-5


def timed(sides: Mapping[str, Callable[[], None]], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each side, one after another in each round."""
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
    """What int8 brings over float32 in the engine, by its kernels and by torch's as int8 is, and its mismatch."""
    ways: dict[str, dict[str, Any]] = {
        "float32": {},
        "float32 by torch": {"native_kernels": "off"},
        "int8": {"int8": True},
    }
    plain = load_model(ModelSettings())
    prompts = case.ids(plain)
    sides = {name: Ours(load_model(ModelSettings()), prompts, case.group, **given) for name, given in ways.items()}
    times = timed(dict(sides), rounds + 1, clock)
    times = {name: values[1:] for name, values in times.items()}
    each = per_token(times, {name: side.sampled for name, side in sides.items()})
    off = off_full_forward(plain, sides["int8"].prompts, sides["int8"].found)
    for side in sides.values():
        side.close()
    for name in list(ways)[:-1]:
        middle, low, high = ratio(each, name, "int8")
        print(f"int8 against {name}: {middle:.2f} times as fast per token ({low:.2f} to {high:.2f})")
    print(f"log-probs {off:.3f} off in the mean")


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
    held = [compare(Case(size), args.rounds, bar, clock) for size, bar in BARS.items()]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
