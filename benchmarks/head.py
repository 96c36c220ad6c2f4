"""Time and memory of the fused LM head, which never stores all logits, compared with the naive formula.

4096 trainable tokens, vocabulary of 49152, width 576, float32: forward and backward, including gradients of hidden
states and weights. Times are interleaved in one process; memory is the peak of a separate process. Exits with 1 if a
threshold is missed.

    python benchmarks/head.py            # about two minutes
    python benchmarks/head.py --quick    # an eighth of the tokens, as a smoke test
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import torch

from benchmarks.measure import Peak, interleave, ratio, run_in_new_process, verdict
from keel.training.step.lm_head import LMHead, logprobs
from keel.training.step.malloc import retain_freed_memory

VOCAB_SIZE, WIDTH = 49152, 576
TIME_THRESHOLD, MEMORY_THRESHOLD = 1.1, 350.0


class Problem:
    """Hidden states, weights, targets and the gradient of the loss with respect to each log-prob."""

    def __init__(self, tokens: int, vocab_size: int = VOCAB_SIZE) -> None:
        rng = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH, generator=rng).requires_grad_()
        self.weight = torch.randn(vocab_size, WIDTH, generator=rng).mul_(0.05).requires_grad_()
        self.targets = torch.randint(0, vocab_size, (tokens,), generator=rng)
        self.grad_logprob = torch.randn(tokens, generator=rng)
        self.head = LMHead(self.weight)

    def sides(self) -> dict[str, Callable[[], None]]:
        return {"naive": self.naive, "fused": self.fused, "recomputed": self.recomputed}

    def naive(self) -> None:
        self.hidden.grad = self.weight.grad = None
        logits = self.hidden @ self.weight.T
        chosen = logits.gather(1, self.targets[:, None])[:, 0] - logits.logsumexp(-1)
        (chosen * self.grad_logprob).sum().backward()  # type: ignore[no-untyped-call]

    def fused(self) -> None:
        """Token-local objectives: the gradient of each log-prob is known in the same pass."""
        self.hidden.grad = self.weight.grad = None
        grad = self.grad_logprob
        _, gradients = self.head.score_and_grad(self.hidden.detach(), self.targets, 1.0, lambda _, rows: grad[rows])
        self.hidden.grad, self.weight.grad = gradients.hidden, gradients.weight

    def recomputed(self) -> None:
        """Other objectives: the logits are computed again in the backward pass."""
        self.hidden.grad = self.weight.grad = None
        chosen = logprobs(self.head, self.hidden, self.targets)
        (chosen * self.grad_logprob).sum().backward()  # type: ignore[no-untyped-call]


def check_equal(tokens: int) -> float:
    """Return the largest relative difference of a gradient from the naive one."""
    problem, gradients = Problem(tokens), {}
    for name, run in problem.sides().items():
        run()
        gradients[name] = [problem.hidden.grad, problem.weight.grad]
    pairs = [
        (ours, naive)
        for name in ("fused", "recomputed")
        for ours, naive in zip(gradients[name], gradients["naive"], strict=True)
    ]
    return max(
        float((ours - naive).norm() / naive.norm()) for ours, naive in pairs if ours is not None and naive is not None
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", metavar="SIDE", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = args.tokens or (512 if args.quick else 4096)
    retain_freed_memory()
    if args.peak:
        problem, peak = Problem(tokens), Peak()
        # load libraries first; a small vocabulary leaves no freed memory for the measured run to reuse
        Problem(8, 64).sides()[args.peak]()
        peak.start()
        problem.sides()[args.peak]()
        print(json.dumps({"megabytes": peak.megabytes()}))
        return 0
    print(f"{tokens} tokens x {VOCAB_SIZE} vocabulary, width {WIDTH}, float32, {torch.get_num_threads()} threads")
    print(f"gradients equal the naive ones to {check_equal(min(tokens, 512)):.1e} (relative)\n")
    times = interleave(Problem(tokens).sides(), args.rounds)
    missed = False
    print(f"{'':12} {'seconds':>8}   against naive (lowest to highest)   peak extra memory")
    for name in times:
        memory = run_in_new_process(__file__, "--peak", name, "--tokens", str(tokens))["megabytes"]
        middle, low, high = ratio(times, name, "naive")
        judged = ""
        if name == "fused":
            passed = middle <= TIME_THRESHOLD and memory <= MEMORY_THRESHOLD
            missed |= not passed
            judged = f"  {verdict(passed)}: at most {TIME_THRESHOLD}x and {MEMORY_THRESHOLD:.0f} MB"
        spread = f"{middle:5.2f}x ({low:.2f} to {high:.2f})"
        print(f"{name:12} {min(times[name]):8.2f}   {spread:32} {memory:9.0f} MB{judged}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
