"""The output shown in the documentation is what Keel prints."""

import contextlib
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import keel
import keel.objectives
from keel.cli import main
from tests.support.paths import ROOT

PAGES = ["README.md", "docs/audit.md", "docs/running.md"]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language. Fences are matched in pairs, so a closing one never counts as opening."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def sessions(page: str) -> list[tuple[str, str]]:
    """Return commands and the output shown below them."""
    pairs = []
    for block in blocks(page, ""):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            pairs.append((command, shown.rstrip("\n")))
    return pairs


@pytest.mark.parametrize(("command", "shown"), [pair for page in PAGES for pair in sessions(page)])
def test_every_command_shown_prints_what_is_shown(
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_losses.py").write_text(blocks("docs/audit.md", "python")[0])
    (tmp_path / "run.toml").write_text(blocks("docs/running.md", "toml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)  # imported from the folder of another test
    main(command.split()[1:])
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).rstrip("\n").split("\n")
    assert [line.rstrip() for line in lines] == shown.split("\n")


def test_the_readme_example_prints_the_numbers_in_its_comments() -> None:
    example = blocks("README.md", "python")[0]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "README.md", "exec"), {})
    comments = re.findall(r"^print\(.*?\)\s*# (.*)$", example, re.MULTILINE)
    for printed, comment in zip(out.getvalue().splitlines(), comments, strict=True):
        assert printed.startswith(comment.split("...")[0])


def test_the_readme_composition_is_an_objective() -> None:
    table = tomllib.loads(blocks("README.md", "toml")[0])["objective"]
    composition = keel.objective(table).composition
    assert [gate.scope for gate in composition.gates] == ["token", "sequence"]


def test_the_running_page_shows_real_advantages() -> None:
    lines = blocks("docs/running.md", "python")[0].splitlines()
    assert lines[0] == ">>> import keel"
    for call, shown in zip(lines[1::2], lines[2::2], strict=True):
        assert str(eval(call.removeprefix(">>> "), {"keel": keel})) == shown


def test_links_between_documents_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_readme_and_changelog_name_all_objectives() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"{len(keel.objectives.PRESETS)} published objectives" in text
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert all(f"`{name}`" in changelog for name in keel.objectives.PRESETS)


@pytest.mark.model
def test_the_example_of_the_policy_page_is_the_file_and_prints_what_is_shown() -> None:
    """Train real steps of a real model; numbers may differ in the last digit between machines."""
    page = (ROOT / "docs/policy.md").read_text()
    example = (ROOT / "examples/steps.py").read_text()
    assert blocks("docs/policy.md", "python")[0] == example
    completed = subprocess.run(
        [sys.executable, "examples/steps.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shown = page.partition("printed\n\n```text\n")[2].partition("```")[0]
    number = r"[+-]?\d+(?:\.\d+)?"
    assert re.sub(number, "#", completed.stdout) == re.sub(number, "#", shown)
    printed = [float(text) for text in re.findall(number, completed.stdout)]
    assert printed == pytest.approx([float(text) for text in re.findall(number, shown)], abs=0.25)
