"""`python -m tests.faults`: all faults in the numbers that were asked for, as the table of docs/reliability.md.

A row is written down as soon as it is known; a second call with the same --out goes on after the last. Exits with 1
when anything that must hold did not.
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

from . import clock, disk, kills, scenes
from .lives import Lives
from .proxy import LOST, SPOILT
from .world import ENDS, Result, World

ANY = ("trainer", "engine", "both")
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
"""Which runs are killed, who in them, and their share of the kills."""
SIZES = (260, 700, 1500, 2600, 4000)
"""Kilobytes of the disks that fill up: in the first moments, in a record, a checkpoint, the ledger."""


class Suite:
    """All rows by name, each a function that makes it."""

    def __init__(self, lives: Lives, folder: Path, count: int) -> None:
        self.lives, self.folder, self.count = lives, folder, count
        self._straight: Path | None = None

    @property
    def straight(self) -> Path:
        """The synchronous run that others are compared with, made when it is first needed."""
        if self._straight is None:
            self._straight = kills.straight(self.lives, self.folder / "straight", 12)
        return self._straight

    def rows(self) -> Iterator[tuple[str, Callable[[Path], Result]]]:
        for name, kind, synchronous, victims, share in SHARES:
            yield name, self._kills(kind, synchronous, list(victims), round(share * self.count))
        few = max(round(0.02 * self.count), 1)
        yield "SIGKILL of a rank, trainer on 2 ranks", lambda at: scenes.ranks(self.lives, at, few)
        for fault in (*LOST, *SPOILT):
            share = 1.0 if fault == scenes.MISMATCH else 0.3
            yield f"engine, 30 %: {fault}" if share < 1 else f"engine, all: {fault}", self._wire(fault, share)
        yield (
            "engine, all: error 500, always",
            lambda at: scenes.wire(self.lives, at, "error 500", share=1.0, stall=8),
        )
        yield "engine, all: hang, always", lambda at: scenes.wire(self.lives, at, "hang", share=1.0, stall=12)
        yield "engine, all: hang while loading weights", lambda at: scenes.deaf_to_weights(self.lives, at)
        yield "full disk (tmpfs, ENOSPC), then space again", self._full
        yield "a file that cannot grow (RLIMIT_FSIZE, EFBIG), then it can", self._limited
        yield "damaged checkpoint: the newest, or all", self._checkpoints
        yield "half-written checkpoint, record and a record of no step", self._half
        yield "damaged ledger: run.db or its log", self._ledger
        yield "damaged record: one that is needed, or not", self._records
        yield "time of day jumps by up to a year, 5 times a second", self._clock
        for name, options in EPISODES.items():
            yield name, lambda at, name=name, options=options: scenes.episodes(self.lives, at, name, options)
        yield "episode that blocks the event loop", lambda at: scenes.held(self.lives, at)
        yield "settings changed between kill and resume", lambda at: scenes.settings(self.lives, at)

    def _kills(self, kind: str, synchronous: bool, victims: list[str], count: int) -> Callable[[Path], Result]:
        def make(at: Path) -> Result:
            compare = self.straight if synchronous and kind == "local" else None
            return kills.campaign(
                self.lives, at, kind=kind, synchronous=synchronous, victims=victims, kills=count, compare=compare
            )

        return make

    def _wire(self, fault: str, share: float, stall: float = 60) -> Callable[[Path], Result]:
        return lambda at: scenes.wire(self.lives, at, fault, share=share, stall=stall)

    def _full(self, at: Path) -> Result:
        if not disk.can_mount(at):
            raise SystemExit("a full disk needs a file system of its own, which only root may mount")
        found = [
            disk.full(self.lives, at / f"{size}{mode}", size, synchronous=mode, compare=self.straight if mode else None)
            for size in SIZES
            for mode in (True, False)
        ]
        return _sum(found)

    def _limited(self, at: Path) -> Result:
        sizes = (30_000, 90_000, 300_000)
        return _sum([disk.limited(self.lives, at / str(size), size, compare=self.straight) for size in sizes])

    def _checkpoints(self, at: Path) -> Result:
        chance, world = random.Random(1), disk.stopped_run(self.lives, at / "base")
        found = [
            disk.checkpoint(world, at / f"{how}{every}", how, chance, self.straight, all_=every)
            for how in disk.HARMS
            for every in (False, True)
        ]
        return _sum(found)

    def _half(self, at: Path) -> Result:
        return disk.half_written(disk.stopped_run(self.lives, at / "base"), at / "half", self.straight)

    def _ledger(self, at: Path) -> Result:
        chance, world = random.Random(2), disk.stopped_run(self.lives, at / "base")
        ended = World(self.lives, at / "ended", scheduler__max_off_policy_steps=0)
        life = ended.start()
        life.wait(ENDS)
        cases = [(world, file, how) for file in ("run.db", "run.db-wal") for how in (*disk.HARMS, "flip", "cut")]
        cases += [(ended, "run.db", "flip")] * 8  # with everything in the one file
        found = [
            disk.ledger(which, at / str(number), file, how, chance, self.straight)
            for number, (which, file, how) in enumerate(cases)
        ]
        return _sum(found)

    def _records(self, at: Path) -> Result:
        chance, world = random.Random(3), disk.stopped_run(self.lives, at / "base")
        found = [
            disk.record(world, at / f"{how}{needed}", how, chance, self.straight, needed=needed)
            for how in disk.HARMS
            for needed in (True, False)
        ]
        return _sum(found)

    def _clock(self, at: Path) -> Result:
        at.mkdir(parents=True)
        library = clock.shim(at)
        if library is None:
            raise SystemExit("a clock that jumps needs a C compiler")
        result = Result("")
        with Lives({"LD_PRELOAD": str(library)}) as lives:
            for mode in (True, False):
                world = World(lives, at / str(mode), scheduler__max_off_policy_steps=0 if mode else 2)
                began = time.monotonic()
                if scenes.ends(world, world.start(), result) and mode:
                    result.violations += kills.checks.same_bits(world.run, self.straight, world.steps)
                result.injected += int((time.monotonic() - began) * 5)
        return result


EPISODES: dict[str, dict[str, object]] = {
    "environment, 30 %: exceptions": {"share": 0.3, "way": "raise"},
    "environment, 30 %: exceptions, NaN rewards, SystemExit, endless": {
        "share": 0.3,
        "way": ["raise", "nan", "exit", "wait"],
    },
    "environment, 5 %: endless episodes": {"share": 0.05, "way": "wait"},
    "environment, 5 %: endless episodes that ignore their end": {"share": 0.05, "way": "deaf"},
}


def _sum(results: list[Result]) -> Result:
    total = Result("")
    for one in results:
        total.add(one)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="SIGKILLs in all (default: 200)")
    parser.add_argument(
        "--out", type=Path, default=Path("faults.jsonl"), help="rows that are known (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name holds this")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which stay in it")
    given = parser.parse_args()
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    folder = given.keep or Path(tempfile.mkdtemp(prefix="keel-faults-"))
    try:
        with Lives() as lives, given.out.open("a") as out:
            rows = list(Suite(lives, folder, given.kills).rows())
            for number, (name, make) in enumerate(rows):
                if given.only not in name or name in {row["fault"] for row in known}:
                    continue
                began = time.monotonic()
                result = make(folder / str(number))
                row = {**dataclasses.asdict(result), "fault": name, "seconds": round(time.monotonic() - began, 1)}
                known.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                sys.stderr.write(f"{name}: {len(result.violations)} violations in {row['seconds']} s\n")
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    order = [name for name, _ in rows]
    sys.stdout.write(table(sorted(known, key=lambda row: order.index(row["fault"]))))
    return int(any(row["violations"] for row in known))


def table(rows: list[dict[str, object]]) -> str:
    """As it stands in the documents."""
    lines = ["| fault | injected | runs | continued | stopped, cause named | violations | longest recovery |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        recovery = f"{row['recovery']:.1f} s" if row["recovery"] else "-"
        counts = " | ".join(str(row[name]) for name in ("injected", "runs", "continued", "stopped"))
        violations = row["violations"]
        assert isinstance(violations, list)
        lines.append(f"| {row['fault']} | {counts} | {len(violations)} | {recovery} |")
    told = [f"{row['fault']}: {line}" for row in rows for line in row["violations"]]  # type: ignore[attr-defined]
    return "\n".join([*lines, *told]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
