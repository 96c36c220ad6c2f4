"""What a data set holds, before a run: columns, lengths, duplicates, the overlap of training and evaluation."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keel.config.dataset import DatasetSettings
from keel.rollout.environments.dataset import IndexedRows, PromptFormat, split_indices
from keel.rollout.environments.dataset_rows import find_dataset

CountTokens = Callable[[Sequence[dict[str, Any]]], int]


@dataclass(frozen=True)
class Distribution:
    """Lengths of all prompts."""

    minimum: int
    median: int
    p99: int
    maximum: int


@dataclass(frozen=True)
class DatasetReport:
    """The description of one data set."""

    path: str
    rows: int
    problems: list[str]
    """Unusable rows, with the place and reason of each."""
    columns: dict[str, str]
    """Type of each column; several types are joined by " | "."""
    characters: Distribution
    tokens: Distribution | None
    """None without a model."""
    duplicates: int
    """Rows whose prompt stands in an earlier row."""
    train: int
    held_out: int
    overlap: int
    """Training rows with a prompt of the evaluation data set; a run leaves them out."""
    prompts: list[list[dict[str, Any]]]
    """The first prompts as messages."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_dataset(settings: DatasetSettings, *, show: int, count_tokens: CountTokens | None) -> DatasetReport:
    """Read every row once and describe the data set as a run would use it."""
    prompt_format = PromptFormat(settings)
    rows = IndexedRows(find_dataset(settings), settings, prompt_format)
    prompt_format.examples = rows.examples
    types: dict[str, set[str]] = {}
    characters, tokens = [], []
    shown: list[list[dict[str, Any]]] = []
    for number in range(len(rows)):
        row = rows.task(number).data
        for name, value in row.items():
            types.setdefault(name, set()).add(type(value).__name__)
        messages = prompt_format.messages(row)
        characters.append(sum(len(str(message["content"])) for message in messages))
        if count_tokens is not None:
            tokens.append(count_tokens(messages))
        if len(shown) < show:
            shown.append(messages)
    train, held_out, overlap = split_indices(rows, settings, prompt_format)
    repeated = sum(count - 1 for count in Counter(rows.hashes.tolist()).values())
    return DatasetReport(
        path=str(rows.path),
        rows=rows.total,
        problems=rows.problems,
        columns={name: " | ".join(sorted(kinds)) for name, kinds in types.items()},
        characters=_distribution(characters),
        tokens=_distribution(tokens) if tokens else None,
        duplicates=repeated,
        train=len(train),
        held_out=len(held_out),
        overlap=overlap,
        prompts=shown,
    )


def _distribution(lengths: list[int]) -> Distribution:
    if not lengths:
        return Distribution(0, 0, 0, 0)
    return Distribution(min(lengths), int(np.median(lengths)), int(np.quantile(lengths, 0.99)), max(lengths))
