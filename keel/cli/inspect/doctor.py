"""`keel doctor`: what this machine is like, what is missing on it, and how fast it is.

Exit code 1 when something keeps Keel from working, 0 otherwise: warnings and optional parts do not count.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine",
        description="Check Python, torch, cores, memory, allocator, disk, ports and optional parts, and time a small"
        " training step\nand sampling. Nothing is installed, downloaded or changed. Exit code 1: there is a problem.",
        epilog="examples:\n  keel doctor\n  keel doctor --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, show, and say by the exit code whether it will do."""
    from keel.tools.doctor import run_checks

    findings = run_checks(Path.cwd())
    counts = {state: sum(one.state == state for one in findings) for state in STYLES}
    if args.json:
        write_stdout(json.dumps({"findings": [asdict(one) for one in findings], **counts}, indent=2) + "\n")
        return 1 if counts["problem"] else 0
    table = Table(box=None, pad_edge=False)
    for title in ("", "", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for one in findings:
        state = Text(one.state, STYLES[one.state])
        table.add_row(Text(one.name), state, Text(one.detail), Text(one.remedy, "dim" if one.state == "ok" else ""))
    screen = console()
    screen.print(table)
    screen.print(Text(f"\n{counts['problem']} problems, {counts['warning']} warnings"))
    return 1 if counts["problem"] else 0
