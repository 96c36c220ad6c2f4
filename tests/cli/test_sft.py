"""`keel sft`: data and settings are checked before a folder exists, and its result is a model for other commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.config import load_settings
from tests.support.sft_runs import sft_overrides, write_rows


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl")


def sft(*arguments: str, **changes: Any) -> int:
    return main(["sft", *arguments, *sft_overrides(Path("train.jsonl"), **changes)])


def test_it_trains_and_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("--run", "runs/first", steps=2) == 0
    printed = capsys.readouterr().out
    assert "first: 2 steps, in runs/first" in printed and "step 2/2  loss" in printed
    assert "evaluation loss on" in printed and 'model.name = "runs/first"' in printed
    assert load_settings("runs/first/config.toml").settings.sft is not None


def test_epochs_become_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("--run", "run", "--json", steps=None, sft__epochs=0.5, sft__dataset__eval_fraction=0) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["steps"] for event in events if event["event"] == "started"] == [5]
    assert [event["event"] for event in events].count("step") == 5
    assert load_settings("run/config.toml").settings.steps == 5
    assert main(["sft", "--resume", "run"]) == 0
    assert sft("--run", "other", steps=7, sft__epochs=0.5, sft__dataset__eval_fraction=0) == 2
    assert "steps = 7 and sft.epochs = 0.5, which are 5 steps of 40 rows" in capsys.readouterr().err


def test_a_dry_run_shows_what_is_trained_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sft("--dry-run", sft__dataset__eval_fraction=0) == 0
    printed = capsys.readouterr().out
    assert "rows       40 for training, 0 held out\nsteps      6 of 4 rows: 0.60 epochs\n" in printed
    assert printed.endswith("<|im_start|>assistant\\n[gdcedgcd<|im_end|>]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    assert sft("--dry-run", "--json", sft__dataset__eval_fraction=0) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["example"][-1] == {"text": "[gdcedgcd<|im_end|>]", "trained": True}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["sft"], "pass a RECIPE, --dataset FILE or --resume RUN"),
        (["sft", "larger_number"], "no table [sft]"),
        (["sft", "--dataset", "missing.jsonl"], 'dataset.path = "missing.jsonl" does not exist'),
        (["sft", "--dataset", "bad.jsonl"], "bad.jsonl:1: no column"),
        (
            ["sft", "--dataset", "train.jsonl", "--model", "tiny", "--sft.max_sequence_tokens", "20"],
            "longer than sft.max",
        ),
        (["train", "reverse_text_sft"], "run `keel sft` instead"),
    ],
)
def test_an_error_names_its_cause_and_leaves_no_folder(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_other_command_does_not_resume_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert sft("--run", "run", steps=1) == 0
    assert main(["train", "--resume", "run"]) == 2
    assert "run `keel sft` instead" in capsys.readouterr().err
