"""`keel compare`: several objectives on the tokens that a run recorded, side by side, without training.

The numbers come from `keel.tools.compare`; here they become tables in a terminal, JSON, a page or a parquet file.
With --live each objective trains short runs of its own instead: see `keel/cli/display/sweep_display.py`.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.cli.display import sweep_display
from keel.cli.display.console import console, write_stdout
from keel.errors import KeelError

if TYPE_CHECKING:
    from keel.tools.compare import ComparisonReport
    from keel.tools.compare.report import ObjectiveSummary

DEFAULT_MODEL_STEPS = 3
DEFAULT_TEXTS = 5
OFFLINE_FLAGS = ("--texts", "--proximal", "--model", "--model-steps")
"""Flags that only act on recorded tokens."""
FLAGS = ("--live", "--objectives", "--steps", *OFFLINE_FLAGS, *sweep_display.FLAGS)


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "compare",
        help="evaluate several objectives on a run's recorded tokens",
        description="Evaluate every objective on the same recorded tokens: what each keeps and drops and why, its loss,"
        " its gradient,\nand how far they agree. RUN is a run folder, or a parquet or JSON-lines file of tokens"
        " (docs/compare.md has the columns).\n\nWith --live RECIPE every objective trains short runs from the same"
        " start, on the same tasks, with the same seeds;\noverrides of the recipe are --a.b VALUE (docs/sweeps.md)."
        "\n\nExit code 0: compared; 1: a live run failed or was stopped; 2: refused.",
        epilog="examples:\n  keel compare runs/first\n"
        '  keel compare runs/first --objectives "icepop,ipo_kl(kl_tau=0.01),mine.toml" --steps 1-20\n'
        "  keel compare tokens.jsonl --html report.html --parquet numbers.parquet\n"
        "  keel compare runs/first --model runs/first/checkpoints/step_20 --steps 20\n"
        "  keel compare --live recipes/larger_number.toml --objectives icepop,ipo_kl --seeds 3 --steps 20",
        usage="keel compare [-h] [--objectives LIST] [--steps STEPS] [--texts N] [--proximal WHICH] [--model MODEL]\n"
        "                    [--model-steps N] [--html FILE] [--parquet FILE] [--json] RUN\n"
        "       keel compare --live RECIPE [--objectives LIST] [--seeds K] [--parallel N] [--run DIR] [--steps N]\n"
        "                    [--html FILE] [--parquet FILE] [--json] [--a.b VALUE ...]\n"
        "       keel compare --live --resume DIR",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_or_file", metavar="RUN", type=Path, nargs="?")
    parser.add_argument("--live", metavar="RECIPE", nargs="?", const="", help="train instead of reading a recording")
    parser.add_argument(
        "--objectives",
        metavar="LIST",
        help="names with commas between them, parameters in parentheses, or TOML files: icepop,ipo_kl(kl_tau=0.01),"
        "mine.toml (default: icepop,ipo_kl,dppo_tv,dppo_kl,opsm)",
    )
    parser.add_argument("--steps", metavar="STEPS", help="1-20,30 or 40- (default: all); with --live: of each run")
    parser.add_argument(
        "--texts", metavar="N", type=int, help=f"most dropped token texts shown (default {DEFAULT_TEXTS})"
    )
    parser.add_argument(
        "--proximal",
        choices=["recorded", "policy"],
        help="policy: where no proximal log-probs were recorded, take the policy's, as a step with one update does",
    )
    parser.add_argument("--model", metavar="MODEL", help="a checkpoint or a name: gradients by its weights too")
    parser.add_argument(
        "--model-steps",
        metavar="N",
        type=int,
        help=f"with --model: steps, evenly spaced (default {DEFAULT_MODEL_STEPS})",
    )
    sweep_display.add_flags(parser, "runs/RECIPE-live")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that needs no network")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="write every number of every step")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write what was asked for."""
    if args.live is not None:
        return _run_live(args)
    _check_args(args)
    report = _compare_recording(args)
    if args.html is not None:
        from keel.tools.compare.files import atomic_file
        from keel.tools.compare.html import render_report

        with atomic_file(args.html) as temporary:
            temporary.write_text(render_report(report), encoding="utf-8")
    if args.json:
        write_stdout(json.dumps(report.as_json(), indent=2) + "\n")
        return 0
    out = console()
    print_report(out, report)
    for path in (args.html, args.parquet):
        if path is not None:
            out.print(f"written: {path}")
    return 0


