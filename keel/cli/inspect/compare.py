"""`keel compare`: evaluate several objectives on the recorded tokens of a run, without training.

The results come from `keel.tools.compare` and are shown as tables, JSON, an HTML page or a parquet file. With --live
each objective trains short runs instead: see `keel/cli/display/sweep_display.py`.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.cli.display import sweep_display
from keel.cli.display.console import console, write_stdout
from keel.errors import KeelError

if TYPE_CHECKING:
    from keel.tools.compare import ComparisonReport

DEFAULT_MODEL_STEPS = 3
DEFAULT_TEXTS = 5
OFFLINE_FLAGS = ("--texts", "--proximal", "--model", "--model-steps")
"""Flags that only have an effect on recorded tokens."""
FLAGS = ("--live", "--objectives", "--steps", *OFFLINE_FLAGS, *sweep_display.FLAGS)


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "compare",
        help="evaluate several objectives on a run's recorded tokens",
        description="Evaluate every objective on the same recorded tokens: which tokens it drops and why, its loss, its"
        " gradient,\nand how far the objectives agree. RUN is a run folder, or a parquet or JSON-lines file of tokens"
        " (columns: docs/compare.md).\n\nWith --live RECIPE every objective trains short runs with the same initial"
        " weights, tasks and seeds;\noverride settings of the recipe with --a.b VALUE (docs/sweeps.md)."
        "\n\nExit code 0: success; 1: a live run failed or was stopped; 2: invalid arguments or input.",
        epilog="examples:\n  keel compare runs/first\n"
        '  keel compare runs/first --objectives "icepop,ipo_kl(kl_tau=0.01),mine.toml" --steps 1-20\n'
        "  keel compare tokens.jsonl --html report.html --parquet numbers.parquet\n"
        "  keel compare runs/first --model runs/first/checkpoints/step_20 --steps 20\n"
        "  keel compare --live larger_number --objectives icepop,ipo_kl --seeds 3 --steps 20",
        usage="keel compare [-h] [--objectives LIST] [--steps STEPS] [--texts N] [--proximal WHICH] [--model MODEL]\n"
        "                    [--model-steps N] [--html FILE] [--parquet FILE] [--json] RUN\n"
        "       keel compare --live RECIPE [--objectives LIST] [--seeds K] [--parallel N] [--run DIR] [--steps N]\n"
        "                    [--html FILE] [--parquet FILE] [--json] [--a.b VALUE ...]\n"
        "       keel compare --live --resume DIR",
    )
    parser.add_argument("run_or_file", metavar="RUN", type=Path, nargs="?")
    parser.add_argument(
        "--live", metavar="RECIPE", nargs="?", const="", help="train short runs instead of reading recorded tokens"
    )
    parser.add_argument(
        "--objectives",
        metavar="LIST",
        help="comma-separated presets, with parameters in parentheses, or TOML files: icepop,ipo_kl(kl_tau=0.01),"
        "mine.toml (default: icepop,ipo_kl,dppo_tv,dppo_kl,opsm)",
    )
    parser.add_argument(
        "--steps", metavar="STEPS", help="1-20,30 or 40- (default: all); with --live: number of steps of each run"
    )
    parser.add_argument(
        "--texts", metavar="N", type=int, help=f"number of most dropped token texts to show (default: {DEFAULT_TEXTS})"
    )
    parser.add_argument(
        "--proximal",
        choices=["recorded", "policy"],
        help="policy: if no proximal log-probs are recorded, use the policy's, as a step with one update does",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="checkpoint or model name: also compute gradients with respect to its weights"
    )
    parser.add_argument(
        "--model-steps",
        metavar="N",
        type=int,
        help=f"with --model: number of evenly spaced steps (default: {DEFAULT_MODEL_STEPS})",
    )
    sweep_display.add_flags(parser, "runs/RECIPE-live")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write an HTML report that works offline")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="write all numbers of every step as a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print the report, and write the requested files."""
    if args.live is not None:
        return _run_live(args)
    _check_args(args)
    report = _compare_recording(args)
    if args.html is not None:
        from keel.common.atomic_files import atomic_file
        from keel.tools.compare.html import render_report

        with atomic_file(args.html) as temporary:
            temporary.write_text(render_report(report), encoding="utf-8")
    if args.json:
        write_stdout(json.dumps(report.as_json(), indent=2) + "\n")
        return 0
    from keel.cli.display.compare_display import print_report

    out = console()
    print_report(out, report)
    for path in (args.html, args.parquet):
        if path is not None:
            out.print(f"written: {path}")
    return 0


def _run_live(args: argparse.Namespace) -> int:
    """Train short runs with every objective."""
    flags = [name for name in OFFLINE_FLAGS if getattr(args, name[2:].replace("-", "_")) is not None]
    if flags or args.run_or_file is not None:
        argument = flags[0] if flags else args.run_or_file
        raise KeelError(f"{argument} has no effect with --live, which reads no recorded tokens; remove it")
    if args.resume is not None:
        flags_by_name = {"--live RECIPE": args.live, "--objectives": args.objectives, "--steps": args.steps}
        sweep_display.check_resume_flags(args, **flags_by_name)
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
            raise KeelError(f"--{name} {value} has no effect without --live RECIPE; remove it")
    if args.run_or_file is None:
        raise KeelError("give a run folder or a file of tokens, or --live RECIPE")
    if args.texts is None:
        args.texts = DEFAULT_TEXTS
    if args.texts < 0:
        raise KeelError(f"--texts {args.texts} must not be negative")
    if args.model_steps is not None and args.model is None:
        raise KeelError(f"--model-steps {args.model_steps} has no effect without --model; remove it")
    if args.model_steps is not None and args.model_steps < 1:
        raise KeelError(f"--model-steps {args.model_steps} must be at least 1")


def _compare_recording(args: argparse.Namespace) -> "ComparisonReport":
    """Evaluate the objectives in one pass over the steps."""
    from keel.tools.compare import Comparison, Recording, parse_candidates, parse_steps
    from keel.tools.compare.candidates import DEFAULT_OBJECTIVES
    from keel.tools.compare.report import build_report

    candidates = parse_candidates(args.objectives if args.objectives is not None else DEFAULT_OBJECTIVES)
    recording = Recording(args.run_or_file, None if args.steps is None else parse_steps(args.steps))
    comparison = Comparison(candidates, proximal_is_policy=args.proximal == "policy")
    weights, model_steps = None, list[int]()
    if args.model is not None:
        from keel.tools.compare.weight_gradients import WeightGradients, evenly_spaced_steps

        model_steps = evenly_spaced_steps(recording.step_numbers(), args.model_steps or DEFAULT_MODEL_STEPS)
        weights = WeightGradients(args.model)
    with ExitStack() as stack:
        table = None
        if args.parquet is not None:
            from keel.tools.compare.long_table import open_long_table

            table = stack.enter_context(open_long_table(args.parquet))
        for step in recording.steps():
            step_comparison = comparison.add(step)
            if table is not None:
                table.add(step_comparison)
            if weights is not None and step.number in model_steps:
                weights.add(step_comparison)
        if not comparison.steps:
            raise KeelError(f"{args.run_or_file} has no trainable token with logprobs in the selected steps")
    summary = weights.summary(comparison.names) if weights is not None and weights.steps else None
    return build_report(comparison, recording, texts=args.texts, weights=summary)
