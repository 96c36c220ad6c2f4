"""`keel config`: the resolved settings as TOML, and where each value came from.

What it prints is a settings file again: reading it gives the same settings. Values that are not given are comments,
because TOML has no word for them.
"""

import argparse
import json
from typing import Any

from rich.text import Text

from keel.cli.console import console, write
from keel.config import Loaded, load

FLAGS = ("--json",)


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="print the resolved settings and where each value came from",
        description="Resolve a settings file with overrides (defaults < FILE < command line) and print the result.",
        epilog="examples:\n  keel config run.toml\n  keel config run.toml --objective.kl_tau 0.01\n"
        "  keel config run.toml --objective.gates.0.high 8 > resolved.toml",
        usage="keel config [-h] [--json] [FILE] [--a.b VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="a TOML file; not given: the defaults")
    parser.add_argument("--json", action="store_true", help="values and origins by name, for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    loaded = load(args.file, args.overrides)
    if args.json:
        rows = {path: {"value": value, "origin": origin} for path, value, origin in loaded.rows()}
        write(json.dumps(rows, indent=2) + "\n")
        return 0
    text = Text()
    for line, comment in toml_lines(loaded):
        text.append(line)
        text.append(comment + "\n", style="dim")
    console().print(text, end="", soft_wrap=True)
    return 0


def toml_lines(loaded: Loaded) -> list[tuple[str, str]]:
    """The settings line by line, each with its trailing comment."""
    tables: dict[tuple[str, ...], list[tuple[str, Any, str]]] = {}
    # what stands outside of all tables must come first
    for path, value, origin in sorted(loaded.rows(), key=lambda row: "." in row[0]):
        *parents, key = path.split(".")
        tables.setdefault(tuple(parents), []).append((key, value, origin))
    lines: list[tuple[str, str]] = []
    for table, rows in tables.items():
        if table:
            lines += ([("", "")] if lines else []) + [(_header(table), "")]
        for key, value, origin in rows:
            shown = origin if origin.isprintable() else repr(origin)
            line = ("", f"# {key} is not given") if value is None else (f"{key} = {toml(value)}", "")
            lines.append((line[0], f"{line[1]}  # {shown}"))
    return lines


def _header(table: tuple[str, ...]) -> str:
    """The header of a table, or of the next table of a list."""
    name = ".".join(part for part in table if not part.isdecimal())
    return f"[[{name}]]" if table[-1].isdecimal() else f"[{name}]"


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {toml(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return str(value)
