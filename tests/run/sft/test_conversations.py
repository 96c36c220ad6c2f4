"""Rows become conversations, and rows that cannot are named with file and line before anything starts."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.config import load_settings
from keel.errors import ConfigError
from keel.run.sft.conversations import SftData, open_data
from tests.support.sft_runs import sft_overrides, write_rows

USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}


def opened(path: Path, **changes: Any) -> SftData:
    changes = {"sft__dataset__eval_fraction": 0, **changes}
    return open_data(load_settings(None, sft_overrides(path, **changes)).settings)


def conversation(tmp_path: Path, row: dict[str, Any], **changes: Any) -> tuple[list[Any], list[int]]:
    found = opened(write_rows(tmp_path / "rows.jsonl", [row]), **changes).train[0]
    return found.messages, found.trained


def test_a_row_of_messages_trains_every_reply_or_the_last(tmp_path: Path) -> None:
    row = {"messages": [USER, REPLY, USER, REPLY]}
    assert conversation(tmp_path, row) == (row["messages"], [1, 3])
    assert conversation(tmp_path, row, sft__train_on="last")[1] == [3]


def test_a_prompt_and_a_completion_may_be_text_or_messages_and_only_the_completion_trains(tmp_path: Path) -> None:
    assert conversation(tmp_path, {"prompt": "q", "completion": "a"}) == ([USER, REPLY], [1])
    shots = [USER, REPLY, USER]
    assert conversation(tmp_path, {"prompt": shots, "completion": [REPLY]}) == ([*shots, REPLY], [3])


def test_columns_a_template_and_a_system_message_can_be_set(tmp_path: Path) -> None:
    settings = {
        "sft__dataset__template": "{{ instruction }}!",
        "sft__dataset__completion": "output",
        "sft__dataset__system": "s",
    }
    messages, trained = conversation(tmp_path, {"instruction": "i", "output": "a"}, **settings)
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "i!"}, REPLY] and trained == [2]
    row = {"chat": [USER, REPLY], "tools": [{"name": "t"}]}
    messages, _ = conversation(tmp_path, row, sft__dataset__messages="chat", sft__dataset__system="s")
    assert messages[0] == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "x"}, 'no column "messages" or "completion"; it has text'),
        ({"messages": []}, 'the column "messages" is neither text nor a list of messages'),
        ({"messages": [USER]}, "the conversation has no message of the assistant"),
        ({"messages": [REPLY]}, "starts with a message of the assistant"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, 'message 2 of the column "messages", of the as'),
        (
            {"messages": [USER, {"role": "bot", "content": "x"}]},
            "has the role 'bot'; known: system, developer",
        ),
        ({"messages": [{"from": "human", "value": "x"}]}, "has the role 'None'"),
        ({"prompt": "q", "completion": " "}, 'the column "completion" is empty'),
        ({"prompt": "", "completion": "a"}, 'the column "prompt" is empty'),
        ({"completion": "a"}, 'no column "prompt"'),
        ({"prompt": "q", "completion": 3}, 'the column "completion" is neither text nor'),
    ],
)
def test_an_unusable_row_is_named_with_file_and_line(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "completion": "a"}] * 3 + [row])
    with pytest.raises(ConfigError) as raised:
        opened(path)
    assert f"1 of 4 rows of {path} cannot be used:\n  {path}:4: " in str(raised.value)
    assert problem in str(raised.value)
    assert len(opened(path, sft__dataset__max_invalid_fraction=0.25).train) == 3


def test_a_split_by_hash_keeps_equal_prompts_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n % 50}", "completion": f"a{n}"} for n in range(200)]
    data = opened(write_rows(tmp_path / "rows.jsonl", rows), sft__dataset__eval_fraction=0.3)
    prompts = [
        {part[index].messages[0]["content"] for index in range(len(part))} for part in (data.train, data.held_out)
    ]
    assert not prompts[0] & prompts[1] and len(data.train) + len(data.held_out) == 200 and prompts[1]


def test_a_parquet_file_gives_the_same_conversations_as_a_jsonl_file(tmp_path: Path) -> None:
    rows = [{"messages": [USER, REPLY]}, {"messages": [{"role": "system", "content": "s"}, USER, REPLY]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = [write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"]
    first, second = ([opened(file).train[n].messages for n in range(2)] for file in files)
    assert first == second == [row["messages"] for row in rows]


def test_a_csv_file_may_hold_messages_as_json(tmp_path: Path) -> None:
    text = json.dumps([USER, REPLY]).replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'messages\n"{text}"\n')
    assert opened(tmp_path / "rows.csv").train[0].messages == [USER, REPLY]


def test_an_environment_without_demonstrations_is_an_error() -> None:
    overrides = ["--environments.arithmetic={}", '--sft.environment="arithmetic"']
    with pytest.raises(ConfigError, match=r'sft.environment = "arithmetic" has no solutions'):
        open_data(load_settings(None, overrides).settings)


def test_settings_without_the_table_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no table \[sft\]"):
        open_data(load_settings("larger_number").settings)
