"""Describe every setting from the code: name, type, default and docstring.

Used by `keel config --explain` and by the generated settings page. A part NAME of a setting's name is a key that the
user chooses, such as the name of an environment, and N is an index into a list.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from keel.common.settings import unknown_setting_error
from keel.config.run import RunSettings
from keel.config.toml_writer import to_toml
from keel.objectives import PRESETS, Composition
from keel.objectives.loss_function import FunctionSettings
from keel.objectives.preset import COMMON_NAMES, PRESET_PARAMETERS, CommonParameters

PLACEHOLDERS = ("NAME", "N")


@dataclass(frozen=True)
class SettingDescription:
    """One setting."""

    name: str
    """Dotted name."""
    type: str
    default: str
    """A TOML value, "required" or "not set"; for a preset's parameter, the value of each preset."""
    description: str


@dataclass(frozen=True)
class TableDescription:
    """One table: the settings directly in it."""

    name: str
    """Dotted name; "" for the settings outside of any table."""
    description: str
    settings: tuple[SettingDescription, ...]


def describe_tables() -> list[TableDescription]:
    """Return every table of a run's settings, in the order of their definition."""
    return list(_describe_nested("", RunSettings))


def find_settings(name: str) -> list[TableDescription]:
    """Return the tables with the settings that a name selects: one setting, a table, or the last part of any name.

    Raises a `ConfigError` that names the closest setting, or Keel's word for that of another system.
    """
    tables, parts = describe_tables(), name.split(".")
    exact = _select(tables, lambda setting: _matches(setting.split("."), parts))
    inside = _select(tables, lambda setting: _matches(setting.split(".")[: len(parts)], parts))
    ending = _select(tables, lambda setting: setting.split(".")[-len(parts) :] == parts)
    if found := exact or inside or ending:
        return found
    raise unknown_setting_error(name, [setting.name for table in tables for setting in table.settings])


def _select(tables: list[TableDescription], wanted: typing.Callable[[str], bool]) -> list[TableDescription]:
    selected = (
        TableDescription(table.name, table.description, tuple(s for s in table.settings if wanted(s.name)))
        for table in tables
    )
    return [table for table in selected if table.settings]


def _matches(setting: list[str], parts: list[str]) -> bool:
    return len(setting) == len(parts) and all(a == b or a in PLACEHOLDERS for a, b in zip(setting, parts, strict=True))


def _describe_nested(name: str, model: type[BaseModel]) -> Iterator[TableDescription]:
    """Yield the table of a settings class, then the tables inside it."""
    yield describe_table(name, model)
    for key, field in model.model_fields.items():
        path = f"{name}.{key}" if name else key
        for inner in nested_settings(field.annotation):
            if path == "objective":
                yield from _describe_objective()
            else:
                yield from _describe_nested(f"{path}.NAME" if is_mapping(field.annotation) else path, inner)


def _describe_objective() -> Iterator[TableDescription]:
    """Yield the parameters of presets, then the tables of a composition."""
    names = [*PRESET_PARAMETERS, *COMMON_NAMES]
    settings = [
        SettingDescription(
            "objective.name",
            "string",
            to_toml(RunSettings().objective.name),
            "A preset; `keel objectives` lists them. Or `module:function`, a loss of your own. Without a name the table"
            " is a composition of gates, weights, a policy term, penalties and a reduction.",
        ),
        *(
            replace(setting, description=f"With a loss of your own: {setting.description}")
            for setting in describe_table("objective", FunctionSettings).settings
            if setting.name.rpartition(".")[2] in ("reads", "audit", "options")
        ),
        *(_describe_parameter(name) for name in names),
    ]
    yield TableDescription(
        "objective", "A preset with its parameters, a loss of your own, or a composition.", tuple(settings)
    )
    for key, field in Composition.model_fields.items():
        for inner in nested_settings(field.annotation, in_lists=True):
            is_list = typing.get_origin(field.annotation) is list
            yield describe_table(f"objective.{key}.N" if is_list else f"objective.{key}", inner)


def _describe_parameter(name: str) -> SettingDescription:
    """Return a parameter of presets, with the presets that have each default."""
    common = CommonParameters.model_fields.get(name)
    annotation, meaning = PRESET_PARAMETERS[name] if common is None else (common.annotation, common.description or "")
    presets: dict[str, list[str]] = {}
    for preset in PRESETS.values():
        if name in preset.parameters_class.model_fields:
            default = preset.parameters_class.model_fields[name].default
            presets.setdefault("not set" if default is None else to_toml(default), []).append(preset.name)
    if len(presets) == 1 and name in COMMON_NAMES:
        shown = next(iter(presets))
    else:
        shown = "; ".join(f"{default} ({', '.join(owners)})" for default, owners in presets.items())
    meaning = " ".join(meaning.split()).rstrip(".")
    meaning = f"{meaning[:1].upper()}{meaning[1:]}."
    return SettingDescription(f"objective.{name}", type_name(annotation), shown, meaning)


def describe_table(name: str, model: type[BaseModel], quote: str = "") -> TableDescription:
    """Return the settings directly in a settings class. `quote` is put around values in types and defaults."""
    settings = tuple(
        SettingDescription(
            f"{name}.{key}" if name else key,
            type_name(field.annotation, quote),
            _default(field, quote),
            " ".join((field.description or "").split()),
        )
        for key, field in model.model_fields.items()
        if not nested_settings(field.annotation)
    )
    # the docstring of the class, unless it inherits the one of its base
    return TableDescription(name, " ".join((model.__doc__ or "").split()), settings)


def _default(field: FieldInfo, quote: str) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    default = field.get_default(call_default_factory=True)
    return "not set" if default is None else f"{quote}{to_toml(default)}{quote}"


def nested_settings(annotation: Any, *, in_lists: bool = False) -> list[type[BaseModel]]:
    """Return the settings classes inside an annotation such as `PoolSettings | None` or `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (list, tuple) and not in_lists:
        return []
    arguments = typing.get_args(annotation)
    return [model for argument in arguments for model in nested_settings(argument, in_lists=in_lists)]


def is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict


def type_name(annotation: Any, quote: str = "") -> str:
    """Return the type of a setting in words. `quote` is put around the values of an enumeration."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0], quote)
    if origin is typing.Literal:
        return " or ".join(f"{quote}{to_toml(value)}{quote}" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(one, quote) for one in arguments if one is not type(None))
    if origin is not None:
        inner = ", ".join(type_name(one, quote) for one in arguments if one is not Ellipsis)
        return f"{'list' if origin is tuple else origin.__name__} of {inner}"
    names = {"str": "string", "int": "integer", "bool": "boolean"}
    return names.get(annotation.__name__, annotation.__name__) if isinstance(annotation, type) else str(annotation)
