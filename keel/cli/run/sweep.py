"""`keel sweep`: the same short run with other values of a setting, from the same start, on the same tasks."""

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
        help="train short runs over the values of a setting, side by side",
        description="Train RECIPE once for every value of a setting and every seed: same start, same tasks, same seeds"
        " of sampling.\nEach is an ordinary run below one folder. Several --set give every combination. Bad settings"
        " are refused before\nthe first run starts; a run that fails is reported, and the others go on."
        "\n\nExit code 0: all finished; 1: some failed or were stopped; 2: refused.",
        epilog="examples:\n  keel sweep run.toml --set objective.kl_penalty_coef=0.0001,0.001,0.01,0.1,1 --steps 20\n"
        "  keel sweep run.toml --set trainer.optimizer.lr=1e-5,1e-4 --set scheduler.groups_per_step=4,8 --seeds 3 --parallel 2\n"
        "  keel sweep --resume runs/run-sweep --html report.html",
        usage="keel sweep [-h] [--set a.b=VALUE,VALUE ...] [--seeds K] [--parallel N] [--run DIR | --resume DIR]\n"
        "                  [--html FILE] [--parquet FILE] [--json] [RECIPE] [--a.b VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file")
    parser.add_argument(
        "--set", dest="sets", metavar="a.b=VALUE,VALUE", action="append", help="values, as in TOML, with commas between"
    )
    sweep_display.add_flags(parser, "runs/RECIPE-sweep")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with curves that needs no network")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="write every number of every run")
    parser.add_argument("--json", action="store_true", help="print the results as JSON; progress goes to stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the values, then run."""
    if args.resume is not None:
        sweep_display.check_resume_flags(args, RECIPE=args.recipe, **{"--set": args.sets})
        return sweep_display.run_sweep(args, None, [], "sweep")
    if args.recipe is None or not args.sets:
        raise ConfigError("give a RECIPE and --set name.of.setting=value,value; or --resume DIR")
    from keel.tools.sweep.variants import variants_from_settings

    return sweep_display.run_sweep(args, args.recipe, variants_from_settings(args.sets), "sweep")
