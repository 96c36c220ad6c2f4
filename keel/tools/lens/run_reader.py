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
from keel.config import RunSettings, load_settings
from keel.errors import ConfigError, KeelError

MAX_POINTS = 2000
"""Of a series, at most; a longer one is averaged over equally many steps to the point."""
QUERY_TIMEOUT = 20.0
"""Seconds for all queries of one answer."""
MAX_VALUE_BYTES = 64 * 2**20
"""Bytes of one value in a ledger."""
SEARCH_DEPTH = 3
"""How many folders deep runs are looked for."""


class UnknownRun(KeelError):
    """A run that is not there, or not any more."""


class RunReader:
    """One run folder, read."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._lock = threading.Lock()
        self._reset_cache()

    def _reset_cache(self) -> None:
        self._file_identity: tuple[int, int] | None = None
        self._steps = array("q")
        self._times = array("d")
        self._series: dict[str, array[float]] = {}
        self._outcomes: dict[int, Counter[str]] = {}
        self._config: tuple[int, RunSettings | None, str] = (0, None, "")

    # -- how it is doing ----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What a line about the run says."""
        settings, problem = self.settings()
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('status', 'why')").fetchall())
            waiting = db.execute("SELECT count(*) FROM finished").fetchone()[0]
            version = db.execute("SELECT coalesce(max(version), 0) FROM steps").fetchone()[0]
            steps, times = list(self._steps[-1:]), list(self._times[-1:])
        origin = self._read_json_object("run.json")
        git = origin.get("git")
        return {
            "run": self.name,
            "status": meta.get("status", "unknown"),
            "why": meta.get("why", ""),
            "step": steps[0] if steps else 0,
            "time": times[0] if times else None,
            "version": version,
            "waiting": waiting,
            "live": _plain_values(self._read_json_object("live.json")),
            "created": _plain_values(origin).get("created"),
            "commit": _plain_values(git).get("commit") if isinstance(git, dict) else None,
            "steps": settings.steps if settings else None,
            "objective": (settings.objective.name or "composition") if settings else None,
            "model": settings.model.name if settings else None,
            "environments": list(settings.environments) if settings else [],
            "problem": problem,
        }

    def settings(self) -> tuple[RunSettings | None, str]:
        """The resolved settings, or why they cannot be read."""
        try:
            path = self.resolve_file("config.toml")
        except UnknownRun as error:
            return None, str(error)
        try:
            changed = path.stat().st_mtime_ns
            if changed != self._config[0]:
                self._config = (changed, load_settings(path).settings, "")
        except ConfigError as error:
            self._config = (changed, None, str(error))
        except OSError as error:
            return None, f"{path} cannot be read: {error.strerror}"
        return self._config[1], self._config[2]

    def evaluations(self) -> list[dict[str, Any]]:
        with self._open_ledger() as db:
            rows = db.execute(
                "SELECT step, environment, metrics FROM evaluations ORDER BY step, environment"
            ).fetchall()
            return [
                {"step": step, "environment": name, "numbers": _plain_values(parse_json(text))}
                for step, name, text in rows
            ]

    def outcomes(self) -> dict[str, Any]:
        """How many rollouts trained or were refused for what reason: of the run, and of each step."""
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            # the last step that was counted may have got more: what is left over when a run ends is written to it
            first = max(self._outcomes, default=-1)
            found: dict[int, Counter[str]] = {}
            rows = db.execute(
                "SELECT step, coalesce(reason, outcome), count(*) FROM rollouts WHERE step >= ? GROUP BY 1, 2", (first,)
            )
            for step, reason, count in rows:
                found.setdefault(step, Counter())[reason] = count
            self._outcomes |= found
            total: Counter[str] = Counter()
            for counts in self._outcomes.values():
                total.update(counts)
        return {"rollouts": total.total(), "outcomes": dict(total.most_common())}

    # -- numbers ------------------------------------------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Of all numbers that some step has."""
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            return sorted(self._series)

    def series(self, names: Sequence[str]) -> dict[str, Any]:
        """Some numbers over the steps; None where a step has none."""
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            each = max(1, math.ceil(len(self._steps) / MAX_POINTS))
            ends = range(0, len(self._steps), each)
            blank = array("d")
            return {
                "run": self.name,
                "each": each,
                "step": [self._steps[min(end + each, len(self._steps)) - 1] for end in ends],
                "values": {
                    name: [_finite_mean(self._series.get(name, blank)[end : end + each]) for end in ends]
                    for name in names
                },
            }

    def recorded_steps(self) -> list[int]:
        """The steps whose rollouts are written down. A file whose step was never committed is not one of them."""
        with suppress(OSError):
            there = set(os.listdir(self.path / "rollouts"))
            with self._lock, self._open_ledger() as db:
                self._read_new_steps(db)
                return [step for step in self._steps if f"step_{step:06d}.parquet" in there]
        return []

    def rollout_file(self, step: int) -> Path:
        """Where the rollouts of a step are."""
        path = self.resolve_file(f"rollouts/step_{step:06d}.parquet")
        if not path.is_file():
            raise UnknownRun(f"step {step} of run {self.name} has no recorded rollouts: {path} is not there")
        return path

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _open_ledger(self) -> Iterator[sqlite3.Connection]:
        """The ledger, open to be read. Whatever is wrong in it is an `UnknownRun` that says so."""
        try:
            with closing(self._connect()) as db:
                yield db
        except KeelError:
            raise
        except (sqlite3.Error, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            self._reset_cache()  # it may have been read by half
            raise UnknownRun(f"{self.path / 'run.db'} is damaged or no ledger: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        path = self.resolve_file("run.db")
        uri = path.resolve().as_uri()
        try:
            here = path.stat()
            try:
                db = _restrict_connection(
                    sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=5, check_same_thread=False)
                )
            except sqlite3.OperationalError:
                # a folder that may not be written to: a log file cannot be opened there, and nobody is writing one
                db = _restrict_connection(sqlite3.connect(f"{uri}?immutable=1", uri=True, check_same_thread=False))
        except (OSError, sqlite3.DatabaseError) as error:
            raise UnknownRun(f"{path} cannot be read: {error}") from error
        if self._file_identity != (here.st_dev, here.st_ino):
            # another run has taken the place of the one that was read
            self._reset_cache()
            self._file_identity = (here.st_dev, here.st_ino)
        return db

    def _read_json_object(self, name: str) -> dict[str, Any]:
        """The object in a small file; empty when there is none."""
        try:
            found = read_json(self.resolve_file(name))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def resolve_file(self, name: str) -> Path:
        """A file of the run; a link that leads out of its folder is none."""
        path = self.path / name
        try:
            inside = path.resolve().is_relative_to(self.path.resolve())
        except (OSError, RuntimeError) as error:
            raise UnknownRun(f"{path} cannot be followed: {error}") from error
        if not inside:
            raise UnknownRun(f"{path} is a link that leads out of the run's folder, and is not followed")
        return path

    def _read_new_steps(self, db: sqlite3.Connection) -> None:
        """Read the steps that are new."""
        last = self._steps[-1] if self._steps else -1
        for step, at, text in db.execute("SELECT step, time, metrics FROM steps WHERE step > ? ORDER BY step", (last,)):
            for name, value in parse_json(text).items():
                if isinstance(value, int | float):
                    column = self._series.setdefault(name, array("d"))
                    column.extend([math.nan] * (len(self._steps) - len(column)))
                    column.append(value)
            self._steps.append(step)
            self._times.append(at)
            for column in self._series.values():
                column.extend([math.nan] * (len(self._steps) - len(column)))


class RunCatalog:
    """The runs below a folder, or the one that it is."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise KeelError(f"{root} is no folder; give a run, or a folder that holds runs")
        self.root = root.resolve()
        self._runs_by_name: dict[str, RunReader] = {}
        if not self.list_runs():
            raise KeelError(
                f"{root} holds no run: there is no run.db in it, nor {SEARCH_DEPTH} folders deep; give another folder"
            )

    def list_runs(self) -> list[RunReader]:
        """All runs there are now, those that were started last first."""
        if (self.root / "run.db").is_file():
            found = {self.root.name: self.root}
        else:
            found = {
                path.relative_to(self.root).as_posix(): path for path in _find_run_folders(self.root, SEARCH_DEPTH)
            }
        self._runs_by_name = {
            name: self._runs_by_name.get(name) or RunReader(name, path) for name, path in found.items()
        }
        return sorted(self._runs_by_name.values(), key=lambda run: (-_creation_time(run.path), run.name))

    def get(self, name: str) -> RunReader:
        """One run, by the name that `all` gave it; a name is never taken for a path."""
        if name not in self._runs_by_name:
            self.list_runs()
        if name not in self._runs_by_name:
            raise UnknownRun(f"run {name[:200]!r} is not in {self.root}")
        return self._runs_by_name[name]


def replace_non_finite(value: Any) -> Any:
    """A value that JSON can say: NaN and infinities are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return value


def _finite_mean(values: Sequence[float]) -> float | None:
    good = [value for value in values if math.isfinite(value)]
    return math.fsum(good) / len(good) if good else None


def _creation_time(path: Path) -> float:
    with suppress(OSError):
        return (path / "config.toml").stat().st_mtime
    return 0.0


def _find_run_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in map(Path, inside):
        if (path / "run.db").is_file():
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _find_run_folders(path, depth - 1)


def _plain_values(payload: Any) -> dict[str, Any]:
    """The plain values of an object; a number may be too large to be one."""
    if not isinstance(payload, dict):
        raise ValueError(f"{str(payload)[:40]} is no object")
    return {
        str(name): None if isinstance(value, int) and abs(value) > 2**63 else replace_non_finite(value)
        for name, value in payload.items()
        if isinstance(value, str | int | float | None)
    }


def _restrict_connection(db: sqlite3.Connection) -> sqlite3.Connection:
    """A ledger that others may have made: no query runs for long, no value is large, no view stands for a table."""
    end = time.monotonic() + QUERY_TIMEOUT
    db.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    db.execute("PRAGMA trusted_schema = OFF")
    if db.execute("SELECT 1 FROM sqlite_master WHERE type = 'view'").fetchone():
        raise sqlite3.DatabaseError("it has a view, and no ledger has one")
    db.execute("SELECT 1 FROM meta").fetchone()
    return db
