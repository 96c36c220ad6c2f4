"""Optional dependencies: the core works without them, and a missing one is an error that names its extra."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from keel.common.extras import EXTRA_OF, import_object
from keel.errors import ConfigError
from tests.support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WITHOUT_EXTRAS = """
import importlib.abc, sys
from keel.common.extras import EXTRA_OF

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which no optional package can be imported."""
    return subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True, check=False)


def distribution(requirement: str) -> str:
    """Return the normalised name of a requirement such as `torch>=2.6`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"keel"}


def test_every_imported_package_is_in_the_core_or_has_an_extra() -> None:
    core = {distribution(requirement) for requirement in PYPROJECT["dependencies"]}
    imported = set().union(*(imported_packages(path) for path in (ROOT / "keel").rglob("*.py")))
    core_modules = {name for name, dists in packages_distributions().items() if {d.lower() for d in dists} & core}
    # pydantic_core and openai: the first is part of pydantic, the second is the user's own client
    assert imported - core_modules - EXTRA_OF.keys() - {"pydantic_core", "openai"} == set()


def test_every_optional_package_is_installed_by_its_extra() -> None:
    distributions = packages_distributions()
    for package, extra in EXTRA_OF.items():
        required = {distribution(requirement) for requirement in PYPROJECT["optional-dependencies"][extra]}
        names = distributions.get(package, [package])  # one that is not installed here is named like its module
        assert {name.lower().replace("_", "-") for name in names} & required, package


def test_the_core_pins_no_exact_version() -> None:
    optional = [one for name, group in PYPROJECT["optional-dependencies"].items() if name != "test" for one in group]
    assert [one for one in (*PYPROJECT["dependencies"], *optional) if "==" in one] == []


def test_objectives_and_the_audit_work_with_the_core_alone() -> None:
    code = """
import torch, keel
from keel.cli import main
batch = keel.TokenBatch(
    logprobs=torch.tensor([-0.1, -3.0], requires_grad=True), sampler_logprobs=torch.tensor([-0.1, -0.2]),
    advantages=torch.ones(2), trainable=torch.ones(2, dtype=torch.bool), sequence=torch.zeros(2, dtype=torch.long),
)
print(keel.objective("icepop")(batch).keep.tolist())
assert main(["objectives", "icepop"]) == main(["audit", "icepop"]) == main(["config"]) == 0
"""
    done = run_without_extras(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[True, False]\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "larger_number"],
        ["eval", "tiny", "--environment", "arithmetic"],
        ["serve", "tiny"],
        ["lens", "runs"],
        ["compare", "runs/a", "--objectives", "icepop"],
        ["export", "runs/a", "b"],
        ["pool", "http://127.0.0.1:1"],
    ],
)
def test_a_command_without_its_packages_names_the_extra(argv: list[str]) -> None:
    done = run_without_extras(f"from keel.cli import main; sys.exit(main({argv!r}))")
    assert done.returncode == 2
    assert re.fullmatch(
        rf'keel: {argv[0]}: the package \w+ is not installed; run: pip install "keel-rl\[train\]"\n', done.stderr
    )


def test_the_python_api_without_its_packages_names_the_extra() -> None:
    done = run_without_extras("import keel; keel.LocalBackend")
    assert done.stderr.splitlines()[-1].endswith('is not installed; run: pip install "keel-rl[train]"')


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("", "no_such_module:x", "x = 1 cannot be imported: No module named 'no_such_module'; put the module next to"),
        ("import no_such_package", "user_code:x", "x = 1 cannot be imported: No module named 'no_such_package'$"),
        ("1 / 0", "user_code:x", r"x = 1 cannot be imported: ZeroDivisionError: division by zero \(.*user_code.py:1\)"),
        ("def x(:", "user_code:x", r"x = 1 cannot be imported: SyntaxError: .*user_code.py, line 1"),
        ("y = 1", "user_code:x", "x = 1 cannot be imported: module 'user_code' has no attribute 'x'"),
        ("x = 1", "user_code:x", "x = 1 is a int, not a class or function; it must be a reward$"),
        ("", "user_code", "x = 1 is not an import path; write it as module:attribute"),
    ],
)
def test_an_object_of_the_user_that_cannot_be_imported_is_an_error_that_names_setting_and_line(
    source: str, path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_code.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=message):
        import_object(path, "x = 1", "a reward")


def test_an_object_inside_a_class_can_be_imported() -> None:
    assert import_object("pathlib:Path.cwd", "x") == Path.cwd
