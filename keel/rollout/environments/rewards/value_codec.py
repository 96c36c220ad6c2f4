"""Values of Python as JSON data and back: plain data by value, everything else by reference.

Decoding runs no code of the peer: there are no pickles. What a hostile peer can produce is data, references to its own
or previously exported objects, and functions or classes of a few modules of the standard library. Runs inside the
sandbox and imports only the standard library.
"""

import builtins
import collections
import importlib
import types
from collections.abc import Callable
from typing import Any, NoReturn

CONTAINERS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)}
MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, collections.Counter, collections.OrderedDict)}
TEXT: dict[str, tuple[str, Callable[[Any], str], Callable[[Any, str], Any]]] = {
    "bytes": ("builtins", lambda value: bytes.decode(value, "latin-1"), lambda kind, text: kind(text, "latin-1")),
    "bytearray": ("builtins", lambda value: value.decode("latin-1"), lambda kind, text: kind(text, "latin-1")),
    "complex": ("builtins", lambda z: f"{z.real!r} {z.imag!r}", lambda kind, text: kind(*map(float, text.split()))),
    "Decimal": ("decimal", str, lambda kind, text: kind(text)),
    "Fraction": ("fractions", str, lambda kind, text: kind(text)),
    "datetime": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "date": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    "time": ("datetime", lambda value: value.isoformat(), lambda kind, text: kind.fromisoformat(text)),
}
"""Classes that are copied as text: module, function to text, function of the class and the text. The modules are
imported only where a value needs them, because every sandboxed process pays for its imports."""
LIBRARY_TYPES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType)
"""What may be named instead of copied. Not instances, which could be equal to everything."""
LIBRARY_MODULES = frozenset(
    [
        *("abc", "bisect", "builtins", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum"),
        *("fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re"),
        *("statistics", "string", "time", "typing"),
    ]
)
"""Modules whose functions, called by a test, return plain data and change only their arguments. A program can claim
that any of its names is one of them: `unittest.mock` would offer objects that equal everything."""
UNSAFE_BUILTINS = frozenset(
    [
        *("__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "exit", "getattr", "globals"),
        *("help", "input", "locals", "memoryview", "open", "print", "quit", "setattr", "super", "vars"),
    ]
)


def _library_name(value: Any) -> list[str] | None:
    """Return [module, qualified name] of a class, function or module of the standard library, else None."""
    if not isinstance(value, LIBRARY_TYPES):
        return None
    if isinstance(value, types.ModuleType):
        names = [value.__name__, ""]
    else:
        names = [str(getattr(value, "__module__", None) or ""), str(getattr(value, "__qualname__", ""))]
        owner = getattr(value, "__objclass__", None)
        names = [owner.__module__, names[1]] if isinstance(owner, type) else names
    try:
        return names if _library_object(*names) is value else None
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def _library_object(module: str, name: str) -> Any:
    """Return a class, function or module of the standard library."""
    if module.lstrip("_") not in LIBRARY_MODULES or (
        module == "builtins" and name.partition(".")[0] in UNSAFE_BUILTINS
    ):
        raise ValueError(f"{module}.{name} is not a name that processes exchange")
    module_object = importlib.import_module(module)
    value: Any = module_object
    for part in name.split(".") if name else ():
        if part.startswith("_") or (isinstance(value, types.ModuleType) and value is not module_object):
            raise ValueError(f"{module}.{name} leads through private names or other modules")
        value = getattr(value, part)
    if not isinstance(value, LIBRARY_TYPES) or (name and isinstance(value, types.ModuleType)):
        raise TypeError(f"{module}.{name} is neither a class nor a function")
    return value


class ValueCodec:
    """Encodes values and keeps the tables of exported and remote objects.

    `remote_kind(codec, number)` makes the stand-in of an object of the peer; it has an attribute `_identifier`.
    """

    def __init__(self, remote_kind: Callable[[Any, int], Any]) -> None:
        self._remote_kind = remote_kind
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remote: dict[int, Any] = {}
        self._exceptions: dict[int, type[BaseException]] = {}
        self._exception_numbers: dict[type, int] = {}

    def export(self, value: Any) -> int:
        """Return the number by which the peer may use an object of this process; the object stays alive."""
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)
        return number

    def encode(self, value: Any) -> Any:
        """Return plain data as JSON data and anything else as a reference."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if issubclass(kind, int):
            number = int.__int__(value)
            return number if abs(number) < 2**63 else ["int", hex(number)]
        if issubclass(kind, str | float):
            return str.__str__(value) if issubclass(kind, str) else float.__float__(value)
        if kind is self._remote_kind:
            return ["yours", value._identifier]
        if isinstance(value, type) and value in self._exception_numbers:
            return ["yours", self._exception_numbers[value]]
        for base in kind.__mro__:
            if base.__name__ in TEXT and TEXT[base.__name__][0] == base.__module__:
                return [base.__name__, TEXT[base.__name__][1](value)]
        container = self._encode_container(kind, value)
        if container is not None:
            return container
        library = _library_name(value)
        if library is not None:
            return ["library", *library]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self._encode_exception_class(value)]
        return ["object", self.export(value)]

    def _encode_container(self, kind: type, value: Any) -> list[Any] | None:
        fields = getattr(kind, "_fields", None)
        if issubclass(kind, tuple) and isinstance(fields, tuple):
            return ["namedtuple", kind.__name__, list(fields), [self.encode(item) for item in tuple.__iter__(value)]]
        for base in kind.__mro__:
            name = base.__name__
            if CONTAINERS.get(name) is base:
                return [name, [self.encode(item) for item in base.__iter__(value)]]  # type: ignore[attr-defined]
            if MAPPINGS.get(name) is base:
                return [name, [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if (kind.__module__, kind.__name__) == ("datetime", "timedelta"):
            return ["timedelta", value.days, value.seconds, value.microseconds]
        return None

    def decode(self, data: Any) -> Any:
        """Return the value of encoded data."""
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in CONTAINERS:
            return CONTAINERS[kind](self.decode(item) for item in rest[0])
        if kind in MAPPINGS:
            result = MAPPINGS[kind]()
            for key, item in rest[0]:
                result[self.decode(key)] = self.decode(item)
            return result
        if kind in TEXT:
            module, _, from_text = TEXT[kind]
            return from_text(getattr(importlib.import_module(module), kind), rest[0])
        return getattr(self, f"_decode_{kind}")(*rest)

    def _decode_int(self, text: str) -> int:
        return int(text, 16)

    def _decode_range(self, start: int, stop: int, step: int) -> range:
        return range(start, stop, step)

    def _decode_timedelta(self, *parts: int) -> Any:
        return importlib.import_module("datetime").timedelta(*parts)

    def _decode_namedtuple(self, name: str, fields: list[str], items: list[Any]) -> Any:
        kind = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc]
        return kind(*(self.decode(item) for item in items))

    def _decode_library(self, module: str, name: str) -> Any:
        return _library_object(module, name)

    def _decode_yours(self, number: int) -> Any:
        return self._exported[number]

    def _decode_object(self, number: int) -> Any:
        if number not in self._remote:
            self._remote[number] = self._remote_kind(self, number)
        return self._remote[number]

    def _decode_exception(self, names: list[Any]) -> type[BaseException]:
        return self._decode_exception_class(names)

    def _encode_exception_class(self, kind: type[BaseException]) -> list[Any]:
        """Return built-in classes by name and others by name and number, most derived first."""
        bases = [base for base in kind.__mro__ if issubclass(base, BaseException)]
        return [
            base.__name__ if getattr(builtins, base.__name__, None) is base else [base.__name__, self.export(base)]
            for base in bases
        ]

    def _decode_exception_class(self, names: list[Any]) -> type[BaseException]:
        """Return a class of this process. Only built-in ones are taken: unittest.SkipTest would skip a test."""
        known = [getattr(builtins, name, None) for name in names if isinstance(name, str)]
        classes = [kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)]
        result: type[BaseException] = classes[0] if classes else Exception
        for name, number in reversed([name for name in names if not isinstance(name, str)]):
            result = self._exceptions.setdefault(number, type(str(name), (result,), {}))
            self._exception_numbers[result] = number
        return result

    def encode_error(self, error: BaseException) -> list[Any]:
        arguments = [value if type(value) in (str, int, float, bool) else repr(value) for value in error.args]
        return ["raise", self._encode_exception_class(type(error)), self.encode(arguments)]

    def raise_error(self, names: list[Any], arguments: Any) -> NoReturn:
        kind = self._decode_exception_class(names)
        try:
            error = kind(*self.decode(arguments))
        except TypeError:  # UnicodeDecodeError and the like need other arguments than were sent
            error = kind.__new__(kind)
        raise error
