"""`keel config`: print the resolved settings as TOML, with the origin of each value.

The output is a valid settings file: reading it gives the same settings. Values that are not set are printed as
comments, because TOML has no null.
"""

import argparse
import json

from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.config import load_settings
from keel.config.toml_writer import toml_lines

FLAGS = ("--json",)


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="print the resolved settings and the origin of each value",
        description="Resolve a settings file with overrides (defaults < FILE < command line) and print the result as"
        " TOML,\nwith the origin of each value as a comment.",
        epilog="examples:\n  keel config larger_number\n"
        "  keel config larger_number --objective.kl_tau 0.01\n"
        "  keel config larger_number --sampling.max_tokens 64 > resolved.toml",
        usage="keel config [-h] [--json] [FILE] [--a.b VALUE ...]",
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a TOML file (default: none, all settings are defaults)"
    )
    parser.add_argument("--json", action="store_true", help="print values and origins as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
