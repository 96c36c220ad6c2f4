"""Parse the objectives to compare from a list such as `icepop,ipo_kl(kl_tau=0.01),rule.toml`.

An entry is a preset's name, a preset with parameters in parentheses (TOML values, strings without quotes), or the path
of a TOML file with an [objective]. An entry's text is its name in tables, so the same text twice is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.common.settings import suggest_name
from keel.config import load_settings
from keel.config.load import parse_overrides
from keel.errors import ConfigError
from keel.objectives import PRESETS
from keel.signal import Objective, objective

DEFAULT_OBJECTIVES = "icepop,ipo_kl,dppo_tv,dppo_kl,opsm"
"""Objectives that are compared by default."""

_OPENING_BRACKETS, _CLOSING_BRACKETS = "([{", ")]}"


@dataclass(frozen=True, eq=False)
class Candidate:
    """An objective to compare, with its name."""

    name: str
    objective: Objective
    table: dict[str, Any] = field(default_factory=dict)
    """The [objective] table it was made from, for runs that train with it."""


def parse_candidates(text: str) -> list[Candidate]:
    """Return every objective of a list; an invalid entry raises a `ConfigError`."""
    candidates = [_parse_candidate(part) for part in split_list(text) if part]
    if not candidates:
        raise ConfigError("--objectives is empty; give names separated by commas: icepop,ipo_kl(kl_tau=0.01)")
    names = [candidate.name for candidate in candidates]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--objectives lists {name} twice; remove one of them")
    return candidates


def split_list(text: str, flag: str = "--objectives") -> list[str]:
    """Split at commas, except at those inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPENING_BRACKETS:
            depth += 1
        elif character in _CLOSING_BRACKETS:
            depth -= 1
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
        if depth < 0:
            break
    if depth or quote:
        raise ConfigError(f"{flag} {text}: unbalanced brackets or quotes")
    return [part.strip() for part in parts]


def _parse_candidate(text: str) -> Candidate:
    name, parenthesis, rest = text.partition("(")
    name = name.strip()
    if not parenthesis and name.endswith(".toml"):
        settings = load_settings(name).settings.objective
        table = {key: value for key, value in settings.table.items() if value is not None}
        return Candidate(text, objective(settings), table)
    if name not in PRESETS:
        hint = suggest_name(name, PRESETS)
        raise ConfigError(f'--objectives: "{name}" is not an objective; {hint} A file must end in .toml')
    if parenthesis and not rest.endswith(")"):
        raise ConfigError(f"--objectives {text}: parameters must end with a closing parenthesis")
    parameters = _parse_parameters(split_list(rest[:-1]), text) if parenthesis else {}
    try:
        return Candidate(text, objective(name, **parameters), {"name": name, **parameters})
    except ConfigError as error:
        raise ConfigError("\n".join(f"{text}: {line}" for line in str(error).splitlines())) from None


def _parse_parameters(parts: Sequence[str], text: str) -> dict[str, object]:
    parameters: dict[str, object] = {}
    for part in parts:
        name, equals, value = (side.strip() for side in part.partition("="))
        if not (name and equals and value):
            raise ConfigError(f"--objectives {text}: {part!r} is not a parameter; write name=value")
        if name in parameters:
            raise ConfigError(f"--objectives {text}: {name} is given twice")
        ((_, parameters[name]),) = parse_overrides([f"--{name}={value}"])
    return parameters
