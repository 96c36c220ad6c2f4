"""`keel objectives`: every recipe in a table, one recipe in full, or the whole page of documentation.

All of it is read off the declarations in `keel.config`; nothing about a particular rule is written here.
"""

import argparse
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.cli.display.objectives_markdown import render_markdown
from keel.cli.display.parameters import format_defaults, format_value, parameter_rows
from keel.cli.display.plot import draw_dropped_region
from keel.common.settings import suggest_name
from keel.config.load import parse_overrides, set_dotted
from keel.errors import ConfigError
from keel.objectives import PRESETS, ObjectivePreset, resolve_objective
from keel.objectives.describe import Description, describe_preset

FLAGS = ("--json", "--markdown")


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "objectives",
        help="list the objectives, or explain one",
        description="Without NAME, a table of all objectives. With NAME, its formula, its parameters and a plot of what"
        " it keeps and drops; parameters given as --parameter value are taken into account.",
        epilog="examples:\n  keel objectives\n  keel objectives dppo_kl\n"
        "  keel objectives icepop --rollout_min_ratio 1e-5\n  keel objectives --json",
        usage="keel objectives [-h] [--json | --markdown] [NAME] [--parameter VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="one objective; not given: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same for machines")
    form.add_argument("--markdown", action="store_true", help="the page docs/objectives.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given: dict[str, Any] = {}
    for name, value in parse_overrides(args.overrides):
        set_dotted(given, name, value)
    if args.markdown or args.name is None:
        if given:
            raise ConfigError(f"--{next(iter(given))} is a parameter of an objective: give its name too")
        if args.markdown and args.name is not None:
            raise ConfigError(f"--markdown prints the page of all objectives; leave out {args.name!r}")
        _print_all(args)
        return 0
    if args.name not in PRESETS:
        raise ConfigError(f'"{args.name}" is not an objective; {suggest_name(args.name, PRESETS)}')
    recipe = PRESETS[args.name]
    if args.json:
        write_stdout(json.dumps(preset_as_json(recipe, given), indent=2) + "\n")
    else:
        print_preset(console(), recipe, given)
    return 0


def _print_all(args: argparse.Namespace) -> None:
    if args.markdown:
        write_stdout(render_markdown())
    elif args.json:
        write_stdout(json.dumps([preset_as_json(recipe, {}) for recipe in PRESETS.values()], indent=2) + "\n")
    else:
        out = console()
        out.print(overview_table())
        out.print("keel objectives NAME explains one. A gate's bounds are kept; A is the advantage.", style="dim")


def preset_as_json(preset: ObjectivePreset, overrides: dict[str, Any]) -> dict[str, Any]:
    """A recipe for machines."""
    words = describe_preset(preset, overrides)
    return {
        "name": preset.name,
        "title": preset.title,
        "source": preset.source,
        "anchor": words.anchor,
        "dropped": list(words.dropped),
        "dropped_optional": list(words.optional),
        "divisor": words.divisor,
        "leaves": words.dropped_from,
        "formula": words.formula,
        "legend": [symbol._asdict() for symbol in words.legend],
        "parameters": {
            row.name: {"value": row.value, "default": row.default, "meaning": row.meaning, "own": row.own}
            for row in parameter_rows(preset, overrides)
        },
        "note": preset.note,
    }


def overview_table() -> Table:
    """All recipes. Cells fold, nothing is cut off."""
    table = Table(box=box.SIMPLE_HEAD, leading=1, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("objective", no_wrap=True, style="bold")
    table.add_column("anchor", no_wrap=True)
    for name, share in (("who is dropped", 3), ("what divides", 2), ("defaults", 2), ("from", 2)):
        table.add_column(name, overflow="fold", ratio=share)
    table.expand = True
    for recipe in PRESETS.values():
        words = describe_preset(recipe)
        dropped = "\n".join(words.dropped + words.optional)
        table.add_row(recipe.name, words.anchor, dropped, words.divisor, format_defaults(recipe), recipe.source)
    return table


def print_preset(out: Console, preset: ObjectivePreset, overrides: dict[str, Any]) -> None:
    """One recipe in full."""
    words = describe_preset(preset, overrides)
    _, _, composition = resolve_objective({"name": preset.name, **overrides})
    out.print(Text.assemble((preset.name, "bold"), ": ", preset.title))
    out.print(f"from {preset.source}", style="dim")
    _print_section(out, "loss", Text(words.formula, style="bold"))
    _print_section(out, "who is dropped", *(Text(sentence) for sentence in words.dropped + words.optional))
    _print_section(out, "a dropped token leaves", Text(words.dropped_from))
    _print_section(out, "anchor", Text(words.anchor))
    _print_section(out, "what divides", Text(words.divisor))
    if preset.note:
        _print_section(out, "note", Text(preset.note))
    _print_section(out, "kept and dropped", draw_dropped_region(composition))
    rows = parameter_rows(preset, overrides)
    own, common = [row for row in rows if row.own], [row for row in rows if not row.own]
    for title, part in (("parameters", own), ("parameters of every objective", common)):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for row in part:
            changed = "" if row.value == row.default else f" (default {format_value(row.default)})"
            grid.add_row(row.name, format_value(row.value) + changed, row.meaning)
        if part:
            _print_section(out, title, grid)
    _print_section(out, "symbols", _legend_table(words))


def _legend_table(description: Description) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for symbol in description.legend:
        meaning = f"= {symbol.definition}: {symbol.meaning}" if symbol.definition else symbol.meaning
        grid.add_row(symbol.name, meaning)
    return grid


def _print_section(out: Console, title: str, *parts: Text | Table) -> None:
    out.print()
    out.print(title, style="bold cyan")
    for part in parts:
        out.print(Padding(part, (0, 0, 0, 2), expand=False))
