"""The ledger of a run: `run.db`, SQLite with a write-ahead log, with the outcome of every rollout, step by step.

Guarantees. A step is written in one transaction: its metrics, the outcome of every rollout in it, and the state from
which the run resumes with the pass rates of its tasks. The key of a rollout (group, member, attempt) is a primary key,
so a second outcome cannot be written. Finished rollouts that wait for their batch are stored in `finished` until their
outcome is known. A checksum covers everything a step wrote, and `check` detects any later change (SQLite pages have no
checksum). Every disk failure is a `StorageError`. One process writes; any number may read concurrently.
"""

import hashlib
import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from keel.common.safe_read import MAX_FILE_BYTES, parse_json
from keel.common.sample import Sample
from keel.errors import KeelError, StorageError
from keel.rollout.rollout import Rollout
from keel.rollout.scheduler.pass_rates import TaskRecord

FORMAT = 2
"""Format of the tables; raised by a change that an older version could not read."""

TABLES_SQL = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, stepped INTEGER NOT NULL, time REAL NOT NULL,
    metrics TEXT NOT NULL
) STRICT;
CREATE TABLE rollouts (
    "group" TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, environment TEXT NOT NULL,
    task_id TEXT NOT NULL, step INTEGER NOT NULL, outcome TEXT NOT NULL CHECK (outcome IN ('trained', 'dropped')),
    reason TEXT, error TEXT, reward REAL, tokens INTEGER NOT NULL,
    PRIMARY KEY ("group", member, attempt)
) STRICT, WITHOUT ROWID;
CREATE INDEX rollouts_by_step ON rollouts (step);
CREATE TABLE finished (
    "group" TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY ("group", member, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE evaluations (
    step INTEGER NOT NULL, environment TEXT NOT NULL, time REAL NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (step, environment)
) STRICT;
"""

CHECKSUMS_SQL = (
    "CREATE TABLE IF NOT EXISTS checksums (step INTEGER PRIMARY KEY, content TEXT NOT NULL, record_hash TEXT) STRICT"
)
"""Hashes of what a step wrote in the ledger and of its parquet file. Added to an older ledger when its run resumes."""

TASKS_SQL = """CREATE TABLE IF NOT EXISTS tasks (
    environment TEXT NOT NULL, task_index INTEGER NOT NULL, task_id TEXT NOT NULL, groups INTEGER NOT NULL,
    rollouts INTEGER NOT NULL, pass_rate REAL, last_pass_rate REAL, solved_in_a_row INTEGER NOT NULL,
    state TEXT NOT NULL, last_step INTEGER NOT NULL, PRIMARY KEY (environment, task_index)
) STRICT, WITHOUT ROWID"""
"""One `TaskRecord` for every task that was sampled. Added to an older ledger when its run resumes."""

RunStatus = Literal["running", "stopped", "finished", "failed"]


class RolloutOutcome(NamedTuple):
    """The outcome of one rollout."""

    group: str
    member: int
    attempt: int
    environment: str
    task_id: str
    outcome: Literal["trained", "dropped"]
    reason: str | None
    error: str | None
    reward: float | None
    tokens: int


class RolloutErrors(NamedTuple):
    """The rollouts of a run that ended in an error."""

    total: int
    last: str
    """The most frequent error of the last step that has one."""
    last_total: int
    """Rollouts with the error `last`."""

    def __str__(self) -> str:
        plural = "" if self.total == 1 else "s"
        times = "" if self.total == 1 else f" ({self.last_total} times)"
        return f"{self.total} rollout{plural} failed; the last error{times}: {self.last}"


class StepRow(NamedTuple):
    """One recorded step."""

    step: int
    version: int
    """Policy version after the step."""
    stepped: bool
    time: float
    metrics: dict[str, float]


class Ledger:
    """The open `run.db`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._lock = threading.RLock()
        self.path = path
        if not create and not path.is_file():
            raise KeelError(f"{path} does not exist: the folder does not hold a run")
        try:
            # one connection for the event loop and its threads; the lock serialises them
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._storage_error(error) from error
        try:
            self._open_tables(create)
        except BaseException:
            self._db.close()
            raise

    def _open_tables(self, create: bool) -> None:
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            if create:
                with self._transaction():
                    for statement in TABLES_SQL.split(";"):
                        self._db.execute(statement)
                    self._db.execute(CHECKSUMS_SQL)
                    self._db.execute(TASKS_SQL)
                    self._set_meta("format", str(FORMAT))
        except sqlite3.Error as error:
            raise self._storage_error(error) from error
        if self._query("SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger')"):
            raise self._storage_error("it has a view or a trigger, which a ledger never has")
        version = self.get_meta("format")
        if version != str(FORMAT):
            raise KeelError(f"{self.path} has format {version}, and this version of keel reads {FORMAT}")

    def close(self) -> None:
        self._db.close()

    def check(self) -> None:
        """Raise if the ledger was changed or damaged; a run that resumes reads all of it first."""
        problems = [row[0] for row in self._query("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise self._storage_error("; ".join(" ".join(str(line).split()) for line in problems))
        with self._transaction():
            self._db.execute(CHECKSUMS_SQL)
            self._db.execute(TASKS_SQL)
        checksums = self._query("SELECT step, content FROM checksums ORDER BY step")
        for step, content in checksums:
            if self._step_checksum(step) != content:
                raise self._storage_error(f"the records of step {step} were changed")
        last = max((step for step, _ in checksums), default=0)
        if self.last_step > last > 0:
            raise self._storage_error(f"step {self.last_step} has no checksum")
        tasks = self._query("SELECT * FROM tasks")
        if reduce(xor, map(_task_hash, tasks), 0) != self._tasks_hash:
            raise self._storage_error("the pass rates of tasks were changed")
        self.state()

    # -- metadata -----------------------------------------------------------------------------------------------------

    def get_meta(self, key: str) -> str | None:
        rows = self._query("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        with self._transaction():
            self._set_meta(key, value)

    def set_status(self, status: RunStatus, reason: str = "") -> None:
        """Record whether the run is running and, if not, why."""
        with self._transaction():
            self._set_meta("status", status)
            self._set_meta("why", reason)

    def state(self) -> dict[str, Any] | None:
        """Return the state from which the run resumes; None before the first step."""
        text = self.get_meta("state")
        if text is None:
            return None
        if self.get_meta("state_hash") not in (None, _hash(text)):
            raise self._storage_error("the state to resume from was changed")
        return self._parse_object(text)

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        step = self._query("SELECT coalesce(max(step), 0) FROM steps")[0][0]
        if not isinstance(step, int):
            raise self._storage_error(f"it has {str(step)[:40]!r} as the number of a step")
        return step

    def write_step(
        self,
        step: int,
        *,
        version: int,
        stepped: bool,
        metrics: Mapping[str, float],
        outcomes: Iterable[RolloutOutcome],
        state: Mapping[str, Any],
        record_hash: str | None = None,
        tasks: Iterable[TaskRecord] = (),
    ) -> None:
        """Write all of a step or nothing; it is on disk on return. `record_hash` is the hash of its parquet file."""
        outcomes = list(outcomes)
        with self._transaction(durable=True):
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?)",
                (step, version, int(stepped), time.time(), json.dumps(dict(metrics), allow_nan=False)),
            )
            self._insert_outcomes(step, outcomes)
            self._set_tasks(tasks)
            self._set_state(state)
            self._write_checksum(step, record_hash)

    def write_dropped(
        self,
        step: int,
        outcomes: Iterable[RolloutOutcome],
        state: Mapping[str, Any],
        tasks: Iterable[TaskRecord] = (),
    ) -> None:
        """Write the outcomes of rollouts outside a batch: those left when a run ends."""
        with self._transaction(durable=True):
            self._insert_outcomes(step, list(outcomes))
            self._set_tasks(tasks)
            self._set_state(state)
            self._write_checksum(step, self.record_hash(step))

    def discard_steps(self, after: int) -> None:
        """Remove the steps after one, with their rollouts: those whose checkpoint was not written."""
        with self._transaction(durable=True):
            for table in ("steps", "rollouts", "checksums"):
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (after,))

    def record_hash(self, step: int) -> str | None:
        """Return the hash of a step's parquet file; None if it was not recorded."""
        rows = self._query("SELECT record_hash FROM checksums WHERE step = ?", (step,))
        return rows[0][0] if rows else None

    def steps(self, after: int = 0) -> list[StepRow]:
        rows = self._query("SELECT * FROM steps WHERE step > ? ORDER BY step", (after,))
        return [
            StepRow(step, version, bool(done), at, self._parse_object(text)) for step, version, done, at, text in rows
        ]

    def outcome_counts(self) -> dict[str, int]:
        """Count rollouts by outcome: "trained", or the reason why they were dropped."""
        return dict(self._query("SELECT coalesce(reason, outcome), count(*) FROM rollouts GROUP BY 1 ORDER BY 2 DESC"))

    def errors(self) -> RolloutErrors | None:
        """Return how many rollouts ended in an error, and the last error; None if there is none."""
        rows = self._query(
            "SELECT error, count(*) FROM rollouts WHERE error IS NOT NULL GROUP BY error"
            " ORDER BY max(step) DESC, 2 DESC, 1"
        )
        return RolloutErrors(sum(count for _, count in rows), *rows[0]) if rows else None

    def task_records(self) -> list[TaskRecord]:
        """Return what is known about the tasks that were sampled."""
        return [TaskRecord(*row) for row in self._query("SELECT * FROM tasks ORDER BY environment, task_index")]

    # -- finished rollouts --------------------------------------------------------------------------------------------

    def store_finished(self, group: str, member: int, attempt: int, rollout: Rollout) -> None:
        """Store a finished rollout until its outcome is written; ignore one that already has an outcome."""
        content = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
        content["samples"] = [sample.as_lists() for sample in rollout.samples]
        data = zlib.compress(json.dumps(content).encode(), 1)
        key = (group, member, attempt)
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO finished SELECT ?, ?, ?, ? WHERE NOT EXISTS"
                ' (SELECT 1 FROM rollouts WHERE "group" = ? AND member = ? AND attempt = ?)',
                (*key, data, *key),
            )

    def load_finished(self, group: str, member: int, attempt: int) -> Rollout | None:
        """Return a rollout that had finished before the process ended; None if there is none."""
        key = (group, member, attempt)
        rows = self._query('SELECT data FROM finished WHERE "group" = ? AND member = ? AND attempt = ?', key)
        return self._decode_rollout(*key, rows[0][0]) if rows else None

    def unresolved(self) -> list[tuple[str, int, int, Rollout]]:
        """Return the finished rollouts without an outcome."""
        rows = self._query('SELECT * FROM finished ORDER BY "group", member, attempt')
        return [
            (group, member, attempt, self._decode_rollout(group, member, attempt, data))
            for group, member, attempt, data in rows
        ]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sampled: no step, no rollout and no evaluation is recorded."""
        tables = ("steps", "rollouts", "finished", "evaluations")
        return not any(self._query(f"SELECT EXISTS (SELECT 1 FROM {table})")[0][0] for table in tables)

    # -- evaluations --------------------------------------------------------------------------------------------------

    def write_evaluation(self, step: int, environment: str, metrics: Mapping[str, Any]) -> None:
        values = (step, environment, time.time(), json.dumps(dict(metrics)))
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", values)

    def evaluations(self) -> list[tuple[int, str, dict[str, Any]]]:
        rows = self._query("SELECT step, environment, metrics FROM evaluations ORDER BY step, environment")
        return [(step, environment, self._parse_object(text)) for step, environment, text in rows]

    # -- internals ----------------------------------------------------------------------------------------------------

    def _insert_outcomes(self, step: int, outcomes: list[RolloutOutcome]) -> None:
        try:
            self._db.executemany(
                'INSERT INTO rollouts ("group", member, attempt, environment, task_id, outcome, reason, error, reward,'
                " tokens, step) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*outcome, step) for outcome in outcomes],
            )
        except sqlite3.IntegrityError as error:
            raise KeelError(f"step {step} would give a rollout a second outcome: {error}") from error
        self._db.executemany(
            'DELETE FROM finished WHERE "group" = ? AND member = ? AND attempt = ?',
            [outcome[:3] for outcome in outcomes],
        )

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _set_state(self, state: Mapping[str, Any]) -> None:
        text = json.dumps(dict(state))
        self._set_meta("state", text)
        self._set_meta("state_hash", _hash(text))

    def _set_tasks(self, records: Iterable[TaskRecord]) -> None:
        """Replace the rows of these tasks, and their part of the hash over all rows."""
        total = self._tasks_hash
        for record in records:
            old = self._query("SELECT * FROM tasks WHERE environment = ? AND task_index = ?", record[:2])
            total = reduce(xor, map(_task_hash, (*old, record)), total)
            self._db.execute("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", record)
        self._set_meta("tasks_hash", f"{total:x}")

    @property
    def _tasks_hash(self) -> int:
        """A hash of all task records that does not depend on their order, so that a step updates its part alone."""
        try:
            return int(self.get_meta("tasks_hash") or "0", 16)
        except ValueError as error:
            raise self._storage_error(f"tasks_hash: {error}") from error

    def _write_checksum(self, step: int, record_hash: str | None) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO checksums VALUES (?, ?, ?)", (step, self._step_checksum(step), record_hash)
        )

    def _step_checksum(self, step: int) -> str:
        """Return a hash of everything a step wrote."""
        rows = self._query("SELECT * FROM steps WHERE step = ?", (step,))
        rows += self._query('SELECT * FROM rollouts WHERE step = ? ORDER BY "group", member, attempt', (step,))
        return _hash(json.dumps(rows, default=repr))

    def _parse_object(self, text: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = parse_json(text)
        except (ValueError, TypeError) as error:
            raise self._storage_error(error) from error
        if not isinstance(content, dict):
            raise self._storage_error(f"{text[:40]!r} is not a JSON object")
        return content

    def _decode_rollout(self, group: str, member: int, attempt: int, data: bytes) -> Rollout:
        try:
            content: dict[str, Any] = parse_json(_decompress(data))
            samples: list[dict[str, Any]] = content.pop("samples")
            return Rollout(**content, samples=tuple(Sample(**values) for values in samples))
        except (zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._storage_error(f"finished rollout {group}/{member}/{attempt}: {error}") from error

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(query, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._storage_error(error) from error

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        with self._lock:
            try:
                # before BEGIN: the pragma has no effect inside a transaction
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    # a failed write may already have ended the transaction
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._storage_error(error) from error

    def _storage_error(self, error: object) -> StorageError:
        """Return an error that says what failed and what to do."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return StorageError(
                f"{self.path} could not be written: {error}; nothing that was committed is lost: free space or fix the"
                " disk, then rerun with --resume"
            )
        if code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StorageError(
                f"{self.path} is locked by another process ({error}); end that process, then rerun with --resume"
            )
        if code is not None and code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            return StorageError(f"{self.path} cannot be opened for writing: {error}; check its owner")
        return StorageError(
            f"{self.path} is damaged or not a ledger: {error}; restore it from a copy, or start a new run with"
            f" model.name = {self.path.parent / 'checkpoints'}/step_N"
        )


def _decompress(data: bytes) -> bytes:
    """Decompress up to `MAX_FILE_BYTES`: a few kilobytes can expand to gigabytes of zeros."""
    stream = zlib.decompressobj()
    text = stream.decompress(data, MAX_FILE_BYTES)
    if stream.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    if not stream.eof:
        raise ValueError("it is truncated")  # and so is its checksum
    return text


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _task_hash(row: Sequence[Any]) -> int:
    return int(_hash(json.dumps(list(row), default=repr)), 16)
