"""Resolve an `[objective]` table: a preset by name, optionally extended, a loss function, or a composition.

With the name of a preset, the other keys are its parameters, and `gates`, `weights` and `penalties` are added to those
of the preset. With `module:function`, they are those of `FunctionSettings`. Without `name`, the table is a composition.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from keel.common.settings import suggest_name, to_config_error
from keel.errors import ConfigError
from keel.objectives.catalog import PRESETS
from keel.objectives.composition import Composition
from keel.objectives.loss_function import FunctionSettings

EXTENSIONS = ("gates", "weights", "penalties")


def resolve_objective(table: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], Composition]:
    """Return the preset's name and parameters (None and {} for a composition), and the composition."""
    if table.get("name") is None:
        for key in table:
            owners = [preset.name for preset in PRESETS.values() if key in preset.parameters_class.model_fields]
            if key not in ("name", *Composition.model_fields) and owners:
                raise ConfigError(
                    f"objective.{key} is a parameter of a preset: set objective.name too ({', '.join(owners)})"
                )
        try:
            return None, {}, Composition.model_validate({key: value for key, value in table.items() if key != "name"})
        except ValidationError as error:
            raise to_config_error(error, ("objective",), of_run=True) from None
    name = table["name"]
    if is_loss_function(name):
        settings = function_settings(table)
        return name, settings.model_dump(exclude={"name"}), settings.composition()
    if name not in PRESETS:
        hint = suggest_name(str(name), PRESETS)
        own = "" if hint.startswith("did you mean") else ' (your own loss: "module:function")'
        raise ConfigError(f'objective.name = "{name}" is not a preset; {hint}{own}')
    overrides = {key: value for key, value in table.items() if key != "name" and key not in EXTENSIONS}
    extra_parts = {key: table[key] for key in EXTENSIONS if table.get(key)}
    for key, value in extra_parts.items():
        if not isinstance(value, list):
            raise ConfigError(f"objective.{key} = {value!r} must be a list of tables")
    parameters, composition = PRESETS[name].resolve(overrides, ("objective",), extra_parts)
    return name, parameters, composition


def is_loss_function(name: object) -> bool:
    """Return whether an objective's name is `module:function` instead of a preset."""
    return isinstance(name, str) and ":" in name


def function_settings(table: Mapping[str, Any]) -> FunctionSettings:
    """Return the settings of a loss function from its `[objective]` table."""
    try:
        return FunctionSettings.model_validate(dict(table))
    except ValidationError as error:
        raise to_config_error(error, ("objective",), of_run=True) from None


class ObjectiveSettings(BaseModel):
    """A validated `[objective]` table with its resolved parameters and composition."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str | None = None
    """Name of a preset; `keel objectives` lists them. Or `module:function`, a loss of your own. Without it, the table
    is a composition."""
    _parameters: dict[str, Any] = PrivateAttr(default_factory=dict)
    _composition: Composition = PrivateAttr(default_factory=Composition)

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, data: Any) -> Any:
        """Take `objective = "NAME"` for a table with that name."""
        return {"name": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        _, self._parameters, self._composition = resolve_objective(self.table)
        return self

    @property
    def table(self) -> dict[str, Any]:
        """The table as the user wrote it."""
        return {"name": self.name, **(self.model_extra or {})}

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of all parameters of the preset, defaults included."""
        return dict(self._parameters)

    @property
    def composition(self) -> Composition:
        """The composition that the table resolves to."""
        return self._composition
