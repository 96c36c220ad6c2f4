"""The folder of a run: its contents, its lock, and how it is created and opened.

One process writes to a run at a time; the kernel releases the lock of a process that is killed. `config.toml` holds the
resolved settings, `run.json` the environment the run was started in: package versions and the state of the git
checkout. A folder without `run.db` is not yet a run, so a run exists completely or not at all. The ledger holds a copy
of the settings: an edited `config.toml` has to be allowed explicitly, and a lost one is restored.
"""

import contextlib
import difflib
import errno
import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from keel.common.atomic_files import TEMP_PREFIX, atomic_file, write_json
from keel.config import LoadedSettings, RunSettings, load_settings
from keel.config.load import load_settings_from_text
from keel.config.toml_writer import toml_lines
from keel.errors import ConfigError, KeelError, StorageError
from keel.run.ledger import Ledger

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Errors of the operating system for a full or broken disk."""
RECORDED_PACKAGES = (
    "keel-rl",
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "tokenizers",
    "renderers",
    "numpy",
    "pyarrow",
)


class RunFolder:
    """An open run, locked for this process."""

    def __init__(self, path: Path, settings: RunSettings, lock: IO[str], ledger: Ledger) -> None:
        self.path, self.settings, self.ledger = path, settings, ledger
        self.settings_changed = False
        """Whether the run resumes with other settings or another loss function than before."""
        self.allow_changes = False
        """Whether changes since the run was started are allowed."""
        self.sampled = False
        """Whether a batch was sampled since the folder was created or opened."""
        self._lock = lock
        self._before: FolderSnapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run. A start that failed leaves no folder behind.

        Unless the error (a stall, a full disk, a lost rank) says to rerun with --resume.
        """
        if isinstance(error, Exception) and "--resume" not in str(error):
            self.discard_if_unused()
        self.close()

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        """Folder of the completions of evaluations."""
        return self.path / "evaluations"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Folder for weights published to engines in other processes."""
        return self.path / "weights"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.parquet"

    @classmethod
    def create(cls, path: Path, loaded: LoadedSettings, write_inputs: Callable[[Path], None] | None = None) -> Self:
        """Create a new run. The folder must not hold one already.

        `write_inputs` writes files that the run needs into the folder, before the run exists.
        """
        if (path / "run.db").exists():
            raise ConfigError(
                f"{path} already holds a run; resume it with --resume {path} (resume=True in Python), or choose another"
                " --run"
            )
        # SQLite would apply the old log to the new ledger, and old checkpoints would look like the new run's
        folders = ("checkpoints", "rollouts", "evaluations")
        parts = [path / "run.db-wal", *(part for folder in folders for part in path.glob(f"{folder}/step_*"))]
        if leftovers := [part.relative_to(path) for part in parts if part.exists()]:
            raise ConfigError(
                f"{path} holds {leftovers[0]} of a run whose run.db is missing; restore it from a copy, or"
                " choose another --run"
            )
        try:
            before = FolderSnapshot(path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run {path} cannot be created: {error.strerror}") from error
        lock = _acquire_lock(path)
        try:
            text = _write_config(path, loaded)
            write_json(path / "run.json", _provenance(path.name, loaded.recipe_folder))
            if write_inputs is not None:
                write_inputs(path)
            temporary = path / "run.db.new"
            for old in path.glob("run.db.new*"):
                old.unlink()
            ledger = Ledger(temporary, create=True)
            ledger.set_meta("config", text)
            ledger.close()
            temporary.rename(path / "run.db")
            created = cls(path, loaded.settings, lock, Ledger(path / "run.db"))
            created._before = before
            return created
        except BaseException as error:
            before.restore()
            lock.close()
            if isinstance(error, OSError):
                raise StorageError(
                    f"{path} could not be written: {error.strerror}; free space, or choose another --run"
                ) from error
            raise

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        file: str | Path | None = None,
        overrides: Sequence[str] = (),
        values: Sequence[tuple[str, Any]] = (),
        allow_changes: bool = False,
    ) -> Self:
        """Open a run to resume it with its own settings; changes by file, overrides or values have to be allowed."""
        if not (path / "run.db").is_file():
            raise ConfigError(f"{path} does not hold a run: it has no run.db")
        lock = _acquire_lock(path)
        try:
            ledger = Ledger(path / "run.db")
            try:
                ledger.check()
                before = _stored_settings(path, ledger)
                after = load_settings(file or path / "config.toml", overrides, values)
                changes = settings_diff(before, after)
                if changes and not allow_changes:
                    raise ConfigError(
                        f"the settings differ from those {path} was started with:\n"
                        + "\n".join(f"  {line}" for line in changes)
                        + "\naccept them with --allow-changes (allow_changes=True in Python), or remove them"
                        + ("" if file or overrides or values else f" from {path / 'config.toml'}")
                    )
                if changes:
                    ledger.set_meta("config", _write_config(path, after))
                _remove_stale_files(path)
                opened = cls(path, after.settings, lock, ledger)
                opened.settings_changed, opened.allow_changes = bool(changes), allow_changes
                return opened
            except BaseException:
                ledger.close()
                raise
        except BaseException:
            lock.close()
            raise

    def is_new_source(self, setting: str, source_hash: str) -> bool:
        """Return whether the code that a setting names was not recorded yet with this hash.

        Code that changed since it was recorded is an error unless changes are allowed: the steps after the last
        checkpoint would be trained again to other weights.
        """
        recorded = self.ledger.get_meta(f"source of {setting}")
        if recorded not in (None, source_hash) and not self.allow_changes:
            raise ConfigError(
                f"{setting}: its file has changed since {self.path} was started (SHA-256 {recorded[:12]}, now"
                f" {source_hash[:12]}); restore it, or accept the change with --resume {self.path} --allow-changes"
            )
        return recorded != source_hash

    def record_source(self, setting: str, source_hash: str) -> None:
        """Record the hash of the code that a setting names."""
        self.settings_changed |= self.ledger.get_meta(f"source of {setting}") not in (None, source_hash)
        self.ledger.set_meta(f"source of {setting}", source_hash)

    def update_settings(self, values: Sequence[tuple[str, Any]]) -> None:
        """Change settings of the open run; dotted names with values."""
        before, after = (
            load_settings(self.path / "config.toml"),
            load_settings(self.path / "config.toml", values=values),
        )
        if settings_diff(before, after):
            self.ledger.set_meta("config", _write_config(self.path, after))
            self.settings = after.settings

    def discard_if_unused(self) -> None:
        """Close the run; if this process created it and sampled nothing, restore what was there before."""
        unused = self._before is not None and not self.sampled and self.ledger.is_empty
        self.ledger.close()
        if unused and self._before is not None:
            self._before.restore()  # still locked: no other process may start a run here meanwhile
        self._lock.close()

    def close(self) -> None:
        self.ledger.close()
        self._lock.close()


class FolderSnapshot:
    """What a folder held before a run was created in it. `restore` removes the rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        # a new run overwrites these two
        files = (path / "config.toml", path / "run.json")
        self._contents = {file: file.read_bytes() for file in files if file.is_file()}
        self._missing = [folder for folder in (path, *path.parents) if not folder.exists()]

    def restore(self) -> None:
        """Remove what was added since, including parent folders that did not exist and are empty now."""
        with contextlib.suppress(OSError):  # the run has failed already, and its error matters more
            for entry in self._path.iterdir():
                if entry.name in self._entries:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            for file, content in self._contents.items():
                file.write_bytes(content)
            for folder in self._missing:
                folder.rmdir()


