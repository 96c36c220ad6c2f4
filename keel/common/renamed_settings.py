"""Settings that were renamed: the old name is an error that states the new one.

`RENAMED_KEYS` maps the old dotted name of a setting to its new one. `RENAMED_VALUES` maps a setting, under its present
name, to {old value: new value}. A part `*` of a name stands for any one part (the name of an environment, a position in
a list); each `*` of a new name takes the part that the `*` at the same place in the order matched. Both tables are read
only after a name or a value was rejected, so an entry never changes the meaning of settings that load.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Parts = tuple[str, ...]

RENAMED_KEYS: dict[str, str] = {
    "advantages.no_signal": "advantages.zero_variance_groups",
}

RENAMED_VALUES: dict[str, dict[Any, Any]] = {}
"""For example {"environments.*.limits.over_length": {"refuse": "drop"}}."""


def renamed_key(name: str) -> str | None:
    """Return the present name of a setting that was renamed, else None."""
    parts = tuple(name.split("."))
    for old, new in RENAMED_KEYS.items():
        matched = _match(tuple(old.split(".")), parts)
        if matched is not None:
            rest = iter(matched)
            return ".".join(next(rest) if part == "*" else part for part in new.split("."))
    return None


def renamed_value(name: str, value: Any) -> Any:
    """Return the present form of a value that was renamed, else None."""
    if not isinstance(value, str | int | float):
        return None
    for setting, values in RENAMED_VALUES.items():
        if value in values and _match(tuple(setting.split(".")), tuple(name.split("."))) is not None:
            return values[value]
    return None


def renamed_keys_in(name: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (old name, value, new name) for an unknown setting, or for those inside it when it is a table."""
    new = renamed_key(name)
    if new is not None:
        yield name, value, new
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from renamed_keys_in(f"{name}.{key}", inner)


def _match(pattern: Parts, parts: Parts) -> list[str] | None:
    """Return what each `*` of the pattern stands for, or None when the parts do not match it."""
    if len(pattern) != len(parts) or any(a not in ("*", b) for a, b in zip(pattern, parts, strict=True)):
        return None
    return [part for star, part in zip(pattern, parts, strict=True) if star == "*"]
