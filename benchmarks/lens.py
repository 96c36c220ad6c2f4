"""Latency and memory of the lens on a large run.

Creates a run folder of a given apparent size: a few step files of 512 rollouts with 300 tokens each, hard-linked as
often as needed, and a ledger with an outcome for every rollout (10 GB: a million rollouts). Linked files are in the
page cache after the first read: disk reads are warm, decoding is real. A server in a separate process and headless
Chromium then measure the first paint, the curves, the first histogram and how fast it is refined, one rollout, the
dropped tokens of a step, and the peak memory of the server. Exits with 1 if a threshold is missed.

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

# replace this folder, whose signal.py would shadow the standard library's, by the repository
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
DISTINCT_FILES = 4
"""Step files that are not links of each other."""
REFINE_SECONDS = 20.0
"""How long to keep refining the histogram."""
PAINT_THRESHOLD = 1.0
"""Most seconds until the first paint."""
MEMORY_THRESHOLD = 1500.0
"""Most megabytes of the server."""


def make_file(path: Path, seed: int) -> None:
    """Write one step of random rollouts."""
    rng = np.random.default_rng(seed)
    size = ROLLOUTS * LENGTH
    ends = pa.array(np.arange(0, size + 1, LENGTH, dtype=np.int32))
    trainable = np.tile(np.arange(LENGTH) >= PROMPT, ROLLOUTS)
    ids = rng.zipf(1.3, size).clip(max=49_000).astype(np.int32)
    sampler = np.where(trainable, -rng.exponential(0.7, size), 0.0)
    staleness = rng.integers(0, 4, size)
    policy = np.minimum(sampler + rng.normal(0, 0.02 + 0.3 * staleness), -1e-6)
    log_ratio = policy - sampler
    drop_reason = np.full(size, None, dtype=object)
    drop_reason[log_ratio < np.log(0.2)] = "gate 0 (ratio) low"
    drop_reason[log_ratio > np.log(5)] = "gate 0 (ratio) high"

    def tokens(values: Any, dtype: pa.DataType, trainable_only: bool = True) -> pa.Array:
        return pa.ListArray.from_arrays(ends, pa.array(values, dtype, mask=~trainable if trainable_only else None))

    rewards = rng.integers(0, 2, ROLLOUTS).astype(np.float64)
    constants = {"step": 1, "version": 9, "environment": "sums", "task_id": "t", "attempt": 0, "sample": 0, "turns": 1}
    columns: dict[str, Any] = {name: [value] * ROLLOUTS for name, value in constants.items()}
    columns |= {"outcome": ["trained"] * ROLLOUTS, "reason": [None] * ROLLOUTS, "error": [None] * ROLLOUTS}
    columns |= {"split_reason": ["start"] * ROLLOUTS, "temperature": [1.0] * ROLLOUTS, "reward": rewards}
    columns |= {name: [[]] * ROLLOUTS for name in ("reward_components", "environment_metrics")}
    columns["group"] = [f"sums/{number // GROUP}" for number in range(ROLLOUTS)]
    columns["member"] = [number % GROUP for number in range(ROLLOUTS)]
    columns["advantage"] = rewards - 0.5
    columns["token_ids"] = tokens(ids, pa.int32(), trainable_only=False)
    columns["token_text"] = tokens([f" t{number}" for number in ids], pa.string(), trainable_only=False)
    columns["trainable"] = tokens(trainable, pa.bool_(), trainable_only=False)
    columns["versions"] = tokens(np.where(trainable, 9 - staleness, -1), pa.int32(), trainable_only=False)
    columns["sampler_logprobs"] = tokens(sampler, pa.float64(), trainable_only=False)
    columns["logprobs"] = tokens(policy, pa.float64())
    columns["entropy"] = tokens(rng.exponential(0.5, size), pa.float64())
    columns["dloss_dlogprob"] = tokens(log_ratio / 1e4, pa.float64())
    columns |= {"seconds": rng.exponential(5.0, ROLLOUTS), "ended_at": 1.7e9 + rng.random(ROLLOUTS)}
    columns["reference_logprobs"] = [None] * ROLLOUTS
    columns["drop_reason"] = tokens(drop_reason, pa.string())
    pq.write_table(pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA), path, compression="zstd")


def make_folder(run: Path, gigabytes: float) -> tuple[int, int]:
    """Create a run of that size; return its numbers of steps and rollouts."""
    (run / "rollouts").mkdir(parents=True)
    for number in range(DISTINCT_FILES):
        make_file(step_path(run / "rollouts", number + 1), number)
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir()) / DISTINCT_FILES
    steps = max(DISTINCT_FILES, round(gigabytes * 1e9 / size))
    loaded = load_settings(overrides=["--objective.name", "icepop", "--steps", str(steps)])
    (run / "config.toml").write_text("".join(f"{line}{comment}\n" for line, comment in toml_lines(loaded)))
    (run / "run.json").write_text(json.dumps({"format": 1, "name": run.name, "created": time.time()}))
    ledger, rng = Ledger(run / "run.db", create=True), np.random.default_rng(0)
    ledger.set_status("running")
    names = ["reward", "loss", "mismatch_kl", "is_masked_low", "is_masked_high", "entropy", "staleness", "grad_norm"]
    names += [f"other/{number}" for number in range(40)]
    for step in range(1, steps + 1):
        if step > DISTINCT_FILES:
            os.link(step_path(run / "rollouts", 1 + step % DISTINCT_FILES), step_path(run / "rollouts", step))
        outcomes = [
            RolloutOutcome(
                f"s{step}/{number // GROUP}", number % GROUP, 0, "sums", "t", "trained", None, None, 0.5, LENGTH
            )
            for number in range(ROLLOUTS)
        ]
        metrics = dict(zip(names, rng.random(len(names)).tolist(), strict=True))
        ledger.write_step(step, version=step, stepped=True, metrics=metrics, outcomes=outcomes, state={})
    ledger.close()
    return steps, steps * ROLLOUTS


def peak(process: int) -> float:
    """Return the peak resident memory of a process in megabytes."""
    match = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(match[1]) / 1024 if match else float("nan")


def timed_query(client: httpx.Client, query: str, **params: Any) -> tuple[float, dict[str, Any]]:
    """Send a query; return its seconds and its result."""
    start = time.perf_counter()
    response = client.get(f"/query/{query}", params=params)
    response.raise_for_status()
    return time.perf_counter() - start, response.json()


def measure(folder: Path) -> dict[str, float]:
    """Return the measurements, in seconds or megabytes."""
    command = [sys.executable, "-m", "keel.cli", "lens", str(folder), "--port", "0"]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split()[-1]
        results = {"server up": time.perf_counter() - start}
        with browser() as window:
            window.open(address)
            window.wait("return document.body.dataset.ready === 'overview'", seconds=120)
            script = "return performance.getEntriesByName(arguments[0])[0].startTime / 1000"
            results["first paint"] = window.run(script, "first-contentful-paint")
            results["curves drawn"] = window.run(script, "curves")
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            results["rollouts counted by reason"] = timed_query(client, "outcomes", run="run")[0]
            results["first histogram"], histogram = timed_query(client, "region", run="run")
            results["share of steps in it"] = histogram["read"] / histogram["steps"]
            start, before = time.perf_counter(), histogram["read"]
            while histogram["read"] < histogram["steps"] and time.perf_counter() - start < REFINE_SECONDS:
                histogram = timed_query(client, "region", run="run")[1]
            results["steps read in a second"] = (histogram["read"] - before) / (time.perf_counter() - start)
            results["groups of a step"] = timed_query(client, "groups", run="run", step=3)[0]
            sample = {"group": "sums/5", "member": 3, "attempt": 0, "sample": 0}
            results["one rollout"] = timed_query(client, "sample", run="run", step=3, **sample)[0]
            filters = {"outcome": "dropped", "side": "positive", "first": 3, "last": 3}
            results["dropped tokens of a step"] = timed_query(client, "extremes", run="run", **filters)[0]
        results["server, MB at most"] = peak(server.pid)
        return results
    finally:
        server.terminate()
        server.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--keep", type=Path, help="create the run in this folder and keep it")
    args = parser.parse_args()
    if missing():
        print(missing())
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        run = (args.keep or Path(temporary)) / "run"
        steps, rollouts = make_folder(run, args.gigabytes)
        print(f"{args.gigabytes:g} GB, {steps:,} steps, {rollouts:,} rollouts, {rollouts * LENGTH:,} tokens")
        results = measure(run)
    for name, value in results.items():
        print(f"  {name:28} {value:8.2f}")
    passed = results["first paint"] < PAINT_THRESHOLD and results["server, MB at most"] < MEMORY_THRESHOLD
    print(f"  first paint below {PAINT_THRESHOLD:g} s, server below {MEMORY_THRESHOLD:g} MB: {verdict(passed)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
