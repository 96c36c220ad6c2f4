"""Cost of the training signal compared with a loop over sequences and with a minimal loss.

All sides run in one process, in interleaved rounds, and are printed as ratios with their spread, so the results hold on
a busy machine. Exits with 1 if a threshold is missed. Measures the loss alone, on CPU tensors: no model, no
log-softmax, no GPU.

    python benchmarks/signal.py            # 1 million tokens in 20,000 sequences, and growth to 10 million
    python benchmarks/signal.py --quick    # a tenth of the tokens in few rounds, as a smoke test
"""

import os
import sys

# torch imports the standard library's signal module, so the folder of this file must come last
sys.path.sort(key=lambda path: os.path.abspath(path) == os.path.dirname(os.path.abspath(__file__)))

import argparse
import gc
import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from keel import TokenBatch, objective

PRESETS = ("icepop", "ipo_kl", "opsm", "gspo")
OBJECTIVES = {preset: objective(preset) for preset in PRESETS}
LOOP_THRESHOLD, MINIMUM_THRESHOLD, METRICS_THRESHOLD, MEMORY_THRESHOLD = 20.0, 4.0, 1.5, 12.0
GROWTH, GROWTH_THRESHOLD = 10, 1.5
"""Relative to the minimal loss, whose time per token grows too because of caches and page faults."""


@dataclass(frozen=True)
class Step:
    """A batch and the lengths of its consecutive sequences."""

    batch: TokenBatch
    lengths: list[int]


