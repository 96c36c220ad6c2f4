"""A function becomes a module that does the same in another process, or an error says why it cannot."""

import functools
import math
import re
import runpy
import string
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keel.errors import ConfigError
from keel.run.start.function_source import import_path, write_source

MODULE = """
import functools
import math
import os.path
import re
from collections import Counter
from string import capwords as upper

import xml.etree.ElementTree

PATTERN = re.compile("a+", re.I)
LIMITS = {"low": -1, "high": float("inf"), "names": ("x",), "set": {"b", "a"}}
API_KEY = "sk-1"
model = object()
counts = {}


def helper(text):
    return len(PATTERN.findall(text))


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **options):
        return 2 * function(*args, **options)
    return wrapper


def uses_helpers(completion, low=LIMITS["low"], **columns):
    model = helper(completion)  # hides the global of this name
    return max(low, model) + len(LIMITS["set"]) + math.sqrt(4)


@doubled
def decorated(completion):
    return float(helper(completion))


async def later(completion: "Missing") -> float:
    return float(len([character for character in completion if character in upper(completion)]))


def submodule(completion):
    return xml.etree.ElementTree.fromstring(completion).tag == os.path.basename("/b")


def secret(completion):
    return len(API_KEY)


def unwritable(completion):
    return bool(model)


def undefined(completion):
    return missing_name


def make(factor):
    count = 0
    def closure(completion):
        return factor * len(completion)
    def counting(completion):
        nonlocal count
        count += 1
        return count
    return closure, counting


pair = [lambda completion: 1.0, lambda completion: len(completion) * LIMITS["low"]]
"""


@pytest.fixture
def functions(tmp_path: Path) -> dict[str, Any]:
    """The names of a script, which no other process can import."""
    file = tmp_path / "script.py"
    file.write_text(MODULE)
    return runpy.run_path(str(file), run_name="__main__")


def loaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Write a function as a module and return it from there."""
    name, text = write_source(function)
    module = types.ModuleType("written")
    exec(compile(text, "written", "exec"), module.__dict__)
    result: Callable[..., Any] = getattr(module, name)
    return result


@pytest.mark.parametrize(
    ("name", "value"), [("uses_helpers", 6.0), ("decorated", 4.0), ("submodule", None)], ids=lambda value: str(value)
)
def test_a_function_does_the_same_with_what_it_uses(functions: dict[str, Any], name: str, value: float | None) -> None:
    function = functions[name]
    argument = "Aba" if value is not None else "<b/>"
    assert loaded(function)(argument) == function(argument) == (True if value is None else value)


def test_async_functions_closures_and_lambdas_are_written(functions: dict[str, Any]) -> None:
    assert loaded(functions["later"]).__name__ == "later"
    closure, _ = functions["make"](3)
    assert loaded(closure)("ab") == 6
    first, second = functions["pair"]
    assert loaded(first)("ab") == 1.0 and loaded(second)("ab") == -2


def test_the_text_is_the_same_every_time(functions: dict[str, Any]) -> None:
    text = write_source(functions["uses_helpers"])[1]
    assert text == write_source(functions["uses_helpers"])[1]
    assert "'set': {'a', 'b'}" in text and "model" not in text.partition("def uses_helpers")[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("secret", "uses API_KEY, which looks like a secret"),
        ("unwritable", r"the function unwritable uses model, a object, which cannot be written as source"),
        ("undefined", "uses missing_name, which is not defined"),
    ],
)
def test_what_cannot_be_written_is_an_error_that_names_it(functions: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_source(functions[name])


def test_a_function_that_changes_a_variable_around_it_is_an_error(functions: dict[str, Any]) -> None:
    _, counting = functions["make"](3)
    with pytest.raises(ConfigError, match="changes a variable of the function around it"):
        write_source(counting)


def test_a_file_that_was_changed_after_it_was_loaded_is_an_error(tmp_path: Path, functions: dict[str, Any]) -> None:
    (tmp_path / "script.py").write_text(MODULE.replace("len(PATTERN", "2 * len(PATTERN"))
    with pytest.raises(ConfigError, match="was the file changed"):
        write_source(functions["uses_helpers"])


@pytest.mark.parametrize("value", [functools.partial(math.sqrt, 4), "text".startswith])
def test_other_callables_are_errors(value: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to worker processes; wrap it in a function"):
        write_source(value)


def test_a_function_of_a_module_keeps_its_name() -> None:
    assert import_path(string.capwords) == "string:capwords"
    assert import_path(textwrap.TextWrapper.wrap) == "textwrap:TextWrapper.wrap"
    assert import_path(lambda: None) is None
    assert import_path(re.compile("a").match) is None
    assert import_path(sys) is None
