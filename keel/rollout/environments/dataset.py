"""An environment made of a data set and reward functions: one prompt, one completion, one reward."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from keel.config.dataset import DatasetSettings
from keel.config.rollout import EnvironmentSettings
from keel.errors import ConfigError
from keel.rollout.environments.dataset_rows import InvalidRow, Row, Rows, find_dataset, open_rows
from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.environments.prompt_lengths import CountTokens, find_long_prompts
from keel.rollout.environments.rewards.scorer import RewardScorer
from keel.rollout.environments.rewards.workers import RewardError
from keel.rollout.policy_client import PolicyClient, Reply

MAX_NAMED_ROWS = 5
"""Unusable rows that an error names."""
RESERVED = ("completion", "completions", "prompt", "prompts", "messages", "completion_tokens", "answer")
"""Names of the arguments of a reward that do not come from a column of the same name."""

logger = logging.getLogger("keel")


class DatasetEnvironment:
    """Tasks from a data set; the episode asks for one completion and scores it."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        assert settings.dataset is not None
        self.name = settings.name
        self._settings = settings.dataset
        self._scorer = RewardScorer(settings.rewards, settings.reward_total, settings.max_reward_failure_fraction)
        self._format = PromptFormat(settings.dataset)
        rows = IndexedRows(find_dataset(settings.dataset), settings.dataset, self._format)
        rows.check_problems()
        self._format.examples = rows.examples
        self._train, self._eval, overlap = split_indices(rows, settings.dataset, self._format)
        if overlap:
            logger.warning(
                "%s: %d rows have a prompt of %s and are not trained", rows.path, overlap, settings.dataset.eval_path
            )
        if not len(self._train) and settings.dataset.eval_fraction < 1:
            raise ConfigError(f'dataset.path = "{rows.path}" has no row to train on')

    def check_lengths(self, count_tokens: CountTokens, *, limit: int, max_tokens: int) -> None:
        """Report rows whose prompt is too long, as `IndexedRows.check_lengths`, in training and evaluation."""
        for rows in dict.fromkeys((self._train.rows, self._eval.rows)):
            rows.check_lengths(self._format, count_tokens, limit=limit, max_tokens=max_tokens)

    def tasks(self, split: Split) -> "DatasetTasks":
        return self._train if split == "train" else self._eval

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        messages = self.messages(task)
        return await self.score(task, messages, await client.chat(messages))

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """Return the prompt of a task."""
        return self._format.messages(task.data)

    def reference_answer(self, task: Task) -> Any:
        """Return the answer of a task, or None if its row has none."""
        column = self._format.answer_column(task.data)
        return None if column is None else task.data[column]

    async def score(self, task: Task, messages: Sequence[Mapping[str, Any]], reply: Reply) -> EpisodeResult:
        """Return the reward of a completion; rewards that need the group are computed by `score_group`."""
        inputs = {"completion": reply.text, "completion_tokens": reply.completion_tokens}
        result = await self._scorer.score_completion(self._arguments(task, messages, inputs))
        return replace(result, group_inputs=inputs) if self._scorer.needs_group else result

    async def score_group(self, task: Task, results: Sequence[EpisodeResult]) -> list[EpisodeResult | RewardError]:
        """Compute the rewards that need all completions of a group; see `group_rewards`."""
        messages = self.messages(task)
        items = [self._arguments(task, messages, result.group_inputs or {}) for result in results]
        return await self._scorer.score_group(items, results)

    def _arguments(
        self, task: Task, messages: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments that reward functions receive by name."""
        columns = {name: value for name, value in task.data.items() if name not in RESERVED}
        has_answer = self._format.answer_column(task.data) is not None
        answer = {"answer": self.reference_answer(task)} if has_answer else {}
        return {
            **columns,
            **answer,
            "prompt": messages[-1]["content"],
            "messages": list(messages),
            **inputs,
        }

    async def close(self) -> None:
        await self._scorer.close()


class PromptFormat:
    """How a row becomes messages."""

    def __init__(self, settings: DatasetSettings) -> None:
        self._settings = settings
        self._render = _compile_template(settings.template)
        self.examples: list[Row] = []
        """Rows shown before every prompt."""

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a prompt, with the system message and the examples."""
        system = [] if self._settings.system is None else [{"role": "system", "content": self._settings.system}]
        shown: list[dict[str, Any]] = []
        for example in self.examples:
            shown += self.prompt(example)
            shown.append({"role": "assistant", "content": str(example[self.answer_column(example) or ""])})
        return [*system, *shown, *self.prompt(row)]

    def prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of the row itself; raise InvalidRow if it has none."""
        if self._render is not None:
            return [{"role": "user", "content": _nonempty("the rendered template", self._render(row))}]
        column = self._settings.prompt
        if column not in row:
            raise InvalidRow(f'no column "{column}"; it has {", ".join(map(str, row)) or "none"}')
        value = row[column]
        if isinstance(value, str):
            return [{"role": "user", "content": _nonempty(f'the column "{column}"', value)}]
        if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
            raise InvalidRow(f'the column "{column}" is neither text nor a list of messages with role and content')
        if value[-1]["role"] == "assistant":
            raise InvalidRow(f'the column "{column}" ends with a message of the assistant, not of the user')
        return [dict(message) for message in value]

    def answer_column(self, row: Mapping[str, Any]) -> str | None:
        if self._settings.answer is not None:
            return self._settings.answer
        return "answer" if "answer" in row else None

    def check(self, row: Row) -> None:
        """Raise InvalidRow if the row has no usable prompt or lacks the answer that the settings name."""
        self.prompt(row)
        if self._settings.answer is not None and row.get(self._settings.answer) is None:
            raise InvalidRow(f'no column "{self._settings.answer}"')


class IndexedRows:
    """The usable rows of a data set, with a hash of each prompt."""

    def __init__(self, path: Path, settings: DatasetSettings, prompt_format: PromptFormat) -> None:
        self.path = path
        self._rows: Rows = open_rows(path)
        self._id_column = settings.id
        self.examples: list[Row] = []
        usable, hashes, sizes = [], [], []
        self.problems: list[str] = []
        """The place and reason of every unusable row."""
        ids: set[str] = set()
        for index in range(len(self._rows)):
            try:
                row = self._rows[index]
                prompt_format.check(row)
                if settings.id is not None:
                    self._check_id(row, ids)
            except InvalidRow as error:
                self.problems.append(f"{self._rows.place(index)}: {error}")
                continue
            if len(self.examples) < settings.few_shot and path == find_dataset(settings):
                if prompt_format.answer_column(row) is None:
                    raise ConfigError(f"dataset.few_shot = {settings.few_shot} needs a column of answers")
                self.examples.append(row)
                continue
            usable.append(index)
            text = json.dumps(prompt_format.prompt(row), sort_keys=True, default=str)
            hashes.append(_hash(text))
            sizes.append(len(text))
        self._max_invalid_fraction = settings.max_invalid_fraction
        self._indices = np.array(usable, dtype=np.int64)
        self.hashes = np.array(hashes, dtype=np.uint64)
        self._sizes = np.array(sizes, dtype=np.int64)
        """Characters of each prompt as ASCII JSON, which are at least its bytes."""

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def total(self) -> int:
        """Rows of the file, unusable ones included."""
        return len(self._rows)

    def check_problems(self) -> None:
        """Warn about unusable rows; raise if there are too many or no row at all."""
        if not self.total:
            raise ConfigError(f'dataset.path = "{self.path}" has no rows')
        if self.problems:
            self._report_problems(self.problems, "cannot be used")

    def check_lengths(
        self, prompt_format: PromptFormat, count_tokens: CountTokens, *, limit: int, max_tokens: int
    ) -> None:
        """Warn about prompts that leave too little room for a completion; raise if too many rows leave none.

        A prompt needs fewer than `limit` tokens; see `prompt_lengths.py` for which rows are looked at.
        """

        def messages(number: int) -> list[dict[str, Any]]:
            return prompt_format.messages(self.task(number).data)

        report = find_long_prompts(self._sizes, messages, count_tokens, limit=limit, max_tokens=max_tokens)
        if report.checked < report.candidates:
            logger.warning(
                "%s: of %d prompts that may be too long the %d longest were checked",
                *(self.path, report.candidates, report.checked),
            )
        if report.cut:
            logger.warning(
                "%s: after %d prompts fewer than sampling.max_tokens = %d tokens are left of the %d that a sequence may"
                " have",
                *(self.path, report.cut, max_tokens, limit),
            )
        if report.too_long:
            problems = [
                f"{self._rows.place(int(self._indices[number]))}: its prompt has {tokens} tokens, and limits."
                f"max_sequence_tokens and the model leave room for {limit - 1}"
                for number, tokens in report.too_long
            ]
            self._report_problems([*problems, *self.problems], "cannot be used (prompt_too_long)")

    def _report_problems(self, problems: list[str], what: str) -> None:
        """Warn about unusable rows; raise if there are too many."""
        named = "\n".join(f"  {problem}" for problem in problems[:MAX_NAMED_ROWS])
        more = f"\n  and {len(problems) - MAX_NAMED_ROWS} more" if len(problems) > MAX_NAMED_ROWS else ""
        text = f"{len(problems)} of {self.total} rows of {self.path} {what}:\n{named}{more}"
        if len(problems) > self._max_invalid_fraction * self.total:
            raise ConfigError(
                f"{text}\nfix them, or raise dataset.max_invalid_fraction = {self._max_invalid_fraction:g}"
            )
        logger.warning("%s", text)

    def task(self, number: int) -> Task:
        index = int(self._indices[number])
        row = self._rows[index]
        label = row[self._id_column] if self._id_column is not None else f"{self.path.name}:{index}"
        return Task(str(label), row)

    def place(self, number: int) -> str:
        """Return the file and line of a row."""
        return self._rows.place(int(self._indices[number]))

    def _check_id(self, row: Row, ids: set[str]) -> None:
        value = row.get(self._id_column or "")
        if value is None or value == "":
            raise InvalidRow(f'no column "{self._id_column}"')
        if str(value) in ids:
            raise InvalidRow(f"the id {str(value)[:80]!r} is not unique")
        ids.add(str(value))


class DatasetTasks(Sequence[Task]):
    """Some rows of a data set as tasks, read when they are needed."""

    def __init__(self, rows: IndexedRows, indices: "np.ndarray[Any, Any]") -> None:
        self.rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return DatasetTasks(self.rows, self._indices[index])
        return self.rows.task(int(self._indices[index]))

    def place(self, index: int) -> str:
        """Return the file and line of a task."""
        return self.rows.place(int(self._indices[index]))

    def __iter__(self) -> Iterator[Task]:
        return (self.rows.task(int(index)) for index in self._indices)


def split_indices(
    rows: IndexedRows, settings: DatasetSettings, prompt_format: PromptFormat
) -> tuple[DatasetTasks, DatasetTasks, int]:
    """Return the tasks for training and evaluation, and the number of training rows left out for their prompt."""
    overlap = 0
    if settings.eval_path is not None:
        other = IndexedRows(find_dataset(settings, evaluation=True), settings, prompt_format)
        other.check_problems()
        held_out = DatasetTasks(other, np.arange(len(other)))
        in_training = ~np.isin(rows.hashes, other.hashes)
        overlap = int((~in_training).sum())
    else:
        # the hash of a prompt is uniform, so a threshold selects the fraction
        threshold = int(settings.eval_fraction * 2**64)
        in_training = rows.hashes >= np.uint64(min(threshold, 2**64 - 1))
        if threshold == 2**64:
            in_training[:] = False
        elif threshold and in_training.all() and len(rows) and (rows.hashes != rows.hashes[0]).any():
            in_training = rows.hashes != rows.hashes.min()  # few rows: hold out one prompt, so that there is a test
        held_out = DatasetTasks(rows, np.flatnonzero(~in_training))
    return DatasetTasks(rows, np.flatnonzero(in_training)), held_out, overlap


def _compile_template(template: str | None) -> Callable[[Mapping[str, Any]], str] | None:
    if template is None:
        return None
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"dataset.template is not a jinja template: {error}") from error

    def render(row: Mapping[str, Any]) -> str:
        try:
            return compiled.render(**row)
        except jinja2.TemplateError as error:
            raise InvalidRow(f"dataset.template cannot be rendered: {error}") from None

    return render


def _nonempty(name: str, text: str) -> str:
    if not text.strip():
        raise InvalidRow(f"{name} is empty")
    return text


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
