"""Parameters of queries, validated by the same declarations that describe them in the OpenAPI document.

Guarantees that an undeclared parameter is an error, and that a declared one reaches its query as an integer in range,
one of a fixed set of values, or a text of bounded length. This module knows nothing about runs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from keel.errors import KeelError

MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class IntParam:
    """An integer. A minimum of -1 is used for the sample of a rollout without samples."""

    default: int | None = None
    """None: the parameter is required."""
    minimum: int = 0

    def parse(self, name: str, text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 11:
            raise KeelError(f"{name} = {text[:40]!r} must be an integer")
        if not self.minimum <= int(text) <= MAX_INT:
            raise KeelError(f"{name} = {text} must be an integer from {self.minimum} to {MAX_INT}")
        return int(text)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.minimum, "maximum": MAX_INT}


@dataclass(frozen=True)
class TextParam:
    """Any text up to a maximum length."""

    default: str | None = None
    max_length: int = 2000

    def parse(self, name: str, text: str) -> str:
        if len(text) > self.max_length:
            raise KeelError(f"{name} has {len(text)} characters; the maximum is {self.max_length}")
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.max_length}


@dataclass(frozen=True)
class ChoiceParam:
    """One of a fixed set of values."""

    choices: Collection[str]
    default: str | None = None

    def parse(self, name: str, text: str) -> str:
        if text not in self.choices:
            raise KeelError(f"{name} = {text[:40]!r} must be one of {', '.join(self.choices)}")
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.choices)}


Param = IntParam | TextParam | ChoiceParam
ParamValues = Mapping[str, Any]


def parse_params(declared: Mapping[str, Param], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all declared parameters; an empty text counts as not given."""
    for name in query:
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise KeelError(f"{name[:40]!r} is not a parameter of this query; known parameters: {known}")
    values: dict[str, Any] = {}
    for name, param in declared.items():
        text = query.get(name, "")
        if text:
            values[name] = param.parse(name, text)
        elif param.default is None:
            raise KeelError(f"{name} is missing")
        else:
            values[name] = param.default
    return values


def openapi_parameters(declared: Mapping[str, Param]) -> list[dict[str, Any]]:
    """Return the parameters as an OpenAPI document lists them."""
    return [
        {"name": name, "in": "query", "required": param.default is None, "schema": param.schema()}
        for name, param in declared.items()
    ]
