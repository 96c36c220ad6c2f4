"""The page for users of other systems names settings that exist, and prints what Keel prints."""

import re

import pytest

from keel.cli import main
from keel.config.setting_reference import find_settings
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `") and line.count(" | ") == 2]


def test_every_setting_in_the_tables_exists() -> None:
    settings = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])]
    assert len(settings) > 70
    for name in settings:
        assert [setting.name for table in find_settings(name) for setting in table.settings] == [name]


def test_every_setting_in_the_text_exists() -> None:
    tables = ("advantages", "checkpoints", "environments", "model", "objective", "sampling", "scheduler", "trainer")
    for name in re.findall(rf"`((?:{'|'.join(tables)})\.[\w.]+)(?: = [^`]*)?`", PAGE.partition("## TRL")[0]):
        assert find_settings(name)


@pytest.mark.parametrize(("argv", "output"), re.findall(r"^\$ keel (.*)\n(.*)$", PAGE, re.MULTILINE))
def test_the_printed_errors_are_those_of_keel(argv: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    assert capsys.readouterr().err == f"{output}\n"
