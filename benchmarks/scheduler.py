"""What the scheduler costs by itself, against a bare asyncio semaphore and gather that does the same awaits.

Both sides run the same 20,000 rollouts, at most 5,000 at once, one core, interleaved. A rollout sleeps as often and as
long on either side, a few milliseconds at most, so that nearly all the time is spent in asyncio and in the scheduler;
the second case sleeps for no time at all, which leaves nothing to hide behind. Since asyncio's semaphore is slow when
thousands wait for it, the same bar is held against less: gather alone, in waves of as many as may be in flight. Memory
is what Python has allocated, by tracemalloc, at most at any time: it must be linear in what is in flight and flat in
the total. Exits 1 when a bar is missed.

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

# the repository in place of this folder, whose signal.py is not the standard library's
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
"""Batches of work ahead: with the one that is waited for, five that together may be in flight."""
BAR = 3.0
"""Times the bare semaphore and gather."""
MEMORY_BAR = 1.15
"""Peak memory of five times as many rollouts with the same number in flight, against that of fewer."""


@dataclass(frozen=True)
class Task:
    id: str


@dataclass(frozen=True, slots=True)
class Told:
    """A rollout, as far as the scheduler looks at it."""

    error_kind: str | None = None
    error: str | None = None
    oldest_version: int = 0


@dataclass(frozen=True)
class Case:
    rollouts: int
    in_flight: int
    sleeps: int = 2
    longest: float = 0.004

    def seconds(self, number: int) -> float:
        """Spread evenly, without chance: the same on both sides."""
        return self.longest * (number * 7919 % 1000) / 1000

    async def episode(self, number: int) -> Told:
        for _ in range(self.sleeps):
            await asyncio.sleep(self.seconds(number))
        return Told()

    async def bare(self) -> None:
        semaphore = asyncio.Semaphore(self.in_flight)

        async def one(number: int) -> Told:
            async with semaphore:
                return await self.episode(number)

        results = await asyncio.gather(*(one(number) for number in range(self.rollouts)))
        assert len(results) == self.rollouts

    async def gathered(self) -> None:
        """As many at a time as may be in flight, each in a task of its own, without a semaphore."""
        for first in range(0, self.rollouts, self.in_flight):
            numbers = range(first, min(first + self.in_flight, self.rollouts))
            await asyncio.gather(*(self.episode(number) for number in numbers))

    async def scheduled(self) -> None:
        groups = self.in_flight // (GROUP * (AHEAD + 1))
        settings = SchedulerSettings(
            groups_per_step=groups,
            group_size=GROUP,
            max_in_flight=self.in_flight,
            max_off_policy_steps=AHEAD,
            window_batches=1,
        )
        numbers = iter(range(self.rollouts * 2))

        async def run(_dispatch: RolloutRequest) -> Told:
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
        "semaphore": lambda: asyncio.run(case.bare()),
        "gather": lambda: asyncio.run(case.gathered()),
        "scheduler": lambda: asyncio.run(case.scheduled()),
    }
    times = interleave(sides, rounds)
    print(
        f"{case.rollouts} rollouts, {case.in_flight} in flight, {case.sleeps} sleeps of up to {case.longest * 1e3:g} ms"
    )
    for name, measured in times.items():
        each = min(measured) / case.rollouts * 1e6
        print(f"  {name:10} s   {' '.join(f'{value:5.2f}' for value in measured)}   at best {each:.0f} µs a rollout")
    held = True
    for name, what in (("semaphore", "semaphore and gather"), ("gather", "gather alone, in waves")):
        middle, low, high = ratio(times, "scheduler", name)
        held &= middle <= BAR
        print(f"  times {what:24} {middle:.2f} ({low:.2f} to {high:.2f})   {verdict(middle <= BAR)}: at most {BAR:g}")
    return held


def peak(case: Case) -> float:
    """Megabytes that Python had allocated at most while the scheduler ran."""
    gc.collect()
    tracemalloc.start()
    asyncio.run(case.scheduled())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most / 1e6


def memory(rollouts: int, in_flight: int, *, draw: bool) -> bool:
    """Peak memory by the total, which must not matter, and by what is in flight, which must not cost more than once."""
    totals = [rollouts // 4, rollouts // 2, rollouts, rollouts * 5 // 4]
    flights = [in_flight // 4, in_flight // 2, in_flight]
    by_total = [peak(Case(total, in_flight // 4)) for total in totals]
    by_flight = [peak(Case(rollouts, flying)) for flying in flights]
    print(f"peak memory, {in_flight // 4} in flight")
    flat = by_total[-1] <= MEMORY_BAR * by_total[0]
    for total, most in zip(totals, by_total, strict=True):
        print(f"  {total:6} rollouts   {most:5.1f} MB")
    more = by_total[-1] / by_total[0]
    print(f"  times more for {totals[-1] / totals[0]:.0f} times the rollouts: {more:.2f}   {verdict(flat)}")
    print(f"peak memory, {rollouts} rollouts")
    for flying, most in zip(flights, by_flight, strict=True):
        print(f"  {flying:6} in flight   {most:5.1f} MB   {most / flying * 1e3:.1f} kB each")
    linear = by_flight[-1] / flights[-1] <= MEMORY_BAR * by_flight[0] / flights[0]
    print(f"  no more for each than with the fewest   {verdict(linear)}")
    if draw:
        write_growth(totals, by_total, flights, by_flight)
    return flat and linear


def write_growth(totals: list[int], by_total: list[float], flights: list[int], by_flight: list[float]) -> None:
    panels = [
        Panel("rollouts in all", "peak MB", [Line("scheduler", [float(x) for x in totals], by_total)]),
        Panel("rollouts in flight", "peak MB", [Line("scheduler", [float(x) for x in flights], by_flight)]),
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
    held = [memory(total, in_flight, draw=args.growth)]
    if not args.growth:
        held += [compare(Case(total, in_flight), rounds), compare(Case(total, in_flight, 1, 0.0), rounds)]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
