"""`keel audit`: check a loss for known silent failures and print the smallest batch on which a check fails."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.config.load import parse_overrides
from keel.objectives import PRESETS
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.signal.audit import Finding, Report

FLAGS = ("--like", "--anchor", "--decisions", "--dropped-from", "--divisor", "--signal", "--seed", "--json")
"""The command's own flags; any other `--name value` is a parameter of the preset."""

COLUMNS = {
    "sequence": "sequence",
    "group": "group",
    "trainable": "trainable",
    "logprobs": "l",
    "sampler_logprobs": "b",
    "advantages": "A",
}
OPTIONAL_COLUMNS = {"proximal_logprobs": "o", "reference_logprobs": "f", "teacher_logprobs": "h"}
"""Columns of a counterexample of the comparison, if the preset reads them."""

STYLES = {"passed": "green", "failed": "bold red", "error": "bold yellow", "not applicable": "dim"}


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "audit",
        help="check a preset or any loss for known silent failures",
        description="Check a loss for known silent failures.\n\nTARGET is a preset, with any of its parameters"
        " as --name value;\na TOML file with an [objective];\nor module:function, a function from a TokenBatch to a"
        " loss.\n\nWith --like PRESET, its loss and gradient are also compared with those of a preset on random"
        " batches,\nand --name value are the parameters of PRESET.\n\nExit code 0: every class passed; 1: a class"
        " failed; 2: the target cannot be loaded or called,\nor no class failed but the target raised an exception, or"
        " is not finite, on a valid batch.",
        epilog="examples:\n  keel audit icepop\n  keel audit opsm --opsm_delta 0.01\n"
        "  keel audit my_losses:sequence_mask --anchor proximal --divisor sequences\n"
        "  keel audit my_losses:clip_higher --like dapo --eps_high 0.3",
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument(
        "--like",
        metavar="PRESET",
        help="compare with a preset, or with the [objective] of a TOML file; a function without a declaration is"
        " checked against that of PRESET",
    )
    declared = parser.add_argument_group(
        "declaration", "the intended properties of the loss; the others keep their defaults"
    )
    declared.add_argument("--anchor", help="the policy that the ratio is measured against: sampler, proximal or none")
    declared.add_argument(
        "--decisions", help="scopes of decisions: token, sequence or step; separate several with commas"
    )
    declared.add_argument(
        "--dropped-from", help='terms that a dropped token does not contribute to: "every term" or "policy term"'
    )
    declared.add_argument(
        "--divisor", help="tokens, sequences or constant; kept-tokens, ... if dropped tokens do not count"
    )
    declared.add_argument("--signal", help="the weights of the policy term: advantage, teacher or none")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random batches (default 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit the target, print the report and return the exit code."""
    from keel.signal.audit import audit

    add_module_folders()
    options = {name: getattr(args, name) for name in ("anchor", "dropped_from", "divisor", "signal")}
    declared: dict[str, Any] = {name: value.replace("-", " ") for name, value in options.items() if value}
    if args.decisions is not None:
        declared["decisions"] = tuple(part.strip() for part in args.decisions.split(",") if part.strip())
    parameters = dict(parse_overrides(args.overrides))
    if args.like in PRESETS and "anchor" in PRESETS[args.like].parameters and args.anchor:
        parameters["anchor"] = args.anchor  # the flag has the name of a parameter of these presets
    report = audit(args.target, seed=args.seed, parameters=parameters, like=args.like, **declared)
    if args.json:
        write_stdout(json.dumps(_as_json(report), indent=2) + "\n")
    else:
        _print_report(report)
    if report.failed:
        return 1
    return 2 if report.errors else 0


def _print_report(report: "Report") -> None:
    screen = console()
    table = Table(box=None, pad_edge=False)
    for name in ("", "checked for", "", "finding"):
        table.add_column(name, overflow="fold")
    for finding in report.findings:
        status = Text(finding.status, STYLES[finding.status])
        table.add_row(finding.letter, finding.title, status, Text(finding.message))
    screen.print(f"audit of {report.target}\n")
    screen.print(table)
    shown: set[str] = set()
    for finding in report.findings:
        # one line of the loss often raises in several classes; show one batch for it
        location = finding.message.rpartition(" (")[2] if finding.status == "error" else finding.letter
        if finding.batch is None or location in shown:
            continue
        shown.add(location)
        kind = "batch found with this error" if finding.status == "error" else "counterexample found"
        screen.print(f"\n{finding.letter}. smallest {kind}")
        screen.print(_token_table(finding))
    screen.print(f"\n{_summary(report)}")


def _summary(report: "Report") -> str:
    passed = sum(finding.status == "passed" for finding in report.findings)
    summary = f"{passed} passed, {len(report.failed)} failed"
    if report.failed:
        summary += f": {', '.join(report.failed)}"
    if report.errors:
        errors = "error" if len(report.errors) == 1 else "errors"
        summary += f"; {len(report.errors)} {errors}: {', '.join(report.errors)}"
    return summary


def _token_table(finding: "Finding") -> Table:
    batch = finding.batch
    assert batch is not None
    optional = finding.like.optional_fields if finding.like is not None else ()
    columns = COLUMNS | {name: OPTIONAL_COLUMNS[name] for name in optional}
    table = Table(box=None, pad_edge=False)
    table.add_column("token", justify="right")
    tensors = batch.tensors()
    names = [name for name in columns if name in tensors]
    for name in names:
        table.add_column(columns[name], justify="right")
    for index in range(len(batch)):
        cells = [tensors[name][index].item() for name in names]
        table.add_row(str(index), *(_cell(cell) for cell in cells))
    return table


def _cell(value: float | int | bool) -> str:
    return f"{value + 0.0:.6g}" if isinstance(value, float) else str(value).lower()  # adding 0 turns -0 into 0


def _as_json(report: "Report") -> dict[str, Any]:
    return {
        "target": report.target,
        "passed": report.passed,
        "failed": report.failed,
        "errors": report.errors,
        "findings": [_finding_json(finding) for finding in report.findings],
    }


def _finding_json(finding: "Finding") -> dict[str, Any]:
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
