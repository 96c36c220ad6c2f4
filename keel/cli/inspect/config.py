"""`keel config`: the resolved settings as TOML, and where each value came from.

What it prints is a settings file again: reading it gives the same settings. Values that are not given are comments,
because TOML has no word for them.
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
