"""The parameters of a recipe as rows, its own first and then those that every recipe takes.

Names, defaults and meanings come from `keel.config`; this only puts them side by side and writes values for people.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from keel.objectives import Recipe, resolve_objective
from keel.objectives.describe import number
from keel.objectives.preset import COMMON_NAMES, PARAMETERS, Common


class Row(NamedTuple):
    """One parameter."""

    name: str
    value: Any
    default: Any
    meaning: str
    own: bool


def parameters(recipe: Recipe, given: Mapping[str, Any] | None = None) -> list[Row]:
    """Every parameter that the recipe takes, with its value when these are given."""
    _, values, _ = resolve_objective({"name": recipe.name, **(given or {})})
    fields = recipe.settings.model_fields
    names = [*recipe.own_parameters, *COMMON_NAMES]
    own = set(recipe.own_parameters)
    return [Row(name, values[name], fields[name].default, meaning(name), name in own) for name in names]


def meaning(name: str) -> str:
    """What a parameter is for."""
    text = PARAMETERS[name][1] if name in PARAMETERS else Common.model_fields[name].description or ""
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def defaults(recipe: Recipe) -> str:
    """The values that make the recipe what it is, without those that are not given."""
    given = {name: value for name, value in recipe.parameters.items() if value is not None and name != "anchor"}
    return ", ".join(f"{name} {show(value)}" for name, value in given.items()) or "-"


def show(value: Any) -> str:
    """A value for people."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "true" if value else "false"
    return number(value) if isinstance(value, float) else str(value)
