"""`keel doctor`: check this machine and the installation, and measure their speed.

The exit code is 1 if there is a problem and 0 otherwise: warnings and missing optional packages do not count.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout

STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "problem": "bold red"}


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and the installation",
        description="Check Python, torch, GPUs, cores, memory, allocator, disk, ports and optional packages, and time"
        " a small\ntraining step and sampling. Nothing is installed, downloaded or changed. The exit code is 1 if there"
        " is a\nproblem, else 0.",
        epilog="examples:\n  keel doctor\n  keel doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks, print them, and return 1 if there is a problem."""
    from keel.tools.doctor import run_checks

    checks = run_checks(Path.cwd())
    counts = {state: sum(check.state == state for check in checks) for state in STYLES}
    if args.json:
        write_stdout(json.dumps({"checks": [asdict(check) for check in checks], **counts}, indent=2) + "\n")
        return 1 if counts["problem"] else 0
    table = Table(box=None, pad_edge=False)
    for title in ("check", "state", "detail", "what to do"):
        table.add_column(title, overflow="fold")
    for check in checks:
        state = Text("-" if check.state == "absent" else check.state, STYLES[check.state])
        remedy = Text(check.remedy, "dim" if check.state in ("ok", "absent") else "")
        table.add_row(Text(check.name), state, Text(check.detail), remedy)
    screen = console()
    screen.print(table)
    screen.print(Text(f"\n{_count(counts['problem'], 'problem')}, {_count(counts['warning'], 'warning')}"))
    return 1 if counts["problem"] else 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
