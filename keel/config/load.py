"""Load settings from a TOML file, command-line overrides and Python values, and record where each value came from.

Python values override the command line, which overrides the TOML file, which overrides the defaults. An override is
`--a.b value` or `--a.b=value`; its value is parsed as TOML, and taken as a string if it is not valid TOML. All settings
are validated before any are returned.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from keel.common.settings import to_config_error
from keel.config.recipe_files import RECIPES_FOLDER, find_recipe
from keel.config.run import RunSettings
from keel.errors import ConfigError

MAX_BYTES = 16 * 2**20
"""Maximum size of a settings file."""
MAX_DEPTH = 32
"""Maximum nesting of tables and lists."""
PYTHON_ORIGIN = "Python"
"""Origin of a value that a Python program gave."""


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and the origin of every setting that is not a default."""

    settings: RunSettings
    origins: dict[str, str]
    recipe_folder: Path | None = None
    """Absolute folder of the TOML file, for modules next to it. None if the settings do not come from a file."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (name, value, origin) of every setting, including the resolved parameters of the objective."""
        tree: dict[str, Any] = {name: _dump(getattr(self.settings, name)) for name in type(self.settings).model_fields}
        objective = self.settings.objective
        if objective.name is None:
            tree["objective"] = objective.composition.model_dump()
        else:
            extra = {key: value for key, value in objective.table.items() if key not in objective.parameters}
            tree["objective"] = {"name": objective.name, **objective.parameters, **extra}
        return [(path, value, self.origin(path)) for path, value in _flatten(tree)]

    def origin(self, path: str) -> str:
        """Return the origin of a setting: the name of the file, "command line", "Python" or "default"."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


def load_settings(
    path: str | Path | None = None, overrides: Sequence[str] = (), values: Sequence[tuple[str, Any]] = ()
) -> LoadedSettings:
    """Read a recipe, apply overrides and validate.

    `overrides` are the remaining command-line arguments; `values` are dotted names with Python values, as `keel.train`
    receives them.
    """
    if path is None:
        return _validate({}, "default", overrides, values)
    file = find_recipe(path)
    loaded = _validate(_read_toml(file), str(path), overrides, values)
    return loaded if file.parent == RECIPES_FOLDER else replace(loaded, recipe_folder=file.absolute().parent)


def load_settings_from_text(text: str, origin: str) -> LoadedSettings:
    """Load settings from TOML text. `origin` is the origin recorded for its values."""
    return _validate(_parse_toml(text, origin), origin, ())


def read_tables(path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the merged tables without validation, for callers that complete them first."""
    tree = {} if path is None else _read_toml(find_recipe(path))
    for name, value in parse_overrides(overrides):
        set_dotted(tree, name, value)
    return tree


def _validate(
    tree: dict[str, Any], origin: str, overrides: Sequence[str], values: Sequence[tuple[str, Any]] = ()
) -> LoadedSettings:
    origins = {leaf: origin for leaf, _ in _flatten(tree)}
    changes = [(name, value, "command line") for name, value in parse_overrides(overrides)]
    changes += [(name, value, PYTHON_ORIGIN) for name, value in values]
    for name, value, source in changes:
        set_dotted(tree, name, value)
        origins = {leaf: origin for leaf, origin in origins.items() if not leaf.startswith(f"{name}.")}
        origins |= {leaf: source for leaf, _ in _flatten(value, name)}
    table = tree.get("objective")
    if isinstance(table, dict) and not {"name", "gates", "weights", "policy", "penalties"} & table.keys():
        # parameters without a name belong to the default preset
        table["name"] = "cross_entropy" if tree.get("sft") else RunSettings().objective.name
    try:
        return LoadedSettings(RunSettings.model_validate(tree), origins)
    except ValidationError as error:
        raise to_config_error(error, of_run=True) from None


def _dump(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dump(item) for key, item in value.items()}
    return value.model_dump() if isinstance(value, BaseModel) else value


def parse_overrides(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """Parse `--a.b value` and `--a.b=value` into (name, value) pairs, in order."""
    pairs = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--") or len(argument) == 2:
            raise ConfigError(f"{argument!r} is not an override; write --name.of.setting value")
        name, equals, text = argument[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"--{name} needs a value")
            text = remaining.pop(0)
        pairs.append((name, _parse_value(text)))
    return pairs


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, OverflowError, RecursionError):
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes, the maximum for settings")
    return _parse_toml(text, str(path))


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise _depth_error(origin) from None
    except (ValueError, OverflowError) as error:  # TOMLDecodeError, or a number or date that Python cannot represent
        raise ConfigError(f"{origin} is not valid TOML: {error}") from None
    _check_depth(tree, origin)
    return tree


def _check_depth(tree: Any, origin: str) -> None:
    """Raise an error for tables nested so deeply that recursive functions would fail on them."""
    level, depth = [tree], 0
    while level:
        if depth > MAX_DEPTH:
            raise _depth_error(origin)
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level, depth = [child for child in children if isinstance(child, dict | list)], depth + 1


def _depth_error(origin: str) -> ConfigError:
    return ConfigError(f"{origin} is nested more than {MAX_DEPTH} levels deep, and no setting is")


def set_dotted(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set the value at a dotted name. A number is an index into a list (`objective.gates.0.low`)."""
    *parents, last = name.split(".")
    if len(parents) > MAX_DEPTH:
        raise _depth_error(f"--{name[:40]}...")
    node: Any = tree
    for depth, part in enumerate(parents):
        node = node[_list_index(node, part, name)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"--{name}: {'.'.join(parents[: depth + 1])} = {node!r} is not a table")
    if isinstance(node, list):
        node[_list_index(node, last, name)] = value
    else:
        node[last] = value


def _list_index(items: list[Any], part: str, name: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(f"--{name}: {part} is not an index into a list of {len(items)}")
    return int(part)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        items = tree.items()
    elif isinstance(tree, list) and tree and all(isinstance(value, dict) for value in tree):
        items = enumerate(tree)  # type: ignore[assignment]
    else:
        return [(prefix, tree)] if prefix else []
    return [leaf for key, value in items for leaf in _flatten(value, f"{prefix}.{key}" if prefix else str(key))]
