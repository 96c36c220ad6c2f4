"""Training step with shared prompts compared with padded micro-batches (SmolLM2-135M, float32, CPU).

The padded baseline is the usual one: every sample has its own prompt, prompts padded on the left and completions on the
right, micro-batches of eight, and the head on completions only. Both sides run forward and backward of the same
objective on the same samples, interleaved in one process with an allocator that retains memory; their gradients are
compared. Memory is the peak of a separate process; the token budget is chosen so that it stays below that of the
baseline. Exits with 1 if a threshold is missed.

    python benchmarks/train.py            # prompts of 50 and 256 tokens, about fifteen minutes on two cores
    python benchmarks/train.py --quick    # a few samples, as a smoke test
    python benchmarks/train.py --growth   # growth of time and memory, four minutes; writes docs/images/training.svg
    python benchmarks/train.py --full     # adds prompts of 256 tokens with completions of exactly 64 tokens
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Peak, interleave, ratio, run_in_new_process, seconds, verdict
from benchmarks.plot import Line, Panel, write_svg
from keel import ModelSettings, Sample, TokenBatch, TrainerSettings, load_model, objective
from keel.training.model.model import Model
from keel.training.step.forward import Forward
from keel.training.step.malloc import retain_freed_memory
from keel.training.step.optimizer import build_optimizer
from keel.training.step.optimizer_step import OptimizerStep
from keel.training.step.step_report import StepColumns
from keel.training.step.trainable_tokens import TrainableTokens

ROOT = Path(__file__).parent.parent
OBJECTIVE = objective("icepop")
MICRO_BATCH = 8
THRESHOLDS = {50: 3.0, 256: 4.0}
"""Prompt length -> least speed-up over padded micro-batches."""
WORDS = ["time", "water", "number", "people", "word", "day", "part", "sound", "work", "place", "year", "light"]


@dataclass(frozen=True)
class Case:
    """Prompts with a group of completions each, whose lengths are between `shortest` and `longest`."""

    prompts: int = 8
    group: int = 8
    prompt: int = 50
    longest: int = 16
    shortest: int = 0
    """0 means half of `longest`."""

    def samples(self, model: Model) -> list[Sample]:
        rng, samples = np.random.default_rng(0), []
        for group in range(self.prompts):
            prompt = self._prompt(model, rng)
            for _ in range(self.group):
                length = int(rng.integers(self.shortest or self.longest // 2, self.longest + 1))
                completion = rng.integers(100, 40000, length)
                ids = np.concatenate([prompt, completion])
                samples.append(
                    Sample(
                        token_ids=ids,
                        trainable=np.arange(len(ids)) >= len(prompt),
                        advantage=float(rng.normal()),
                        sampler_logprobs=np.full(len(ids), -10.0),
                        group=group,
                    )
                )
        return samples

    def _prompt(self, model: Model, rng: np.random.Generator) -> list[int]:
        """Return a chat prompt of about `prompt` tokens; all prompts start with the opening of the chat template."""
        filler = " ".join(rng.choice(WORDS, max(self.prompt - 42, 1)))
        question = f"{filler}. Which is larger, {rng.integers(100)} or {rng.integers(100)}?"
        turn = [{"role": "user", "content": question}]
        ids = model.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        assert isinstance(ids, list)
        return [int(token) for token in ids]  # type: ignore[arg-type]

    def budget(self, samples: list[Sample]) -> int:
        """Return a token budget an eighth above a padded micro-batch: a token needs less memory here (checked)."""
        return MICRO_BATCH * max(len(sample) for sample in samples) * 9 // 8


class SharedPrompts:
    """Forward and backward of the trainer."""

    def __init__(self, model: Model, samples: list[Sample], budget: int) -> None:
        self.settings = TrainerSettings(max_tokens_per_micro_batch=budget, compute_entropy=False)
        self.model, self.tokens = model, TrainableTokens(samples)
        self.forward = Forward(model, max_tokens=budget)
        self.optimizer = build_optimizer(self.settings.optimizer, model.parameters().values())

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        columns = StepColumns.empty(self.tokens, torch.float32, self.model.device, entropy=False)
        numbers = range(len(self.tokens.samples))
        update = OptimizerStep(self.forward, self.optimizer, self.settings, OBJECTIVE, columns, numbers, None)
        plan = self.forward.plan(self.tokens)
        self.computed = sum(len(batch) for batch in plan)
        with self.forward.tree_attention_enabled():
            update.backward(plan)


class PaddedBatches:
    """The padded baseline."""

    def __init__(self, model: Model, samples: list[Sample]) -> None:
        self.model, self.samples = model, samples
        self.tokens = TrainableTokens(samples)
        self.template = self.tokens.to_batch(torch.zeros(len(self.tokens)))
        self.totals = OBJECTIVE.totals([self.template])
        self.computed = 0

    def __call__(self) -> None:
        self.model.network.zero_grad(set_to_none=True)
        self.computed = 0
        for first in range(0, len(self.samples), MICRO_BATCH):
            numbers = range(first, min(first + MICRO_BATCH, len(self.samples)))
            logprobs, is_real = self._logprobs([self.samples[number] for number in numbers])
            tokens = torch.cat([torch.arange(len(self.tokens))[self.tokens.slice_of(number)] for number in numbers])
            batch: TokenBatch = self.template.take(tokens).replace(logprobs=logprobs[is_real])
            OBJECTIVE(batch, self.totals).loss.backward()  # type: ignore[no-untyped-call]

    def _logprobs(self, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        """Return log-probs [samples, longest completion] and a mask of those that are not padding."""
        starts = [int(np.argmax(sample.trainable)) for sample in samples]
        before = max(starts)
        after = max(len(sample) - start for sample, start in zip(samples, starts, strict=True))
        ids = torch.zeros(len(samples), before + after, dtype=torch.int64)
        attention_mask = torch.zeros_like(ids)
        for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
            tokens = slice(before - start, before - start + len(sample))
            ids[row, tokens] = torch.from_numpy(np.asarray(sample.token_ids))
            attention_mask[row, tokens] = 1
        self.computed += ids.numel()
        output = self.model.network(
            input_ids=ids, attention_mask=attention_mask, logits_to_keep=after + 1, use_cache=False
        )
        logits = output.logits[:, :-1]
        chosen = logits.gather(2, ids[:, before:, None])[..., 0]
        # row by row, to avoid a second tensor of all logits
        norm = torch.stack([row.logsumexp(-1) for row in logits])
        return chosen - norm, attention_mask[:, before:].bool()


def gradients(model: Model, run: Callable[[], object]) -> list[Tensor]:
    run()
    return [weight.grad.clone() for weight in model.parameters().values() if weight.grad is not None]


def compare(case: Case, rounds: int, threshold: float | None) -> bool:
    """Compare times, gradients and peak memory of one case; return whether the thresholds were met."""
    model = load_model(ModelSettings())
    samples = case.samples(model)
    shared = SharedPrompts(model, samples, case.budget(samples))
    padded = PaddedBatches(model, samples)
    pairs = zip(gradients(model, shared), gradients(model, padded), strict=True)
    error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    times = interleave({"padded": padded, "shared": shared}, rounds, warm=True)
    middle, low, high = ratio(times, "padded", "shared")
    peaks = {side: measure(case, side, 0)["megabytes"] for side in ("padded", "shared")}
    fast, small = threshold is None or middle >= threshold, peaks["shared"] <= peaks["padded"]
    prompt = round(float(np.mean([np.argmax(sample.trainable) for sample in samples])))
    lengths = f"{case.shortest or case.longest // 2} to {case.longest}"
    print(f"\n{case.prompts} prompts of about {prompt} tokens x {case.group} completions of {lengths}")
    print(f"  tokens computed   padded {padded.computed:6d}      shared {shared.computed:6d}")
    print(f"  seconds           padded {min(times['padded']):6.2f}      shared {min(times['shared']):6.2f}")
    judged = f"   {verdict(fast)}: at least {threshold}x" if threshold else ""
    print(f"  times faster      {middle:.2f} ({low:.2f} to {high:.2f}){judged}")
    print(f"  peak memory, MB   padded {peaks['padded']:6.0f}      shared {peaks['shared']:6.0f}   {verdict(small)}")
    print(
        f"  gradients         equal to {error:.1e} (relative, the worst parameter)   {verdict(error < 1e-4)}",
        flush=True,
    )
    return fast and small and error < 1e-4


@cache
def measure(case: Case, side: str, rounds: int) -> dict[str, float]:
    """Return the seconds and peak memory of one side in a new process."""
    fields = [case.prompts, case.group, case.prompt, case.longest, case.shortest, rounds]
    return run_in_new_process(__file__, "--side", side, "--case", *map(str, fields))


def run_side(side: str, case: Case, rounds: int) -> None:
    model, peak = load_model(ModelSettings()), Peak()
    samples = case.samples(model)
    run: Callable[[], None] = (
        PaddedBatches(model, samples) if side == "padded" else SharedPrompts(model, samples, case.budget(samples))
    )
    peak.start()
    run()
    times = [seconds(run) for _ in range(rounds)]
    print(json.dumps({"seconds": min(times, default=0.0), "megabytes": peak.megabytes()}))


def growth() -> None:
    """Measure and plot time and memory by number of prompts, group size and prompt length."""
    series = {
        "prompts (tokens of the step)": [Case(prompts=n, group=4) for n in (2, 4, 8)],
        "completions of a prompt": [Case(prompts=2, group=n) for n in (2, 4, 8)],
        "tokens of a prompt": [Case(prompts=1, group=8, prompt=n) for n in (50, 128, 256)],
    }
    rows: list[list[Panel]] = [[], []]
    for name, cases in series.items():
        field = {"prompts (tokens of the step)": "prompts", "completions of a prompt": "group"}.get(name, "prompt")
        xs = [float(getattr(case, field)) for case in cases]
        results = {side: [measure(case, side, 1) for case in cases] for side in ("padded", "shared")}
        for row, unit in zip(rows, ("seconds", "megabytes"), strict=True):
            lines = [Line(side, xs, [point[unit] for point in points]) for side, points in results.items()]
            row.append(Panel(name, f"{unit} (forward + backward)" if unit == "seconds" else "peak MB", lines))
        for side, points in results.items():
            text = "  ".join(
                f"{x:.0f}: {p['seconds']:.2f} s {p['megabytes']:.0f} MB" for x, p in zip(xs, points, strict=True)
            )
            print(f"{name:30} {side:7} {text}", flush=True)
    target = ROOT / "docs" / "images" / "training.svg"
    write_svg(target, rows)
    print(f"wrote {target.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--side", choices=("padded", "shared"), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    retain_freed_memory()
    if args.side:
        run_side(args.side, Case(*args.case[:-1]), args.case[-1])
        return 0
    if args.growth:
        growth()
        return 0
    print(f"SmolLM2-135M, float32, {torch.get_num_threads()} threads, forward + backward, objective {OBJECTIVE.name}")
    if args.quick:
        return int(not compare(Case(prompts=2, group=8), 1, None))
    cases = [(Case(), args.rounds), (Case(prompt=256, longest=64), max(args.rounds - 2, 2))]
    if args.full:
        cases.append((Case(prompt=256, longest=64, shortest=64), max(args.rounds - 2, 2)))
    passed = [compare(case, rounds, THRESHOLDS[case.prompt]) for case, rounds in cases]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
