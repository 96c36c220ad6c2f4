"""Manifests: a file that names every file of a folder with its size and hash, so that damage is found before use.

Whoever writes a folder seals it (`keel.common.atomic_files`), and whoever reads one checks it here: checkpoints, and
the weights that travel to engines. The hashes find accidents and careless edits; they are no signature against
someone who rewrites the manifest too. Imports no torch.
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
"""In every folder of weights that Keel writes: whose they are."""
_LOADABLE_SUFFIXES = (".safetensors", ".json")


class UnreadableFile(ModelError):
    """Files that are there and cannot be read, now or by this user: no sign of damage, no reason to discard them."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of everything in the folder. Nothing may be added or changed afterwards."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "blake2b": hash_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    # no newline at the end: the manifest without its last byte must not pass for whole
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files, "blake2b": _hash_entries(files)}, indent=2))


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a sealed folder by name, each with `size` and `blake2b`, as its manifest has them."""
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
        raise ModelError(f"{path} was changed: its entries do not have the hash it carries")
    return files


def verify_manifest(
    folder: Path, *, check_hashes: bool = True, include: Callable[[str], bool] = lambda _name: True
) -> None:
    """Refuse a sealed folder with a file that is missing, truncated or changed, by its name.

    Without `hashes` only presence and sizes are looked at, which is quick. `only`: names of the files that count, for
    who reads no others.
    """
    for name, entry in read_manifest(folder).items():
        path = folder / name
        if not include(name):
            continue
        try:
            found = path.stat()
            size = found.st_size
            if not stat.S_ISREG(found.st_mode) or not path.resolve().is_relative_to(folder.resolve()):
                raise ModelError(f"{path} is no file of this folder: it is a link that leads out of it, or a device")
            if size != entry["size"]:
                raise ModelError(f"{path} has {size:,} bytes instead of {entry['size']:,}")
            if check_hashes and hash_file(path) != entry["blake2b"]:
                raise ModelError(f"{path} was changed: it does not have the hash in {MANIFEST_FILE}")
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from error


def check_weights(folder: Path) -> None:
    """Refuse a folder of weights that is not as it was written, by the file: before anything of it is loaded.

    Every folder that Keel writes has a manifest, and one that lost it is refused too. Folders of others have none and
    are taken as they are. Subfolders are not looked at: no engine reads them.
    """
    if not (folder / MANIFEST_FILE).is_file() and not (folder / IDENTITY_FILE).is_file():
        return
    verify_manifest(folder, include=lambda name: "/" not in name)
    named = read_manifest(folder).keys() | {MANIFEST_FILE}
    for path in sorted(folder.iterdir()):
        # what loads weights takes every file of these kinds that it finds
        if path.suffix in _LOADABLE_SUFFIXES and path.name not in named:
            raise ModelError(f"{path} is not in {MANIFEST_FILE}: it was put there by somebody else")


def hash_file(path: Path) -> str:
    """blake2b of a file's content, 32 bytes in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _check_entry(name: str, entry: dict[str, Any]) -> None:
    """Refuse an entry that names a file elsewhere, or says something else than a size and a hash."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or not name or {"", ".", ".."} & set(parts):
        raise ValueError(f"{name[:200]!r} is no file in this folder")
    if type(entry["size"]) is not int or not isinstance(entry["blake2b"], str):
        raise ValueError(f"the entry of {name[:200]!r} has no size and hash")


def _hash_entries(files: dict[str, dict[str, Any]]) -> str:
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=32).hexdigest()
