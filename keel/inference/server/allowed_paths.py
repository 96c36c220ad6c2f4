"""The folders that a server may load weights from: whatever path a request names must lie below one of them.

Guarantees that a path is followed to where it really is before it is compared, links included, that no file inside
leads out again, and that outside of them the answer is the same whether anything is there or not. Who may write below
a root is trusted not to change links while they are read; it reads no weights.
"""

from collections.abc import Sequence
from pathlib import Path

from keel.inference.server.openai_requests import RequestError


class AllowedFolders:
    """Where weights may come from; none: from nowhere."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.folders = tuple(folders)

    def resolve(self, field: str, requested: str) -> Path:
        """The folder that field `name` of a request gives, as it really is, or a refusal."""
        found = _resolve_path(requested)
        roots = [root for root in (_resolve_path(str(folder)) for folder in self.folders) if root is not None]
        if found is None or not _is_inside(found, roots):
            allowed = ", ".join(map(str, self.folders)) or "nowhere"
            raise RequestError(
                403,
                f"{field} = {requested[:200]} is not in a folder that this server loads from ({allowed}); start it with"
                " --weights-from DIR",
                param=field,
            )
        if not found.is_dir():
            raise RequestError(400, f"{field} = {requested[:200]} is not a folder on the server's machine", param=field)
        for path in found.rglob("*"):
            if path.is_symlink() and not _is_inside(_resolve_path(str(path)), roots):
                raise RequestError(
                    403, f"{field} = {requested[:200]}: {path.name} is a link that leads out of it", param=field
                )
        return found


def _is_inside(path: Path | None, roots: Sequence[Path]) -> bool:
    return path is not None and any(path.is_relative_to(root) for root in roots)


def _resolve_path(path: str) -> Path | None:
    """Where a path leads; none when no file can have such a name."""
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
