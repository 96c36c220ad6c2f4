"""Find settings that look like secrets. They are errors, because settings are printed and written into the run folder.

Guarantees that the name of such a setting is reported and its value never is. Only the names of settings and the parts
of URLs are examined: a secret under a harmless name is not found.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:api|access|auth|private|secret|bearer)?_?(?:key|token|password|passwd|secret|credentials?)$", re.I
)
"""Matches the last word of a name, or the last two. `key_file` and `token_env` do not match, because they name where a
secret is stored. `stop_token` matches although it is harmless: a false alarm costs a rename, a missed secret is written
to disk."""


def secret_names(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the strings in nested settings whose name looks like that of a secret."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            path = f"{prefix}.{name}" if prefix else str(name)
            if isinstance(inner, str) and inner and SECRET_NAME.search(str(name)):
                yield path
            yield from secret_names(inner, path)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, inner in enumerate(value):
            yield from secret_names(inner, f"{prefix}.{index}")


def secret_in_url(url: str) -> str | None:
    """Describe the part of a URL that looks like a secret, or return None."""
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if SECRET_NAME.search(name)]
    except ValueError:
        return None
    if "@" in parts.netloc:
        return "a user name or password"
    return f"the query parameter {names[0]}" if names else None
