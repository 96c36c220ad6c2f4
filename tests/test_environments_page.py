"""What the page about environments shows is what happens."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from scripted import END, ScriptedEngine, load, play

from keel.config import EnvironmentSettings, EpisodeLimits
from keel.rollout import builtin
from keel.rollout.environment import Task, load_environment
from keel.rollout.tasks import Supply

PAGE = Path(__file__).parent.parent / "docs" / "environments.md"


def page_blocks():
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {re.match(r"# (\w+\.py)", text)[1]: text for kind, text in found if kind == "python"}, [
        tomllib.loads(text) for kind, text in found if kind == "toml"
    ]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The files that the page shows, where Python finds them."""
    for name, text in page_blocks()[0].items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_environments", raising=False)
    return tmp_path


def test_the_environment_of_the_page_plays_as_it_says(page):
    table = page_blocks()[1][0]["environments"][0]
    settings = EnvironmentSettings.model_validate(table)
    environment = load_environment(settings)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    task = train[0]
    for said, reward, turns in ((["tac"], 1.0, 1), (["x", "Tac"], 0.5, 2), (["x", "tab"], 0.1 * 2 / 3, 2)):
        rollout = play(environment, task, ScriptedEngine(*[text + END for text in said]), limits=settings.limits)
        assert rollout.error is None
        assert rollout.reward == pytest.approx(reward)
        assert (rollout.turns, len(rollout.samples)) == (turns, 1)


def test_the_errors_of_the_page_are_the_errors(page):
    environment = load("my_environments:Backwards", tries=3)
    text = PAGE.read_text()
    missing = play(environment, Task("t", {}), ScriptedEngine())
    asked = play(environment, environment.tasks("train")[0], ScriptedEngine("x", "x"), limits=EpisodeLimits(turns=2))
    for rollout in (missing, asked):
        assert f"| `{rollout.error_kind}` |" in text
        assert f"`{rollout.error}`" in text


def test_every_table_of_settings_on_the_page_loads(page):
    for table in page_blocks()[1]:
        for entry in table["environments"]:
            if entry["name"].startswith("reasoning_gym"):
                pytest.importorskip("reasoning_gym")
            environment = load_environment(EnvironmentSettings.model_validate(entry))
            assert next(iter(environment.tasks("train")))


def test_the_page_names_every_built_in_environment_and_option():
    text = PAGE.read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|", text, re.MULTILINE))
    for name, kind in builtin.ENVIRONMENTS.items():
        own = set(type(kind().options).model_fields) - set(Supply.model_fields)
        assert set(re.findall(r"`(\w+)` \(", rows[name])) == own


def test_the_page_can_be_tried_out_as_it_stands(page, capsys):
    """With the tiny model instead of the one that comes with Keel: the same lines, other numbers."""
    program = page_blocks()[0]["try_it.py"].replace("smollm2-135m", "tiny")
    exec(compile(program, "try_it.py", "exec"), {"__name__": "try_it"})
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"^```\n(backwards/.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1].splitlines()
    assert len(printed) == len(shown) == 9
    form = [re.sub(r"\d+(\.\d+)?", "N", line) for line in printed[:8]]
    assert form == [re.sub(r"\d+(\.\d+)?", "N", line) for line in shown[:8]]
