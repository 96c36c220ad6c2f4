"""The cache folder for files that Keel can recreate: converted models, fingerprints, compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/keel, or ~/.cache/keel if the variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "keel"
