"""Settings as TOML again: reading what is written gives the same settings, and each line says where its value is from.

Values that are not given are comments, because TOML has no word for them.
"""

import json
from typing import Any

from keel.config.load import LoadedSettings


def toml_lines(loaded: LoadedSettings) -> list[tuple[str, str]]:
    """The settings line by line, each with its trailing comment."""
    tables: dict[tuple[str, ...], list[tuple[str, Any, str]]] = {}
    # what stands outside of all tables must come first
    for path, value, origin in sorted(loaded.rows(), key=lambda row: "." in row[0]):
        *parents, key = path.split(".")
        tables.setdefault(tuple(parents), []).append((key, value, origin))
    lines: list[tuple[str, str]] = []
    for table, rows in tables.items():
        if table:
            lines += ([("", "")] if lines else []) + [(_table_header(table), "")]
        for key, value, origin in rows:
            shown = origin if origin.isprintable() else repr(origin)
            line = ("", f"# {key} is not given") if value is None else (f"{key} = {to_toml(value)}", "")
            lines.append((line[0], f"{line[1]}  # {shown}"))
    return lines


def _table_header(table: tuple[str, ...]) -> str:
    """The header of a table, or of the next table of a list."""
    name = ".".join(part for part in table if not part.isdecimal())
    return f"[[{name}]]" if table[-1].isdecimal() else f"[{name}]"


def to_toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {to_toml(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return str(value)
