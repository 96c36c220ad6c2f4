"""Import of libraries that only some environments need."""

import importlib
from typing import Any

from keel.errors import ConfigError


def import_optional(module: str, package: str) -> Any:
    """Import `module`, or raise `ConfigError` that says to install `package`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"environments of {package} need the library: pip install {package}") from error
