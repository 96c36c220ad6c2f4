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

from keel.cli.display.console import console, write
from keel.cli.display.objectives_markdown import page
from keel.cli.display.parameters import defaults, parameters, show
from keel.cli.display.plot import draw
from keel.common.settings import nearest
from keel.config.load import parse_overrides, put
from keel.errors import ConfigError
from keel.objectives import RECIPES, Recipe, resolve_objective
from keel.objectives.describe import Words, describe_recipe

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
        put(given, name, value)
    if args.markdown or args.name is None:
        if given:
            raise ConfigError(f"--{next(iter(given))} is a parameter of an objective: give its name too")
        if args.markdown and args.name is not None:
            raise ConfigError(f"--markdown prints the page of all objectives; leave out {args.name!r}")
        _all(args)
        return 0
    if args.name not in RECIPES:
        raise ConfigError(f'"{args.name}" is not an objective; {nearest(args.name, RECIPES)}')
    recipe = RECIPES[args.name]
    if args.json:
        write(json.dumps(as_json(recipe, given), indent=2) + "\n")
    else:
        explain(console(), recipe, given)
    return 0


def _all(args: argparse.Namespace) -> None:
    if args.markdown:
        write(page())
    elif args.json:
        write(json.dumps([as_json(recipe, {}) for recipe in RECIPES.values()], indent=2) + "\n")
    else:
        out = console()
        out.print(overview())
        out.print("keel objectives NAME explains one. A gate's bounds are kept; A is the advantage.", style="dim")


def as_json(recipe: Recipe, given: dict[str, Any]) -> dict[str, Any]:
    """A recipe for machines."""
    words = describe_recipe(recipe, given)
    return {
        "name": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "anchor": words.anchor,
        "dropped": list(words.dropped),
        "dropped_optional": list(words.optional),
        "divisor": words.divisor,
        "leaves": words.leaves,
        "formula": words.formula,
        "legend": [symbol._asdict() for symbol in words.legend],
        "parameters": {
            row.name: {"value": row.value, "default": row.default, "meaning": row.meaning, "own": row.own}
            for row in parameters(recipe, given)
        },
        "note": recipe.note,
    }


def overview() -> Table:
    """All recipes. Cells fold, nothing is cut off."""
    table = Table(box=box.SIMPLE_HEAD, leading=1, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("objective", no_wrap=True, style="bold")
    table.add_column("anchor", no_wrap=True)
    for name, share in (("who is dropped", 3), ("what divides", 2), ("defaults", 2), ("from", 2)):
        table.add_column(name, overflow="fold", ratio=share)
    table.expand = True
    for recipe in RECIPES.values():
        words = describe_recipe(recipe)
        dropped = "\n".join(words.dropped + words.optional)
        table.add_row(recipe.name, words.anchor, dropped, words.divisor, defaults(recipe), recipe.source)
    return table


def explain(out: Console, recipe: Recipe, given: dict[str, Any]) -> None:
    """One recipe in full."""
    words = describe_recipe(recipe, given)
    _, _, composition = resolve_objective({"name": recipe.name, **given})
    out.print(Text.assemble((recipe.name, "bold"), ": ", recipe.title))
    out.print(f"from {recipe.source}", style="dim")
    _section(out, "loss", Text(words.formula, style="bold"))
    _section(out, "who is dropped", *(Text(sentence) for sentence in words.dropped + words.optional))
    _section(out, "a dropped token leaves", Text(words.leaves))
    _section(out, "anchor", Text(words.anchor))
    _section(out, "what divides", Text(words.divisor))
    if recipe.note:
        _section(out, "note", Text(recipe.note))
    _section(out, "kept and dropped", draw(composition))
    rows = parameters(recipe, given)
    own, common = [row for row in rows if row.own], [row for row in rows if not row.own]
    for title, part in (("parameters", own), ("parameters of every objective", common)):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for row in part:
            changed = "" if row.value == row.default else f" (default {show(row.default)})"
            grid.add_row(row.name, show(row.value) + changed, row.meaning)
        if part:
            _section(out, title, grid)
    _section(out, "symbols", _legend(words))


def _legend(words: Words) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(overflow="fold")
    for symbol in words.legend:
        meaning = f"= {symbol.definition}: {symbol.meaning}" if symbol.definition else symbol.meaning
        grid.add_row(symbol.name, meaning)
    return grid


def _section(out: Console, title: str, *parts: Text | Table) -> None:
    out.print()
    out.print(title, style="bold cyan")
    for part in parts:
        out.print(Padding(part, (0, 0, 0, 2), expand=False))
