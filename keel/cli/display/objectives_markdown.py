"""Render docs/objectives.md: prose for every objective, and tables generated from the presets.

The output is deterministic. Names and numbers of particular presets are never written here by hand; tests compare the
lists that code defines elsewhere (estimators, metrics) with that code.
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
    """Return the page."""
    symbols = [(f"`{s.name}`", f"`{s.definition}`" if s.definition else "", s.meaning) for s in COMMON_SYMBOLS]
    common = [row for row in parameter_rows(PRESETS["icepop"]) if not row.own]
    blocks = [
        INTRODUCTION.replace("{symbols}", _markdown_table(("symbol", "definition", "meaning"), symbols)),
        "## Overview",
        _overview_table(),
        "## Common parameters",
        COMMON_PARAMETERS.replace("{common}", _parameters_table(common)),
        "## Advantages",
        _markdown_table(
            ("name", "advantage of a rollout with reward R"), [(f"`{k}`", v) for k, v in ADVANTAGES.items()]
        ),
        "Set `[advantages] name = ...`, or call `keel.advantages(name, rewards, group)`. An invalid rollout changes no"
        " baseline and gets an advantage of 0. A group with a single valid rollout has no comparison and gets 0.",
        COMPOSITION.replace(
            "{parts}",
            "\n\n".join(_part_section(part) for part in (Gate, ImportanceWeight, PolicyTerm, Penalty, Reduction)),
        ),
        METRICS_START,
        _markdown_table(("metric", "meaning"), [(f"`{name}`", meaning) for name, meaning in METRICS.items()]),
        METRICS_END,
        "## Presets",
        *(_preset_section(preset) for preset in PRESETS.values()),
    ]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _markdown_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _overview_table() -> str:
    rows = []
    for preset in PRESETS.values():
        description = describe_preset(preset)
        link = f"[`{preset.name}`](#{preset.name})"
        dropped = "; ".join(description.dropped + description.optional)
        rows.append((link, description.anchor, dropped, description.divisor, format_defaults(preset), preset.source))
    return _markdown_table(("objective", "anchor", "dropped tokens", "divisor", "defaults", "source"), rows)


def _parameters_table(rows: list[ParameterRow]) -> str:
    cells = [(f"`{row.name}`", format_value(row.default), row.meaning) for row in rows]
    return _markdown_table(("parameter", "default", "meaning"), cells)


def _part_section(part: type[Any]) -> str:
    """Return the section of one kind of part with its fields."""
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
    summary = (part.__doc__ or "").strip()
    return f"**{part.__name__}.** {summary}\n\n{_markdown_table(('field', 'values', 'default', 'meaning'), rows)}"


def _accepted_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return the accepted values of a field as text."""
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
    description = describe_preset(preset)
    rows = [row for row in parameter_rows(preset) if row.own or row.name in preset.parameters]
    blocks = [
        f"### {preset.name}",
        f"{preset.title[:1].upper()}{preset.title[1:]}. Source: {preset.source}.",
        f"```text\nloss = {description.formula}\n{_definitions(description)}```",
        _properties_list(description),
        _parameters_table(rows) if rows else "It has only the common parameters.",
        preset.note,
        f"```toml\n{_toml_snippet(rows, preset)}```",
    ]
    return "\n\n".join(block for block in blocks if block)


def _definitions(description: Description) -> str:
    """Return the definitions of the symbols that are not in the table at the top of the page."""
    common = {symbol.name for symbol in COMMON_SYMBOLS} | {"A'", "k"}
    specific = [s for s in description.legend if s.definition and (s.name not in common or s.name == "o")]
    return "".join(f"{symbol.name} = {symbol.definition}\n" for symbol in specific)


def _properties_list(description: Description) -> str:
    dropped = "; ".join(description.dropped + description.optional)
    return (
        f"- dropped tokens: {dropped}\n- dropped from: {description.dropped_from}\n"
        f"- anchor: {description.anchor}\n- divisor: {description.divisor}"
    )


def _toml_snippet(rows: list[ParameterRow], preset: ObjectivePreset) -> str:
    lines = ["[objective]", f'name = "{preset.name}"']
    for row in rows:
        value = f'"{row.value}"' if isinstance(row.value, str) else format_value(row.value)
        lines.append(f"# {row.name} is not given" if row.value is None else f"{row.name} = {value}")
    return "\n".join(lines) + "\n"
