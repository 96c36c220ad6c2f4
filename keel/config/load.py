"""From a TOML file and command-line overrides to checked settings, remembering where each value came from.

Defaults < TOML < command line. An override is `--a.b value` or `--a.b=value`; its value is read as TOML and, when it is
none, as a string. Everything is checked before anything is returned.
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
"""Bytes of a settings file."""
MAX_DEPTH = 32
"""Tables and lists inside each other."""


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and for every setting that was given somewhere, where."""

    settings: RunSettings
    origins: dict[str, str]
    recipe_folder: Path | None = None
    """The absolute folder of the file, for modules next to it; None: the settings are not from a file."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every setting with its value and its origin, the resolved parameters of the objective included."""
        tree: dict[str, Any] = {name: _dump(getattr(self.settings, name)) for name in type(self.settings).model_fields}
        objective = self.settings.objective
        if objective.name is None:
            tree["objective"] = objective.composition.model_dump()
        else:
            added = {key: value for key, value in objective.table.items() if key not in objective.parameters}
            tree["objective"] = {"name": objective.name, **objective.parameters, **added}
        return [(path, value, self.origin(path)) for path, value in _flatten(tree)]

    def origin(self, path: str) -> str:
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


def load_settings(path: str | Path | None = None, overrides: Sequence[str] = ()) -> LoadedSettings:
    """Read, merge and check. `overrides` are the command line's remaining words."""
    if path is None:
        return _validate({}, "default", overrides)
    file = find_recipe(path)
    loaded = _validate(_read_toml(file), str(path), overrides)
    return loaded if file.parent == RECIPES_FOLDER else replace(loaded, recipe_folder=file.absolute().parent)


def load_settings_from_text(text: str, origin: str) -> LoadedSettings:
    """The same from TOML that is no file; `origin`: what its values are said to be from."""
    return _validate(_parse_toml(text, origin), origin, ())


def read_tables(path: str | Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables as they were given, merged and not checked: for who has to complete them first."""
    tree = {} if path is None else _read_toml(find_recipe(path))
    for name, value in parse_overrides(overrides):
        set_dotted(tree, name, value)
    return tree


def _validate(tree: dict[str, Any], origin: str, overrides: Sequence[str]) -> LoadedSettings:
    origins = {leaf: origin for leaf, _ in _flatten(tree)}
    for name, value in parse_overrides(overrides):
        set_dotted(tree, name, value)
        origins = {leaf: origin for leaf, origin in origins.items() if not leaf.startswith(f"{name}.")}
        origins |= {leaf: "command line" for leaf, _ in _flatten(value, name)}
    table = tree.get("objective")
    if isinstance(table, dict) and not {"name", "gates", "weights", "policy", "penalties"} & table.keys():
        table["name"] = RunSettings().objective.name  # parameters alone are those of the default
    try:
        return LoadedSettings(RunSettings.model_validate(tree), origins)
    except ValidationError as error:
        raise to_config_error(error) from None


def _dump(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dump(item) for key, item in value.items()}
    return value.model_dump() if isinstance(value, BaseModel) else value


def parse_overrides(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """`--a.b value` and `--a.b=value` as (name, value) pairs, in order."""
    pairs = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"{word!r} is not an override; write --name.of.setting value")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} needs a value")
            text = rest.pop(0)
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
        raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes; settings are a page or two")
    return _parse_toml(text, str(path))


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(origin) from None
    except (ValueError, OverflowError) as error:  # TOMLDecodeError, and numbers and dates that Python has none of
        raise ConfigError(f"{origin} is not valid TOML: {error}") from None
    _check_depth(tree, origin)
    return tree


def _check_depth(tree: Any, origin: str) -> None:
    """Refuse tables so deep that nothing could walk through them."""
    layer, depth = [tree], 0
    while layer:
        if depth > MAX_DEPTH:
            raise _too_deep(origin)
        inside = (inner for one in layer for inner in (one.values() if isinstance(one, dict) else one))
        layer, depth = [inner for inner in inside if isinstance(inner, dict | list)], depth + 1


def _too_deep(origin: str) -> ConfigError:
    return ConfigError(f"{origin} is nested more than {MAX_DEPTH} deep; no setting is")


def set_dotted(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name; a number steps into a list (`objective.gates.0.low`)."""
    *parents, last = name.split(".")
    if len(parents) > MAX_DEPTH:
        raise _too_deep(f"--{name[:40]}...")
    place: Any = tree
    for depth, part in enumerate(parents):
        place = place[_list_index(place, part, name)] if isinstance(place, list) else place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--{name}: {'.'.join(parents[: depth + 1])} = {place!r} has no settings inside it")
    if isinstance(place, list):
        place[_list_index(place, last, name)] = value
    else:
        place[last] = value


def _list_index(items: list[Any], part: str, name: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(f"--{name}: {part} is not a position in a list of {len(items)}")
    return int(part)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        items = tree.items()
    elif isinstance(tree, list) and tree and all(isinstance(value, dict) for value in tree):
        items = enumerate(tree)  # type: ignore[assignment]
    else:
        return [(prefix, tree)] if prefix else []
    return [leaf for key, value in items for leaf in _flatten(value, f"{prefix}.{key}" if prefix else str(key))]
