"""The output shown in docs/api.md is what its code and the example print, up to random numbers, and both learn."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NUMBER = r"[+-]?\d+(?:\.\d+)?"


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs/api.md").read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def shape(text: str) -> str:
    return re.sub(NUMBER, "#", text)


def rewards(text: str) -> list[float]:
    return [float(text) for text in re.findall(r"reward (\d\.\d+)", text)]


@pytest.mark.model
def test_the_code_of_the_page_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,), shown = blocks("python"), blocks("text")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/api.md", "exec"), {})
    printed = capsys.readouterr().out
    assert shape(printed) == shape(shown)
    assert "KL from step 0 +0.0000" in printed and printed.endswith("runs/demo/agent-1/checkpoints/step_3\n")
    assert (tmp_path / "runs/demo/agent-1/checkpoints/step_3/model.safetensors").is_file()
    assert re.findall(r"step 0 (\S+)", printed)[-1] != "+0.0000"


@pytest.mark.model
def test_the_example_agent_learns_to_use_its_tool_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent.py"])
    runpy.run_path(str(ROOT / "examples/agent.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert shape(printed) == shape(blocks("text")[1])
    values = rewards(printed)
    # the rise is about 0.8, six times its standard deviation
    assert len(values) == 6 and sum(values[-2:]) > sum(values[:2]) + 0.2
