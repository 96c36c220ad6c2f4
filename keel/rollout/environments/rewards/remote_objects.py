"""Objects of another process: calls and attribute access over a socket, with plain data passed by value.

A test process uses the functions and classes of a program that runs in another process. Numbers, strings and containers
are copied, so that the test compares real data that no method of the program can influence. Everything else is a
`RemoteObject`, whose operations run in the process that owns the object.

- Arguments that a function changed in place (list, dict, set, bytearray, deque) are copied back to the caller.
- A remote object never equals plain data, and never computes with or is ordered against it: the program's `__eq__`
  or `__sub__` cannot decide a comparison with an expected value.
- Exceptions keep their built-in class; other exception classes of the peer are recreated by name.

Runs inside the sandbox and imports only the standard library.
"""

import builtins
import collections
import json
import operator
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from keel.rollout.environments.rewards.value_codec import ValueCodec

MAX_MESSAGE = 64 << 20
"""Bytes of one message; the memory limit of the process is the real bound."""
FRAME_ATTRIBUTES = ("gi_", "cr_", "ag_", "tb_", "f_", "co_", "func_")


class ProgramExited(BaseException):
    """The other process has closed the connection. Not an Exception: a test must not take it for an expected error."""


def _binary(name: str) -> Callable[..., Any]:
    def forward(self: "RemoteObject", other: Any) -> Any:
        return self._connection.request(name, self, other) if isinstance(other, RemoteObject) else NotImplemented

    return forward


def _unary(name: str) -> Callable[..., Any]:
    def forward(self: "RemoteObject", *arguments: Any) -> Any:
        return self._connection.request(name, self, *arguments)

    return forward


class RemoteObject:
    """An object that lives in the other process."""

    _connection: "Connection"
    _identifier: int

    def __init__(self, connection: "Connection", identifier: int) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_identifier", identifier)

    def __getattr__(self, name: str) -> Any:
        return self._connection.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._connection.request("setattr", self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._connection.call(self, arguments, keywords)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._connection.request("iter", self)
        return iterator if isinstance(iterator, RemoteObject) else iter(iterator)

    def __contains__(self, value: Any) -> bool:
        return any(value is item or value == item for item in self)

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        return bool(self._connection.request("eq", self, other)) if isinstance(other, RemoteObject) else False

    def __hash__(self) -> int:
        return hash(("remote", self._identifier))

    def __bool__(self) -> bool:
        return bool(_plain(self._connection.request("bool", self), bool))

    def __len__(self) -> int:
        return int(_plain(self._connection.request("len", self), int))

    def __str__(self) -> str:
        return str(_plain(self._connection.request("str", self), str))

    def __repr__(self) -> str:
        return str(_plain(self._connection.request("repr", self), str))

    def __enter__(self) -> Any:
        return self._connection.request("enter", self)

    def __exit__(self, *error: Any) -> bool:
        return bool(_plain(self._connection.request("exit", self, str(error[1]) if error[1] else None), bool))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._connection.request("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._connection.request("issubclass", value, self) is True

    __next__ = _unary("next")
    __getitem__, __setitem__, __delitem__ = _unary("getitem"), _unary("setitem"), _unary("delitem")
    __int__, __float__, __index__, __complex__ = _unary("int"), _unary("float"), _unary("index"), _unary("complex")
    __abs__, __neg__, __pos__, __invert__ = _unary("abs"), _unary("neg"), _unary("pos"), _unary("invert")
    __round__, __reversed__ = _unary("round"), _unary("reversed")
    # no reflected methods: plain data on either side is a TypeError
    __add__, __sub__, __mul__, __matmul__ = _binary("add"), _binary("sub"), _binary("mul"), _binary("matmul")
    __truediv__, __floordiv__, __mod__ = _binary("truediv"), _binary("floordiv"), _binary("mod")
    __pow__, __and__, __or__, __xor__ = _binary("pow"), _binary("and_"), _binary("or_"), _binary("xor")
    __lt__, __gt__, __le__, __ge__ = _binary("lt"), _binary("gt"), _binary("le"), _binary("ge")


def _plain(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"the program returned {type(value).__name__} where Python needs {kind.__name__}")
    return value


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "iter", "next", "len", "bool", "str", "repr")},
    **{name: getattr(builtins, name) for name in ("int", "float", "complex", "abs", "round", "reversed")},
    **{name: getattr(builtins, name) for name in ("isinstance", "issubclass")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "index", "neg", "pos", "invert")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "matmul", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("and_", "or_", "xor", "eq", "lt", "gt", "le", "ge")},
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, error: bool(
        type(manager).__exit__(manager, *((None,) * 3 if error is None else (Exception, Exception(error), None)))
    ),
}


