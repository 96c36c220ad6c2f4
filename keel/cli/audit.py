"""`keel audit`: hold a training signal to what it says of itself, and show the smallest batch on which it fails."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from keel.cli.console import console, write
from keel.cli.modules import add_module_folders
from keel.config.load import parse_overrides

if TYPE_CHECKING:
    from keel.audit import Finding, Report
    from keel.signal import TokenBatch

FLAGS = ("--anchor", "--decisions", "--leaves", "--divisor", "--signal", "--seed", "--json")
"""The command's own flags; any other `--name value` is a parameter of the recipe."""

COLUMNS = {
    "sequence": "sequence",
    "group": "group",
    "trainable": "trainable",
    "logprobs": "l",
    "sampler_logprobs": "b",
    "advantages": "A",
}
STYLES = {"held": "green", "broken": "bold red", "outside": "dim"}


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "audit",
        help="check a recipe, or any loss, against the known silent failures",
        description="Ask a training signal about every known silent failure.\n\nTARGET is a recipe, with any of its"
        " parameters as --name value;\na TOML file with an [objective];\nor module:function, a function from a"
        " TokenBatch to a loss.\n\nExit code 0: all held; 1: one is broken; 2: the target cannot be loaded or called.",
        epilog="examples:\n  keel audit icepop\n  keel audit opsm --opsm_delta 0.01\n"
        "  keel audit my_losses:sequence_mask --anchor proximal --divisor sequences",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="TARGET")
    said = parser.add_argument_group("what a function says of itself", "the strict default holds where nothing is said")
    said.add_argument("--anchor", help="sampler, proximal or none")
    said.add_argument("--decisions", help="token, sequence, step, or several with commas")
    said.add_argument("--leaves", help='what a dropped token leaves: "every term" or "policy term"')
    said.add_argument("--divisor", help="tokens, sequences or constant, or with kept: kept-tokens, ...")
    said.add_argument("--signal", help="advantage, teacher or none")
    parser.add_argument("--seed", type=int, default=0, help="for the random batches (default 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit and print; 1 when something is broken."""
    from keel.audit import audit

    add_module_folders()
    word = {name: getattr(args, name) for name in ("anchor", "leaves", "divisor", "signal") if getattr(args, name)}
    word = {name: value.replace("-", " ") for name, value in word.items()}
    if args.decisions is not None:
        word["decisions"] = tuple(part.strip() for part in args.decisions.split(",") if part.strip())
    report = audit(args.target, seed=args.seed, parameters=dict(parse_overrides(args.overrides)), **word)
    if args.json:
        write(json.dumps(_as_json(report), indent=2) + "\n")
    else:
        _show(report)
    return 0 if report.held else 1


def _show(report: "Report") -> None:
    screen = console()
    table = Table(box=None, pad_edge=False)
    for name in ("", "class", "", "what was found"):
        table.add_column(name, overflow="fold")
    for finding in report.findings:
        status = "not in a loss" if finding.status == "outside" else finding.status
        table.add_row(finding.letter, finding.title, Text(status, STYLES[finding.status]), finding.message)
    screen.print(f"audit of {report.target}\n")
    screen.print(table)
    for finding in report.findings:
        if finding.batch is not None:
            screen.print(f"\n{finding.letter}. smallest counterexample found")
            screen.print(_tokens(finding.batch))
    held = sum(finding.status == "held" for finding in report.findings)
    verdict = f"{held} held, {len(report.broken)} broken"
    screen.print(f"\n{verdict}" + (f": {', '.join(report.broken)}" if report.broken else ""))


def _tokens(batch: "TokenBatch") -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("token", justify="right")
    tensors = batch.tensors()
    names = [name for name in COLUMNS if name in tensors]
    for name in names:
        table.add_column(COLUMNS[name], justify="right")
    for place in range(len(batch)):
        cells = [tensors[name][place].item() for name in names]
        table.add_row(str(place), *(f"{cell:.6g}" if isinstance(cell, float) else str(cell).lower() for cell in cells))
    return table


def _as_json(report: "Report") -> dict[str, Any]:
    return {
        "target": report.target,
        "held": report.held,
        "broken": report.broken,
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: "Finding") -> dict[str, Any]:
    batch = None
    if finding.batch is not None:
        batch = {name: value.tolist() for name, value in finding.batch.tensors().items()}
    return {
        "class": finding.letter,
        "title": finding.title,
        "status": finding.status,
        "message": finding.message,
        "counterexample": batch,
    }
