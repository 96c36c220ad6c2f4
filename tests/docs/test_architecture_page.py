"""The architecture page: the path of a token names files and functions that exist, and every room is listed."""

import ast
import re
from pathlib import Path

from tests.support.paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
WALK = re.findall(r"^\d+\. `(keel/[\w/]+\.py):([\w.]+)`", PAGE, re.MULTILINE)


def defined_names(path: Path) -> set[str]:
    """Return the functions and classes of a module, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_a_token_passes_through_at_most_18_files() -> None:
    assert 10 < len(WALK) == len({file for file, _ in WALK}) <= 18


def test_every_function_on_the_path_of_a_token_exists() -> None:
    for file, function in WALK:
        assert function in defined_names(ROOT / file), f"{file}:{function}"


def test_every_room_is_listed() -> None:
    rooms = {path.parent.name for path in (ROOT / "keel").glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `keel/(\w+)/` \|", PAGE, re.MULTILINE))
    assert listed - {"recipes"} == rooms
