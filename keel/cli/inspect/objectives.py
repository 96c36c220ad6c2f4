"""`keel objectives`: a table of all presets, one preset in detail, or the documentation page.

Everything is generated from the presets in `keel.objectives`; no particular preset is described here.
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
        description="Without NAME, print a table of all objectives. With NAME, print its formula, its parameters and a"
        " plot of the tokens it keeps and drops; --parameter VALUE sets a parameter.",
        epilog="examples:\n  keel objectives\n  keel objectives dppo_kl\n"
        "  keel objectives icepop --rollout_min_ratio 1e-5\n  keel objectives --json",
        usage="keel objectives [-h] [--json | --markdown] [NAME] [--parameter VALUE ...]",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of one objective (default: all)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/objectives.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the requested objectives and return the exit code."""
    overrides: dict[str, Any] = {}
    for name, value in parse_overrides(args.overrides):
        set_dotted(overrides, name, value)
    if args.markdown or args.name is None:
        if overrides:
            raise ConfigError(
                f"--{next(iter(overrides))} is a parameter of an objective; write keel objectives NAME"
                f" --{next(iter(overrides))} VALUE"
            )
        if args.markdown and args.name is not None:
            raise ConfigError(f"--markdown prints the page of all objectives; remove {args.name!r}")
        _print_all(args)
        return 0
    if args.name not in PRESETS:
        raise ConfigError(f'"{args.name}" is not an objective; {suggest_name(args.name, PRESETS)}')
    preset = PRESETS[args.name]
    if args.json:
        write_stdout(json.dumps(preset_as_json(preset, overrides), indent=2) + "\n")
    else:
        print_preset(console(), preset, overrides)
    return 0


def _print_all(args: argparse.Namespace) -> None:
    if args.markdown:
        write_stdout(render_markdown())
    elif args.json:
        write_stdout(json.dumps([preset_as_json(preset, {}) for preset in PRESETS.values()], indent=2) + "\n")
    else:
        out = console()
        out.print(overview_table())
        out.print(
            "keel objectives NAME explains one objective. Values equal to a bound are kept. A is the advantage.",
            style="dim",
        )


def preset_as_json(preset: ObjectivePreset, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a preset as JSON values."""
    description = describe_preset(preset, overrides)
    return {
        "name": preset.name,
        "title": preset.title,
        "source": preset.source,
        "anchor": description.anchor,
        "dropped": list(description.dropped),
        "dropped_optional": list(description.optional),
        "divisor": description.divisor,
        "dropped_from": description.dropped_from,
        "formula": description.formula,
        "legend": [symbol._asdict() for symbol in description.legend],
        "parameters": {
            row.name: {"value": row.value, "default": row.default, "meaning": row.meaning, "own": row.own}
            for row in parameter_rows(preset, overrides)
        },
        "note": preset.note,
    }


def overview_table() -> Table:
    """Return a table of all presets. Cells wrap and are never truncated."""
    table = Table(box=box.SIMPLE_HEAD, leading=1, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("objective", no_wrap=True, style="bold")
    table.add_column("anchor", no_wrap=True)
    for name, ratio in (("dropped tokens", 3), ("divisor", 2), ("defaults", 2), ("source", 2)):
        table.add_column(name, overflow="fold", ratio=ratio)
    table.expand = True
    for preset in PRESETS.values():
        description = describe_preset(preset)
        dropped = "\n".join(description.dropped + description.optional)
        defaults = format_defaults(preset)
        table.add_row(preset.name, description.anchor, dropped, description.divisor, defaults, preset.source)
    return table


def print_preset(out: Console, preset: ObjectivePreset, overrides: dict[str, Any]) -> None:
    """Print one preset in detail."""
    description = describe_preset(preset, overrides)
    _, _, composition = resolve_objective({"name": preset.name, **overrides})
    out.print(Text.assemble((preset.name, "bold"), ": ", preset.title))
    out.print(f"source: {preset.source}", style="dim")
    _print_section(out, "loss", Text(description.formula, style="bold"))
    _print_section(out, "dropped tokens", *(Text(sentence) for sentence in description.dropped + description.optional))
    _print_section(out, "dropped from", Text(description.dropped_from))
    _print_section(out, "anchor", Text(description.anchor))
    _print_section(out, "divisor", Text(description.divisor))
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
    _print_section(out, "symbols", _legend_table(description))


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
