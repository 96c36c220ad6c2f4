"""Run all fault scenarios and print the table of docs/reliability.md: `python -m tests.faults`.

Each row is saved when it is complete; a second call with the same --out continues after the last row. Exits with code 1
if any invariant was violated.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import clock, disk, kills, scenarios
from .processes import ForkServer
from .proxy import CORRUPTIONS, TRANSPORT_FAULTS
from .target_run import RUN_TIMEOUT, Result, TargetRun

SHARES = (
    ("SIGKILL of the trainer, engine in it, synchronous", "local", True, ("trainer",), 0.26),
    ("SIGKILL of the trainer, engine in it, asynchronous", "local", False, ("trainer",), 0.26),
    ("SIGKILL of trainer, engine or both, pool of 2, asynchronous", "pool", False, ("trainer", "engine", "both"), 0.24),
    ("SIGKILL of trainer, engine or both, pool of 2, synchronous", "pool", True, ("trainer", "engine", "both"), 0.14),
    (
        "SIGKILL of trainer, engine or both, engine a child process",
        "process",
        False,
        ("trainer", "engine", "both"),
        0.1,
    ),
)
"""Row, engine kind, synchronous, victims, and share of all kills."""
SIZES = (260, 700, 1500, 2600, 4000)
"""Disk sizes in kilobytes; the disks fill up at the start, in a record, in a checkpoint or in the ledger."""


class Suite:
    """All rows of the table by name, each with the function that computes it."""

    def __init__(self, fork_server: ForkServer, folder: Path, count: int) -> None:
        self.fork_server, self.folder, self.count = fork_server, folder, count
        self._uninterrupted: Path | None = None

    @property
    def uninterrupted(self) -> Path:
        """The synchronous run that others are compared with, created on first use."""
        if self._uninterrupted is None:
            self._uninterrupted = kills.uninterrupted(self.fork_server, self.folder / "uninterrupted", 12)
        return self._uninterrupted

    def rows(self) -> Iterator[tuple[str, Callable[[Path], Result]]]:
        for name, kind, synchronous, victims, share in SHARES:
            yield name, self._kills(kind, synchronous, list(victims), round(share * self.count))
        few = max(round(0.02 * self.count), 1)
        yield "SIGKILL of a rank, trainer on 2 ranks", lambda at: scenarios.ranks(self.fork_server, at, few)
        for fault in (*TRANSPORT_FAULTS, *CORRUPTIONS):
            share = 1.0 if fault == scenarios.MISMATCH else 0.3
            yield f"engine, 30 %: {fault}" if share < 1 else f"engine, all: {fault}", self._wire(fault, share)
        yield (
            "engine, all: error 500, always",
            lambda at: scenarios.engine_faults(self.fork_server, at, "error 500", share=1.0, stall=8),
        )
        yield (
            "engine, all: hang, always",
            lambda at: scenarios.engine_faults(self.fork_server, at, "hang", share=1.0, stall=12),
        )
        yield "engine, all: hang on weight load", lambda at: scenarios.weights_never_load(self.fork_server, at)
        yield "full disk (tmpfs, ENOSPC), then free space again", self._full
        yield "a file that cannot grow (RLIMIT_FSIZE, EFBIG), then it can", self._limited
        yield "damaged checkpoint: the newest, or all", self._checkpoints
        yield "partially written checkpoint and record, record without a step", self._half
        yield "damaged ledger: run.db or its log", self._ledger
        yield "damaged record: one that is needed, or not", self._records
        yield "time of day jumps by up to a year, 5 times a second", self._clock
        for name, options in EPISODES.items():
            yield name, lambda at, name=name, options=options: scenarios.episodes(self.fork_server, at, name, options)
        yield "episode that blocks the event loop", lambda at: scenarios.blocked_event_loop(self.fork_server, at)
        yield "settings changed between kill and resume", lambda at: scenarios.settings(self.fork_server, at)

    def _kills(self, kind: str, synchronous: bool, victims: list[str], count: int) -> Callable[[Path], Result]:
        def make(at: Path) -> Result:
            compare = self.uninterrupted if synchronous and kind == "local" else None
            return kills.campaign(
                self.fork_server, at, kind=kind, synchronous=synchronous, victims=victims, kills=count, compare=compare
            )

        return make

    def _wire(self, fault: str, share: float, stall: float = 60) -> Callable[[Path], Result]:
        return lambda at: scenarios.engine_faults(self.fork_server, at, fault, share=share, stall=stall)

    def _full(self, at: Path) -> Result:
        if not disk.can_mount(at):
            raise SystemExit("the full-disk row mounts its own file system, which requires root")
        results = [
            disk.full(
                self.fork_server,
                at / f"{size}{mode}",
                size,
                synchronous=mode,
                compare=self.uninterrupted if mode else None,
            )
            for size in SIZES
            for mode in (True, False)
        ]
        return _sum(results)

    def _limited(self, at: Path) -> Result:
        sizes = (30_000, 90_000, 300_000)
        return _sum(
            [disk.limited(self.fork_server, at / str(size), size, compare=self.uninterrupted) for size in sizes]
        )

    def _checkpoints(self, at: Path) -> Result:
        rng, target = random.Random(1), disk.stopped_run(self.fork_server, at / "base")
        results = [
            disk.checkpoint(target, at / f"{damage}{every}", damage, rng, self.uninterrupted, all_checkpoints=every)
            for damage in disk.DAMAGES
            for every in (False, True)
        ]
        return _sum(results)

    def _half(self, at: Path) -> Result:
        return disk.half_written(disk.stopped_run(self.fork_server, at / "base"), at / "half", self.uninterrupted)

    def _ledger(self, at: Path) -> Result:
        rng, target = random.Random(2), disk.stopped_run(self.fork_server, at / "base")
        ended = TargetRun(self.fork_server, at / "ended", scheduler__max_off_policy_steps=0)
        process = ended.start()
        process.wait(RUN_TIMEOUT)
        cases = [
            (target, file, damage) for file in ("run.db", "run.db-wal") for damage in (*disk.DAMAGES, "flip", "cut")
        ]
        cases += [(ended, "run.db", "flip")] * 8  # a finished run has everything in run.db
        results = [
            disk.ledger(which, at / str(number), file, damage, rng, self.uninterrupted)
            for number, (which, file, damage) in enumerate(cases)
        ]
        return _sum(results)

    def _records(self, at: Path) -> Result:
        rng, target = random.Random(3), disk.stopped_run(self.fork_server, at / "base")
        results = [
            disk.record(target, at / f"{damage}{needed}", damage, rng, self.uninterrupted, needed=needed)
            for damage in disk.DAMAGES
            for needed in (True, False)
        ]
        return _sum(results)

    def _clock(self, at: Path) -> Result:
        at.mkdir(parents=True)
        library = clock.shim(at)
        if library is None:
            raise SystemExit("the clock row needs a C compiler")
        result = Result("")
        with ForkServer({"LD_PRELOAD": str(library)}) as fork_server:
            for mode in (True, False):
                target = TargetRun(fork_server, at / str(mode), scheduler__max_off_policy_steps=0 if mode else 2)
                start = time.monotonic()
                if scenarios.expect_completion(target, target.start(), result) and mode:
                    result.violations += kills.checks.compare_checkpoints(
                        target.run_folder, self.uninterrupted, target.steps
                    )
                result.injected += int((time.monotonic() - start) * 5)
        return result


EPISODES: dict[str, dict[str, object]] = {
    "environment, 30 %: exceptions": {"share": 0.3, "failure": "raise"},
    "environment, 30 %: exceptions, NaN rewards, SystemExit, endless": {
        "share": 0.3,
        "failure": ["raise", "nan", "exit", "wait"],
    },
    "environment, 5 %: endless episodes": {"share": 0.05, "failure": "wait"},
    "environment, 5 %: endless episodes that ignore cancellation": {"share": 0.05, "failure": "ignore_cancel"},
}


def _sum(results: list[Result]) -> Result:
    total = Result("")
    for result in results:
        total.add(result)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="total number of SIGKILLs (default: 200)")
    parser.add_argument(
        "--out", type=Path, default=Path("faults.jsonl"), help="file of completed rows (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="run only rows whose name contains TEXT")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    folder = args.keep or Path(tempfile.mkdtemp(prefix="keel-faults-"))
    try:
        with ForkServer() as fork_server, args.out.open("a") as out:
            rows = list(Suite(fork_server, folder, args.kills).rows())
            for number, (name, make) in enumerate(rows):
                if args.only not in name or name in {row["fault"] for row in known}:
                    continue
                start = time.monotonic()
                result = make(folder / str(number))
                row = {**dataclasses.asdict(result), "fault": name, "seconds": round(time.monotonic() - start, 1)}
                known.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                sys.stderr.write(f"{name}: {len(result.violations)} violations in {row['seconds']} s\n")
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    order = [name for name, _ in rows]
    sys.stdout.write(table(sorted(known, key=lambda row: order.index(row["fault"]))))
    return int(any(row["violations"] for row in known))


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as a Markdown table, followed by all violations."""
    lines = ["| fault | injected | runs | continued | stopped, cause named | violations | longest recovery |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        recovery = f"{row['recovery']:.1f} s" if row["recovery"] else "-"
        counts = " | ".join(str(row[name]) for name in ("injected", "runs", "continued", "stopped"))
        violations = row["violations"]
        assert isinstance(violations, list)
        lines.append(f"| {row['fault']} | {counts} | {len(violations)} | {recovery} |")
    violations_text = [f"{row['fault']}: {line}" for row in rows for line in row["violations"]]  # type: ignore[attr-defined]
    return "\n".join([*lines, *violations_text]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