def _run_live(args: argparse.Namespace) -> int:
    """Train by every objective."""
    given = [name for name in OFFLINE_FLAGS if getattr(args, name[2:].replace("-", "_")) is not None]
    if given or args.run_or_file is not None:
        raise KeelError(f"{given[0] if given else args.run_or_file} cannot act with --live, which reads no recording")
    if args.resume is not None:
        named = {"--live RECIPE": args.live, "--objectives": args.objectives, "--steps": args.steps}
        sweep_display.check_resume_flags(args, **named)
        return sweep_display.run_sweep(args, None, [], "live")
    if not args.live:
        raise KeelError("--live needs a RECIPE, or --resume DIR")
    from keel.tools.compare.candidates import DEFAULT_OBJECTIVES
    from keel.tools.sweep.variants import variants_from_objectives

    if args.steps is not None:
        args.overrides = [*args.overrides, f"--steps={args.steps}"]
    variants = variants_from_objectives(args.objectives if args.objectives is not None else DEFAULT_OBJECTIVES)
    return sweep_display.run_sweep(args, args.live, variants, "live")


def _check_args(args: argparse.Namespace) -> None:
    if args.overrides:
        raise KeelError(f"unrecognized arguments: {' '.join(args.overrides)}")
    for name, value in (
        ("seeds", args.seeds),
        ("parallel", args.parallel),
        ("run", args.folder),
        ("resume", args.resume),
    ):
        if value is not None:
            raise KeelError(f"--{name} {value} cannot act without --live RECIPE")
    if args.run_or_file is None:
        raise KeelError("give a RUN or a file of tokens, or --live RECIPE")
    if args.texts is None:
        args.texts = DEFAULT_TEXTS
    if args.texts < 0:
        raise KeelError(f"--texts {args.texts} must not be negative")
    if args.model_steps is not None and args.model is None:
        raise KeelError(f"--model-steps {args.model_steps} cannot act without --model")
    if args.model_steps is not None and args.model_steps < 1:
        raise KeelError(f"--model-steps {args.model_steps} must be at least 1")


def _compare_recording(args: argparse.Namespace) -> "ComparisonReport":
    """One pass over the steps."""
    from keel.tools.compare import Comparison, Recording, parse_candidates, parse_steps
    from keel.tools.compare.candidates import DEFAULT_OBJECTIVES
    from keel.tools.compare.report import build_report

    candidates = parse_candidates(args.objectives if args.objectives is not None else DEFAULT_OBJECTIVES)
    recording = Recording(args.run_or_file, None if args.steps is None else parse_steps(args.steps))
    comparison = Comparison(candidates, proximal_is_policy=args.proximal == "policy")
    weights, sampled = None, list[int]()
    if args.model is not None:
        from keel.tools.compare.weight_gradients import WeightGradients, evenly_spaced_steps

        sampled = evenly_spaced_steps(recording.step_numbers(), args.model_steps or DEFAULT_MODEL_STEPS)
        weights = WeightGradients(args.model)
    with ExitStack() as stack:
        table = None
        if args.parquet is not None:
            from keel.tools.compare.long_table import open_long_table

            table = stack.enter_context(open_long_table(args.parquet))
        for step in recording.steps():
            compared = comparison.add(step)
            if table is not None:
                table.add(compared)
            if weights is not None and step.number in sampled:
                weights.add(compared)
        if not comparison.steps:
            raise KeelError(f"{args.run_or_file} has no trainable token with logprobs in the chosen steps")
    found = weights.summary(comparison.names) if weights is not None and weights.steps else None
    return build_report(comparison, recording, texts=args.texts, weights=found)


# -- the terminal -----------------------------------------------------------------------------------------------------


