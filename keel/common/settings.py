"""The base of every settings class, and the conversion of validation errors to readable messages.

Guarantees that an unknown key is an error that suggests the closest name, and that every message contains the full name
and the value of the setting. Settings are frozen, so they cannot change after validation.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from keel.common.renamed_settings import other_system_hints, renamed_keys_in, renamed_value
from keel.errors import ConfigError

KeyPath = tuple[str | int, ...]
_FIELD = re.compile(r"\{([\w.-]+)\}")
"""A field name in an error message, as in `{low}` or `{publish.every}`."""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of an "unknown name" message: the closest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"known names: {', '.join(known)}"


def setting_error(message: str, values: Mapping[str, Any] | None = None, **fields: Any) -> PydanticCustomError:
    """Return an error about one or more fields of the model that is being validated.

    `message` contains field names in braces. When the error is shown, each becomes `name = value`, with the name that
    the user wrote (a preset calls the low bound of its first gate `ratio_low`). A validator that compares settings of
    nested tables passes them in `values` by dotted name: `{publish.every}`.
    """
    return PydanticCustomError("keel", "{sentence}", {"sentence": message, "values": {**(values or {}), **fields}})


@dataclass(frozen=True)
class OneOf:
    """Annotate a string setting whose allowed values are looked up each time a value is validated.

    Works like a `Literal` whose values come from a table: error messages and JSON schema are the same.
    """

    choices: Callable[[], tuple[str, ...]]

    def _validate(self, value: Any) -> str:
        choices = self.choices()
        if isinstance(value, str) and value in choices:
            return value
        quoted = [repr(choice) for choice in choices]
        expected = " or ".join([part for part in (", ".join(quoted[:-1]), quoted[-1]) if part])
        raise PydanticKnownError("literal_error", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(self.choices())}


class Settings(BaseModel):
    """A frozen table of settings in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _forbid_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := [str(key) for key in data if key not in cls.model_fields]):
            raise PydanticCustomError("unknown", "{keys}", {"keys": unknown, "known": list(cls.model_fields)})
        return data


def dotted_name(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def to_config_error(
    error: ValidationError,
    prefix: KeyPath = (),
    user_name_of: Callable[[KeyPath], str | None] = lambda _path: None,
    *,
    of_run: bool = False,
) -> ConfigError:
    """Convert all problems of one validation to a single error, with one line per problem.

    `user_name_of` may map the path of a setting to the name under which the user wrote it. With `of_run`, these are
    settings of a run, and a setting of another system is answered with Keel's name.
    """

    def label(path: KeyPath) -> str:
        return dotted_name((*prefix, user_name_of(path) or dotted_name(path)))

    lines = []
    for item in error.errors():
        path: KeyPath = tuple(part for part in item["loc"] if not _is_union_tag(part))
        context = item.get("ctx", {})
        if item["type"] == "unknown":
            # a request or an option names only the first: its sender may have written any number of them
            for key in context["keys"] if of_run else context["keys"][:1]:
                value = item["input"].get(key) if isinstance(item["input"], Mapping) else None
                lines += _unknown_lines(label((*path, key)), key, value, context["known"], of_run=of_run)
        elif item["type"] == "keel":
            shown = {
                field: f"{label((*path, *field.split('.')))} = {_toml_value(value)}"
                for field, value in context["values"].items()
            }
            lines.append(_fill_fields(context["sentence"], shown))
        elif isinstance(context.get("error"), ConfigError):
            lines.append(str(context["error"]))
        elif item["type"] == "missing":
            lines.append(f"{label(path)} is missing")
        elif (new := renamed_value(label(path), item["input"])) is not None:
            lines.append(
                f"{label(path)} = {_toml_value(item['input'])} was renamed; write {label(path)} = {_toml_value(new)}"
            )
        else:
            lines.append(f"{label(path)} = {_toml_value(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return ConfigError("\n".join(dict.fromkeys(lines)))


def unknown_setting_error(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not a setting of a run; `known` are the full names of all settings."""
    hints = [
        *_renamed_lines(name, None),
        *(f"{name} is not a setting; {hint}" for _, hint in other_system_hints(name, None)),
    ]
    if hints:
        return ConfigError(hints[0])
    # a typo in a full name, or in its last part, which stands for the shortest name that ends with it
    by_length = sorted(known, key=len, reverse=True)
    full_names = {written: full for full in by_length for written in (full.rpartition(".")[2], full)}
    close = difflib.get_close_matches(name, full_names, n=1, cutoff=0.7)
    hint = f"did you mean {full_names[close[0]]}?" if close else "`keel config --explain` lists all settings"
    return ConfigError(f"{name} is not a setting; {hint}")


def _fill_fields(sentence: str, shown: Mapping[str, str]) -> str:
    """Replace each `{field}` that is in `shown`. Other braces are part of the user's text."""
    return _FIELD.sub(lambda match: shown.get(match[1], match[0]), sentence)


def _unknown_lines(name: str, key: str, value: Any, known: Iterable[str], *, of_run: bool) -> list[str]:
    """Return the lines about an unknown key: its new name, Keel's name for it, or the closest name."""
    if lines := _renamed_lines(name, value):
        return lines
    if of_run and (hints := list(other_system_hints(name, value))):
        return [f"{setting} is not a setting; {hint}" for setting, hint in hints]
    return [f"{name} is not a setting; {suggest_name(key, known)}"]


def _renamed_lines(name: str, unknown: Any) -> list[str]:
    """Return one line per renamed setting in an unknown key, with the new value if the value was renamed too."""
    lines = []
    for old, value, new in renamed_keys_in(name, unknown):
        changed = renamed_value(new, value)
        if changed is None:
            lines.append(f"{old} was renamed to {new}")
        else:
            lines.append(f"{old} = {_toml_value(value)} was renamed to {new} = {_toml_value(changed)}")
    return lines


def _is_union_tag(part: str | int) -> bool:
    # pydantic adds the type it tried ("float", "function-before[...]") to the path of an error inside a union
    return isinstance(part, str) and (part in {"float", "int", "str", "bool", "none"} or "[" in part)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
