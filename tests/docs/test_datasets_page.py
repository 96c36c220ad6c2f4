"""docs/datasets.md: its files and recipe work as printed."""

import json
import re
from pathlib import Path

import pytest

from keel.cli import main
from keel.config import load_settings
from keel.rollout.environments.registry import load_environment
from keel.rollout.environments.rewards.builtin import BUILTIN
from tests.docs.test_pages import blocks
from tests.support.paths import ROOT

PAGE = "docs/datasets.md"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rewards.py").write_text(blocks(PAGE, "python")[0])
    (tmp_path / "run.toml").write_text(blocks(PAGE, "toml")[0])
    rows = re.findall(r"^\{.*\}$", (ROOT / PAGE).read_text(), re.MULTILINE)
    (tmp_path / "train.jsonl").write_text("".join(f"{row}\n" for row in rows))


def test_the_recipe_of_the_page_loads_its_data_and_rewards() -> None:
    settings = load_settings("run.toml").settings
    environment = load_environment(settings.environments["larger"])
    assert {task.data["answer"] for split in ("train", "eval") for task in environment.tasks(split)} == {"82", "42"}


def test_the_shown_rows_are_described_as_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "train.jsonl"]) == 0
    out = capsys.readouterr().out
    page = (ROOT / PAGE).read_text()
    for line in out.splitlines():
        if line.startswith(("columns", "characters", "user")):
            assert line in page


def test_every_built_in_reward_is_on_the_page() -> None:
    page = (ROOT / PAGE).read_text()
    assert all(f"| `{name}` |" in page for name in BUILTIN)


@pytest.mark.process
def test_the_reward_of_the_page_trains_from_the_command_line() -> None:
    rows = [{"prompt": f"Which is larger, {n} or {n + 1}?", "answer": str(n + 1)} for n in range(20)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--dataset", "train.jsonl", "--reward", "my_rewards:reward", "--model", "tiny"]
    assert main(["train", *arguments, "--steps", "1", "--sampling.max_tokens", "4", "--evaluation.when", "never"]) == 0
