"""Read an API key from a file, which keeps it out of settings, command lines and logs.

Guarantees that the key is a single ASCII word that can be sent in a header. This module neither
generates nor prints keys.
"""

from pathlib import Path

from keel.errors import ConfigError


def read_api_key(setting: str, file: str | Path) -> str:
    """Return the key in a file; `setting` is the name of the setting that gave the file, for errors."""
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting} = {file} cannot be read: {error}; use a file that contains only the key"
        ) from error
    if not key or not key.isascii() or key.split() != [key]:
        raise ConfigError(f"{setting} = {file} must contain one word of ASCII letters and digits, and nothing else")
    return key
