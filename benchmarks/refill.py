"""Sampled tokens until the evaluation reward of a recipe reaches a target, with and without scheduler.refill.

    python benchmarks/refill.py [--seeds 0,1,2] [--target 0.8]

Runs `keel train larger_number` once for each seed and setting, alternating, and prints a table and the ratio of the
medians. Every sampled token counts: also those of zero-variance groups and of rollouts that were dropped.
"""

import argparse
import os
import sys

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import sqlite3
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from keel.run.ledger import Ledger


class Outcome(NamedTuple):
    """What one run needed to reach the target; `None` if it did not."""

    step: int | None
    tokens: int | None
    total_tokens: int
    last_reward: float


def train(folder: Path, seed: int, refill: bool, args: argparse.Namespace) -> Outcome:
    """Run the recipe in `folder` unless it has already run there, and read its ledger."""
    if not folder.exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "keel.cli", "train", args.recipe, "--run", str(folder), "--seed", str(seed)),
                *("--scheduler.refill", "true" if refill else "false", "--evaluation.every", str(args.every)),
                *("--evaluation.num_tasks", str(args.tasks), "--steps", str(args.steps)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    ledger = Ledger(folder / "run.db")
    rewards = [(step, metrics["reward"]) for step, _, metrics in ledger.evaluations()]
    ledger.close()
    reached = next((step for step, reward in rewards if reward >= args.target), None)
    with sqlite3.connect(folder / "run.db") as database:
        counted = database.execute("SELECT step, SUM(tokens) FROM rollouts GROUP BY step").fetchall()
    until = None if reached is None else sum(tokens for step, tokens in counted if step <= reached)
    return Outcome(reached, until, sum(tokens for _, tokens in counted), rewards[-1][1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="larger_number")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between two evaluations (default: 4)")
    parser.add_argument("--tasks", type=int, default=128, help="tasks of an evaluation (default: 128)")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder, and continue from those in it")
    args = parser.parse_args()
    needed: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as temporary:
        runs = args.runs or Path(temporary)
        for seed in (int(text) for text in args.seeds.split(",")):
            for refill in (True, False):
                outcome = train(runs / f"seed_{seed}_{'refill' if refill else 'plain'}", seed, refill, args)
                needed[refill].append(float("inf") if outcome.tokens is None else outcome.tokens)
                when = "not reached" if outcome.step is None else f"step {outcome.step:3}, {outcome.tokens:7,} tokens"
                print(
                    f"seed {seed}  refill = {str(refill).lower():5}  {args.target:g}: {when:28}"
                    f"  end: {outcome.last_reward:.2f}, {outcome.total_tokens:,} tokens",
                    flush=True,
                )
    with_refill, without = (statistics.median(needed[refill]) for refill in (True, False))
    print(f"sampled tokens until {args.target:g}, median with refill / without: {with_refill / without:.2f}")
    return 0 if with_refill < without else 1


if __name__ == "__main__":
    raise SystemExit(main())
