"""A cache of verdicts by content: in memory, and optionally in a folder that other runs share.

A file is written under a temporary name and renamed, so that concurrent runs read complete files. One that cannot be
read is ignored: the verdict is asked for again.
"""

import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

from keel.common import safe_read
from keel.common.atomic_files import atomic_file
from keel.errors import ModelError

MAX_ENTRIES = 20_000
"""Verdicts in memory; the least recently used one is forgotten first."""

logger = logging.getLogger("keel")


def content_key(content: Any) -> str:
    """Return a hash of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class VerdictCache:
    """Maps a hash of what was judged to the scores."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._entries: OrderedDict[str, tuple[float, ...]] = OrderedDict()

    def get(self, key: str) -> tuple[float, ...] | None:
        """Return the scores, or None."""
        if key not in self._entries and (scores := self._read(key)) is not None:
            self.remember(key, scores)
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def remember(self, key: str, scores: tuple[float, ...]) -> None:
        """Keep the scores in memory."""
        self._entries[key] = scores
        if len(self._entries) > MAX_ENTRIES:
            self._entries.popitem(last=False)

    def store(self, key: str, scores: tuple[float, ...]) -> None:
        """Write the scores to the folder, if there is one. If that fails, report it and no longer use the folder.

        Waits for the disk, so call it in a thread.
        """
        if self._folder is None:
            return
        try:
            with atomic_file(self._path(self._folder, key)) as temporary:
                temporary.write_text(json.dumps({"scores": scores}))
        except ModelError as error:
            logger.warning("judge: options.cache_folder is no longer used: %s", error)
            self._folder = None

    def _read(self, key: str) -> tuple[float, ...] | None:
        if self._folder is None:
            return None
        try:
            content = safe_read.read_json(self._path(self._folder, key))
            return tuple(float(score) for score in content["scores"])
        except (OSError, ValueError, TypeError, LookupError):
            return None

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
