"""The ledger of a run: `run.db`, SQLite with a write-ahead log. What became of every rollout, step by step.

Guarantees. A step is written in one transaction: its numbers, the fate of every rollout that it emitted, and the state
from which the run goes on. The name of a rollout (group, member, attempt) is a primary key, so that a second fate for
it cannot be written. Rollouts that have ended and wait for their batch are kept in `finished` until their fate is
known. One process writes; any number may read while it does.
"""

import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keel.errors import KeelError
from keel.rollout.rollout import Rollout
from keel.rollout.trajectory import TrainingSample

FORMAT = 1
"""Of the tables; a change that an older version could not read raises it."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, stepped INTEGER NOT NULL, time REAL NOT NULL,
    numbers TEXT NOT NULL
) STRICT;
CREATE TABLE rollouts (
    "group" TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, environment TEXT NOT NULL,
    task_id TEXT NOT NULL, step INTEGER NOT NULL, fate TEXT NOT NULL CHECK (fate IN ('trained', 'refused')),
    reason TEXT, error TEXT, reward REAL, tokens INTEGER NOT NULL,
    PRIMARY KEY ("group", member, attempt)
) STRICT, WITHOUT ROWID;
CREATE INDEX rollouts_by_step ON rollouts (step);
CREATE TABLE finished (
    "group" TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY ("group", member, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE evaluations (
    step INTEGER NOT NULL, environment TEXT NOT NULL, time REAL NOT NULL, numbers TEXT NOT NULL,
    PRIMARY KEY (step, environment)
) STRICT;
"""

Status = Literal["running", "stopped", "finished", "failed"]


class Fate(NamedTuple):
    """What became of one rollout."""

    group: str
    member: int
    attempt: int
    environment: str
    task_id: str
    fate: Literal["trained", "refused"]
    reason: str | None
    error: str | None
    reward: float | None
    tokens: int


class StepRow(NamedTuple):
    """One step as it was written down."""

    step: int
    version: int
    """Of the policy after it."""
    stepped: bool
    time: float
    numbers: dict[str, float]


class Ledger:
    """The open `run.db`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._lock = threading.RLock()
        if not create and not path.is_file():
            raise KeelError(f"{path} does not exist: that folder holds no run")
        try:
            # one connection for the event loop and the threads that it starts; the lock keeps them apart
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            if create:
                with self._transaction():
                    for statement in TABLES.split(";"):
                        self._db.execute(statement)
                    self._set("format", str(FORMAT))
            found = self.get("format")
        except sqlite3.DatabaseError as error:
            raise KeelError(f"{path} is damaged or no ledger: {error}; restore it from a copy") from error
        if found != str(FORMAT):
            raise KeelError(f"{path} has format {found}, and this version of keel reads {FORMAT}")

    def close(self) -> None:
        self._db.close()

    # -- small facts --------------------------------------------------------------------------------------------------

    def get(self, key: str) -> str | None:
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def set_status(self, status: Status, why: str = "") -> None:
        """For whoever looks at the folder: is it running, and if not, why."""
        with self._transaction():
            self._set("status", status)
            self._set("why", why)

    def state(self) -> dict[str, Any] | None:
        """From where the run goes on; none before the first step."""
        found = self.get("state")
        return None if found is None else json.loads(found)

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        return int(self._db.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0])

    def write_step(
        self,
        step: int,
        *,
        version: int,
        stepped: bool,
        numbers: Mapping[str, float],
        fates: Iterable[Fate],
        state: Mapping[str, Any],
    ) -> None:
        """All of a step, or nothing of it; on the disk when this returns."""
        fates = list(fates)
        with self._transaction(durable=True):
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?)",
                (step, version, int(stepped), time.time(), json.dumps(dict(numbers), allow_nan=False)),
            )
            self._emit(step, fates)
            self._set("state", json.dumps(dict(state)))

    def write_refused(self, step: int, fates: Iterable[Fate], state: Mapping[str, Any]) -> None:
        """Fates outside of a batch: what is left when a run ends."""
        with self._transaction(durable=True):
            self._emit(step, list(fates))
            self._set("state", json.dumps(dict(state)))

    def steps(self, after: int = 0) -> list[StepRow]:
        rows = self._db.execute("SELECT * FROM steps WHERE step > ? ORDER BY step", (after,))
        return [StepRow(step, version, bool(done), at, json.loads(text)) for step, version, done, at, text in rows]

    def fates(self) -> dict[str, int]:
        """How many rollouts came to what: "trained", or the reason why not."""
        rows = self._db.execute("SELECT coalesce(reason, fate), count(*) FROM rollouts GROUP BY 1 ORDER BY 2 DESC")
        return dict(rows.fetchall())

    # -- rollouts that wait -------------------------------------------------------------------------------------------

    def keep(self, group: str, member: int, attempt: int, rollout: Rollout) -> None:
        """A rollout that has ended, until its fate is written."""
        data = zlib.compress(json.dumps(asdict(rollout)).encode(), 1)
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO finished VALUES (?, ?, ?, ?)", (group, member, attempt, data))

    def recall(self, group: str, member: int, attempt: int) -> Rollout | None:
        """A rollout that had ended before the process did."""
        found = self._db.execute(
            'SELECT data FROM finished WHERE "group" = ? AND member = ? AND attempt = ?', (group, member, attempt)
        ).fetchone()
        return None if found is None else _rollout(found[0])

    def left_over(self) -> list[tuple[str, int, int, Rollout]]:
        """Those whose fate was never written."""
        rows = self._db.execute('SELECT * FROM finished ORDER BY "group", member, attempt').fetchall()
        return [(group, member, attempt, _rollout(data)) for group, member, attempt, data in rows]

    # -- evaluations --------------------------------------------------------------------------------------------------

    def write_evaluation(self, step: int, environment: str, numbers: Mapping[str, Any]) -> None:
        values = (step, environment, time.time(), json.dumps(dict(numbers)))
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", values)

    def evaluations(self) -> list[tuple[int, str, dict[str, Any]]]:
        rows = self._db.execute("SELECT step, environment, numbers FROM evaluations ORDER BY step, environment")
        return [(step, environment, json.loads(text)) for step, environment, text in rows]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _emit(self, step: int, fates: list[Fate]) -> None:
        try:
            self._db.executemany(
                'INSERT INTO rollouts ("group", member, attempt, environment, task_id, fate, reason, error, reward,'
                " tokens, step) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*fate, step) for fate in fates],
            )
        except sqlite3.IntegrityError as error:
            raise KeelError(f"step {step} would give a rollout a second fate: {error}") from error
        self._db.executemany(
            'DELETE FROM finished WHERE "group" = ? AND member = ? AND attempt = ?', [fate[:3] for fate in fates]
        )

    def _set(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        with self._lock:
            # outside of a transaction: it has no effect inside
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rollout(data: bytes) -> Rollout:
    found: dict[str, Any] = json.loads(zlib.decompress(data))
    listed: list[dict[str, Any]] = found.pop("samples")
    samples = tuple(TrainingSample(**{name: _tuple(value) for name, value in one.items()}) for one in listed)
    return Rollout(**found, samples=samples)
