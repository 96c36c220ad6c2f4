"""Write a Python function as a module that other processes can import.

Reward functions run in worker processes that are killed when they hang, so a function that only exists in this process
(in a notebook, a script or another function) has to reach them. It is written as source text: the function, the
functions and constants it uses, and imports of the modules it uses. The text can be read and resumed from, and unlike a
pickle or a forked process it carries no hidden state. What cannot be written this way is an error that names it.
"""

import ast
import builtins
import contextlib
import dis
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import InspectLoader
from typing import Any

from keel.config.secrets import secret_names
from keel.errors import ConfigError

MAX_CONSTANT = 100_000
"""Characters of a constant in the source; larger ones belong in a column of the data set or in a file."""
LAMBDA_NAME = "lambda_reward"
"""Name of a lambda in its module."""
BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", dict: "{}"}
_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def import_path(function: Any) -> str | None:
    """Return `module:name` if other processes can import the object by it, else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "__mp_main__"):
        return None
    found: Any = sys.modules.get(module)
    if found is None or getattr(found, "__spec__", None) is None:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def write_source(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of the function and the text of a module that defines it."""
    writer = _SourceWriter(function)
    return writer.name, writer.text()


class _SourceWriter:
    """Collects everything that a function needs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, types.FunctionType):
            raise ConfigError(
                f"rewards: {function!r:.80} is a {type(function).__name__}, which cannot be sent to worker processes;"
                ' wrap it in a function, or put it into a module and name it "module:name"'
            )
        self._label = function.__name__
        self._objects: dict[str, Any] = {}
        self._imports: list[str] = []
        self._constants: list[str] = []
        self._definitions: list[str] = []
        self.name = LAMBDA_NAME if function.__name__ == "<lambda>" else function.__name__
        self._define(self.name, function)

    def text(self) -> str:
        parts = [
            f'"""The reward function `{self.name}`, as keel.train received it."""',
            "from __future__ import annotations",
            "\n".join(sorted(self._imports)),
            "\n".join(self._constants),
            *self._definitions,
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _define(self, name: str, function: types.FunctionType) -> None:
        """Add the definition of a function after those of everything it uses."""
        self._objects[name] = function
        function = inspect.unwrap(function)
        node = self._find_node(function)
        if set(_nonlocal_names(node)) & set(function.__code__.co_freevars):
            raise self._error("changes a variable of the function around it, which does not exist in another process")
        closure, code = inspect.getclosurevars(function).nonlocals, function.__code__
        for used in dict.fromkeys((*code.co_freevars, *_global_names(code), *_outer_names(node))):
            if used in closure:
                self._add(used, closure[used])
            elif used in function.__globals__:
                self._add(used, function.__globals__[used])
            elif not hasattr(builtins, used):
                raise self._error(f"uses {used}, which is not defined")
        self._import_submodules(node, {**function.__globals__, **closure})
        if isinstance(node, ast.Lambda):
            self._definitions.append(f"{name} = {ast.unparse(node)}")
            return
        self._definitions.append(ast.unparse(node))
        if node.name != name:
            self._definitions.append(f"{name} = {node.name}")

    def _add(self, name: str, value: Any) -> None:
        if name in self._objects:
            if self._objects[name] is not value:
                raise self._error(f"uses two different objects named {name}; rename one")
            return
        path = import_path(value)
        if isinstance(value, types.ModuleType):
            self._objects[name] = value
            self._imports.append(f"import {value.__name__} as {name}")
        elif path is not None:
            self._objects[name] = value
            module, _, attribute = path.partition(":")
            first, _, rest = attribute.partition(".")
            self._imports.append(f"from {module} import {first} as {name}")
            if rest:
                self._constants.append(f"{name} = {name}.{rest}")
        elif isinstance(value, types.FunctionType):
            self._define(name, value)
        else:
            self._objects[name] = value
            self._constants.append(f"{name} = {self._literal(name, value)}")

    def _import_submodules(self, node: _Node, scope: Mapping[str, Any]) -> None:
        """Import the submodules that the function uses as attributes: `import xml.etree` binds the name xml."""
        for attribute in (part for part in ast.walk(node) if isinstance(part, ast.Attribute)):
            base: ast.expr = attribute
            path: list[str] = []
            while isinstance(base, ast.Attribute):
                path, base = [base.attr, *path], base.value
            module = scope.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(module, types.ModuleType):
                name = ".".join((module.__name__, *path))
                if name in sys.modules and f"import {name}" not in self._imports:
                    self._imports.append(f"import {name}")

    def _literal(self, name: str, value: Any) -> str:
        if secret := next(secret_names({name: value}), None):
            raise self._error(
                f"uses {secret}, which looks like a secret, and the function is written into the run's folder; let it"
                " read the secret from a file or a variable of the environment"
            )
        if isinstance(value, re.Pattern):
            self._imports.append("import re as _re")
            return f"_re.compile({value.pattern!r}, {int(value.flags)})"
        text = _literal_text(value)
        if text is None:
            raise self._error(
                f"uses {name}, a {type(value).__name__}, which cannot be written as source; create it inside the"
                ' function, or put both into a module and name the function "module:name"'
            )
        if len(text) > MAX_CONSTANT:
            raise self._error(f"uses {name}, a constant of {len(text):,} characters; read it from a file instead")
        return text

    def _find_node(self, function: types.FunctionType) -> _Node:
        """Return the definition of a function in its source; raise if the source is not the function's."""
        code = function.__code__
        try:
            lines, _ = inspect.findsource(code)
            tree = ast.parse("".join(lines))
        except (OSError, TypeError, SyntaxError, IndexError) as error:
            raise self._error(f"has no source that can be read ({error}); put it into a module") from error
        if any(_same_code(code, other) for other in _compiled(tree)):
            for node in ast.walk(tree):
                if _defines(node, code):
                    assert isinstance(node, _Node)
                    return node
        raise self._error(f"is not in {code.co_filename} any more; was the file changed after it was loaded?")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"rewards: the function {self._label} {problem}")


