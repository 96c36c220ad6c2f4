"""The words of a question: what may be asked with it, checked by the same table that describes it.

Guarantees that a word which is not declared is refused, and that one which is reaches its question as a whole number in
range, one of a closed list, or a text of bounded length. It knows nothing of runs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from keel.errors import KeelError

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Whole:
    """A whole number; -1 is the sample of a rollout that has none."""

    default: int | None = None
    """Not given: the word is needed."""
    least: int = 0

    def read(self, name: str, text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 11:
            raise KeelError(f"{name} = {text[:40]!r} must be a whole number")
        if not self.least <= int(text) <= LARGEST:
            raise KeelError(f"{name} = {text} must be a whole number from {self.least} to {LARGEST}")
        return int(text)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": LARGEST}


@dataclass(frozen=True)
class Text:
    """Any text; what is longer is refused."""

    default: str | None = None
    longest: int = 2000

    def read(self, name: str, text: str) -> str:
        if len(text) > self.longest:
            raise KeelError(f"{name} has {len(text)} characters; at most {self.longest} are taken")
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.longest}


@dataclass(frozen=True)
class Choice:
    """One of a closed list."""

    known: Collection[str]
    default: str | None = None

    def read(self, name: str, text: str) -> str:
        if text not in self.known:
            raise KeelError(f"{name} = {text[:40]!r} must be one of {', '.join(self.known)}")
        return text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.known)}


Word = Whole | Text | Choice
Read = Mapping[str, Any]


def read(declared: Mapping[str, Word], given: Mapping[str, str]) -> dict[str, Any]:
    """The words of a question as values; an empty word is one that was not given."""
    for name in given:
        if name not in declared:
            raise KeelError(f"{name[:40]!r} is no word of this question; known are {', '.join(declared) or 'none'}")
    values: dict[str, Any] = {}
    for name, word in declared.items():
        text = given.get(name, "")
        if text:
            values[name] = word.read(name, text)
        elif word.default is None:
            raise KeelError(f"{name} is missing")
        else:
            values[name] = word.default
    return values


def parameters(declared: Mapping[str, Word]) -> list[dict[str, Any]]:
    """The words as OpenAPI has them."""
    return [
        {"name": name, "in": "query", "required": word.default is None, "schema": word.schema()}
        for name, word in declared.items()
    ]
