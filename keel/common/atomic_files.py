"""Write folders and files atomically: a target is either complete or absent.

A folder is filled under a temporary name next to its target, synced to disk and renamed. A writer that is killed leaves
the target unchanged and a temporary folder behind, which no reader mistakes for a result and the next writer removes. A
write that fails on a full disk leaves nothing behind. `keel.common.manifest`, whose names are exported here too, writes
and verifies the manifest of a folder. Needs a POSIX file system.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from keel.common import safe_read
from keel.common.manifest import (
    MANIFEST_FILE,
    UnreadableFile,
    hash_file,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from keel.errors import ModelError

__all__ = [
    "MANIFEST_FILE",
    "TEMP_PREFIX",
    "UnreadableFile",
    "atomic_file",
    "atomic_folder",
    "hash_file",
    "read_json",
    "read_manifest",
    "remove_folder",
    "remove_stale_temp",
    "verify_manifest",
    "write_json",
    "write_manifest",
]

TEMP_PREFIX = ".keel-tmp-"
"""Prefix of the names of unfinished and removed folders."""


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` if the block succeeds and is removed if it raises.

    `target` must not exist or must be an empty folder. A failed write raises a `ModelError` with the reason.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_temp(target.parent)
        temporary = _temp_path(target)
        temporary.mkdir()
    except OSError as error:
        raise _write_error(target, error) from error
    try:
        with _folder_lock(temporary):
            yield temporary
            _sync_folder(temporary)
            temporary.rename(target)
            _fsync(target.parent)
    except BaseException as error:
        # BaseException, because a process that survives an interrupt must not leave gigabytes behind
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _write_error(target, error) from error
        raise


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `target` if the block succeeds."""
    temporary = _temp_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _fsync(temporary)
        temporary.replace(target)
        _fsync(target.parent)
    except OSError as error:
        raise _write_error(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a killed process never leaves half of it under its name."""
    temporary = _temp_path(folder)
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)  # the next writer removes whatever remains


def remove_stale_temp(parent: Path) -> None:
    """Remove the temporary folders that killed writers left in `parent`. Running writers hold a lock on theirs."""
    for path in parent.glob(f"{TEMP_PREFIX}*"):
        with contextlib.suppress(OSError), _folder_lock(path, wait=False):
            shutil.rmtree(path)


def write_json(path: Path, content: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Any problem raises a `ModelError` that names the file."""
    try:
        content = safe_read.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _sync_folder(folder: Path) -> None:
    """Sync the folder and its files to disk, and make the files readable to everyone who may read the folder."""
    # safetensors creates files that only their owner can read, but an inference server may run as another user
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _folder_lock(folder: Path, *, wait: bool = True) -> Iterator[None]:
    # the kernel releases the lock of a killed process, so an unlocked folder has no writer in any process
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            # on a file system without locks, write anyway, but remove nothing that may have a writer
            if not wait:
                raise
        yield
    finally:
        os.close(handle)


def _temp_path(target: Path) -> Path:
    return target.with_name(f"{TEMP_PREFIX}{target.name}-{secrets.token_hex(4)}")


def _write_error(target: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{target} could not be written: {error}; free disk space, or check the permissions. Previous content is"
        " unchanged"
    )
