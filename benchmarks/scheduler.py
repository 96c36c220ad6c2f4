"""Overhead of the scheduler compared with a plain asyncio semaphore and gather with the same awaits.

Both sides run the same 20,000 rollouts, at most 5,000 concurrently, on one core, interleaved. A rollout sleeps equally
often and long on both sides, a few milliseconds at most, so that nearly all time is spent in asyncio and in the
scheduler; in the second case the sleeps have no duration. Since asyncio's semaphore is slow when thousands wait for it,
the same threshold applies to gather alone, in waves of as many rollouts as may be in flight. Memory is the peak of
Python's allocations (tracemalloc): it must be linear in the rollouts in flight and independent of the total. Exits with
1 if a threshold is missed.

    python benchmarks/scheduler.py            # about a minute and a half
    python benchmarks/scheduler.py --quick    # a fifth of the rollouts, once
    python benchmarks/scheduler.py --growth   # memory only; writes docs/images/scheduler.svg
"""

import argparse
import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import asyncio

from benchmarks.measure import interleave, ratio, verdict
from benchmarks.plot import Line, Panel, write_svg
from keel.config import SchedulerSettings
from keel.rollout.scheduler.groups import RolloutRequest
from keel.rollout.scheduler.scheduler import Scheduler
from keel.rollout.scheduler.task_sources import TaskSource

ROOT = Path(__file__).parent.parent
GROUP = 8
AHEAD = 4
"""Batches ahead of the current one: five batches may be in flight together."""
TIME_THRESHOLD = 3.0
"""Most time relative to the semaphore and to gather."""
MEMORY_THRESHOLD = 1.15
"""Most growth of the peak memory with five times as many rollouts and the same number in flight."""


@dataclass(frozen=True)
class Task:
    id: str


@dataclass(frozen=True, slots=True)
class FakeRollout:
    """A rollout with the attributes that the scheduler reads."""

    error_kind: str | None = None
    error: str | None = None
    oldest_version: int = 0