class Connection(ValueCodec):
    """Two processes that use each other's objects, one request at a time; a request may cause others in return.

    With `hide_internals` the peer reads only public attributes of exported objects: no `__globals__`, no frames. The
    test process sets it, because a test function it passed to the program leads to the source and expected values.
    """

    def __init__(self, descriptor: int, *, hide_internals: bool) -> None:
        super().__init__(RemoteObject)
        self._descriptor = descriptor
        self._hide_internals = hide_internals
        self.closed = False

    def send(self, message: list[Any]) -> None:
        """Send one message."""
        data = json.dumps(message).encode()
        try:
            view = memoryview(struct.pack("!I", len(data)) + data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            self._close("the program has exited")

    def _close(self, reason: str) -> NoReturn:
        self.closed = True
        raise ProgramExited(reason)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = os.read(self._descriptor, min(size - len(data), 1 << 20))
            except OSError:
                chunk = b""
            if not chunk:
                self._close("the program has exited")
            data += chunk
        return bytes(data)

    def receive(self) -> list[Any]:
        """Return the next message of the peer."""
        (size,) = struct.unpack("!I", self._read(4))
        if size > MAX_MESSAGE:
            self._close(f"the program sent a message of {size} bytes")
        message = json.loads(self._read(size))
        if not isinstance(message, list) or len(message) != 3:
            self._close("the program sent an invalid message")
        return message

    def request(self, operation: str, *arguments: Any) -> Any:
        """Let the peer perform an operation on its object and return the result, or raise its exception."""
        return self._exchange([operation, [self.encode(value) for value in arguments], {}])[0]

    def call(self, function: RemoteObject, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function of the peer; containers that it changed in place are changed here too."""
        encoded = [self.encode(value) for value in (function, *arguments)]
        result, changed = self._exchange(["call", encoded, {name: self.encode(v) for name, v in keywords.items()}])
        if changed is not None:
            for value, data in zip(arguments, changed[0], strict=True):
                restore(value, self.decode(data))
            for name, data in changed[1].items():
                restore(keywords[name], self.decode(data))
        return result

    def _exchange(self, message: list[Any]) -> tuple[Any, Any]:
        self.send(message)
        while True:
            kind, first, second = self.receive()
            if kind == "return":
                return self.decode(first), second
            if kind == "raise":
                self.raise_error(first, second)
            self.serve([kind, first, second])

    def serve(self, message: list[Any]) -> None:
        """Perform one request of the peer and reply."""
        operation, encoded, keywords = message
        try:
            if not (isinstance(encoded[0], list) and encoded[0][0] == "yours"):
                raise TypeError("a request must name an exported object")
            arguments = [self.decode(value) for value in encoded]
            if operation == "call":
                named = {name: self.decode(value) for name, value in keywords.items()}
                reply = ["return", self.encode(arguments[0](*arguments[1:], **named)), None]
                after = [[self.encode(v) for v in arguments[1:]], {name: self.encode(v) for name, v in named.items()}]
                reply[2] = after if after != [encoded[1:], keywords] else None
            else:
                self._check_access(operation, arguments)
                reply = ["return", self.encode(OPERATIONS[operation](*arguments)), None]
        except ProgramExited:
            raise
        except BaseException as error:  # noqa: BLE001  any exception is the reply, SystemExit included
            reply = self.encode_error(error)
        self.send(reply)

    def _check_access(self, operation: str, arguments: list[Any]) -> None:
        if not self._hide_internals or operation not in ("getattr", "setattr"):
            return
        name = arguments[1]
        if not isinstance(name, str) or name.startswith(("_", *FRAME_ATTRIBUTES)):
            raise AttributeError("attribute of the test process is not accessible")


def restore(value: Any, changed: Any) -> None:
    """Give a container the content of its changed copy; rows of a matrix stay the same objects."""
    if type(value) is not type(changed):
        return
    if isinstance(value, list):
        for number, (old, new) in enumerate(zip(value, changed, strict=False)):
            if type(old) is type(new) and isinstance(old, list | dict | set):
                restore(old, new)
                changed[number] = old
        value[:] = changed
    elif isinstance(value, dict | set):
        value.clear()
        value.update(changed)
    elif isinstance(value, bytearray):
        value[:] = changed
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(changed)
