"""Rows and reward functions given from Python, as files in the folder of a run.

Names contain a hash of the content: equal inputs are equal settings, so a run resumes with them, and changed inputs are
changed settings. The files are found by their names when the run is resumed or evaluated, also from the command line
and after the folder was moved.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from keel.common.atomic_files import atomic_file
from keel.errors import ConfigError
from keel.run.start.function_source import import_path, write_source
from keel.run.start.module_folders import INPUTS_FOLDER

HASH_DIGITS = 12

RewardLike = str | Mapping[str, Any] | Callable[..., Any]
"""A built-in reward, `module:function`, a table with the settings of a reward, or a function."""
DatasetLike = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""A path, or rows: a list of dicts, or a Hugging Face `datasets.Dataset`."""


class RunInputs:
    """Files that wait to be written into the folder of a run. Use as a context manager."""

    def __init__(self) -> None:
        self._staging = tempfile.TemporaryDirectory(prefix="keel-inputs-")
        self._names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._staging.cleanup()

    def add_dataset(self, dataset: DatasetLike, label: str) -> str:
        """Return the setting of a data set: its path, or the name of the file with its rows."""
        if isinstance(dataset, str | os.PathLike):
            return os.fspath(dataset)
        if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
            raise ConfigError(
                f"{label} rows are a {type(dataset).__name__}; pass a path, a list of rows (dicts), or one split of a"
                ' DatasetDict, for example dataset["train"]'
            )
        temporary, digest = Path(self._staging.name) / f"{label}.new", hashlib.sha256()
        with temporary.open("wb") as file:
            for number, row in enumerate(dataset):
                line = _row_line(number, row)
                digest.update(line)
                file.write(line)
        return self._keep(temporary, f"{label}-{digest.hexdigest()[:HASH_DIGITS]}.jsonl")

    def add_reward(self, reward: RewardLike) -> dict[str, Any]:
        """Return the settings of a reward; a function becomes the name by which worker processes import it."""
        table = dict(reward) if isinstance(reward, Mapping) else {"name": reward}
        function = table.get("name")
        if callable(function):
            table["name"] = import_path(function) or self._add_function(function)
        return table

    def write(self, run: Path) -> None:
        """Write the files into the folder of a run, each completely or not at all."""
        for name in self._names:
            target = run / INPUTS_FOLDER / name
            if target.exists():
                continue  # its name says what it holds
            with atomic_file(target) as temporary:
                shutil.copyfile(Path(self._staging.name) / name, temporary)

    def _add_function(self, function: Callable[..., Any]) -> str:
        name, text = write_source(function)
        temporary = Path(self._staging.name) / "function.new"
        temporary.write_text(text, encoding="utf-8")
        module = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]}"
        self._keep(temporary, f"{module}.py")
        return f"{module}:{name}"

    def _keep(self, file: Path, name: str) -> str:
        file.replace(file.with_name(name))
        if name not in self._names:
            self._names.append(name)
        return name


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested or dotted settings as dotted names with values that TOML has."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        name = f"{prefix}{key}"
        value = _plain(value)
        pairs += flatten_settings(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return pairs


def _plain(value: Any) -> Any:
    """Return settings objects as tables of what was set, and paths as text."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _row_line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"dataset: row {number} is a {type(row).__name__}, not a dict with columns (a pandas table has"
            ' to_dict("records"); of a DatasetDict pass one split)'
        )
    try:
        return (json.dumps(dict(row), allow_nan=False) + "\n").encode()
    except (TypeError, ValueError):
        pass
    for column, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'dataset: row {number}, column "{column}" is a {type(value).__name__} that is not JSON: {error};'
                " convert it to text, numbers, lists or dicts"
            ) from None
    raise ConfigError(f"dataset: row {number} has a column whose name is not text: {list(row)!r:.80}")
