"""`keel data` on real files."""

import json
from pathlib import Path

import pytest

from keel.cli import main


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(40)]
    write(tmp_path / "good.jsonl", [*rows, rows[0]])
    write(tmp_path / "eval.jsonl", rows[:5])
    write(tmp_path / "bad.jsonl", [*rows, {"prompt": ""}, {"prompt": "\x1b[2J red", "answer": 1}])


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_data_set_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "good.jsonl", "--eval", "eval.jsonl", "--model", "tiny", "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert "41 in good.jsonl; 41 can be used" in out
    assert "prompt (str), answer (int)" in out
    assert "1 rows repeat the prompt of an earlier row" in out
    assert "35 rows\n" in out
    assert "5 rows; 6 rows for training have one of its prompts and are left out" in out
    assert "user       0 + 1?" in out
    assert "tokens" in out


def test_unusable_rows_are_named_and_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "bad.jsonl", "--show", "50"]) == 1
    out = capsys.readouterr().out
    assert 'unusable   bad.jsonl:41: the column "prompt" is empty' in out
    assert "\x1b" not in out


def test_the_description_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "good.jsonl", "--json", "--template", "Compute {{ prompt }}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 41
    assert report["duplicates"] == 1
    assert report["characters"] == {"minimum": 14, "median": 15, "p99": 15, "maximum": 15}
    assert report["prompts"][0] == [{"role": "user", "content": "Compute 0 + 1?"}]
    assert report["train"] + report["held_out"] == 41


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
