"""Run folders as the lens reads them: which there are, how they are doing, and their numbers step by step.

Reads `run.db`, `run.json`, `config.toml` and the names of files, while a run writes to them or after it has ended, and
writes nothing. What was read of steps is kept and only added to, so that looking again is cheap; rollouts are counted
step by step for the same reason. No run room is imported: a folder is all that the lens knows of a run.
"""

import math
import os
import sqlite3
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from keel.common.safe_read import parse_json, read_json
from keel.config import RunSettings, load
from keel.errors import ConfigError, KeelError

POINTS = 2000
"""Of a series, at most; a longer one is averaged over equally many steps to the point."""
LONGEST = 20.0
"""Seconds for all queries of one answer."""
VALUE = 64 * 2**20
"""Bytes of one value in a ledger."""
DEPTH = 3
"""How many folders deep runs are looked for."""


class UnknownRun(KeelError):
    """A run that is not there, or not any more."""


class Run:
    """One run folder, read."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None
        self._steps = array("q")
        self._times = array("d")
        self._series: dict[str, array[float]] = {}
        self._fates: dict[int, Counter[str]] = {}
        self._config: tuple[int, RunSettings | None, str] = (0, None, "")

    # -- how it is doing ----------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What a line about the run says."""
        settings, problem = self.settings()
        with self._lock, self._reading() as db:
            self._catch_up(db)
            meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('status', 'why')").fetchall())
            waiting = db.execute("SELECT count(*) FROM finished").fetchone()[0]
            version = db.execute("SELECT coalesce(max(version), 0) FROM steps").fetchone()[0]
            steps, times = list(self._steps[-1:]), list(self._times[-1:])
        origin = self._json("run.json")
        git = origin.get("git")
        return {
            "run": self.name,
            "status": meta.get("status", "unknown"),
            "why": meta.get("why", ""),
            "step": steps[0] if steps else 0,
            "time": times[0] if times else None,
            "version": version,
            "waiting": waiting,
            "live": _flat(self._json("live.json")),
            "created": _flat(origin).get("created"),
            "commit": _flat(git).get("commit") if isinstance(git, dict) else None,
            "steps": settings.steps if settings else None,
            "objective": (settings.objective.name or "composition") if settings else None,
            "model": settings.model.name if settings else None,
            "environments": list(settings.environments) if settings else [],
            "problem": problem,
        }

    def settings(self) -> tuple[RunSettings | None, str]:
        """The resolved settings, or why they cannot be read."""
        try:
            path = self.own("config.toml")
        except UnknownRun as error:
            return None, str(error)
        try:
            changed = path.stat().st_mtime_ns
            if changed != self._config[0]:
                self._config = (changed, load(path).settings, "")
        except ConfigError as error:
            self._config = (changed, None, str(error))
        except OSError as error:
            return None, f"{path} cannot be read: {error.strerror}"
        return self._config[1], self._config[2]

    def evaluations(self) -> list[dict[str, Any]]:
        with self._reading() as db:
            rows = db.execute(
                "SELECT step, environment, numbers FROM evaluations ORDER BY step, environment"
            ).fetchall()
            return [
                {"step": step, "environment": name, "numbers": _flat(parse_json(text))} for step, name, text in rows
            ]

    def fates(self) -> dict[str, Any]:
        """How many rollouts trained or were refused for what reason: of the run, and of each step."""
        with self._lock, self._reading() as db:
            self._catch_up(db)
            # the last step that was counted may have got more: what is left over when a run ends is written to it
            first = max(self._fates, default=-1)
            found: dict[int, Counter[str]] = {}
            rows = db.execute(
                "SELECT step, coalesce(reason, fate), count(*) FROM rollouts WHERE step >= ? GROUP BY 1, 2", (first,)
            )
            for step, reason, count in rows:
                found.setdefault(step, Counter())[reason] = count
            self._fates |= found
            total: Counter[str] = Counter()
            for counts in self._fates.values():
                total.update(counts)
        return {"rollouts": total.total(), "fates": dict(total.most_common())}

    # -- numbers ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of all numbers that some step has."""
        with self._lock, self._reading() as db:
            self._catch_up(db)
            return sorted(self._series)

    def series(self, names: Sequence[str]) -> dict[str, Any]:
        """Some numbers over the steps; None where a step has none."""
        with self._lock, self._reading() as db:
            self._catch_up(db)
            each = max(1, math.ceil(len(self._steps) / POINTS))
            ends = range(0, len(self._steps), each)
            blank = array("d")
            return {
                "run": self.name,
                "each": each,
                "step": [self._steps[min(end + each, len(self._steps)) - 1] for end in ends],
                "values": {
                    name: [_mean(self._series.get(name, blank)[end : end + each]) for end in ends] for name in names
                },
            }

    def steps(self) -> list[int]:
        """The steps whose rollouts are written down. A file whose step was never committed is not one of them."""
        with suppress(OSError):
            there = set(os.listdir(self.path / "rollouts"))
            with self._lock, self._reading() as db:
                self._catch_up(db)
                return [step for step in self._steps if f"step_{step:06d}.parquet" in there]
        return []

    def file(self, step: int) -> Path:
        """Where the rollouts of a step are."""
        path = self.own(f"rollouts/step_{step:06d}.parquet")
        if not path.is_file():
            raise UnknownRun(f"step {step} of run {self.name} has no recorded rollouts: {path} is not there")
        return path

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """The ledger, open to be read. Whatever is wrong in it is an `UnknownRun` that says so."""
        try:
            with closing(self._open()) as db:
                yield db
        except KeelError:
            raise
        except (sqlite3.Error, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            self._forget()  # it may have been read by half
            raise UnknownRun(f"{self.path / 'run.db'} is damaged or no ledger: {error}") from error

    def _open(self) -> sqlite3.Connection:
        path = self.own("run.db")
        uri = path.resolve().as_uri()
        try:
            here = path.stat()
            try:
                db = _careful(sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=5, check_same_thread=False))
            except sqlite3.OperationalError:
                # a folder that may not be written to: a log file cannot be opened there, and nobody is writing one
                db = _careful(sqlite3.connect(f"{uri}?immutable=1", uri=True, check_same_thread=False))
        except (OSError, sqlite3.DatabaseError) as error:
            raise UnknownRun(f"{path} cannot be read: {error}") from error
        if self._file != (here.st_dev, here.st_ino):
            # another run has taken the place of the one that was read
            self._forget()
            self._file = (here.st_dev, here.st_ino)
        return db

    def _json(self, name: str) -> dict[str, Any]:
        """The object in a small file; empty when there is none."""
        try:
            found = read_json(self.own(name))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def own(self, name: str) -> Path:
        """A file of the run; a link that leads out of its folder is none."""
        path = self.path / name
        try:
            inside = path.resolve().is_relative_to(self.path.resolve())
        except (OSError, RuntimeError) as error:
            raise UnknownRun(f"{path} cannot be followed: {error}") from error
        if not inside:
            raise UnknownRun(f"{path} is a link that leads out of the run's folder, and is not followed")
        return path

    def _catch_up(self, db: sqlite3.Connection) -> None:
        """Read the steps that are new."""
        last = self._steps[-1] if self._steps else -1
        for step, at, text in db.execute("SELECT step, time, numbers FROM steps WHERE step > ? ORDER BY step", (last,)):
            for name, value in parse_json(text).items():
                if isinstance(value, int | float):
                    column = self._series.setdefault(name, array("d"))
                    column.extend([math.nan] * (len(self._steps) - len(column)))
                    column.append(value)
            self._steps.append(step)
            self._times.append(at)
            for column in self._series.values():
                column.extend([math.nan] * (len(self._steps) - len(column)))


