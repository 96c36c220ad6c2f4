"""How soon the lens shows something on a large run, and what it costs.

Makes a run folder of a chosen apparent size: a few step files of 512 rollouts with 300 tokens each, hard-linked as
often as needed, and a ledger with a fate for every rollout (10 GB: a million of them). Files that are links of each
other are in the page cache after the first time: reading is of a warm disk, decoding is real. Then a server in a
process of its own and headless Chromium: first paint, curves drawn, the first histogram, how fast it is read on,
one rollout, tokens found over the step, and the largest the server ever was. Exits 1 when a bar is missed.

    python benchmarks/lens.py                   # 1 GB, about a minute
    python benchmarks/lens.py --gigabytes 10    # about two minutes
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

# the repository in place of this folder, whose signal.py is not the standard library's
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

import subprocess
import tempfile

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import verdict
from keel.config import load_settings
from keel.config.toml_writer import toml_lines
from keel.run.ledger import Ledger, RolloutOutcome
from keel.run.records import SCHEMA, step_path
from tests.support.lens_browser import browser, missing

ROOT = Path(__file__).parent.parent
ROLLOUTS, LENGTH, PROMPT, GROUP = 512, 300, 60, 8
DIFFERENT = 4
"""Step files that are not links of each other."""
READING = 20.0
"""Seconds that the histogram is read on for."""
PAINT_BAR = 1.0
"""Seconds until something is on the screen."""
MEMORY_BAR = 1500.0
"""Megabytes of the server."""


def make_file(path: Path, seed: int) -> None:
    """One step's rollouts, from chance."""
    chance = np.random.default_rng(seed)
    size = ROLLOUTS * LENGTH
    ends = pa.array(np.arange(0, size + 1, LENGTH, dtype=np.int32))
    own = np.tile(np.arange(LENGTH) >= PROMPT, ROLLOUTS)
    ids = chance.zipf(1.3, size).clip(max=49_000).astype(np.int32)
    sampler = np.where(own, -chance.exponential(0.7, size), 0.0)
    age = chance.integers(0, 4, size)
    policy = np.minimum(sampler + chance.normal(0, 0.02 + 0.3 * age), -1e-6)
    ratio = policy - sampler
    kept = np.select([ratio < np.log(0.2), ratio > np.log(5)], ["gate 0 (ratio) low", "gate 0 (ratio) high"], "trained")

    def tokens(values: Any, kind: pa.DataType, hidden: bool = True) -> pa.Array:
        return pa.ListArray.from_arrays(ends, pa.array(values, kind, mask=~own if hidden else None))

    rewards = chance.integers(0, 2, ROLLOUTS).astype(np.float64)
    same = {"step": 1, "version": 9, "environment": "sums", "task_id": "t", "attempt": 0, "sample": 0, "turns": 1}
    columns: dict[str, Any] = {name: [value] * ROLLOUTS for name, value in same.items()}
    columns |= {"fate": ["trained"] * ROLLOUTS, "reason": [None] * ROLLOUTS, "error": [None] * ROLLOUTS}
    columns |= {"split": ["start"] * ROLLOUTS, "temperature": [1.0] * ROLLOUTS, "reward": rewards}
    columns["group"] = [f"sums/{number // GROUP}" for number in range(ROLLOUTS)]
    columns["member"] = [number % GROUP for number in range(ROLLOUTS)]
    columns["advantage"] = rewards - 0.5
    columns["token_ids"] = tokens(ids, pa.int32(), hidden=False)
    columns["pieces"] = tokens([f" t{number}" for number in ids], pa.string(), hidden=False)
    columns["trainable"] = tokens(own, pa.bool_(), hidden=False)
    columns["versions"] = tokens(np.where(own, 9 - age, -1), pa.int32(), hidden=False)
    columns["sampler_logprobs"] = tokens(sampler, pa.float64(), hidden=False)
    for name, values in (("logprobs", policy), ("entropy", chance.exponential(0.5, size)), ("gradient", ratio / 1e4)):
        columns[name] = tokens(values, pa.float64())
    columns["reference_logprobs"] = [None] * ROLLOUTS
    columns["kept"] = tokens(kept, pa.string())
    pq.write_table(pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA), path, compression="zstd")


