"""What the benchmarks of the policy share: interleaved timing, ratios with their spread, and peak memory."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleave(sides: Mapping[str, Callable[[], object]], rounds: int, *, warm: bool = False) -> dict[str, list[float]]:
    """Seconds of each side, one after another in each round; unless they are warm, after one round more."""
    for run in () if warm else sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(seconds(run))
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> tuple[float, float, float]:
    """Median, lowest and highest of the rounds' ratios."""
    ratios = [a / b for a, b in zip(times[above], times[below], strict=True)]
    return median(ratios), min(ratios), max(ratios)


def verdict(held: bool) -> str:
    return "ok" if held else "MISS"


class Peak:
    """Peak resident memory of this process from `start` on, above what it was there. Linux."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def megabytes(self) -> float:
        return (_status("VmHWM") - self.before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def in_process_of_its_own(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script with these arguments and read the JSON object it prints last: memory needs a fresh process."""
    done = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
