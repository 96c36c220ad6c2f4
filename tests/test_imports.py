"""Imports point in one direction: a room imports only rooms before it in the order that data flows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import keel

PACKAGE = Path(keel.__file__).parent

ALLOWED = {
    "common": {"errors"},
    "objectives": {"common", "errors"},
    "config": {"common", "errors", "objectives"},
    "signal": {"common", "config", "errors", "objectives"},
    "signal/audit": {"common", "config", "errors", "objectives", "signal"},
    "inference": {"common", "config", "errors"},
    "inference/kernels": {"common", "inference"},
    "inference/server": {"common", "config", "errors", "inference"},
    "rollout": {"common", "config", "errors", "inference"},
    "training": {"common", "config", "errors", "inference", "objectives", "signal"},
    "run": {"common", "config", "errors", "inference", "rollout", "signal", "training"},
    "api": {"common", "config", "errors", "inference", "objectives", "rollout", "run", "signal", "training"},
    "integrations": {"common", "config", "errors", "inference", "objectives", "signal"},
    "tools": {"common", "config", "errors", "inference", "objectives", "rollout", "run", "signal", "training"},
    "tools/simulate": {"common", "config", "errors", "rollout", "tools"},
    "tools/lens": {"common", "config", "errors", "inference", "objectives", "tools"},
    "tools/compare": {"common", "config", "errors", "objectives", "signal", "tools", "training"},
}
"""The rooms that a room or sub-room may import, besides itself and `keel`."""


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of the Keel modules that a source file imports."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {name for name in modules if name.split(".")[0] == "keel"}


def rooms_imported_by(room: str) -> set[str]:
    """Return the top-level rooms that the files of a room import."""
    modules = {name for path in (PACKAGE / room).rglob("*.py") for name in imported_modules(path)}
    rooms = {name.split(".")[1] for name in modules if "." in name}
    return {name for name in rooms if (PACKAGE / name).is_dir() or name == "errors"}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    assert rooms_imported_by(room) - {room.partition("/")[0]} <= ALLOWED[room]


def test_every_room_has_its_rule() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - {"cli"} == {room for room in ALLOWED if "/" not in room}


def test_kernels_and_protocol_do_not_import_the_rest_of_inference() -> None:
    for path in (PACKAGE / "inference" / "kernels").glob("*.py"):
        own = {name for name in imported_modules(path) if name.startswith("keel.inference.")}
        assert all(name.startswith("keel.inference.kernels") for name in own), path
    protocol = imported_modules(PACKAGE / "inference" / "protocol.py")
    assert not any(name.startswith("keel.inference") for name in protocol)


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    for room in ALLOWED:
        assert "cli" not in rooms_imported_by(room)
    assert "keel.cli" not in (PACKAGE / "__init__.py").read_text()


def test_no_room_holds_more_than_13_files() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 13, folder


@pytest.mark.parametrize("module", ["keel", "keel.config", "keel.objectives.describe", "keel.objectives.scalar_gates"])
def test_settings_and_objectives_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
