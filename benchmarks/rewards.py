"""Verifier calls of which 5 % hang and 5 % crash, against the same calls without faults.

    python benchmarks/rewards.py [--calls 1000] [--rounds 3]

A healthy call needs a fixed amount of processor time, a hanging one is a busy loop. Every call must return or fail
within its time limit; the throughput of the healthy calls must be at least 0.8 of that without faults. Both sides run
in one process, interleaved.
"""

import argparse
import os
import random
import sys
from pathlib import Path

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import asyncio
import statistics
import tempfile
import time

from keel.rollout.environments.rewards.workers import RewardError, RewardFunction, RewardWorkers

FUNCTIONS = """
import os, time

def verify(completion, seconds):
    if completion == "hang":
        while True:
            pass
    if completion == "crash":
        os._exit(3)
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(10_000))
    return 1.0
"""
TIMEOUT = 2.0
BAR = 0.8


async def measure(workers: int, calls: list[str], seconds: float) -> tuple[float, dict[str, int]]:
    """Return the healthy calls per second, and how every call ended."""
    outcomes: dict[str, int] = {}

    async def call(pool: RewardWorkers, completion: str) -> None:
        try:
            await pool.call(0, {"completion": completion, "seconds": seconds})
            outcome = "scored"
        except RewardError as error:
            outcome = error.kind
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    async with RewardWorkers(workers, timeout=TIMEOUT) as pool:
        pool.register(RewardFunction("benchmark_rewards:verify"))
        await asyncio.gather(*(pool.call(0, {"completion": "", "seconds": seconds}) for _ in range(workers)))
        start = time.monotonic()
        await asyncio.gather(*(call(pool, completion) for completion in calls))
        elapsed = time.monotonic() - start
    return outcomes.get("scored", 0) / elapsed, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.05, help="processor time of a healthy call (default: 0.05)")
    args = parser.parse_args()
    kinds = ["hang"] * (args.calls // 20) + ["crash"] * (args.calls // 20)
    faulty = kinds + ["good"] * (args.calls - len(kinds))
    random.Random(0).shuffle(faulty)
    ratios, complete = [], True
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "benchmark_rewards.py").write_text(FUNCTIONS)
        sys.path.insert(0, folder)
        for number in range(args.rounds):
            plain, _ = asyncio.run(measure(args.workers, ["good"] * args.calls, args.seconds))
            mixed, outcomes = asyncio.run(measure(args.workers, faulty, args.seconds))
            complete = complete and sum(outcomes.values()) == args.calls
            ratios.append(mixed / plain)
            print(
                f"round {number + 1}: {plain:6.1f} a second without faults, {mixed:6.1f} with; {outcomes}", flush=True
            )
    middle = statistics.median(ratios)
    passed = middle >= BAR and complete
    print(
        f"throughput with faults: {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), threshold {BAR}: "
        f"{'ok' if passed else 'missed'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