def print_report(out: Console, report: "ComparisonReport") -> None:
    """Everything as tables. Names and texts are printed as they are: markup and control characters mean nothing."""
    steps = f"{len(report.steps):,} step{'s' if len(report.steps) > 1 else ''}"
    groups = f"{report.groups:,} groups, " if report.groups else ""
    out.print(f"{report.source}: {steps}, {groups}{report.sequences:,} sequences, {report.tokens:,} trainable tokens")
    for why, count in report.skipped.items():
        out.print(f"left out: {count:,} sequences {why}", style="dim")
    for name, why in report.failures.items():
        out.print(Text(f"{name} was refused: {why}", "yellow"))
    names = [f"{place} {name}" for place, name in enumerate(report.names, start=1)]
    _print_section(out, "what each keeps", _overview_table(names, report.objectives))
    out.print(
        "of |A|: share of the advantage, in size, that dropped tokens carry; sequences: of which nothing trains;\n"
        "ess: effective sample size; norm: of the gradient by log-prob; rests on: share of the tokens it comes from",
        style="dim",
    )
    _print_section(out, "loss by term, mean over steps", _terms_table(report.objectives))
    if any(row.gates for row in report.objectives):
        _print_section(out, "dropped by gate", _gates_table(report.objectives))
        _print_section(out, "share dropped", _splits_table(report.objectives))
    if any(row.texts for row in report.objectives):
        _print_section(out, "most dropped tokens", _texts_table(report.objectives))
    _print_section(out, "cosine of the gradients by log-prob", _matrix_table(names, report.cosine))
    if any(row.dropped for row in report.objectives):
        title = "overlap: of the tokens that the row drops, the share that the column drops too"
        _print_section(out, title, _matrix_table(names, report.overlap))
    if report.weights is not None:
        found = report.weights
        said = ", ".join(map(str, found.steps))
        _print_section(
            out, f"cosine of the gradients by weight, {found.model}, steps {said}", _matrix_table(names, found.cosine)
        )
        norms = ", ".join(
            f"{name} {_format_number(norm)}" for name, norm in zip(names, found.gradient_norm, strict=True)
        )
        out.print(Text(f"gradient norms: {norms}"))
        difference = _format_number(found.logprob_difference)
        out.print(f"{found.parameters:,} weights; log-probs differ from the recorded ones by {difference} in the mean")


def _overview_table(names: Sequence[str], rows: Iterable["ObjectiveSummary"]) -> Table:
    heads = ["dropped", "of |A|", "sequences", "touched", "clipped", "ess", "loss", "norm", "rests on"]
    table = _make_table("objective", *heads)
    for name, row in zip(names, rows, strict=True):
        table.add_row(
            Text(name),
            _format_percent(row.dropped_share),
            _format_percent(row.dropped_advantage),
            f"{row.sequences_dropped:,} of {row.sequences:,}",
            f"{row.sequences_hit:,}",
            _format_percent(row.clipped_share),
            _format_percent(row.effective_sample_size),
            _format_number(row.loss),
            _format_number(row.gradient_norm),
            _format_percent(row.effective_gradient_tokens),
        )
    return table


def _terms_table(rows: Sequence["ObjectiveSummary"]) -> Table:
    kinds = list(dict.fromkeys(term for row in rows for term in row.terms))
    table = _make_table("objective", *kinds)
    for row in rows:
        table.add_row(
            Text(row.objective), *(_format_number(row.terms[kind]) if kind in row.terms else "" for kind in kinds)
        )
    return table


def _gates_table(rows: Iterable["ObjectiveSummary"]) -> Table:
    table = _make_table("objective", "tokens", "sequences", "gate")
    table.columns[-1].justify = "left"
    for row in rows:
        if row.invalid_logprobs:
            table.add_row(Text(row.objective), f"{row.invalid_logprobs:,}", "", "invalid sampler log-prob")
        for gate in row.gates:
            table.add_row(Text(row.objective), f"{gate.tokens:,}", f"{gate.sequences:,}", gate.reason)
    return table


def _splits_table(rows: Sequence["ObjectiveSummary"]) -> Table:
    table = _make_table("tokens by", "", "tokens", *(str(place) for place in range(1, len(rows) + 1)))
    for kind, shares in rows[0].splits.items():
        for place, share in enumerate(shares):
            parts = (row.splits[kind][place] for row in rows)
            cells = [_format_percent(part.dropped / part.tokens if part.tokens else math.nan) for part in parts]
            table.add_row(kind if place == 0 else "", share.label, f"{share.tokens:,}", *cells)
    return table


def _texts_table(rows: Iterable["ObjectiveSummary"]) -> Table:
    table = _make_table("objective", "token", "dropped", "of", "with A > 0")
    table.columns[1].justify = "left"
    for row in rows:
        for place, word in enumerate(row.texts):
            counts = (f"{word.dropped:,}", f"{word.tokens:,}", f"{word.dropped_positive:,}")
            table.add_row(Text(row.objective if place == 0 else ""), Text(word.text), *counts)
    return table


def _matrix_table(names: Sequence[str], matrix: Sequence[Sequence[float]]) -> Table:
    table = _make_table("", *(name.split()[0] for name in names))
    for name, row in zip(names, matrix, strict=True):
        table.add_row(Text(name), *(f"{value:.3f}" if math.isfinite(value) else "-" for value in row))
    return table


def _make_table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", overflow="fold")
    return table


def _print_section(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(title, style="bold cyan")
    out.print(table)


def _format_percent(fraction: float) -> str:
    return "-" if not math.isfinite(fraction) else f"{100 * fraction:.2f} %"


def _format_number(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.4g}"