def settings_diff(before: LoadedSettings, after: LoadedSettings) -> list[str]:
    """Return the settings that differ, as lines with - and +."""
    was, now = ([f"{name} = {value}" for name, value, _ in loaded.rows()] for loaded in (before, after))
    changed = difflib.unified_diff(was, now, n=0, lineterm="")
    return [f"{line[0]} {line[1:]}" for line in changed if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def unused_path(parent: Path, name: str) -> Path:
    """Return a path of that name that does not exist yet, with a number appended if needed."""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        number += 1


def _acquire_lock(path: Path) -> IO[str]:
    try:
        lock = (path / "lock").open("a+")
    except OSError as error:
        raise StorageError(
            f"{path / 'lock'} cannot be opened: {error.strerror}; check the owner of the folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise KeelError(f"{path} is being written by process {owner}; wait for it, or stop it first") from None
    # informational only: a full disk must not prevent a later resume
    with contextlib.suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    return lock


def _stored_settings(path: Path, ledger: Ledger) -> LoadedSettings:
    """Return the settings the run used last; restore a missing or broken `config.toml` from the ledger."""
    stored, file = ledger.get_meta("config"), path / "config.toml"
    if stored is None:  # a ledger of an older version
        return load_settings(file)
    before = load_settings_from_text(stored, f"{ledger.path}: its copy of config.toml")
    try:
        load_settings(file)
    except ConfigError as error:
        warnings.warn(f"{error}; it is restored from the ledger", stacklevel=3)
        with atomic_file(file) as temporary:
            temporary.write_text(stored)
    return before


def _remove_stale_files(path: Path) -> None:
    """Remove unfinished files of a writer that was killed; the lock excludes other writers."""
    for folder in (path, path / "rollouts", path / "evaluations"):
        for file in folder.glob(f"{TEMP_PREFIX}*"):
            if file.is_file():
                file.unlink()


def _write_config(path: Path, loaded: LoadedSettings) -> str:
    text = "".join(f"{line}{comment}\n" for line, comment in toml_lines(loaded))
    with atomic_file(path / "config.toml") as temporary:
        temporary.write_text(text)
    return text


def _provenance(name: str, recipe_folder: Path | None) -> dict[str, Any]:
    """Return the environment a run was started in."""
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "format": 1,
        "name": name,
        "created": time.time(),
        "argv": sys.argv,
        # so that modules next to the recipe are found when the run is resumed or evaluated
        "recipe_folder": None if recipe_folder is None else str(recipe_folder),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any]:
    """Return the commit checked out in the working directory and whether files differ from it."""

    def git_output(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git_output("rev-parse", "HEAD")
    return {} if commit is None else {"commit": commit, "changed": bool(git_output("status", "--porcelain"))}
