"""Write settings as TOML, with the origin of each value as a comment.

Loading the written text gives the same settings. Unset values are written as comments, because TOML has no null.
"""

import json
from typing import Any

from keel.config.load import LoadedSettings


def toml_lines(loaded: LoadedSettings) -> list[tuple[str, str]]:
    """Return the lines of the TOML text as (content, comment) pairs."""
    tables: dict[tuple[str, ...], list[tuple[str, Any, str]]] = {}
    # TOML requires keys outside of tables to come first
    for path, value, origin in sorted(loaded.rows(), key=lambda row: "." in row[0]):
        *parents, key = path.split(".")
        tables.setdefault(tuple(parents), []).append((key, value, origin))
    lines: list[tuple[str, str]] = []
    for table, rows in tables.items():
        if table:
            lines += ([("", "")] if lines else []) + [(_table_header(table), "")]
        for key, value, origin in rows:
            shown = origin if origin.isprintable() else repr(origin)
            content, note = ("", f"# {key} is not given") if value is None else (f"{key} = {to_toml(value)}", "")
            lines.append((content, f"{note}  # {shown}"))
    return lines


def _table_header(table: tuple[str, ...]) -> str:
    """Return the header of a table, or of the next element of a list of tables."""
    name = ".".join(part for part in table if not part.isdecimal())
    return f"[[{name}]]" if table[-1].isdecimal() else f"[{name}]"


def to_toml(value: Any) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        entries = ", ".join(f"{key} = {to_toml(item)}" for key, item in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    return str(value)