def make_step(tokens: int, sequences: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Step:
    """Return sequences of uneven lengths with one advantage each; staler tokens differ more from the sampler."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn(sequences, generator=rng).exp_().double()
    ends = (weights.cumsum(0) / weights.sum() * (tokens - sequences)).round().long()
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)) + 1
    sequence = torch.arange(sequences).repeat_interleave(lengths)
    staleness = torch.randint(0, 4, (sequences,), generator=rng)[sequence]
    logprobs = torch.empty(tokens, dtype=torch.float64).exponential_(2.0, generator=rng).neg_()
    # most tokens agree to a few percent and a few do not, as with mixed precision and stale weights
    noise = torch.randn(tokens, generator=rng, dtype=torch.float64) * (0.02 + 0.03 * staleness)
    noise += 1.5 * torch.randn(tokens, generator=rng) * (torch.rand(tokens, generator=rng) < 0.02)
    batch = TokenBatch(
        logprobs=logprobs.to(dtype, copy=True).requires_grad_(),
        sampler_logprobs=(logprobs - noise).clamp_(max=0.0).to(dtype),
        advantages=torch.randn(sequences, generator=rng)[sequence].to(dtype),
        trainable=torch.ones(tokens, dtype=torch.bool),
        sequence=sequence,
        version=100 - staleness,
    )
    return Step(batch, lengths.tolist())


def one_sequence(preset: str, logprobs: Tensor, sampler: Tensor, advantages: Tensor) -> Tensor:
    """Return the unnormalised loss of one sequence, written in the usual way with autograd."""
    d = logprobs - sampler
    if preset in ("icepop", "ipo_kl"):
        dropped = (d.detach() < math.log(0.2)) | (d.detach() > math.log(5.0))
        terms = -advantages * d.masked_fill(dropped, 0.0).exp()
        if preset == "ipo_kl":
            terms = terms + 1e-3 * d.square()
        return terms.masked_fill(dropped, 0.0).sum()
    if preset == "opsm":
        dropped = (advantages.mean() < 0) & (-d.detach().mean() > 1e-4)
        r = d.masked_fill(dropped, 0.0).exp()
        terms = torch.maximum(-r * advantages, -r.clamp(0.8, 1.2) * advantages)
        return terms.masked_fill(dropped, 0.0).sum()
    r, advantage = d.mean().exp(), advantages.mean()
    return torch.maximum(-r * advantage, -r.clamp(1 - 3e-4, 1 + 4e-4) * advantage)


def run_loop(preset: str, step: Step) -> Tensor:
    batch = step.batch
    assert batch.sampler_logprobs is not None
    # split instead of slices: the backward of 20,000 slices would fill 20,000 tensors as long as the batch
    fields = (batch.logprobs, batch.sampler_logprobs, batch.advantages)
    parts = zip(*(torch.split(field, step.lengths) for field in fields), strict=True)
    loss = torch.stack([one_sequence(preset, *part) for part in parts]).sum()
    loss = loss / (len(step.lengths) if preset == "gspo" else len(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def run_minimum(step: Step) -> None:
    batch = step.batch
    assert batch.sampler_logprobs is not None
    loss = -((batch.logprobs - batch.sampler_logprobs).exp() * batch.advantages).sum() / len(batch)
    loss.backward()  # type: ignore[no-untyped-call]


def run_keel(preset: str, step: Step, metrics: bool = False) -> Tensor:
    result = OBJECTIVES[preset](step.batch)
    result.loss.backward()  # type: ignore[no-untyped-call]
    if metrics:
        len(result.metrics)  # all metrics are computed when they are first read
    return result.loss.detach()


def settle_allocator() -> None:
    """Free one large block, as any process with a model has done: from then on glibc reuses blocks of up to 32 MB.

    Otherwise each tensor is returned to the system, and page faults dominate the times of both sides.
    """
    torch.ones(31 << 18)


def seconds(step: Step, run: Callable[[Step], object]) -> float:
    step.batch.logprobs.grad = None
    start = time.perf_counter()
    run(step)
    return time.perf_counter() - start


def metrics_milliseconds(preset: str, step: Step) -> float:
    """Return the milliseconds to reduce the metrics of a step to one value per name, including quantiles."""
    metrics = OBJECTIVES[preset](step.batch).metrics
    return 1e3 * min(seconds(step, lambda _: metrics.means()) for _ in range(5))


def check_equal(preset: str) -> None:
    """Check that both sides give the same loss and gradient; a speed-up would be meaningless otherwise."""
    step = make_step(20_000, 400, torch.float64)
    losses: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for run in (run_keel, run_loop):
        step.batch.logprobs.grad = None
        losses.append(run(preset, step))
        gradients.append(step.batch.logprobs.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def peak_tensors(step: Step, run: Callable[[Step], object]) -> float:
    """Return the peak memory allocated by forward and backward, in float32 tensors as long as the batch.

    The sum of the peaks of torch's allocator (including kernels and the gradient) and of Python's and numpy's: an upper
    bound, since the two peaks may occur at different times.
    """
    step.batch.logprobs.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tracemalloc.start()
        run(step)
        _, python_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    now = peak = 0
    results = profiler.profiler.kineto_results
    for event in results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return (peak + python_peak) / (4 * len(step.batch))


class Report:
    """Prints each value with its threshold and records whether any was missed."""

    def __init__(self) -> None:
        self.missed = False

    def line(self, name: str, values: list[float], threshold: float, at_least: bool = False, unit: str = "x") -> None:
        middle = median(values)
        met = middle >= threshold if at_least else middle <= threshold
        self.missed |= not met
        text = f"{middle:8.2f}{unit}"
        if len(values) > 1:
            deciles = quantiles(values, n=10, method="inclusive")
            text += f"  ({deciles[0]:.2f} to {deciles[-1]:.2f})"
        bound = f"at {'least' if at_least else 'most'} {threshold:g}"
        print(f"  {name:<34}{text:<30}{bound:<14}{'pass' if met else 'MISS'}")


def compare(step: Step, rounds: int, repeats: int, report: Report) -> None:
    """Time the loop, the minimal loss, Keel and Keel with metrics in turn."""
    speedup: dict[str, list[float]] = {preset: [] for preset in PRESETS}
    cost: dict[str, list[float]] = {preset: [] for preset in PRESETS}
    metrics: dict[str, list[float]] = {preset: [] for preset in PRESETS}
    milliseconds: dict[str, list[float]] = {preset: [] for preset in PRESETS}
    for number in range(rounds + 1):
        for preset in PRESETS:
            without_metrics, with_metrics = partial(run_keel, preset), partial(run_keel, preset, metrics=True)
            turns: list[list[float]] = [[], [], []]
            for _ in range(repeats):
                turns[0].append(seconds(step, run_minimum))
                turns[1].append(seconds(step, without_metrics))
                turns[2].append(seconds(step, with_metrics))
            minimum, plain, measured = (min(turn) for turn in turns)  # the least disturbed turn
            if number == 0:  # warm-up: allocator, thread pool, caches
                continue
            loop = seconds(step, partial(run_loop, preset))
            gc.collect()
            speedup[preset].append(loop / plain)
            cost[preset].append(plain / minimum)
            metrics[preset].append(measured / plain)
            milliseconds[preset].append(1e3 * plain)
    for preset in PRESETS:
        step_ms, reduce_ms = median(milliseconds[preset]), metrics_milliseconds(preset, step)
        print(f"{preset}: {step_ms:.1f} ms forward and backward; {reduce_ms:.1f} ms to reduce metrics")
        report.line("faster than a loop over sequences", speedup[preset], LOOP_THRESHOLD, at_least=True)
        report.line("cost relative to the minimal loss", cost[preset], MINIMUM_THRESHOLD)
        report.line("with metrics relative to without", metrics[preset], METRICS_THRESHOLD)


def per_token_growth(step: Step, large: Step, run: Callable[[Step], object]) -> float:
    small_time = min(seconds(step, run) for _ in range(GROWTH))
    return min(seconds(large, run) for _ in range(2)) / small_time / GROWTH


def grow(step: Step, rounds: int, report: Report) -> None:
    """Compare time and memory per token with those of a step that is ten times longer."""
    large = make_step(GROWTH * len(step.batch), GROWTH * len(step.lengths))
    for preset in PRESETS:
        run = partial(run_keel, preset)
        small_peak = peak_tensors(step, run)
        large_peak = peak_tensors(large, run)
        keel_growth = [per_token_growth(step, large, run) for _ in range(rounds)]
        minimum_growth = [per_token_growth(step, large, run_minimum) for _ in range(rounds)]
        print(f"{preset}: from {len(step.batch):,} to {len(large.batch):,} tokens")
        print(
            f"  a token takes {median(keel_growth):.2f}x the time; with the minimal loss {median(minimum_growth):.2f}x"
        )
        relative = [a / b for a, b in zip(keel_growth, minimum_growth, strict=True)]
        report.line("time per token relative to minimal", relative, GROWTH_THRESHOLD)
        report.line("memory per token", [large_peak / small_peak], 1.05)
        report.line("peak extra memory", [large_peak], MEMORY_THRESHOLD, unit=" tensors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1, the least noisy)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens and sequences, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.sequences, options.rounds = options.tokens // 10, options.sequences // 10, 2
    torch.set_num_threads(options.threads)
    step = make_step(options.tokens, options.sequences)
    settle_allocator()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    shortest, longest = min(step.lengths), max(step.lengths)
    print(f"{len(step.batch):,} tokens in {len(step.lengths):,} sequences of {shortest} to {longest} tokens")
    for preset in PRESETS:
        check_equal(preset)
        result = OBJECTIVES[preset](step.batch)
        print(f"  {preset} drops {1 - result.kept_tokens / len(step.batch):.2%} of the tokens")
    print("median over rounds (10 % to 90 %)")
    report = Report()
    compare(step, options.rounds, 5, report)
    grow(step, options.rounds, report)
    print("a threshold was missed" if report.missed else "all thresholds met")
    return int(report.missed)


if __name__ == "__main__":
    sys.exit(main())
