"""The parameters of an objective preset as rows: first those of the preset, then those that every preset has.

Names, defaults and meanings come from `keel.objectives`; this module only collects them and formats values.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from keel.objectives import ObjectivePreset, resolve_objective
from keel.objectives.describe import format_number
from keel.objectives.preset import COMMON_NAMES, PRESET_PARAMETERS, CommonParameters


class ParameterRow(NamedTuple):
    """One parameter."""

    name: str
    value: Any
    default: Any
    meaning: str
    own: bool


def parameter_rows(preset: ObjectivePreset, overrides: Mapping[str, Any] | None = None) -> list[ParameterRow]:
    """Return every parameter of a preset, with its value after applying overrides."""
    _, values, _ = resolve_objective({"name": preset.name, **(overrides or {})})
    fields = preset.parameters_class.model_fields
    names = [*preset.own_parameters, *COMMON_NAMES]
    own = set(preset.own_parameters)
    return [
        ParameterRow(name, values[name], fields[name].default, parameter_meaning(name), name in own) for name in names
    ]


def parameter_meaning(name: str) -> str:
    """Return the description of a parameter."""
    text = (
        PRESET_PARAMETERS[name][1]
        if name in PRESET_PARAMETERS
        else CommonParameters.model_fields[name].description or ""
    )
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def format_defaults(preset: ObjectivePreset) -> str:
    """Return the values that define the preset, without those that are not set."""
    values = {name: value for name, value in preset.parameters.items() if value is not None and name != "anchor"}
    return ", ".join(f"{name} {format_value(value)}" for name, value in values.items()) or "-"


def format_value(value: Any) -> str:
    """Format a value for display."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "true" if value else "false"
    return format_number(value) if isinstance(value, float) else str(value)
