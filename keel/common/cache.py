"""Where Keel keeps what it can make again: converted models, fingerprints, compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/keel, or ~/.cache/keel."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "keel"
