"""What log-probs and their gradients cost without the logits: the fused head against the naive formula.

4096 trainable tokens, 49152 words, width 576, float32: forward and backward, gradients of hidden states and weights
included. Time is interleaved in one process; memory is the peak of a process of its own. Exits 1 when a bar is missed.

    python benchmarks/head.py            # about two minutes
    python benchmarks/head.py --quick    # an eighth of the tokens, to see that it works
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

# the repository in place of this folder, whose signal.py is not the standard library's
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import torch

from benchmarks.measure import Peak, in_process_of_its_own, interleave, ratio, verdict
from keel.training.step.lm_head import LMHead, logprobs
from keel.training.step.malloc import retain_freed_memory

WORDS, WIDTH = 49152, 576
TIME_BAR, MEMORY_BAR = 1.1, 350.0


class Problem:
    """Hidden states, weights, targets, and what each log-prob is worth."""

    def __init__(self, tokens: int, words: int = WORDS) -> None:
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH, generator=random).requires_grad_()
        self.weight = torch.randn(words, WIDTH, generator=random).mul_(0.05).requires_grad_()
        self.targets = torch.randint(0, words, (tokens,), generator=random)
        self.worth = torch.randn(tokens, generator=random)
        self.head = LMHead(self.weight)

    def sides(self) -> dict[str, Callable[[], None]]:
        return {"naive": self.naive, "fused": self.fused, "recomputed": self.recomputed}

    def naive(self) -> None:
        self.hidden.grad = self.weight.grad = None
        logits = self.hidden @ self.weight.T
        chosen = logits.gather(1, self.targets[:, None])[:, 0] - logits.logsumexp(-1)
        (chosen * self.worth).sum().backward()  # type: ignore[no-untyped-call]

    def fused(self) -> None:
        """Token-local objectives: what a log-prob is worth is known in the same pass."""
        self.hidden.grad = self.weight.grad = None
        worth = self.worth
        _, gradients = self.head.score_and_grad(self.hidden.detach(), self.targets, 1.0, lambda _, rows: worth[rows])
        self.hidden.grad, self.weight.grad = gradients.hidden, gradients.weight

    def recomputed(self) -> None:
        """Other objectives: logits again in the backward."""
        self.hidden.grad = self.weight.grad = None
        chosen = logprobs(self.head, self.hidden, self.targets)
        (chosen * self.worth).sum().backward()  # type: ignore[no-untyped-call]


def check_equal(tokens: int) -> float:
    """The largest relative difference of a gradient from the naive one."""
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
        # libraries load on first use; a small vocabulary leaves no freed memory that the measured run could use again
        Problem(8, 64).sides()[args.peak]()
        peak.start()
        problem.sides()[args.peak]()
        print(json.dumps({"megabytes": peak.megabytes()}))
        return 0
    print(f"{tokens} tokens x {WORDS} words, width {WIDTH}, float32, {torch.get_num_threads()} threads")
    print(f"gradients equal the naive ones to {check_equal(min(tokens, 512)):.1e} (relative)\n")
    times = interleave(Problem(tokens).sides(), args.rounds)
    missed = False
    print(f"{'':12} {'seconds':>8}   against naive (lowest to highest)   peak extra memory")
    for name in times:
        memory = in_process_of_its_own(__file__, "--peak", name, "--tokens", str(tokens))["megabytes"]
        middle, low, high = ratio(times, name, "naive")
        judged = ""
        if name == "fused":
            held = middle <= TIME_BAR and memory <= MEMORY_BAR
            missed |= not held
            judged = f"  {verdict(held)}: at most {TIME_BAR}x and {MEMORY_BAR:.0f} MB"
        spread = f"{middle:5.2f}x ({low:.2f} to {high:.2f})"
        print(f"{name:12} {min(times[name]):8.2f}   {spread:32} {memory:9.0f} MB{judged}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
