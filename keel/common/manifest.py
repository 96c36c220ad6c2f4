"""Write and verify manifests: a manifest lists every file of a folder with its size and hash.

Checkpoints and published weights are written with a manifest and verified before they are loaded. The hashes detect
accidental damage and edits. They are not a signature: someone who rewrites the manifest too is not detected. Imports no
torch.
"""

import hashlib
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keel.common.safe_read import read_json
from keel.errors import ModelError

MANIFEST_FILE = "manifest.json"
IDENTITY_FILE = "keel.json"
"""Present in every folder of weights that Keel writes; identifies the model."""
_LOADABLE_SUFFIXES = (".safetensors", ".json")


class UnreadableFile(ModelError):
    """A file exists but cannot be read now or by this user. It is not known to be damaged and must not be deleted."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in the folder. No file may be added or changed afterwards."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "blake2b": hash_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    # no trailing newline: a manifest that lost its last byte must not pass as complete
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files, "blake2b": _hash_entries(files)}, indent=2))


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a folder's manifest: for each file name its `size` and `blake2b`."""
    path = folder / MANIFEST_FILE
    try:
        content = read_json(path)
        files: dict[str, dict[str, Any]] = content["files"]
        intact = _hash_entries(files) == content["blake2b"]
        for name, entry in files.items():
            _check_entry(name, entry)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} was changed: {error}") from error
    if not intact:
        raise ModelError(f"{path} was changed: its entries do not match its hash")
    return files


def verify_manifest(
    folder: Path, *, check_hashes: bool = True, include: Callable[[str], bool] = lambda _name: True
) -> None:
    """Raise a `ModelError` that names the first file of a folder that is missing, truncated or changed.

    Without `check_hashes` only presence and sizes are checked, which is fast. `include` selects the files to check by
    name, for callers that read no others.
    """
    for name, entry in read_manifest(folder).items():
        path = folder / name
        if not include(name):
            continue
        try:
            status = path.stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode) or not path.resolve().is_relative_to(folder.resolve()):
                raise ModelError(f"{path} is not a file of this folder: it is a device, or a link to another folder")
            if size != entry["size"]:
                raise ModelError(f"{path} has {size:,} bytes instead of {entry['size']:,}")
            if check_hashes and hash_file(path) != entry["blake2b"]:
                raise ModelError(f"{path} was changed: it does not match its hash in {MANIFEST_FILE}")
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from error


def check_weights(folder: Path) -> None:
    """Raise a `ModelError` that names the file if a folder of weights is not as Keel wrote it. Call before loading it.

    Every folder that Keel writes has a manifest, and a folder that lost it is an error too. Folders from other sources
    have no manifest and pass unchecked. Subfolders are not checked, because no engine reads them.
    """
    if not (folder / MANIFEST_FILE).is_file() and not (folder / IDENTITY_FILE).is_file():
        return
    verify_manifest(folder, include=lambda name: "/" not in name)
    listed = read_manifest(folder).keys() | {MANIFEST_FILE}
    for path in sorted(folder.iterdir()):
        # weight loaders read every file with one of these suffixes
        if path.suffix in _LOADABLE_SUFFIXES and path.name not in listed:
            raise ModelError(f"{path} is not in {MANIFEST_FILE}: it was added after the folder was written")


def hash_file(path: Path) -> str:
    """Return the 32-byte blake2b hash of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _check_entry(name: str, entry: dict[str, Any]) -> None:
    """Raise a `ValueError` for an entry that names a file outside the folder, or lacks a size or a hash."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or not name or {"", ".", ".."} & set(parts):
        raise ValueError(f"{name[:200]!r} is not a file in this folder")
    if type(entry["size"]) is not int or not isinstance(entry["blake2b"], str):
        raise ValueError(f"the entry of {name[:200]!r} has no size and hash")


def _hash_entries(files: dict[str, dict[str, Any]]) -> str:
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=32).hexdigest()
