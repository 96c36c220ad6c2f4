"""The page docs/objectives.md: prose that holds for every objective, and tables printed from the declarations.

The same declarations always give the same bytes. Numbers and names of particular rules are never written here by hand;
lists that code defines elsewhere (estimators, metrics) are held against it by the tests.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from keel.cli.display.objectives_prose import (
    ADVANTAGES,
    AFTER,
    COMPOSE,
    INTRODUCTION,
    METRICS,
    METRICS_END,
    METRICS_START,
)
from keel.cli.display.parameters import Row, defaults, parameters, show
from keel.common.settings import OneOf
from keel.objectives import RECIPES, Gate, Penalty, Policy, Recipe, Reduction, Weight
from keel.objectives.describe import Words, describe_recipe
from keel.objectives.notation import COMMON_SYMBOLS


def page() -> str:
    """The whole page."""
    symbols = [(f"`{s.name}`", f"`{s.definition}`" if s.definition else "", s.meaning) for s in COMMON_SYMBOLS]
    common = [row for row in parameters(RECIPES["icepop"]) if not row.own]
    blocks = [
        INTRODUCTION.replace("{symbols}", _table(("symbol", "is", "meaning"), symbols)),
        "## All of them",
        _overview(),
        "## What every objective takes",
        AFTER.replace("{common}", _parameters(common)),
        "## Advantages",
        _table(("name", "advantage of a rollout with reward R"), [(f"`{k}`", v) for k, v in ADVANTAGES.items()]),
        "Set by `[advantages] name = ...`, or `keel.advantages(name, rewards, group)`. A rollout that is not valid"
        " moves no baseline and gets 0; a group with one valid rollout has nothing to compare and gets 0.",
        COMPOSE.replace("{parts}", "\n\n".join(_part(part) for part in (Gate, Weight, Policy, Penalty, Reduction))),
        METRICS_START,
        _table(("metric", "meaning"), [(f"`{name}`", meaning) for name, meaning in METRICS.items()]),
        METRICS_END,
        "## One by one",
        *(_recipe(recipe) for recipe in RECIPES.values()),
    ]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _overview() -> str:
    rows = []
    for recipe in RECIPES.values():
        words = describe_recipe(recipe)
        link = f"[`{recipe.name}`](#{recipe.name})"
        dropped = "; ".join(words.dropped + words.optional)
        rows.append((link, words.anchor, dropped, words.divisor, defaults(recipe), recipe.source))
    return _table(("objective", "anchor", "who is dropped", "what divides", "defaults", "from"), rows)


def _parameters(rows: list[Row]) -> str:
    cells = [(f"`{row.name}`", show(row.default), row.meaning) for row in rows]
    return _table(("parameter", "default", "meaning"), cells)


def _part(part: type[Any]) -> str:
    """One kind of part with its fields."""
    rows = []
    for name, field in part.model_fields.items():
        default = "required" if field.is_required() else show(field.default)
        rows.append(
            (f"`{name}`", _kind(field.annotation, field.metadata), default, " ".join((field.description or "").split()))
        )
    first = (part.__doc__ or "").strip()
    return f"**{part.__name__}.** {first}\n\n{_table(('field', 'takes', 'default', 'meaning'), rows)}"


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a field takes, in words."""
    for marker in metadata:
        if isinstance(marker, OneOf):
            return ", ".join(f"`{choice}`" for choice in marker.choices())
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if annotation is bool:
        return "true, false"
    inner = [part for part in get_args(annotation) if part is not NoneType]
    return _kind(inner[0]) if get_origin(inner[0] if inner else None) is Literal else "number"


def _recipe(recipe: Recipe) -> str:
    words = describe_recipe(recipe)
    own = [row for row in parameters(recipe) if row.own or row.name in recipe.parameters]
    blocks = [
        f"### {recipe.name}",
        f"{recipe.title[:1].upper()}{recipe.title[1:]}. From {recipe.source}.",
        f"```text\nloss = {words.formula}\n{_definitions(words)}```",
        _facts(words),
        _parameters(own) if own else "It has no parameters of its own.",
        recipe.note,
        f"```toml\n{_snippet(own, recipe)}```",
    ]
    return "\n\n".join(block for block in blocks if block)


def _definitions(words: Words) -> str:
    """The symbols that only some formulas use; those of every formula stand at the top of the page."""
    fixed = {symbol.name for symbol in COMMON_SYMBOLS} | {"A'", "k"}
    special = [s for s in words.legend if s.definition and (s.name not in fixed or s.name == "o")]
    return "".join(f"{symbol.name} = {symbol.definition}\n" for symbol in special)


def _facts(words: Words) -> str:
    dropped = "; ".join(words.dropped + words.optional)
    return (
        f"- who is dropped: {dropped}\n- a dropped token leaves: {words.leaves}\n"
        f"- anchor: {words.anchor}\n- what divides: {words.divisor}"
    )


def _snippet(rows: list[Row], recipe: Recipe) -> str:
    lines = ["[objective]", f'name = "{recipe.name}"']
    for row in rows:
        value = f'"{row.value}"' if isinstance(row.value, str) else show(row.value)
        lines.append(f"# {row.name} is not given" if row.value is None else f"{row.name} = {value}")
    return "\n".join(lines) + "\n"
