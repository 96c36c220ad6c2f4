"""Rows of a data set on disk: read one at a time, never all held in memory.

A JSON-lines file is indexed by the offsets of its lines. A .csv or .parquet file is converted once to an Arrow file in
the cache and mapped into memory, as are the files of a folder saved by Hugging Face `datasets`. Only a .json file, one
list of objects, is read completely.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from keel.common.atomic_files import atomic_file, atomic_folder
from keel.common.cache import cache_folder
from keel.common.extras import install_command
from keel.config.dataset import DatasetSettings
from keel.errors import ConfigError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")

Row = dict[str, Any]


class InvalidRow(Exception):
    """A row that cannot be parsed; the message says why."""


class Rows(Protocol):
    """Random access to rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row:
        """Return a row; raise InvalidRow if it cannot be parsed."""

    def place(self, index: int) -> str:
        """Return the file and line of a row, for errors."""


def find_dataset(settings: DatasetSettings, *, evaluation: bool = False) -> Path:
    """Return the path of a data set: relative to the current folder, or to a folder that modules are imported from.

    A name of the hub is looked up only if there is no such file or folder.
    """
    setting, path = ("eval_path", settings.eval_path or "") if evaluation else ("path", settings.path)
    if (found := find_path(path)) is not None:
        return found
    missing = f'dataset.{setting} = "{path}" does not exist, neither in the current folder nor next to the recipe'
    if not HUB_NAME.fullmatch(path) or path.endswith(SUFFIXES):
        raise ConfigError(f'{missing}; a data set of the hub is named "OWNER/NAME"')
    split = settings.eval_split if evaluation else settings.split
    return download_dataset(path, settings.config_name, split, missing)


def download_dataset(name: str, config_name: str | None, split: str, missing: str) -> Path:
    """Return a folder of Arrow files with a split of a data set of the hub; downloaded once, then read from the cache.

    `missing` is the sentence with which the error begins if it cannot be downloaded.
    """
    key = json.dumps([name, config_name, split])
    label = "-".join(re.sub(r"[^\w.]+", "-", part) for part in (name, config_name or "", split) if part)
    target = cache_folder() / "datasets" / f"{label[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    if target.exists():
        return target
    alternative = "download its files and set the path of a .parquet or .jsonl file instead"
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{missing}, and the hub needs the package datasets; run: {install_command('hub')}; or {alternative}"
        ) from error
    try:
        rows = datasets.load_dataset(name, config_name, split=split)
        with atomic_folder(target) as temporary:
            rows.save_to_disk(str(temporary))
    except Exception as error:  # whatever the library, the network or a loading script raises
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{missing}, and the hub has no usable answer (dataset.config_name = {json.dumps(config_name)}, split"
            f' "{split}"): {type(error).__name__}: {reason}; {alternative}'
        ) from error
    return target


def find_path(path: str) -> Path | None:
    """Return an existing path relative to the current folder, or to a folder that modules are imported from."""
    candidates = (Path(folder, path).expanduser() for folder in ("", *sys.path))
    return next((candidate for candidate in candidates if candidate.exists()), None)


def open_rows(path: Path) -> Rows:
    """Return the rows of a file or folder."""
    if path.is_dir():
        return ArrowRows(path, sorted(path.glob("*.arrow")))
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if suffix == ".json":
        return JsonList(path)
    if suffix in (".csv", ".parquet"):
        return ArrowRows(path, [_convert(path)])
    raise ConfigError(f'dataset.path = "{path}" must end in {", ".join(SUFFIXES)} or be a folder of Arrow files')


class JsonLines:
    """One JSON object per line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        offsets, lines, offset = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    offsets.append(offset)
                    lines.append(number)
                offset += len(line)
        self._offsets = np.array([*offsets, offset], dtype=np.int64)
        self._lines = np.array(lines, dtype=np.int64)
        self._file = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        try:
            row = json.loads(os.pread(self._file, end - start, start).decode())
        except ValueError as error:
            raise InvalidRow(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InvalidRow(f"a {type(row).__name__} and not an object")
        return row

    def place(self, index: int) -> str:
        return f"{self.path}:{self._lines[index]}"

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class JsonList:
    """A JSON file with one list of objects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f'dataset.path = "{path}" is not JSON: {error}') from error
        if not isinstance(rows, list):
            raise ConfigError(f'dataset.path = "{path}" must hold a list of objects, not a {type(rows).__name__}')
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise InvalidRow(f"a {type(row).__name__} and not an object")
        return row

    def place(self, index: int) -> str:
        return f"{self.path} row {index + 1}"


class ArrowRows:
    """Memory-mapped Arrow files."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        import pyarrow as pa

        if not files:
            raise ConfigError(f'dataset.path = "{path}" is a folder without Arrow files')
        self.path = path
        self._batches = [batch for file in files for batch in _read_batches(pa, file)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        (row,) = self._batches[batch].slice(index - int(self._starts[batch]), 1).to_pylist()
        return dict(row)

    def place(self, index: int) -> str:
        return f"{self.path} row {index + 1}"


def _read_batches(pa: Any, file: Path) -> Iterator[Any]:
    source = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(source)
        return iter([reader.get_batch(number) for number in range(reader.num_record_batches)])
    except pa.ArrowInvalid:
        pass  # `datasets` writes the stream format
    try:
        return iter(list(pa.ipc.open_stream(source)))
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{file} is not an Arrow file: {error}") from error


def _convert(path: Path) -> Path:
    """Convert a .csv or .parquet file to an Arrow file in the cache and return it."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    state = path.stat()
    name = f"{path.resolve()}/{state.st_size}/{state.st_mtime_ns}"
    target = cache_folder() / "datasets" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.arrow"
    if target.exists():
        return target
    try:
        batches: Any
        if path.suffix.lower() == ".csv":
            batches = pyarrow.csv.open_csv(path)
            schema = batches.schema
        else:
            parquet = pyarrow.parquet.ParquetFile(path)
            batches, schema = parquet.iter_batches(), parquet.schema_arrow
        with atomic_file(target) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    except pa.ArrowException as error:
        raise ConfigError(f'dataset.path = "{path}" cannot be read: {error}') from error
    return target
