"""Rows and functions from Python are files in the run's folder whose names say what they hold."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.errors import ConfigError
from keel.run.start.run_inputs import RunInputs, flatten_settings

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": [{"role": "user", "content": "b"}], "answer": "2"}]


def test_rows_are_written_once_under_a_name_that_depends_on_their_content(tmp_path: Path) -> None:
    names = []
    for rows in (ROWS, iter(ROWS), [*ROWS, {"prompt": "c"}]):
        with RunInputs() as inputs:
            names.append(inputs.add_dataset(rows, "train"))
            inputs.write(tmp_path)
    assert names[0] == names[1] != names[2]
    lines = (tmp_path / "inputs" / names[0]).read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    assert sorted(path.name for path in (tmp_path / "inputs").iterdir()) == sorted({*names})


def test_paths_and_names_stay_as_they_are(tmp_path: Path) -> None:
    with RunInputs() as inputs:
        assert inputs.add_dataset(Path("data/train.jsonl"), "train") == "data/train.jsonl"
        assert inputs.add_reward("number") == {"name": "number"}
        assert inputs.add_reward({"name": string.capwords, "weight": 0.5}) == {"name": "string:capwords", "weight": 0.5}
        inputs.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_local_function_becomes_a_module_in_the_folder(tmp_path: Path) -> None:
    def reward(completion: str) -> float:
        return float(len(completion))

    with RunInputs() as inputs:
        name = inputs.add_reward(reward)["name"]
        inputs.write(tmp_path)
    module, _, function = name.partition(":")
    assert function == "reward" and "def reward(completion" in (tmp_path / "inputs" / f"{module}.py").read_text()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "train rows are a int; pass a path, a list of rows"),
        ({"train": ROWS}, "one split of a DatasetDict"),
        (["a"], "row 0 is a str, not a dict"),
        ([ROWS[0], {"prompt": object()}], 'row 1, column "prompt" is a object that is not JSON'),
        ([{"prompt": "a", "value": float("nan")}], 'row 0, column "value" is a float that is not JSON'),
    ],
)
def test_unusable_rows_are_named(rows: Any, message: str) -> None:
    with RunInputs() as inputs, pytest.raises(ConfigError, match=message):
        inputs.add_dataset(rows, "train")


def test_a_hugging_face_data_set_is_written_row_by_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets: pip install datasets")
    with RunInputs() as inputs:
        plain = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
        name = inputs.add_dataset(datasets.Dataset.from_list(plain), "train")
        assert name == inputs.add_dataset(plain, "train")


def test_nested_and_dotted_settings_are_the_same() -> None:
    nested = {"trainer": {"optimizer": keel.OptimizerSettings(lr=1e-3)}, "checkpoints": {}}
    assert flatten_settings(nested) == [("trainer.optimizer.lr", 1e-3), ("checkpoints", {})]
    assert flatten_settings({"trainer.optimizer.lr": 1e-3, "publish": {"path": Path("x")}}) == [
        ("trainer.optimizer.lr", 1e-3),
        ("publish.path", "x"),
    ]
