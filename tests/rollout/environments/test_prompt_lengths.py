"""Prompts that are too long: exact for the rows that are looked at, and fast for those that cannot be too long."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.cli import main
from keel.config.rollout import EnvironmentSettings
from keel.errors import ConfigError
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.prompt_lengths import find_long_prompts
from keel.rollout.environments.registry import load_environment

TEMPLATE_TOKENS = 7


def count_bytes(messages: Any) -> int:
    """A tokenizer of bytes, with a chat template of seven tokens."""
    return TEMPLATE_TOKENS + sum(len(message["content"].encode()) for message in messages)


def long_prompts(texts: list[str], **options: Any) -> Any:
    sizes = np.array([len(json.dumps(text)) for text in texts])
    counted: list[str] = []

    def messages(number: int) -> list[dict[str, Any]]:
        counted.append(texts[number])
        return [{"role": "user", "content": texts[number]}]

    report = find_long_prompts(sizes, messages, count_bytes, **{"limit": 100, "max_tokens": 20, **options})
    return report, counted


def test_exactly_the_prompts_without_room_for_a_completion_are_found() -> None:
    lengths = [1, 73, 74, 92, 93, 94, 300]
    report, _ = long_prompts(["x" * length for length in lengths])
    assert report.too_long == [(4, 100), (5, 101), (6, 307)]
    assert report.cut == 2, "74 and 92 bytes leave fewer than 20 tokens"


def test_characters_of_several_bytes_are_not_missed() -> None:
    report, _ = long_prompts(["x", "\U0001f600" * 24])
    assert report.too_long == [(1, 103)]


def test_prompts_that_cannot_be_too_long_are_not_tokenised() -> None:
    report, counted = long_prompts(["short"] * 1000 + ["x" * 200])
    assert (report.candidates, report.checked, len(counted)) == (1, 1, 2)


def test_the_longest_prompts_come_first_when_time_is_short() -> None:
    report, counted = long_prompts(["x" * length for length in range(200, 230)], seconds=0.0)
    assert report.candidates == 30 and report.checked < 30
    assert counted[1:] == ["x" * (229 - index) for index in range(report.checked)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} {'x' * (500 if n in (3, 7) else 5)}", "answer": "a"} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def environment(**dataset: Any) -> DatasetEnvironment:
    table = {"name": "x", "dataset": {"path": "train.jsonl", "eval_fraction": 0.0, **dataset}, "rewards": ["exact"]}
    loaded = load_environment(EnvironmentSettings.model_validate(table))
    assert isinstance(loaded, DatasetEnvironment)
    return loaded


def test_long_rows_are_named_and_count_as_unusable(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"2 of 40 rows(?s:.*)train.jsonl:4: its prompt has 509 tokens(?s:.*):8: "):
        environment().check_lengths(count_bytes, limit=200, max_tokens=10)
    with caplog.at_level(logging.WARNING, logger="keel"):
        environment(max_invalid_fraction=0.05).check_lengths(count_bytes, limit=200, max_tokens=10)
    assert "2 of 40 rows of train.jsonl cannot be used (prompt_too_long)" in caplog.text


def test_the_system_message_counts(folder: Path) -> None:
    environment().check_lengths(count_bytes, limit=600, max_tokens=10)
    with pytest.raises(ConfigError, match="40 of 40 rows"):
        environment(system="s" * 600).check_lengths(count_bytes, limit=600, max_tokens=10)


@pytest.mark.process
def test_a_run_does_not_start_with_a_prompt_that_is_too_long(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dataset", "train.jsonl", "--reward", "exact", "--model", "tiny", "--evaluation.when=never"]
    limits = ["--environments.dataset.limits.max_sequence_tokens=100", "--sampling.max_tokens=8", "--steps=1"]
    assert main(["train", *arguments, *limits]) == 2
    error = capsys.readouterr().err
    assert "2 of 40 rows of train.jsonl cannot be used (prompt_too_long)" in error and "train.jsonl:4: " in error
    assert not (folder / "runs" / "train").exists(), "a failed start leaves no folder"
