"""`keel data`: describe a data set before a run."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.run.monitor.progress import escape_unprintable

if TYPE_CHECKING:
    from keel.tools.dataset_report import CountTokens, DatasetReport, Distribution

MAX_PROBLEMS = 10
"""Unusable rows that are printed."""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "data",
        help="describe a data set: columns, lengths, duplicates, prompts",
        description="Read a data set as a run would and print its columns, the lengths of its prompts, duplicates, rows"
        " that cannot be used,\nthe overlap with a data set for evaluation, and a few prompts."
        "\n\nExit code 0: every row can be used; 1: some cannot; 2: the file cannot be read.",
        epilog="examples:\n  keel data train.jsonl --model smollm2-135m\n"
        '  keel data train.parquet --eval test.parquet --template "Question: {{ question }}"',
    )
    parser.add_argument("file", metavar="FILE", help="a .jsonl, .json, .csv or .parquet file, or a folder")
    parser.add_argument("--eval", dest="eval_path", metavar="FILE", help="a data set for evaluation")
    parser.add_argument("--prompt", default="prompt", metavar="COLUMN", help="column of the prompt (default: prompt)")
    parser.add_argument("--answer", metavar="COLUMN", help='column of the answer (default: "answer" if there is one)')
    parser.add_argument("--template", metavar="TEXT", help="jinja template of the user message")
    parser.add_argument("--system", metavar="TEXT", help="system message before every prompt")
    parser.add_argument("--model", metavar="NAME", help="count tokens as this model does")
    parser.add_argument("--show", type=int, default=2, metavar="N", help="prompts to print (default: 2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description and return 1 if rows cannot be used."""
    from keel.config.dataset import DatasetSettings
    from keel.tools.dataset_report import describe_dataset

    settings = DatasetSettings(
        path=args.file,
        eval_path=args.eval_path,
        prompt=args.prompt,
        answer=args.answer,
        template=args.template,
        system=args.system,
        max_invalid_fraction=1.0,
    )
    count_tokens = None if args.model is None else _token_counter(args.model)
    report = describe_dataset(settings, show=args.show, count_tokens=count_tokens)
    if args.json:
        write_stdout(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        _print(report)
    return 1 if report.problems else 0


def _token_counter(model: str) -> "CountTokens":
    from transformers import AutoTokenizer

    from keel.rollout.rendering.renderer import Renderer
    from keel.training.model.model_source import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model).folder)
    renderer = Renderer(tokenizer)
    return lambda messages: len(renderer.extend([], list(messages), None).ids)


def _print(report: "DatasetReport") -> None:
    screen = console()

    def line(label: str, text: str) -> None:
        screen.print(Text(f"{label:<11}{escape_unprintable(text)}"), soft_wrap=True)

    line("rows", f"{report.rows:,} in {report.path}; {report.rows - len(report.problems):,} can be used")
    line("columns", ", ".join(f"{name} ({kind})" for name, kind in report.columns.items()))
    line("characters", _format(report.characters))
    if report.tokens is not None:
        line("tokens", _format(report.tokens))
    line("duplicates", f"{report.duplicates:,} rows repeat the prompt of an earlier row")
    line("training", f"{report.train:,} rows")
    overlap = (
        f"; {report.overlap:,} rows for training have one of its prompts and are left out" if report.overlap else ""
    )
    line("evaluation", f"{report.held_out:,} rows{overlap}")
    for problem in report.problems[:MAX_PROBLEMS]:
        line("unusable", problem)
    if len(report.problems) > MAX_PROBLEMS:
        line("", f"and {len(report.problems) - MAX_PROBLEMS:,} more")
    for messages in report.prompts:
        screen.print()
        for message in messages:
            line(str(message["role"]), str(message["content"]))


def _format(lengths: "Distribution") -> str:
    spread = f"{lengths.minimum:,} to {lengths.maximum:,} per prompt"
    return f"{spread}, median {lengths.median:,}, 99 % at most {lengths.p99:,}"
