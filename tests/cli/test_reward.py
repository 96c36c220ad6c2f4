"""`keel reward` with the tiny model and real worker processes."""

import json
from pathlib import Path

import pytest

from keel.cli import main

pytestmark = pytest.mark.process

FUNCTIONS = """
def longer(completion, **columns):
    return len(completion) / 100

def zero(completion):
    return 0

def broken(completion):
    raise ValueError("bad [input]")
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial_rewards.py").write_text(FUNCTIONS)
    rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*arguments: str) -> int:
    common = ["--data", "data.jsonl", "--prompt", "question", "--model", "tiny", "--tasks", "3", "--samples", "4"]
    return main(["reward", *arguments, *common, "--max-tokens", "8"])


def test_the_distribution_and_the_extremes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trial_rewards:longer", "exact") == 0
    out = capsys.readouterr().out
    assert "completions 12 of 3 rows; 0 not scored" in out
    assert "groups have different rewards" in out
    assert "longer 0." in out
    assert "exact 0.000" in out
    assert "best" in out
    assert "prompt '" in out


def test_every_completion_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trial_rewards:longer", "--json") == 0
    trial = json.loads(capsys.readouterr().out)
    rewards = [scored["reward"] for scored in trial["scored"]]
    assert len(rewards) == 12
    assert trial["mean"] == pytest.approx(sum(rewards) / 12)
    assert rewards == [pytest.approx(len(scored["completion"]) / 100) for scored in trial["scored"]]


def test_a_constant_reward_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trial_rewards:zero") == 1
    assert (
        "0 of 3 groups have different rewards: all completions of a row have the same reward" in capsys.readouterr().out
    )


def test_a_failing_reward_shows_its_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trial_rewards:broken") == 1
    out = capsys.readouterr().out
    assert "12 not scored" in out
    assert "ValueError: bad [input] (trial_rewards.py:9)" in out
