"""`keel sft`: supervised fine-tuning with a recipe, or on a data set; or resume such a run.

Starting, stopping, resuming and the display are those of `keel train` (`keel.cli.run.train`).
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keel.cli.display.console import console, write_stdout
from keel.cli.run.train import add_metrics_flags, add_run_arguments, start_run
from keel.errors import ConfigError
from keel.run.start.module_folders import add_module_folders

if TYPE_CHECKING:
    from keel.config import LoadedSettings
    from keel.run.checkpointed_run import CheckpointedRun
    from keel.run.start.run_kind import RunKind
    from keel.training.distributed.world import RankInfo

FLAGS = (
    *("--run", "--resume", "--allow-changes", "--dataset", "--model", "--dry-run"),
    *("--json", "--metrics-port", "--metrics-host", "--metrics-key-file"),
)


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "sft",
        help="fine-tune a model on recorded conversations",
        description="Supervised fine-tuning with RECIPE, a TOML file or the name of a packaged recipe with a table"
        " [sft],\nand overrides. Rows of the data set are messages, or a prompt and a completion; the loss is on the\n"
        "assistant's tokens only. Everything the run writes is in its folder, and --resume continues it.\n\n"
        "A recipe of `keel train` starts from the result with model.name = RUN.",
        epilog="examples:\n  keel sft reverse_text_sft\n"
        "  keel sft --dataset train.jsonl --model smollm2-135m --sft.epochs 2\n"
        "  keel sft --dataset train.jsonl --dry-run\n  keel sft --resume runs/train",
        usage="keel sft [-h] [--run DIR | --resume RUN] [--allow-changes] [--dry-run] [--json]"
        " [--metrics-port N]\n                [--metrics-host HOST] [--metrics-key-file FILE]"
        "\n                [RECIPE | --dataset FILE] [--model NAME] [--a.b VALUE ...]",
    )
    add_run_arguments(parser)
    parser.add_argument("--dataset", metavar="FILE", help="the same as --sft.dataset.path")
    parser.add_argument("--model", metavar="NAME", help="the same as --model.name")
    parser.add_argument(
        "--dry-run", action="store_true", help="check settings and data, show what is trained, and train nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_metrics_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train until the run ends or is stopped."""
    if args.dry_run:
        _prepare_arguments(args)
        return _dry_run(args)
    return start_run(args, _prepare_arguments, _sft_kind)


def _prepare_arguments(args: argparse.Namespace) -> None:
    from keel.config.toml_writer import to_toml

    names_data = any(override.startswith("--sft.") for override in args.overrides)
    if not any((args.recipe, args.resume, args.dataset, names_data)):
        raise ConfigError("pass a RECIPE, --dataset FILE or --resume RUN, for example: keel sft reverse_text_sft")
    names = {"sft.dataset.path": args.dataset, "model.name": args.model}
    short = [f"--{name}={to_toml(value)}" for name, value in names.items() if value is not None]
    args.overrides = [*short, *args.overrides]


def load(recipe: str | None, overrides: Sequence[str]) -> "LoadedSettings":
    """Load and check settings and data. With sft.epochs, `steps` becomes the number of their steps."""
    from keel.config import load_settings
    from keel.run.sft.batches import steps_of_epochs
    from keel.run.sft.conversations import open_data

    loaded = load_settings(recipe, overrides)
    data = open_data(loaded.settings)
    assert loaded.settings.sft is not None
    steps = steps_of_epochs(loaded.settings.sft, len(data.train))
    if steps is None:
        return loaded
    if loaded.origin("steps") != "default":
        if steps == loaded.settings.steps:
            return loaded
        raise ConfigError(
            f"steps = {loaded.settings.steps} and sft.epochs = {loaded.settings.sft.epochs:g}, which are {steps} steps"
            f" of {len(data.train)} rows, exclude each other; remove one of them"
        )
    return load_settings(recipe, [*overrides, f"--steps={steps}"])


def _sft_kind(rank_info: "RankInfo | None") -> "RunKind":
    from keel.run.monitor.progress import SFT_COLUMNS
    from keel.run.sft.summary import summarize_sft
    from keel.run.start.run_kind import RunKind, check_start

    def load_and_check(recipe: str | None, overrides: Sequence[str]) -> "LoadedSettings":
        loaded = load(recipe, overrides)
        check_start(loaded, rank_info)
        return loaded

    def make_run(*args: Any, **options: Any) -> "CheckpointedRun":
        from keel.run.sft.loop import SftRun  # last, so that errors in settings are reported quickly

        return SftRun(*args, **options)

    return RunKind("sft", load_and_check, make_run, summarize_sft, SFT_COLUMNS)


def _dry_run(args: argparse.Namespace) -> int:
    """Print what would be trained."""
    import json

    from rich.text import Text

    from keel.run.monitor.progress import escape_unprintable
    from keel.run.sft.preview import preview

    if args.resume is not None:
        raise ConfigError("--dry-run has no effect with --resume: the data was checked when the run started")
    add_module_folders(args.recipe)
    loaded = load(args.recipe, args.overrides)
    shown = preview(loaded.settings)
    if args.json:
        write_stdout(json.dumps(shown.as_json()) + "\n")
        return 0
    out = console()
    for line in shown.lines():
        out.print(Text(escape_unprintable(line)), soft_wrap=True)
    text = Text()
    for piece, trained in shown.pieces:
        text.append(escape_unprintable(piece), style="bold green" if trained else "dim")
    out.print(Text("example    ") + text, soft_wrap=True)
    return 0
