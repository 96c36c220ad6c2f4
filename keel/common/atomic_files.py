"""Folders on disk that are whole or not there.

A folder is filled under a temporary name beside its place, synced to the disk and renamed. Whoever is killed on the
way leaves the place as it was, and a temporary folder that nobody takes for a result; the next writer removes it. A
full disk leaves nothing. A folder can be sealed with a manifest of its files (`keel.common.manifest`, whose names are
here too). Needs a POSIX file system.
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
"""How the names of unfinished and discarded folders begin."""


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `target` when the block ends well and goes away when it does not.

    `target` must not exist, or be an empty folder. A write that fails is a `ModelError` with the reason.
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
        # also an interrupt: the process may live on, and must not leave gigabytes behind
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _write_error(target, error) from error
        raise


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary file to write, which takes the place of `target` when the block ends well."""
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
    """Remove a folder, by a rename first: killed in the middle, no half of it is left under its name."""
    temporary = _temp_path(folder)
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)  # what stays is a leftover, which the next writer removes


def remove_stale_temp(parent: Path) -> None:
    """Remove what killed writers left in a folder. A living writer holds a lock on its own."""
    for path in parent.glob(f"{TEMP_PREFIX}*"):
        with contextlib.suppress(OSError), _folder_lock(path, wait=False):
            shutil.rmtree(path)


def write_json(path: Path, content: object) -> None:
    """JSON for people and machines."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = safe_read.read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no JSON object")
    return content


def _sync_folder(folder: Path) -> None:
    """Everything in the folder, and the folder, on the disk, for whoever may read the folder."""
    # safetensors makes files that only their owner can read; an inference server may be another user
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
    # the kernel drops the lock of a killed process: what is unlocked has no writer, on any number of processes
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            # a file system without locks: write all the same, but remove nothing that may have a writer
            if not wait:
                raise
        yield
    finally:
        os.close(handle)


def _temp_path(target: Path) -> Path:
    return target.with_name(f"{TEMP_PREFIX}{target.name}-{secrets.token_hex(4)}")


def _write_error(target: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{target} could not be written: {error}; make room, or check who may write there. What was there before is as"
        " it was"
    )
