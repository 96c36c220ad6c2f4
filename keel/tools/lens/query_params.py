"""The words of a question: what may be asked with it, checked by the same table that describes it.

Guarantees that a word which is not declared is refused, and that one which is reaches its question as a whole number in
range, one of a closed list, or a text of bounded length. It knows nothing of runs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from keel.errors import KeelError

MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class IntParam:
    """A whole number; -1 is the sample of a rollout that has none."""

    default: int | None = None
    """Not given: the word is needed."""
    minimum: int = 0

    def parse(self, name: str, text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 11:
            raise KeelError(f"{name} = {text[:40]!r} must be a whole number")
        if not self.minimum <= int(text) <= MAX_INT:
            raise KeelError(f"{name} = {text} must be a whole number from {self.minimum} to {MAX_INT}")
        return int(text)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.minimum, "maximum": MAX_INT}


@dataclass(frozen=True)
class TextParam:
    """Any text; what is longer is refused."""

    default: str | None = None
    max_length: int = 2000

    def parse(self, name: str, text: str) -> str:
        if len(text) > self.max_length:
            raise KeelError(f"{name} has {len(text)} characters; at most {self.max_length} are taken")
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.max_length}


@dataclass(frozen=True)
class ChoiceParam:
    """One of a closed list."""

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
    """The words of a question as values; an empty word is one that was not given."""
    for name in query:
        if name not in declared:
            raise KeelError(f"{name[:40]!r} is no word of this question; known are {', '.join(declared) or 'none'}")
    values: dict[str, Any] = {}
    for name, word in declared.items():
        text = query.get(name, "")
        if text:
            values[name] = word.parse(name, text)
        elif word.default is None:
            raise KeelError(f"{name} is missing")
        else:
            values[name] = word.default
    return values


def openapi_parameters(declared: Mapping[str, Param]) -> list[dict[str, Any]]:
    """The words as OpenAPI has them."""
    return [
        {"name": name, "in": "query", "required": word.default is None, "schema": word.schema()}
        for name, word in declared.items()
    ]
