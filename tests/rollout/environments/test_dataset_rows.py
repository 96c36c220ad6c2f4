"""Data sets by their name on the hub: local files first, one download, and errors that name the way out."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.config.dataset import DatasetSettings
from keel.errors import ConfigError
from keel.rollout.environments.dataset_rows import download_dataset, find_dataset, open_rows

LIBRARY = """
import pathlib
import pyarrow as pa

class Rows:
    def __init__(self, rows):
        self.table = pa.Table.from_pylist(rows)
    def save_to_disk(self, folder):
        with pa.OSFile(folder + "/data-00000-of-00001.arrow", "wb") as file:
            with pa.ipc.new_stream(file, self.table.schema) as out:
                out.write_table(self.table)

def load_dataset(name, config_name, *, split):
    with open("calls", "a") as file:
        file.write(f"{name} {config_name} {split}\\n")
    if name == "someone/private":
        raise ConnectionError("cannot reach\\nthe hub")
    return Rows([{"prompt": f"{name} {config_name} {split}"}])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a stand-in for the library `datasets` on the path, and return the file in which it notes its calls."""
    (folder / "library").mkdir()
    (folder / "library" / "datasets.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder / "library"))
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    yield folder / "calls"
    sys.modules.pop("datasets", None)  # the stand-in


def find(evaluation: bool = False, **settings: Any) -> Path:
    return find_dataset(DatasetSettings.model_validate(settings), evaluation=evaluation)


def test_a_name_of_the_hub_is_downloaded_once_for_each_split(library: Path) -> None:
    settings = {"path": "openai/gsm8k", "config_name": "main", "eval_path": "openai/gsm8k"}
    for _ in range(2):
        assert open_rows(find(**settings))[0] == {"prompt": "openai/gsm8k main train"}
        assert open_rows(find(True, **settings))[0] == {"prompt": "openai/gsm8k main test"}
        assert open_rows(find(**settings, split="extra"))[0] == {"prompt": "openai/gsm8k main extra"}
    assert library.read_text().splitlines() == [f"openai/gsm8k main {split}" for split in ("train", "test", "extra")]


def test_a_local_path_of_the_same_name_comes_first(library: Path, folder: Path) -> None:
    (folder / "openai").mkdir()
    (folder / "openai" / "gsm8k").mkdir()
    assert find(path="openai/gsm8k") == Path("openai/gsm8k")
    assert not library.exists()


def test_a_download_that_fails_is_an_error_that_names_the_setting_and_the_way_out(library: Path, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find(path="someone/private")
    assert str(caught.value) == (
        'dataset.path = "someone/private" does not exist, neither in the current folder nor next to the recipe, and the'
        ' hub has no usable answer (dataset.config_name = null, split "train"): ConnectionError: cannot reach the hub;'
        " download its files and set the path of a .parquet or .jsonl file instead"
    )
    assert not list((folder / "cache").rglob("someone*"))
    with pytest.raises(ConfigError, match=r'dataset\.eval_path = "someone/private" does not exist'):
        find(True, path="a.jsonl", eval_path="someone/private")


def test_without_the_library_the_error_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r'the hub needs the package datasets; run: pip install "keel-rl\[hub\]"'):
        find(path="openai/gsm8k")


@pytest.mark.parametrize("path", ["gsm8k", "data/train.jsonl", "a/b/c", "../gsm8k/x"])
def test_what_cannot_be_a_name_of_the_hub_is_not_looked_up(path: str, library: Path) -> None:
    with pytest.raises(ConfigError, match=f'"{path}" does not exist.*a data set of the hub is named "OWNER/NAME"'):
        find(path=path)
    assert not library.exists()


def test_the_library_itself_reads_a_data_set(folder: Path) -> None:
    pytest.importorskip("datasets", reason='needs the package datasets: pip install "keel-rl[hub]"')
    (folder / "mine").mkdir()
    (folder / "mine" / "train.jsonl").write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(3)))
    rows = open_rows(download_dataset(str(folder / "mine"), None, "train", "missing"))
    assert [rows[index]["prompt"] for index in range(len(rows))] == ["0", "1", "2"]
    with pytest.raises(ConfigError, match="missing, and the hub has no usable answer"):
        download_dataset(str(folder / "mine"), None, "no_such_split", "missing")
