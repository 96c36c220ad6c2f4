"""What the training signal costs: against a loop over sequences, and against the least that any loss must do.

Both sides run in one process, in interleaved rounds, and are printed as ratios with their spread, so the numbers hold
on a busy machine. Exits 1 when a promised bar is missed. It measures the loss alone, on CPU tensors: no model, no
log-softmax, no GPU.

    python benchmarks/signal.py            # 1 million tokens in 20,000 sequences, and growth to 10 million
    python benchmarks/signal.py --quick    # a tenth of the tokens in few rounds, to see that it works
"""

import os
import sys

# torch imports the standard library's signal, so this file's folder must come last
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

RULES = ("icepop", "ipo_kl", "opsm", "gspo")
OBJECTIVES = {rule: objective(rule) for rule in RULES}
LOOP_BAR, MINIMUM_BAR, METRICS_BAR, MEMORY_BAR = 20.0, 4.0, 1.5, 12.0
GROWTH, GROWTH_BAR = 10, 1.5
"""Against the bare minimum, whose time per token grows too: past the caches, and by page faults in large tensors."""


@dataclass(frozen=True)
class Step:
    """A batch and the lengths of its sequences, which lie one after another."""

    batch: TokenBatch
    lengths: list[int]


def make_step(tokens: int, sequences: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Step:
    """Uneven sequences, one advantage each, four staleness values; the staler, the further from the sampler."""
    random = torch.Generator().manual_seed(seed)
    share = torch.randn(sequences, generator=random).exp_().double()
    ends = (share.cumsum(0) / share.sum() * (tokens - sequences)).round().long()
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)) + 1
    sequence = torch.arange(sequences).repeat_interleave(lengths)
    staleness = torch.randint(0, 4, (sequences,), generator=random)[sequence]
    logprobs = torch.empty(tokens, dtype=torch.float64).exponential_(2.0, generator=random).neg_()
    # most tokens agree to a few percent, and the odd one not at all: what mixed precision and old weights look like
    noise = torch.randn(tokens, generator=random, dtype=torch.float64) * (0.02 + 0.03 * staleness)
    noise += 1.5 * torch.randn(tokens, generator=random) * (torch.rand(tokens, generator=random) < 0.02)
    batch = TokenBatch(
        logprobs=logprobs.to(dtype, copy=True).requires_grad_(),
        sampler_logprobs=(logprobs - noise).clamp_(max=0.0).to(dtype),
        advantages=torch.randn(sequences, generator=random)[sequence].to(dtype),
        trainable=torch.ones(tokens, dtype=torch.bool),
        sequence=sequence,
        version=100 - staleness,
    )
    return Step(batch, lengths.tolist())


def one_sequence(rule: str, logprobs: Tensor, sampler: Tensor, advantages: Tensor) -> Tensor:
    """The rule as it is usually written: one sequence, autograd, to be divided by the caller."""
    d = logprobs - sampler
    if rule in ("icepop", "ipo_kl"):
        dropped = (d.detach() < math.log(0.2)) | (d.detach() > math.log(5.0))
        terms = -advantages * d.masked_fill(dropped, 0.0).exp()
        if rule == "ipo_kl":
            terms = terms + 1e-3 * d.square()
        return terms.masked_fill(dropped, 0.0).sum()
    if rule == "opsm":
        rejected = (advantages.mean() < 0) & (-d.detach().mean() > 1e-4)
        r = d.masked_fill(rejected, 0.0).exp()
        terms = torch.maximum(-r * advantages, -r.clamp(0.8, 1.2) * advantages)
        return terms.masked_fill(rejected, 0.0).sum()
    r, advantage = d.mean().exp(), advantages.mean()
    return torch.maximum(-r * advantage, -r.clamp(1 - 3e-4, 1 + 4e-4) * advantage)


