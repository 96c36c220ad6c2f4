"""The `[objective]` table: a recipe by name, possibly extended, or a composition spelled out.

With `name`, the other keys are the recipe's parameters, and `gates`, `weights` and `penalties` are added to its own.
Without `name`, the table is a composition.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from keel.common.settings import suggest_name, to_config_error
from keel.errors import ConfigError
from keel.objectives.catalog import PRESETS
from keel.objectives.composition import Composition

EXTENSIONS = ("gates", "weights", "penalties")


def resolve_objective(table: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], Composition]:
    """The recipe's name and parameters (none for a composition), and the composition itself."""
    if table.get("name") is None:
        for key in table:
            owners = [recipe.name for recipe in PRESETS.values() if key in recipe.parameters_class.model_fields]
            if key not in ("name", *Composition.model_fields) and owners:
                raise ConfigError(
                    f"objective.{key} is a parameter of a recipe: give objective.name too ({', '.join(owners)})"
                )
        try:
            return None, {}, Composition.model_validate({key: value for key, value in table.items() if key != "name"})
        except ValidationError as error:
            raise to_config_error(error, ("objective",)) from None
    name = table["name"]
    if name not in PRESETS:
        raise ConfigError(f'objective.name = "{name}" is not a recipe; {suggest_name(str(name), PRESETS)}')
    given = {key: value for key, value in table.items() if key != "name" and key not in EXTENSIONS}
    added = {key: table[key] for key in EXTENSIONS if table.get(key)}
    for key, value in added.items():
        if not isinstance(value, list):
            raise ConfigError(f"objective.{key} = {value!r} must be a list of tables")
    parameters, composition = PRESETS[name].resolve(given, ("objective",), added)
    return name, parameters, composition


class ObjectiveSettings(BaseModel):
    """An `[objective]` table that has been checked, with what it resolves to."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str | None = None
    """A recipe; `keel objectives` lists them."""
    _parameters: dict[str, Any] = PrivateAttr(default_factory=dict)
    _composition: Composition = PrivateAttr(default_factory=Composition)

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        _, self._parameters, self._composition = resolve_objective(self.table)
        return self

    @property
    def table(self) -> dict[str, Any]:
        """The table as it was written."""
        return {"name": self.name, **(self.model_extra or {})}

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self._parameters)

    @property
    def composition(self) -> Composition:
        return self._composition
