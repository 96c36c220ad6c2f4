"""An API key that is kept in a file, so that it stands in no settings, no command line and no log.

Guarantees that what is read is one word that can be sent in a header. It makes no keys and shows none.
"""

from pathlib import Path

from keel.errors import ConfigError


def read_api_key(setting: str, file: str | Path) -> str:
    """The key in a file; `name` is the setting that named the file."""
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting} = {file} cannot be read: {error}; give a file that holds the key alone"
        ) from error
    if not key or not key.isascii() or key.split() != [key]:
        raise ConfigError(f"{setting} = {file} must hold one word of letters and digits, and nothing else")
    return key
