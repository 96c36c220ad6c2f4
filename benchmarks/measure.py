"""Helpers of the benchmarks: interleaved timing, ratios with their spread, and peak memory."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any


def seconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleave(sides: Mapping[str, Callable[[], object]], rounds: int, *, warm: bool = False) -> dict[str, list[float]]:
    """Return the seconds of each side, run in turn in each round; without `warm`, after an untimed round."""
    for run in () if warm else sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(seconds(run))
    return times


def ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> tuple[float, float, float]:
    """Return the median, lowest and highest ratio of two sides over the rounds."""
    ratios = [a / b for a, b in zip(times[numerator], times[denominator], strict=True)]
    return median(ratios), min(ratios), max(ratios)


def verdict(passed: bool) -> str:
    return "ok" if passed else "MISS"


class Peak:
    """Increase of this process's peak resident memory since `start` (Linux only)."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def megabytes(self) -> float:
        return (_status("VmHWM") - self.before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run_in_new_process(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script and return the JSON object on its last line; a fresh process gives a clean peak memory."""
    process = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result