def make_folder(run: Path, gigabytes: float) -> tuple[int, int]:
    """A run of that size; its steps and rollouts."""
    (run / "rollouts").mkdir(parents=True)
    for number in range(DIFFERENT):
        make_file(step_path(run / "rollouts", number + 1), number)
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir()) / DIFFERENT
    steps = max(DIFFERENT, round(gigabytes * 1e9 / size))
    loaded = load_settings(overrides=["--objective.name", "icepop", "--steps", str(steps)])
    (run / "config.toml").write_text("".join(f"{line}{comment}\n" for line, comment in toml_lines(loaded)))
    (run / "run.json").write_text(json.dumps({"format": 1, "name": run.name, "created": time.time()}))
    ledger, chance = Ledger(run / "run.db", create=True), np.random.default_rng(0)
    ledger.set_status("running")
    names = ["reward", "loss", "mismatch_kl", "is_masked_low", "is_masked_high", "entropy", "staleness", "grad_norm"]
    names += [f"other/{number}" for number in range(40)]
    for step in range(1, steps + 1):
        if step > DIFFERENT:
            os.link(step_path(run / "rollouts", 1 + step % DIFFERENT), step_path(run / "rollouts", step))
        fates = [
            RolloutOutcome(
                f"s{step}/{number // GROUP}", number % GROUP, 0, "sums", "t", "trained", None, None, 0.5, LENGTH
            )
            for number in range(ROLLOUTS)
        ]
        numbers = dict(zip(names, chance.random(len(names)).tolist(), strict=True))
        ledger.write_step(step, version=step, stepped=True, metrics=numbers, outcomes=fates, state={})
    ledger.close()
    return steps, steps * ROLLOUTS


def peak(process: int) -> float:
    """Megabytes that a process had at most."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def seconds_of(client: httpx.Client, question: str, **words: Any) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    answer = client.get(f"/query/{question}", params=words)
    answer.raise_for_status()
    return time.perf_counter() - start, answer.json()


def measure(folder: Path) -> dict[str, float]:
    """What each thing takes, in seconds, and megabytes."""
    command = [sys.executable, "-m", "keel.cli", "lens", str(folder), "--port", "0"]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[-1]
        found = {"server up": time.perf_counter() - start}
        with browser() as window:
            window.open(address)
            window.wait("return document.body.dataset.ready === 'overview'", seconds=120)
            script = "return performance.getEntriesByName(arguments[0])[0].startTime / 1000"
            found["first paint"] = window.run(script, "first-contentful-paint")
            found["curves drawn"] = window.run(script, "curves")
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            found["rollouts counted by reason"] = seconds_of(client, "fates", run="run")[0]
            found["first histogram"], told = seconds_of(client, "region", run="run")
            found["share of steps in it"] = told["read"] / told["steps"]
            start, before = time.perf_counter(), told["read"]
            while told["read"] < told["steps"] and time.perf_counter() - start < READING:
                told = seconds_of(client, "region", run="run")[1]
            found["steps read in a second"] = (told["read"] - before) / (time.perf_counter() - start)
            found["groups of a step"] = seconds_of(client, "groups", run="run", step=3)[0]
            name = {"group": "sums/5", "member": 3, "attempt": 0, "sample": 0}
            found["one rollout"] = seconds_of(client, "sample", run="run", step=3, **name)[0]
            chosen = {"outcome": "dropped", "side": "positive", "first": 3, "last": 3}
            found["dropped tokens of a step"] = seconds_of(client, "extremes", run="run", **chosen)[0]
        found["server, MB at most"] = peak(server.pid)
        return found
    finally:
        server.terminate()
        server.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--keep", type=Path, help="make the folder here and leave it")
    args = parser.parse_args()
    if missing():
        print(missing())
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        run = (args.keep or Path(temporary)) / "run"
        steps, rollouts = make_folder(run, args.gigabytes)
        print(f"{args.gigabytes:g} GB, {steps:,} steps, {rollouts:,} rollouts, {rollouts * LENGTH:,} tokens")
        found = measure(run)
    for name, value in found.items():
        print(f"  {name:28} {value:8.2f}")
    good = found["first paint"] < PAINT_BAR and found["server, MB at most"] < MEMORY_BAR
    print(f"  first paint below {PAINT_BAR:g} s, server below {MEMORY_BAR:g} MB: {verdict(good)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
