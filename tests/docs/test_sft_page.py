"""docs/sft.md: its data, its recipe and its commands work as printed."""

import re
from pathlib import Path

import pytest

from keel.cli import main
from keel.config import load_settings
from keel.run.sft.conversations import open_data
from tests.docs.test_pages import blocks
from tests.support.paths import ROOT

PAGE = "docs/sft.md"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = re.findall(r"^\{.*\}$", (ROOT / PAGE).read_text(), re.MULTILINE)
    (tmp_path / "train.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "bad.jsonl").write_text("\n".join(['{"prompt": "Capital of Spain?", "answer": "Madrid"}', *rows]))
    (tmp_path / "sft.toml").write_text(blocks(PAGE, "toml")[0])


def printed(command: str) -> str:
    """Return what the page shows for a command."""
    (shown,) = (text for text in blocks(PAGE, "text") if text.startswith(f"$ {command}\n"))
    return str(shown.partition("\n")[2])


def test_the_recipe_of_the_page_loads_its_data() -> None:
    settings = load_settings("sft.toml", ["--sft.dataset.eval_fraction=0"]).settings
    assert len(open_data(settings).train) == 2


def test_an_unusable_row_is_reported_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = "keel sft --dataset bad.jsonl --model smollm2-135m"
    assert main(command.split()[1:]) == 2
    assert capsys.readouterr().err == printed(command)


@pytest.mark.model
def test_the_dry_run_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    command = re.search(r"^\$ (keel sft .*--dry-run)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert command is not None
    assert main(command[1].split()[1:]) == 0
    assert capsys.readouterr().out == printed(command[1])