def _defines(node: ast.AST, code: types.CodeType) -> bool:
    """Whether a node of the syntax tree is the definition that the code was compiled from."""
    if isinstance(node, ast.Lambda):
        # several lambdas may be on one line: compare the position of the body
        body = (node.body.lineno, node.body.end_lineno, node.body.col_offset, node.body.end_col_offset)
        return code.co_name == "<lambda>" and body in set(code.co_positions())
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != code.co_name:
        return False
    return code.co_firstlineno == min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _same_code(code: types.CodeType, other: types.CodeType) -> bool:
    """Whether both were compiled from the same text at the same place; otherwise the file was changed meanwhile."""
    return (code.co_name, code.co_firstlineno, code.co_code) == (other.co_name, other.co_firstlineno, other.co_code)


def _compiled(tree: ast.Module) -> Iterator[types.CodeType]:
    """Yield the code of every function of a file, compiled as one unit and statement by statement as notebooks do.

    They differ: an attribute of a module that the same unit imports is loaded with another instruction. The code is
    only compared and never executed.
    """
    pending: list[types.CodeType] = []
    for unit in (tree, *(ast.Module([statement], []) for statement in tree.body)):
        with contextlib.suppress(SyntaxError):  # a notebook may await outside of a function
            pending.append(InspectLoader.source_to_code(unit))
    while pending:
        code = pending.pop()
        yield code
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _nonlocal_names(node: _Node) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Nonlocal):
            yield from part.names


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that the code reads, those of nested functions included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _outer_names(node: _Node) -> Iterator[str]:
    """Yield the names that defaults and decorators read, which are evaluated outside of the function."""
    arguments = node.args
    outside: list[ast.expr | None] = [*arguments.defaults, *arguments.kw_defaults]
    outside += [] if isinstance(node, ast.Lambda) else node.decorator_list
    for expression in outside:
        for part in ast.walk(expression) if expression is not None else ():
            if isinstance(part, ast.Name):
                yield part.id


def _literal_text(value: Any) -> str | None:
    """Return a value as source text, or None if it is not made of plain constants."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    brackets = BRACKETS.get(type(value))
    if brackets is None:
        return None
    if value == set():
        return "set()"
    if isinstance(value, dict):
        pairs = [(_literal_text(key), _literal_text(item)) for key, item in value.items()]
        if any(key is None or item is None for key, item in pairs):
            return None
        inner = [f"{key}: {item}" for key, item in pairs]
    else:
        items = [_literal_text(item) for item in value]
        if any(item is None for item in items):
            return None
        inner = [str(item) for item in items]
        if isinstance(value, set):
            inner.sort()  # the order of a set differs between processes, and the text must not
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{brackets[0]}{', '.join(inner)}{comma}{brackets[1]}"