class Runs:
    """The runs below a folder, or the one that it is."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise KeelError(f"{root} is no folder; give a run, or a folder that holds runs")
        self.root = root.resolve()
        self._known: dict[str, Run] = {}
        if not self.all():
            raise KeelError(
                f"{root} holds no run: there is no run.db in it, nor {DEPTH} folders deep; give another folder"
            )

    def all(self) -> list[Run]:
        """All runs there are now, those that were started last first."""
        if (self.root / "run.db").is_file():
            found = {self.root.name: self.root}
        else:
            found = {path.relative_to(self.root).as_posix(): path for path in _search(self.root, DEPTH)}
        self._known = {name: self._known.get(name) or Run(name, path) for name, path in found.items()}
        return sorted(self._known.values(), key=lambda run: (-_made(run.path), run.name))

    def get(self, name: str) -> Run:
        """One run, by the name that `all` gave it; a name is never taken for a path."""
        if name not in self._known:
            self.all()
        if name not in self._known:
            raise UnknownRun(f"run {name[:200]!r} is not in {self.root}")
        return self._known[name]


def finite(value: Any) -> Any:
    """A value that JSON can say: NaN and infinities are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _mean(values: Sequence[float]) -> float | None:
    good = [value for value in values if math.isfinite(value)]
    return math.fsum(good) / len(good) if good else None


def _made(path: Path) -> float:
    with suppress(OSError):
        return (path / "config.toml").stat().st_mtime
    return 0.0


def _search(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in map(Path, inside):
        if (path / "run.db").is_file():
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _search(path, depth - 1)


def _flat(told: Any) -> dict[str, Any]:
    """The plain values of an object; a number may be too large to be one."""
    if not isinstance(told, dict):
        raise ValueError(f"{str(told)[:40]} is no object")
    return {
        str(name): None if isinstance(value, int) and abs(value) > 2**63 else finite(value)
        for name, value in told.items()
        if isinstance(value, str | int | float | None)
    }


def _careful(db: sqlite3.Connection) -> sqlite3.Connection:
    """A ledger that others may have made: no query runs for long, no value is large, no view stands for a table."""
    end = time.monotonic() + LONGEST
    db.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE)
    db.execute("PRAGMA trusted_schema = OFF")
    if db.execute("SELECT 1 FROM sqlite_master WHERE type = 'view'").fetchone():
        raise sqlite3.DatabaseError("it has a view, and no ledger has one")
    db.execute("SELECT 1 FROM meta").fetchone()
    return db
