"""The page docs/objectives.md: prose that holds for every objective, and tables printed from the declarations.

The same declarations always give the same bytes. Numbers and names of particular rules are never written here by hand;
lists that code defines elsewhere (estimators, metrics) are held against it by the tests.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from keel.cli.display.objectives_prose import (
    ADVANTAGES,
    COMMON_PARAMETERS,
    COMPOSITION,
    INTRODUCTION,
    METRICS,
    METRICS_END,
    METRICS_START,
)
from keel.cli.display.parameters import ParameterRow, format_defaults, format_value, parameter_rows
from keel.common.settings import OneOf
from keel.objectives import PRESETS, Gate, ImportanceWeight, ObjectivePreset, Penalty, PolicyTerm, Reduction
from keel.objectives.describe import Description, describe_preset
from keel.objectives.notation import COMMON_SYMBOLS


def render_markdown() -> str:
    """The whole page."""
    symbols = [(f"`{s.name}`", f"`{s.definition}`" if s.definition else "", s.meaning) for s in COMMON_SYMBOLS]
    common = [row for row in parameter_rows(PRESETS["icepop"]) if not row.own]
    blocks = [
        INTRODUCTION.replace("{symbols}", _markdown_table(("symbol", "is", "meaning"), symbols)),
        "## All of them",
        _overview_table(),
        "## What every objective takes",
        COMMON_PARAMETERS.replace("{common}", _parameters_table(common)),
        "## Advantages",
        _markdown_table(
            ("name", "advantage of a rollout with reward R"), [(f"`{k}`", v) for k, v in ADVANTAGES.items()]
        ),
        "Set by `[advantages] name = ...`, or `keel.advantages(name, rewards, group)`. A rollout that is not valid"
        " moves no baseline and gets 0; a group with one valid rollout has nothing to compare and gets 0.",
        COMPOSITION.replace(
            "{parts}",
            "\n\n".join(_part_section(part) for part in (Gate, ImportanceWeight, PolicyTerm, Penalty, Reduction)),
        ),
        METRICS_START,
        _markdown_table(("metric", "meaning"), [(f"`{name}`", meaning) for name, meaning in METRICS.items()]),
        METRICS_END,
        "## One by one",
        *(_preset_section(recipe) for recipe in PRESETS.values()),
    ]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _markdown_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _overview_table() -> str:
    rows = []
    for recipe in PRESETS.values():
        words = describe_preset(recipe)
        link = f"[`{recipe.name}`](#{recipe.name})"
        dropped = "; ".join(words.dropped + words.optional)
        rows.append((link, words.anchor, dropped, words.divisor, format_defaults(recipe), recipe.source))
    return _markdown_table(("objective", "anchor", "who is dropped", "what divides", "defaults", "from"), rows)


def _parameters_table(rows: list[ParameterRow]) -> str:
    cells = [(f"`{row.name}`", format_value(row.default), row.meaning) for row in rows]
    return _markdown_table(("parameter", "default", "meaning"), cells)


def _part_section(part: type[Any]) -> str:
    """One kind of part with its fields."""
    rows = []
    for name, field in part.model_fields.items():
        default = "required" if field.is_required() else format_value(field.default)
        rows.append(
            (
                f"`{name}`",
                _accepted_values(field.annotation, field.metadata),
                default,
                " ".join((field.description or "").split()),
            )
        )
    first = (part.__doc__ or "").strip()
    return f"**{part.__name__}.** {first}\n\n{_markdown_table(('field', 'takes', 'default', 'meaning'), rows)}"


def _accepted_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a field takes, in words."""
    for marker in metadata:
        if isinstance(marker, OneOf):
            return ", ".join(f"`{choice}`" for choice in marker.choices())
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if annotation is bool:
        return "true, false"
    inner = [part for part in get_args(annotation) if part is not NoneType]
    return _accepted_values(inner[0]) if get_origin(inner[0] if inner else None) is Literal else "number"


def _preset_section(preset: ObjectivePreset) -> str:
    words = describe_preset(preset)
    own = [row for row in parameter_rows(preset) if row.own or row.name in preset.parameters]
    blocks = [
        f"### {preset.name}",
        f"{preset.title[:1].upper()}{preset.title[1:]}. From {preset.source}.",
        f"```text\nloss = {words.formula}\n{_definitions(words)}```",
        _properties_list(words),
        _parameters_table(own) if own else "It has no parameters of its own.",
        preset.note,
        f"```toml\n{_toml_snippet(own, preset)}```",
    ]
    return "\n\n".join(block for block in blocks if block)


def _definitions(description: Description) -> str:
    """The symbols that only some formulas use; those of every formula stand at the top of the page."""
    fixed = {symbol.name for symbol in COMMON_SYMBOLS} | {"A'", "k"}
    special = [s for s in description.legend if s.definition and (s.name not in fixed or s.name == "o")]
    return "".join(f"{symbol.name} = {symbol.definition}\n" for symbol in special)


def _properties_list(description: Description) -> str:
    dropped = "; ".join(description.dropped + description.optional)
    return (
        f"- who is dropped: {dropped}\n- a dropped token leaves: {description.dropped_from}\n"
        f"- anchor: {description.anchor}\n- what divides: {description.divisor}"
    )


def _toml_snippet(rows: list[ParameterRow], preset: ObjectivePreset) -> str:
    lines = ["[objective]", f'name = "{preset.name}"']
    for row in rows:
        value = f'"{row.value}"' if isinstance(row.value, str) else format_value(row.value)
        lines.append(f"# {row.name} is not given" if row.value is None else f"{row.name} = {value}")
    return "\n".join(lines) + "\n"