@dataclass(frozen=True)
class Case:
    rollouts: int
    in_flight: int
    sleeps: int = 2
    max_sleep: float = 0.004

    def seconds(self, number: int) -> float:
        """Return a sleep time, evenly distributed and the same on both sides."""
        return self.max_sleep * (number * 7919 % 1000) / 1000

    async def episode(self, number: int) -> FakeRollout:
        for _ in range(self.sleeps):
            await asyncio.sleep(self.seconds(number))
        return FakeRollout()

    async def with_semaphore(self) -> None:
        semaphore = asyncio.Semaphore(self.in_flight)

        async def run(number: int) -> FakeRollout:
            async with semaphore:
                return await self.episode(number)

        results = await asyncio.gather(*(run(number) for number in range(self.rollouts)))
        assert len(results) == self.rollouts

    async def with_gather(self) -> None:
        """Run waves of as many rollouts as may be in flight, each in its own task, without a semaphore."""
        for first in range(0, self.rollouts, self.in_flight):
            numbers = range(first, min(first + self.in_flight, self.rollouts))
            await asyncio.gather(*(self.episode(number) for number in numbers))

    async def with_scheduler(self) -> None:
        groups = self.in_flight // (GROUP * (AHEAD + 1))
        settings = SchedulerSettings(
            groups_per_step=groups,
            group_size=GROUP,
            max_in_flight=self.in_flight,
            max_off_policy_steps=AHEAD,
            window_batches=1,
        )
        numbers = iter(range(self.rollouts * 2))

        async def run(_request: RolloutRequest) -> FakeRollout:
            return await self.episode(next(numbers))

        tasks = (Task(str(number)) for number in range(self.rollouts // GROUP))
        scheduler = Scheduler(run, [TaskSource("bench", tasks)], settings)
        emitted = 0
        while emitted < self.rollouts // GROUP * GROUP:
            batch = await scheduler.next_batch(0)
            emitted += sum(len(group.members) for group in batch.groups)
        assert not await scheduler.close()


def compare(case: Case, rounds: int) -> bool:
    sides: dict[str, Callable[[], object]] = {
        "semaphore": lambda: asyncio.run(case.with_semaphore()),
        "gather": lambda: asyncio.run(case.with_gather()),
        "scheduler": lambda: asyncio.run(case.with_scheduler()),
    }
    times = interleave(sides, rounds)
    sleeps = f"{case.sleeps} sleeps of up to {case.max_sleep * 1e3:g} ms"
    print(f"{case.rollouts} rollouts, {case.in_flight} in flight, {sleeps}")
    for name, values in times.items():
        per_rollout = min(values) / case.rollouts * 1e6
        seconds = " ".join(f"{value:5.2f}" for value in values)
        print(f"  {name:10} s   {seconds}   at best {per_rollout:.0f} µs a rollout")
    passed = True
    for name, label in (("semaphore", "semaphore and gather"), ("gather", "gather alone, in waves")):
        middle, low, high = ratio(times, "scheduler", name)
        met = middle <= TIME_THRESHOLD
        passed &= met
        print(f"  times {label:24} {middle:.2f} ({low:.2f} to {high:.2f})   {verdict(met)}: at most {TIME_THRESHOLD:g}")
    return passed


def peak(case: Case) -> float:
    """Return the peak of Python's allocations in megabytes while the scheduler runs."""
    gc.collect()
    tracemalloc.start()
    asyncio.run(case.with_scheduler())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak_bytes / 1e6


def memory(rollouts: int, in_flight: int, *, draw: bool) -> bool:
    """Measure peak memory by the total, which must not matter, and by the rollouts in flight, which must be linear."""
    totals = [rollouts // 4, rollouts // 2, rollouts, rollouts * 5 // 4]
    concurrencies = [in_flight // 4, in_flight // 2, in_flight]
    by_total = [peak(Case(total, in_flight // 4)) for total in totals]
    by_concurrency = [peak(Case(rollouts, concurrency)) for concurrency in concurrencies]
    print(f"peak memory, {in_flight // 4} in flight")
    flat = by_total[-1] <= MEMORY_THRESHOLD * by_total[0]
    for total, megabytes in zip(totals, by_total, strict=True):
        print(f"  {total:6} rollouts   {megabytes:5.1f} MB")
    growth = by_total[-1] / by_total[0]
    print(f"  times more for {totals[-1] / totals[0]:.0f} times the rollouts: {growth:.2f}   {verdict(flat)}")
    print(f"peak memory, {rollouts} rollouts")
    for concurrency, megabytes in zip(concurrencies, by_concurrency, strict=True):
        print(f"  {concurrency:6} in flight   {megabytes:5.1f} MB   {megabytes / concurrency * 1e3:.1f} kB each")
    linear = by_concurrency[-1] / concurrencies[-1] <= MEMORY_THRESHOLD * by_concurrency[0] / concurrencies[0]
    print(f"  memory per rollout in flight does not grow   {verdict(linear)}")
    if draw:
        write_growth(totals, by_total, concurrencies, by_concurrency)
    return flat and linear


def write_growth(
    totals: list[int], by_total: list[float], concurrencies: list[int], by_concurrency: list[float]
) -> None:
    panels = [
        Panel("total rollouts", "peak MB", [Line("scheduler", [float(x) for x in totals], by_total)]),
        Panel("rollouts in flight", "peak MB", [Line("scheduler", [float(x) for x in concurrencies], by_concurrency)]),
    ]
    write_svg(ROOT / "docs" / "images" / "scheduler.svg", [panels])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    total, in_flight, rounds = (4000, 1000, 1) if args.quick else (20000, 5000, args.rounds)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    passed = [memory(total, in_flight, draw=args.growth)]
    if not args.growth:
        passed += [compare(Case(total, in_flight), rounds), compare(Case(total, in_flight, 1, 0.0), rounds)]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
