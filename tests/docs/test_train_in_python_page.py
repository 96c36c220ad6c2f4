"""docs/train_in_python.md: its program prints what is shown, and every argument is on the page."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keel
from tests.docs.test_pages import blocks
from tests.support.paths import ROOT

PAGE = "docs/train_in_python.md"


def test_every_argument_and_every_part_of_the_result_is_on_the_page() -> None:
    page = (ROOT / PAGE).read_text()
    names = [name for name in inspect.signature(keel.train).parameters if name != "settings"]
    names += [f"result.{name}" for name in ("metrics", "evaluation", "path", "status", "summary", "model()")]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.process
def test_the_program_of_the_page_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(blocks(PAGE, "python")[0])
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = blocks(PAGE, "text")[0].splitlines()
    assert done.stdout.startswith(shown[0]) and all(
        re.sub(r"[\d.e+-]+", "#", line) in re.sub(r"[\d.e+-]+", "#", done.stdout) for line in shown if line != "..."
    )
    before, after = re.findall(r"held-out reward (\S+) -> (\S+),", done.stdout)[0]
    assert float(after) > float(before) + 0.1
