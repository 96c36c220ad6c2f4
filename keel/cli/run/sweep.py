"""`keel sweep`: train short runs with different values of settings, from the same weights and on the same tasks."""

import argparse
from pathlib import Path
from typing import Any

from keel.cli.display import sweep_display
from keel.errors import ConfigError

FLAGS = ("--set", *sweep_display.FLAGS)


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "sweep",
        help="train short runs over values of settings and compare them",
        description="Train RECIPE for every value of a setting and every seed, with the same initial weights, tasks and"
        " sampling seeds.\nEach is an ordinary run below one folder. Several --set give every combination. Invalid"
        " settings are reported before\nthe first run starts; if a run fails, the others continue."
        "\n\nExit code 0: all runs finished; 1: some failed or were stopped; 2: invalid arguments or settings.",
        epilog="examples:\n  keel sweep run.toml --set objective.kl_penalty_coef=0.0001,0.001,0.01,0.1,1 --steps 20\n"
        "  keel sweep run.toml --set trainer.optimizer.lr=1e-5,1e-4 --set scheduler.groups_per_step=4,8 --parallel 2\n"
        "  keel sweep --resume runs/run-sweep --html report.html",
        usage="keel sweep [-h] [--set a.b=VALUE,VALUE ...] [--seeds K] [--parallel N] [--run DIR | --resume DIR]\n"
        "                  [--html FILE] [--parquet FILE] [--json] [RECIPE] [--a.b VALUE ...]",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    parser.add_argument(
        "--set",
        dest="sets",
        metavar="a.b=VALUE,VALUE",
        action="append",
        help="comma-separated TOML values of a setting",
    )
    sweep_display.add_flags(parser, "runs/RECIPE-sweep")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write an HTML report with curves that works offline")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="write all metrics of every run as a table")
    parser.add_argument("--json", action="store_true", help="print the results as JSON; progress goes to stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the sweep."""
    if args.resume is not None:
        sweep_display.check_resume_flags(args, RECIPE=args.recipe, **{"--set": args.sets})
        return sweep_display.run_sweep(args, None, [], "sweep")
    if args.recipe is None or not args.sets:
        raise ConfigError("give a RECIPE and --set name.of.setting=value,value, or --resume DIR")
    from keel.tools.sweep.variants import variants_from_settings

    return sweep_display.run_sweep(args, args.recipe, variants_from_settings(args.sets), "sweep")
