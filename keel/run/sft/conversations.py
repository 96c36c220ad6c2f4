"""The conversations of supervised fine-tuning: rows of a data set, or demonstrations of an environment.

Rows are read when they are needed and checked when the data is opened. A row is a list of messages, or a prompt and a
completion; which of its replies are trained is part of the conversation. The held-out part is chosen by a hash of the
prompt, as for reinforcement learning.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from keel.common.manifest import hash_file
from keel.config import RunSettings
from keel.config.sft import SftDatasetSettings
from keel.errors import ConfigError
from keel.inference.protocol import Message
from keel.rollout.environments.dataset import DatasetTasks, IndexedRows, PromptFormat, split_indices
from keel.rollout.environments.dataset_rows import InvalidRow, Row, find_dataset
from keel.rollout.environments.environment import Environment, Task
from keel.rollout.environments.registry import load_environment

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """One conversation of the data."""

    id: str
    """Name of the row, such as `train.jsonl:12`."""
    messages: list[Message]
    trained: list[int]
    """Indices of the replies that are trained."""
    tools: list[Any] | None = None


class Conversations(Protocol):
    """Random access to conversations."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Conversation: ...

    def place(self, index: int, /) -> str:
        """Return where a conversation comes from, for errors."""


@dataclass(frozen=True)
class SftData:
    """The conversations of a run."""

    train: Conversations
    held_out: Conversations
    fingerprint: str
    """Hash of the data; a run resumes only with the same data."""
    dataset: SftDatasetSettings | None = None
    """None: the conversations come from an environment."""

    @property
    def source(self) -> str:
        return "environment" if self.dataset is None else self.dataset.path


class ConversationFormat(PromptFormat):
    """How a row becomes a conversation."""

    def __init__(self, settings: SftDatasetSettings, train_on: Literal["all", "last"]) -> None:
        super().__init__(settings)
        self._columns, self._train_on = settings, train_on

    def check(self, row: Row) -> None:
        self.conversation("", row)

    def prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages before the first reply; rows that share them are held out together."""
        if self._columns.messages not in row:
            return super().prompt(row)
        messages = self._message_list(self._columns.messages, row)
        replies = _replies(messages)
        return messages[: replies[0]] if replies else messages

    def conversation(self, label: str, row: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a row; raise InvalidRow if there is none to train on."""
        columns = self._columns
        if columns.messages in row:
            messages, start = self._message_list(columns.messages, row), 0
            if columns.system is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": columns.system})
        elif columns.completion in row:
            prompt = self.messages(row)
            messages, start = [*prompt, *self._completion(row)], len(prompt)
        else:
            raise InvalidRow(
                f'no column "{columns.messages}" or "{columns.completion}"; it has {", ".join(map(str, row)) or "none"}'
            )
        if messages[0]["role"] == "assistant":
            raise InvalidRow("the conversation starts with a message of the assistant")
        trained = [index for index in _replies(messages) if index >= start]
        if not trained:
            raise InvalidRow("the conversation has no message of the assistant")
        tools = row.get(columns.tools)
        tools = _parse_json_text(columns.tools, tools) if isinstance(tools, str) else tools
        return Conversation(label, messages, trained if self._train_on == "all" else trained[-1:], tools or None)

    def _completion(self, row: Mapping[str, Any]) -> list[Message]:
        column = self._columns.completion
        value = row[column]
        if isinstance(value, list):
            return self._message_list(column, row)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise InvalidRow(f'the column "{column}" is empty')
        if not isinstance(value, str):
            raise InvalidRow(_no_messages(column))
        return [{"role": "assistant", "content": value}]

    def _message_list(self, column: str, row: Mapping[str, Any]) -> list[Message]:
        value = row[column]
        if isinstance(value, str):  # a .csv file has no lists
            value = _parse_json_text(column, value)
        if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
            raise InvalidRow(_no_messages(column))
        # a column of an Arrow file has every field in every message
        messages = [{key: item for key, item in message.items() if item is not None} for message in value]
        for number, message in enumerate(messages, 1):
            _check_message(column, number, message)
        return messages


class DatasetConversations:
    """Rows of a data set as conversations."""

    def __init__(self, tasks: DatasetTasks, row_format: ConversationFormat) -> None:
        self._tasks, self._format = tasks, row_format

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Conversation:
        task = self._tasks[index]
        return self._format.conversation(task.id, task.data)

    def place(self, index: int) -> str:
        return self._tasks.place(index)


class Demonstrations:
    """Solutions of an environment's tasks as conversations."""

    def __init__(self, environment: Environment, tasks: Sequence[Task]) -> None:
        self._demonstrate = environment.demonstration  # type: ignore[attr-defined]
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Conversation:
        messages = list(self._demonstrate(self._tasks[index]))
        return Conversation(self._tasks[index].id, messages, _replies(messages))

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        return f"task {self._tasks[index].id}"


def open_data(settings: RunSettings) -> SftData:
    """Open the conversations of a run and check every row; raise an error that names unusable rows."""
    sft = settings.sft
    if sft is None:
        raise ConfigError(
            "these settings have no table [sft]: `keel sft` needs one, for example --sft.dataset train.jsonl; a recipe"
            " with environments and rewards is for `keel train`"
        )
    if sft.environment is not None:
        return _open_environment(load_environment(settings.environments[sft.environment]), sft.environment)
    assert sft.dataset is not None
    row_format = ConversationFormat(sft.dataset, sft.train_on)
    rows = IndexedRows(find_dataset(sft.dataset), sft.dataset, row_format)
    rows.check_problems()
    # the order of each epoch is drawn by the run
    train, held_out, _ = split_indices(rows, sft.dataset, row_format)
    if not len(train):
        raise ConfigError(f'sft.dataset.path = "{rows.path}" has no row to train on')
    parts = (False,) if sft.dataset.eval_path is None else (False, True)
    return SftData(
        DatasetConversations(train, row_format),
        DatasetConversations(held_out, row_format),
        _hash_files(find_dataset(sft.dataset, evaluation=part) for part in parts),
        sft.dataset,
    )


def _open_environment(environment: Environment, name: str) -> SftData:
    if not callable(getattr(environment, "demonstration", None)):
        raise ConfigError(
            f'sft.environment = "{name}" has no solutions to train on: it needs a method demonstration(task) that'
            " returns messages"
        )
    train, held_out = (Demonstrations(environment, list(environment.tasks(split))) for split in ("train", "eval"))
    digest = hashlib.blake2b(digest_size=16)
    for part in (train, held_out):
        for conversation in part:
            digest.update(json.dumps(conversation.messages, sort_keys=True).encode())
    return SftData(train, held_out, digest.hexdigest())


def _hash_files(paths: Iterator[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        for file in sorted(path.glob("*.arrow")) if path.is_dir() else [path]:
            digest.update(hash_file(file).encode())
    return digest.hexdigest()


def _replies(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _check_message(column: str, number: int, message: Message) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRow(
            f'message {number} of the column "{column}" has the role {str(role)[:40]!r}; known: {", ".join(ROLES)}'
        )
    content = message.get("content", "")
    if not isinstance(content, str | list):
        raise InvalidRow(f'message {number} of the column "{column}" has a content that is not text')
    if role == "assistant" and not content and not message.get("tool_calls") and not message.get("reasoning_content"):
        raise InvalidRow(f'message {number} of the column "{column}", of the assistant, is empty')
    message.setdefault("content", "")


def _parse_json_text(column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRow(_no_messages(column)) from None


def _no_messages(column: str) -> str:
    return f'the column "{column}" is neither text nor a list of messages with role and content'
