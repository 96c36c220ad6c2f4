"""`keel config`: print the resolved settings as TOML, with the origin of each value, or explain what settings mean.

The resolved settings are a valid settings file: reading it gives the same settings. Values that are not set are printed
as comments, because TOML has no null. With `--explain` the types, defaults and descriptions come from the code.
"""

import argparse
import dataclasses
import json
import textwrap

from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.config import load_settings
from keel.config.setting_reference import describe_tables, find_settings
from keel.config.toml_writer import toml_lines
from keel.errors import ConfigError

FLAGS = ("--json", "--explain")
MAX_TEXT_WIDTH = 100
"""Maximum width of the descriptions that --explain prints."""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="print the resolved settings and the origin of each value",
        description="Resolve a settings file with overrides (defaults < FILE < command line) and print the result as"
        " TOML,\nwith the origin of each value as a comment. With --explain: describe a setting, a table or all"
        " settings.",
        epilog="examples:\n  keel config larger_number\n"
        "  keel config larger_number --objective.kl_tau 0.01\n"
        "  keel config larger_number --sampling.max_tokens 64 > resolved.toml\n"
        "  keel config --explain scheduler",
        usage="keel config [-h] [--json] [FILE] [--a.b VALUE ...]\n       keel config [--json] --explain [NAME]",
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a TOML file (default: none, all settings are defaults)"
    )
    parser.add_argument("--json", action="store_true", help="print values and origins as JSON")
    parser.add_argument(
        "--explain",
        metavar="NAME",
        nargs="?",
        const="",
        help="print default, type and meaning of a setting or of a table (default: of all settings)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.explain is not None:
        return _explain(args)
    loaded = load_settings(args.file, args.overrides)
    if args.json:
        rows = {path: {"value": value, "origin": origin} for path, value, origin in loaded.rows()}
        write_stdout(json.dumps(rows, indent=2) + "\n")
        return 0
    text = Text()
    for line, comment in toml_lines(loaded):
        text.append(line)
        text.append(comment + "\n", style="dim")
    console().print(text, end="", soft_wrap=True)
    return 0


def _explain(args: argparse.Namespace) -> int:
    """Print the settings that a name selects, or all of them."""
    if args.file is not None or args.overrides:
        extra = args.file or args.overrides[0]
        raise ConfigError(f"--explain takes the name of a setting or of a table and nothing else; remove {extra}")
    tables = find_settings(args.explain) if args.explain else describe_tables()
    if args.json:
        rows = [dataclasses.asdict(setting) for table in tables for setting in table.settings]
        write_stdout(json.dumps(rows, indent=2) + "\n")
        return 0
    terminal, text = console(), Text()
    width = min(terminal.width, MAX_TEXT_WIDTH)
    for table in tables:
        text.append("\n" if text else "")
        if table.name:
            text.append(f"[{table.name}]\n", style="bold")
            text.append(textwrap.fill(table.description, width) + "\n", style="dim")
        for setting in table.settings:
            text.append(f"{setting.name}\n", style="bold cyan")
            for line in (f"{setting.type}; default: {setting.default}", setting.description):
                text.append(textwrap.fill(line, width, initial_indent="    ", subsequent_indent="    ") + "\n")
    terminal.print(text, end="", soft_wrap=True)
    return 0
