"""Read run folders: which runs exist, their status, and their metrics by step.

Reads `run.db`, `run.json`, `config.toml` and file names, during a run or after it, and writes nothing. Steps that were
read are cached and only new ones are added, so that repeated requests are cheap; rollouts are counted per step for the
same reason. `keel.run` is not imported: the lens depends only on the format of the folder.
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
from keel.tools.lens.task_rates import read_task_rates

MAX_POINTS = 2000
"""Maximum number of points of a series; in a longer one each point is the mean of several steps."""
QUERY_TIMEOUT = 20.0
"""Seconds for all SQL queries of one request."""
MAX_VALUE_BYTES = 64 * 2**20
"""Maximum size of one value in a ledger."""
SEARCH_DEPTH = 3
"""Depth of folders that are searched for runs."""


class UnknownRun(KeelError):
    """A run, or a file of it, that does not exist or cannot be read."""


class RunReader:
    """Reads one run folder."""

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

    # -- status -------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the status and the main settings of the run."""
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
        """Return the resolved settings, or None and the reason why they cannot be read."""
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
        """Return the results of all evaluations, ordered by step and environment."""
        with self._open_ledger() as db:
            rows = db.execute(
                "SELECT step, environment, metrics FROM evaluations ORDER BY step, environment"
            ).fetchall()
            return [
                {"step": step, "environment": name, "numbers": _plain_values(parse_json(text))}
                for step, name, text in rows
            ]

    def outcomes(self) -> dict[str, Any]:
        """Return how many rollouts of the run trained, and how many were dropped for each reason."""
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            # the last counted step may have grown: rollouts that remain when a run ends are recorded under it
            first = max(self._outcomes, default=-1)
            new_counts: dict[int, Counter[str]] = {}
            rows = db.execute(
                "SELECT step, coalesce(reason, outcome), count(*) FROM rollouts WHERE step >= ? GROUP BY 1, 2", (first,)
            )
            for step, reason, count in rows:
                new_counts.setdefault(step, Counter())[reason] = count
            self._outcomes |= new_counts
            total: Counter[str] = Counter()
            for counts in self._outcomes.values():
                total.update(counts)
        return {"rollouts": total.total(), "outcomes": dict(total.most_common())}

    def task_rates(self) -> dict[str, Any]:
        """Return the pass rates of the tasks that were sampled."""
        with self._open_ledger() as db:
            return read_task_rates(db)

    # -- metrics ------------------------------------------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Return the names of all metrics that at least one step has."""
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            return sorted(self._series)

    def series(self, names: Sequence[str]) -> dict[str, Any]:
        """Return metrics over steps, with None where a step does not have them."""
        with self._lock, self._open_ledger() as db:
            self._read_new_steps(db)
            size = max(1, math.ceil(len(self._steps) / MAX_POINTS))
            starts = range(0, len(self._steps), size)
            empty = array("d")
            return {
                "run": self.name,
                "steps_per_point": size,
                "step": [self._steps[min(start + size, len(self._steps)) - 1] for start in starts],
                "values": {
                    name: [_finite_mean(self._series.get(name, empty)[start : start + size]) for start in starts]
                    for name in names
                },
            }

    def recorded_steps(self) -> list[int]:
        """Return the steps whose rollouts are recorded. A file whose step was never committed does not count."""
        with suppress(OSError):
            files = set(os.listdir(self.path / "rollouts"))
            with self._lock, self._open_ledger() as db:
                self._read_new_steps(db)
                return [step for step in self._steps if f"step_{step:06d}.parquet" in files]
        return []

    def rollout_file(self, step: int) -> Path:
        """Return the path of the rollouts of a step, which exists."""
        path = self.resolve_file(f"rollouts/step_{step:06d}.parquet")
        if not path.is_file():
            raise UnknownRun(f"step {step} of run {self.name} has no recorded rollouts: {path} does not exist")
        return path

    def evaluated_steps(self) -> list[int]:
        """Return the steps whose evaluations are recorded and have their completions stored."""
        with suppress(OSError):
            files = set(os.listdir(self.path / "evaluations"))
            with self._open_ledger() as db:
                rows = db.execute("SELECT DISTINCT step FROM evaluations ORDER BY step").fetchall()
            return [step for (step,) in rows if isinstance(step, int) and f"step_{step:06d}.parquet" in files]
        return []

    def evaluation_file(self, step: int) -> Path:
        """Return the path of the completions of an evaluation, which exists."""
        path = self.resolve_file(f"evaluations/step_{step:06d}.parquet")
        if not path.is_file():
            raise UnknownRun(f"step {step} of run {self.name} has no stored evaluation: {path} does not exist")
        return path

    # -- files --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _open_ledger(self) -> Iterator[sqlite3.Connection]:
        """Open the ledger for reading. Any problem with it raises an `UnknownRun` that describes it."""
        try:
            with closing(self._connect()) as db:
                yield db
        except KeelError:
            raise
        except (sqlite3.Error, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            self._reset_cache()  # it may have been read partially
            raise UnknownRun(f"{self.path / 'run.db'} is damaged or not a ledger: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        path = self.resolve_file("run.db")
        uri = path.resolve().as_uri()
        try:
            status = path.stat()
            try:
                db = _restrict_connection(
                    sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=5, check_same_thread=False)
                )
            except sqlite3.OperationalError:
                # in a read-only folder sqlite cannot open its log file, and nobody is writing to the ledger
                db = _restrict_connection(sqlite3.connect(f"{uri}?immutable=1", uri=True, check_same_thread=False))
        except (OSError, sqlite3.DatabaseError) as error:
            raise UnknownRun(f"{path} cannot be read: {error}") from error
        if self._file_identity != (status.st_dev, status.st_ino):
            # another run has replaced the one that was read
            self._reset_cache()
            self._file_identity = (status.st_dev, status.st_ino)
        return db

    def _read_json_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a small file, or an empty one if there is none."""
        try:
            content = read_json(self.resolve_file(name))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def resolve_file(self, name: str) -> Path:
        """Return the path of a file of the run; a symbolic link to outside the folder is an error."""
        path = self.path / name
        try:
            inside = path.resolve().is_relative_to(self.path.resolve())
        except (OSError, RuntimeError) as error:
            raise UnknownRun(f"{path} cannot be resolved: {error}") from error
        if not inside:
            raise UnknownRun(f"{path} is a symbolic link to outside the run folder, and is not followed")
        return path

    def _read_new_steps(self, db: sqlite3.Connection) -> None:
        """Add the steps that are new to the cache."""
        last = self._steps[-1] if self._steps else -1
        query = "SELECT step, time, metrics FROM steps WHERE step > ? ORDER BY step"
        for step, timestamp, text in db.execute(query, (last,)):
            for name, value in parse_json(text).items():
                if isinstance(value, int | float):
                    column = self._series.setdefault(name, array("d"))
                    column.extend([math.nan] * (len(self._steps) - len(column)))
                    column.append(value)
            self._steps.append(step)
            self._times.append(timestamp)
            for column in self._series.values():
                column.extend([math.nan] * (len(self._steps) - len(column)))


class RunCatalog:
    """The runs below a folder, or the folder itself if it is a run."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise KeelError(f"{root} is not a folder; give a run folder, or a folder that contains runs")
        self.root = root.resolve()
        self._runs_by_name: dict[str, RunReader] = {}
        if not self.list_runs():
            raise KeelError(
                f"{root} contains no run: there is no run.db in it or in subfolders up to {SEARCH_DEPTH} levels deep;"
                " give another folder"
            )

    def list_runs(self) -> list[RunReader]:
        """Return all runs that exist now, most recently started first."""
        if (self.root / "run.db").is_file():
            paths = {self.root.name: self.root}
        else:
            paths = {
                path.relative_to(self.root).as_posix(): path for path in _find_run_folders(self.root, SEARCH_DEPTH)
            }
        self._runs_by_name = {
            name: self._runs_by_name.get(name) or RunReader(name, path) for name, path in paths.items()
        }
        return sorted(self._runs_by_name.values(), key=lambda run: (-_creation_time(run.path), run.name))

    def get(self, name: str) -> RunReader:
        """Return a run by its name in `list_runs`; a name is never used as a path."""
        if name not in self._runs_by_name:
            self.list_runs()
        if name not in self._runs_by_name:
            raise UnknownRun(f"run {name[:200]!r} is not in {self.root}")
        return self._runs_by_name[name]


def replace_non_finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinities, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return value


def _finite_mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _creation_time(path: Path) -> float:
    with suppress(OSError):
        return (path / "config.toml").stat().st_mtime
    return 0.0


def _find_run_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            subfolders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in map(Path, subfolders):
        if (path / "run.db").is_file():
            yield path
        elif depth > 1 and not path.name.startswith("."):
            yield from _find_run_folders(path, depth - 1)


def _plain_values(payload: Any) -> dict[str, Any]:
    """Return the scalar values of a JSON object, with None for integers that are too large."""
    if not isinstance(payload, dict):
        raise ValueError(f"{str(payload)[:40]} is not a JSON object")
    return {
        str(name): None if isinstance(value, int) and abs(value) > 2**63 else replace_non_finite(value)
        for name, value in payload.items()
        if isinstance(value, str | int | float | None)
    }


def _restrict_connection(db: sqlite3.Connection) -> sqlite3.Connection:
    """Limit what an untrusted ledger can do: long queries, large values and views are errors."""
    deadline = time.monotonic() + QUERY_TIMEOUT
    db.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    db.execute("PRAGMA trusted_schema = OFF")
    if db.execute("SELECT 1 FROM sqlite_master WHERE type = 'view'").fetchone():
        raise sqlite3.DatabaseError("it contains a view, which a ledger never does")
    db.execute("SELECT 1 FROM meta").fetchone()
    return db
