"""Folders from which a server may load weights: every path in a request must lie inside one of them.

Guarantees that a path is resolved, symlinks included, before it is compared, that no file inside the folder links out
of the allowed folders, and that the response for a path outside does not reveal whether it exists. Users who can write
to an allowed folder are trusted not to change links while they are read. Weights are not read here.
"""

from collections.abc import Sequence
from pathlib import Path

from keel.inference.server.openai_requests import RequestError


class AllowedFolders:
    """Folders that weights may be loaded from; without any, nothing may be loaded."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.folders = tuple(folders)

    def resolve(self, field: str, requested: str) -> Path:
        """Return the resolved folder in a request's field, or raise `RequestError`."""
        path = _resolve_path(requested)
        roots = [root for root in (_resolve_path(str(folder)) for folder in self.folders) if root is not None]
        shown = f"{field} = {requested[:200]}"
        if path is None or not _is_inside(path, roots):
            allowed = ", ".join(map(str, self.folders)) or "none"
            raise RequestError(
                403,
                f"{shown} is not inside a folder that this server may load from ({allowed}); start the server with"
                " --weights-from DIR",
                param=field,
            )
        if not path.is_dir():
            raise RequestError(400, f"{shown} is not a folder on the server's machine", param=field)
        for entry in path.rglob("*"):
            if entry.is_symlink() and not _is_inside(_resolve_path(str(entry)), roots):
                raise RequestError(
                    403, f"{shown}: {entry.name} is a symlink that leads out of the allowed folders", param=field
                )
        return path


def _is_inside(path: Path | None, roots: Sequence[Path]) -> bool:
    return path is not None and any(path.is_relative_to(root) for root in roots)


def _resolve_path(path: str) -> Path | None:
    """Return the resolved path, or None if no file can have this name."""
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