def run_loop(rule: str, step: Step) -> Tensor:
    batch = step.batch
    assert batch.sampler_logprobs is not None
    # split, not slices: the backward of 20,000 slices would fill 20,000 tensors as long as the batch
    fields = (batch.logprobs, batch.sampler_logprobs, batch.advantages)
    parts = zip(*(torch.split(field, step.lengths) for field in fields), strict=True)
    loss = torch.stack([one_sequence(rule, *part) for part in parts]).sum()
    loss = loss / (len(step.lengths) if rule == "gspo" else len(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def run_minimum(step: Step) -> None:
    batch = step.batch
    assert batch.sampler_logprobs is not None
    loss = -((batch.logprobs - batch.sampler_logprobs).exp() * batch.advantages).sum() / len(batch)
    loss.backward()  # type: ignore[no-untyped-call]


def run_keel(rule: str, step: Step, metrics: bool = False) -> Tensor:
    result = OBJECTIVES[rule](step.batch)
    result.loss.backward()  # type: ignore[no-untyped-call]
    if metrics:
        len(result.metrics)  # every pair, by staleness too, is formed when they are first read
    return result.loss.detach()


def settle_allocator() -> None:
    """Free one large block, as any process with a model has: from then on glibc reuses blocks of up to 32 MB.

    Before, it hands each tensor back to the system and page faults, on both sides, hide what is measured.
    """
    torch.ones(31 << 18)


def seconds(step: Step, run: Callable[[Step], object]) -> float:
    step.batch.logprobs.grad = None
    start = time.perf_counter()
    run(step)
    return time.perf_counter() - start


def printing(rule: str, step: Step) -> float:
    """Milliseconds from the pairs of a step to one number for each name, quantiles included; once a step."""
    metrics = OBJECTIVES[rule](step.batch).metrics
    return 1e3 * min(seconds(step, lambda _: metrics.means()) for _ in range(5))


def check_same_rule(rule: str) -> None:
    """A speed-up over another rule would say nothing, so both sides must give the same loss and gradient."""
    step = make_step(20_000, 400, torch.float64)
    losses: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for run in (run_keel, run_loop):
        step.batch.logprobs.grad = None
        losses.append(run(rule, step))
        gradients.append(step.batch.logprobs.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def peak_tensors(step: Step, run: Callable[[Step], object]) -> float:
    """Peak of the memory that forward and backward allocate, in float32 tensors as long as the batch.

    The peak of torch's allocator, inside kernels and with the gradient, plus the peak of numpy's and Python's: at most
    too high, since the two peaks need not meet.
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
    """Prints each number against its bar and remembers whether one was missed."""

    def __init__(self) -> None:
        self.missed = False

    def line(self, name: str, values: list[float], bar: float, at_least: bool = False, unit: str = "x") -> None:
        middle = median(values)
        met = middle >= bar if at_least else middle <= bar
        self.missed |= not met
        text = f"{middle:8.2f}{unit}"
        if len(values) > 1:
            deciles = quantiles(values, n=10, method="inclusive")
            text += f"  ({deciles[0]:.2f} to {deciles[-1]:.2f})"
        bound = f"at {'least' if at_least else 'most'} {bar:g}"
        print(f"  {name:<34}{text:<30}{bound:<14}{'pass' if met else 'MISS'}")


def compare(step: Step, rounds: int, repeats: int, report: Report) -> None:
    """Loop, minimum, Keel and Keel with metrics, in turns."""
    speedup: dict[str, list[float]] = {rule: [] for rule in RULES}
    cost: dict[str, list[float]] = {rule: [] for rule in RULES}
    metrics: dict[str, list[float]] = {rule: [] for rule in RULES}
    shown: dict[str, list[float]] = {rule: [] for rule in RULES}
    for number in range(rounds + 1):
        for rule in RULES:
            ours, with_metrics = partial(run_keel, rule), partial(run_keel, rule, metrics=True)
            turns: list[list[float]] = [[], [], []]
            for _ in range(repeats):
                turns[0].append(seconds(step, run_minimum))
                turns[1].append(seconds(step, ours))
                turns[2].append(seconds(step, with_metrics))
            minimum, plain, measured = (min(turn) for turn in turns)  # the least disturbed turn of the round
            if number == 0:  # warm-up: allocator, thread pool, caches
                continue
            loop = seconds(step, partial(run_loop, rule))
            gc.collect()
            speedup[rule].append(loop / plain)
            cost[rule].append(plain / minimum)
            metrics[rule].append(measured / plain)
            shown[rule].append(1e3 * plain)
    for rule in RULES:
        print(
            f"{rule}: {median(shown[rule]):.1f} ms forward and backward; to print metrics {printing(rule, step):.1f} ms"
        )
        report.line("faster than a loop over sequences", speedup[rule], LOOP_BAR, at_least=True)
        report.line("cost against the bare minimum", cost[rule], MINIMUM_BAR)
        report.line("with metrics against without", metrics[rule], METRICS_BAR)


def per_token_growth(step: Step, large: Step, run: Callable[[Step], object]) -> float:
    small_time = min(seconds(step, run) for _ in range(GROWTH))
    return min(seconds(large, run) for _ in range(2)) / small_time / GROWTH


def grow(step: Step, rounds: int, report: Report) -> None:
    """Time and memory per token, from a step to one that is ten times longer."""
    large = make_step(GROWTH * len(step.batch), GROWTH * len(step.lengths))
    for rule in RULES:
        ours = partial(run_keel, rule)
        small_peak = peak_tensors(step, ours)
        large_peak = peak_tensors(large, ours)
        ours_grows = [per_token_growth(step, large, ours) for _ in range(rounds)]
        bare_grows = [per_token_growth(step, large, run_minimum) for _ in range(rounds)]
        print(f"{rule}: from {len(step.batch):,} to {len(large.batch):,} tokens")
        print(f"  a token takes {median(ours_grows):.2f}x the time; in the bare minimum {median(bare_grows):.2f}x")
        relative = [a / b for a, b in zip(ours_grows, bare_grows, strict=True)]
        report.line("time per token against the minimum", relative, GROWTH_BAR)
        report.line("memory per token", [large_peak / small_peak], 1.05)
        report.line("peak extra memory", [large_peak], MEMORY_BAR, unit=" tensors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of torch; 1, since more of them time the scheduler too")
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
    for rule in RULES:
        check_same_rule(rule)
        result = OBJECTIVES[rule](step.batch)
        print(f"  {rule} drops {1 - result.kept_tokens / len(step.batch):.2%} of the tokens")
    print("median over rounds (10 % to 90 %)")
    report = Report()
    compare(step, options.rounds, 5, report)
    grow(step, options.rounds, report)
    print("missed a bar" if report.missed else "every bar met")
    return int(report.missed)


if __name__ == "__main__":
    sys.exit(main())
