"""docs/environments.md: every file and command on the page works as printed."""

import os
import re
import sqlite3
import subprocess
import sys
import tomllib

import pytest

from keel.config import EpisodeLimits, RunSettings
from keel.rollout.environments import builtin
from keel.rollout.environments.environment import Task
from keel.rollout.environments.registry import load_environment
from keel.rollout.environments.task_splits import TaskSetOptions
from tests.support.paths import ROOT
from tests.support.scripted_engine import END, ScriptedEngine, load, play

PAGE = ROOT / "docs" / "environments.md"


def page_files() -> dict[str, str]:
    """Return the files on the page by the name in their first line."""
    blocks = re.findall(r"^```(?:python|toml)\n(# ([\w.]+)\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return {name: text for text, name in blocks}


def page_tables() -> list[dict]:
    """Return every TOML block of the page, parsed."""
    blocks = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [tomllib.loads(text) for text in blocks]


def run_in(folder, *command) -> str:
    """Run a command in `folder` with only Keel on PYTHONPATH; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Return a folder on sys.path with the files of the page."""
    for name, text in page_files().items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_environments", raising=False)
    return tmp_path


@pytest.mark.process
def test_the_recipe_of_the_page_trains_from_a_folder_with_only_the_two_files(tmp_path):
    for name in ("my_environments.py", "backwards.toml"):
        (tmp_path / name).write_text(page_files()[name])
    command = re.search(r"^\$ keel (train .*)$", PAGE.read_text(), re.MULTILINE)[1].split()
    printed = run_in(tmp_path, sys.executable, "-P", "-m", "keel.cli", *command)
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    ledger = sqlite3.connect(tmp_path / "runs" / "backwards" / "run.db")
    assert ledger.execute("select count(*) from steps").fetchone() == (3,)


@pytest.mark.process
def test_a_run_finds_its_environment_from_another_folder(tmp_path):
    recipe_folder, other_folder = tmp_path / "recipe", tmp_path / "other"
    recipe_folder.mkdir()
    other_folder.mkdir()
    for name in ("my_environments.py", "backwards.toml"):
        (recipe_folder / name).write_text(page_files()[name])
    keel = (sys.executable, "-P", "-m", "keel.cli")
    run_in(other_folder, *keel, "train", str(recipe_folder / "backwards.toml"), "--run", str(tmp_path / "run"))
    # resumed from a third folder, with more steps than before
    printed = run_in(tmp_path, *keel, "train", "--resume", "run", "--steps", "4", "--allow-changes")
    assert "step 4/4" in printed


def test_the_environment_of_the_page_scores_episodes_as_documented(page):
    settings = RunSettings.model_validate(page_tables()[0]).environments["backwards"]
    environment = load_environment(settings)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    task = train[0]
    for texts, reward, turns in ((["tac"], 1.0, 1), (["x", "Tac"], 0.5, 2), (["x", "tab"], 0.1 * 2 / 3, 2)):
        rollout = play(environment, task, ScriptedEngine(*[text + END for text in texts]), limits=settings.limits)
        assert rollout.error is None
        assert rollout.reward == pytest.approx(reward)
        assert (rollout.turns, len(rollout.samples)) == (turns, 1)


def test_the_error_messages_on_the_page_are_the_real_ones(page):
    environment = load("my_environments:Backwards", tries=3)
    text = PAGE.read_text()
    missing = play(environment, Task("t", {}), ScriptedEngine())
    limited = play(
        environment, environment.tasks("train")[0], ScriptedEngine("x", "x"), limits=EpisodeLimits(max_turns=2)
    )
    for rollout in (missing, limited):
        assert f"| `{rollout.error_kind}` |" in text
        assert f"`{rollout.error}`" in text


def test_every_table_of_settings_on_the_page_loads(page):
    for table in page_tables():
        for entry in RunSettings.model_validate(table).environments.values():
            if entry.name.startswith("reasoning_gym"):
                pytest.importorskip("reasoning_gym")
            environment = load_environment(entry)
            assert next(iter(environment.tasks("train")))


def test_the_page_names_every_built_in_environment_and_option():
    text = PAGE.read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|", text, re.MULTILINE))
    for name, kind in builtin.ENVIRONMENTS.items():
        own = set(type(kind().options).model_fields) - set(TaskSetOptions.model_fields)
        assert set(re.findall(r"`(\w+)` \(", rows[name])) == own


@pytest.mark.model
def test_the_program_of_the_page_prints_lines_of_the_shown_form(page):
    printed = run_in(page, sys.executable, "try_it.py").splitlines()
    shown = re.search(r"^```\n(backwards/.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1].splitlines()
    assert len(printed) == len(shown) == 9
    form = [re.sub(r"\d+(\.\d+)?", "N", line) for line in printed[:8]]
    assert form == [re.sub(r"\d+(\.\d+)?", "N", line) for line in shown[:8]]
