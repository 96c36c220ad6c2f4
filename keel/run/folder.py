"""A run is a folder: what is in it, who may write to it, and how it is made.

One process writes to a run at a time; the kernel drops the lock of one that is killed. `config.toml` holds the settings
as resolved, `run.json` what the run was started with: versions of all parts, the state of the git checkout. A folder
without `run.db` is not yet a run, so that a run is there as a whole or not at all. The ledger holds a copy of the
settings: a `config.toml` that was edited is another run's until that is allowed, and one that is lost is written again.
"""

import contextlib
import difflib
import errno
import fcntl
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from keel.common.atomic_files import TEMP_PREFIX, atomic_file, write_json
from keel.config import LoadedSettings, RunSettings, load_settings
from keel.config.load import load_settings_from_text
from keel.config.toml_writer import toml_lines
from keel.errors import ConfigError, KeelError, StorageError
from keel.run.ledger import Ledger

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""What an operating system says of a disk that is full or broken."""
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
        """Whether it goes on by other settings than before."""
        self._lock = lock

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Where weights are handed to engines in other processes."""
        return self.path / "weights"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.parquet"

    @classmethod
    def create(cls, path: Path, loaded: LoadedSettings) -> Self:
        """A new run. The folder must not hold one."""
        if (path / "run.db").exists():
            raise ConfigError(f"{path} holds a run; go on with it by --resume {path}, or choose another --run")
        # its log would be taken for the new ledger's, and its checkpoints for the new run's
        parts = (path / "run.db-wal", *path.glob("checkpoints/step_*"), *path.glob("rollouts/step_*"))
        if left := [part.relative_to(path) for part in parts if part.exists()]:
            raise ConfigError(
                f"{path} holds {left[0]} of a run whose run.db is gone; restore it from a copy, or choose another --run"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run {path} cannot be made: {error.strerror}") from error
        lock = _acquire_lock(path)
        try:
            text = _write_config(path, loaded)
            write_json(path / "run.json", _provenance(path.name, loaded.recipe_folder))
            temporary = path / "run.db.new"
            for old in path.glob("run.db.new*"):
                old.unlink()
            ledger = Ledger(temporary, create=True)
            ledger.set_meta("config", text)
            ledger.close()
            temporary.rename(path / "run.db")
            return cls(path, loaded.settings, lock, Ledger(path / "run.db"))
        except BaseException as error:
            lock.close()
            if isinstance(error, OSError):
                raise StorageError(
                    f"{path} could not be written: {error.strerror}; make room, or choose --run"
                ) from error
            raise

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        file: str | Path | None = None,
        overrides: Sequence[str] = (),
        allow_changes: bool = False,
    ) -> Self:
        """A run to go on with, by its own settings. Others, by file or overrides, have to be allowed."""
        if not (path / "run.db").is_file():
            raise ConfigError(f"{path} holds no run: there is no run.db in it")
        lock = _acquire_lock(path)
        try:
            ledger = Ledger(path / "run.db")
            try:
                ledger.check()
                before = _stored_settings(path, ledger)
                after = load_settings(file or path / "config.toml", overrides)
                changes = settings_diff(before, after)
                if changes and not allow_changes:
                    raise ConfigError(
                        f"the settings are not those that {path} was started with:\n"
                        + "\n".join(f"  {line}" for line in changes)
                        + "\ngo on with them by --allow-changes, or without by leaving them out"
                        + ("" if file or overrides else f" of {path / 'config.toml'}")
                    )
                if changes:
                    ledger.set_meta("config", _write_config(path, after))
                _remove_stale_files(path)
                opened = cls(path, after.settings, lock, ledger)
                opened.settings_changed = bool(changes)
                return opened
            except BaseException:
                ledger.close()
                raise
        except BaseException:
            lock.close()
            raise

    def close(self) -> None:
        self.ledger.close()
        self._lock.close()


def settings_diff(before: LoadedSettings, after: LoadedSettings) -> list[str]:
    """The settings that differ, as lines with - and +."""
    was, now = ([f"{name} = {value}" for name, value, _ in loaded.rows()] for loaded in (before, after))
    changed = difflib.unified_diff(was, now, n=0, lineterm="")
    return [f"{line[0]} {line[1:]}" for line in changed if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def unused_path(parent: Path, name: str) -> Path:
    """A folder of that name that holds no run, with a number where it has to be."""
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
        raise StorageError(f"{path / 'lock'} cannot be opened: {error.strerror}; check who owns the folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise KeelError(f"{path} is being written by process {owner}; wait for it, or stop it first") from None
    # for people only: a disk that is full must not keep them from going on once there is room
    with contextlib.suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    return lock


def _stored_settings(path: Path, ledger: Ledger) -> LoadedSettings:
    """What the run went on with last. A `config.toml` that is lost or no TOML is written again from the ledger."""
    kept, file = ledger.get_meta("config"), path / "config.toml"
    if kept is None:  # of an older version
        return load_settings(file)
    before = load_settings_from_text(kept, f"{ledger.path}: its copy of config.toml")
    try:
        load_settings(file)
    except ConfigError as error:
        warnings.warn(f"{error}; it is written again as the ledger has it", stacklevel=3)
        with atomic_file(file) as temporary:
            temporary.write_text(kept)
    return before


def _remove_stale_files(path: Path) -> None:
    """Remove the unfinished files of a writer that was killed: whoever holds the lock is the only one."""
    for left in (*path.glob(f"{TEMP_PREFIX}*"), *path.glob(f"rollouts/{TEMP_PREFIX}*")):
        if left.is_file():
            left.unlink()


def _write_config(path: Path, loaded: LoadedSettings) -> str:
    text = "".join(f"{line}{comment}\n" for line, comment in toml_lines(loaded))
    with atomic_file(path / "config.toml") as temporary:
        temporary.write_text(text)
    return text


def _provenance(name: str, recipe_folder: Path | None) -> dict[str, Any]:
    """What a run was started with."""
    versions = {}
    for part in RECORDED_PACKAGES:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "format": 1,
        "name": name,
        "created": time.time(),
        "argv": sys.argv,
        # modules next to the recipe are found again when the run is resumed or evaluated
        "recipe_folder": None if recipe_folder is None else str(recipe_folder),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any]:
    """The commit that is checked out in the working directory, and whether files differ from it."""

    def said(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = said("rev-parse", "HEAD")
    return {} if commit is None else {"commit": commit, "changed": bool(said("status", "--porcelain"))}
