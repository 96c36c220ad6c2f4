"""Which settings would be secrets: they are refused, because settings are written into a run's folder and printed.

Guarantees that what is refused is named and never shown. It looks at names and at addresses, since a secret has no look
of its own; a secret under a harmless name is not found.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:api|access|auth|private|secret|bearer)?_?(?:key|token|password|passwd|secret|credentials?)$", re.I
)
"""The last word of a name, or the last two. `key_file` and `token_env` name places, and `stop_token` is refused too:
better asked for another name than written down."""


def secret_names(value: Any, prefix: str = "") -> Iterator[str]:
    """The names in nested settings under which a text stands that looks like a secret."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            here = f"{prefix}.{name}" if prefix else str(name)
            if isinstance(inner, str) and inner and SECRET_NAME.search(str(name)):
                yield here
            yield from secret_names(inner, here)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, inner in enumerate(value):
            yield from secret_names(inner, f"{prefix}.{number}")


def secret_in_url(url: str) -> str | None:
    """What in a URL is a secret, in words; none when nothing looks like one."""
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if SECRET_NAME.search(name)]
    except ValueError:
        return None
    if "@" in parts.netloc:
        return "a user or password"
    return f"a query with {names[0]}" if names else None
