"""A run trains with a loss function of the user: the audit comes first, drops are recorded, changes are refused."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from keel.cli import main
from keel.errors import ConfigError
from keel.run.folder import RunFolder
from keel.run.records import step_path
from tests.support.tiny_runs import RECIPE, go, resume, train

MODULE = "tests.support.loss_functions"
SHORT = {"steps": 3, "scheduler__max_off_policy_steps": 0, "evaluation__when": "never", "checkpoints__every": 2}


def weights(folder: Path, step: int = 3) -> bytes:
    return (folder / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user in the current folder."""
    file = tmp_path / "my_losses.py"
    file.write_text(f"from {MODULE} import plain_icepop\n\n\ndef loss(batch):\n    return plain_icepop(batch)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    sys.modules.pop("my_losses", None)  # imported from the folder of another test
    yield file
    sys.modules.pop("my_losses", None)


SMALL_MICRO_BATCHES = {
    "trainer__max_tokens_per_micro_batch": 100,
    "environments__larger_number__limits__max_sequence_tokens": 100,
}


@pytest.mark.parametrize(("preset", "more"), [("grpo", SMALL_MICRO_BATCHES), ("icepop", {})])
def test_a_function_equal_to_a_preset_trains_to_the_same_weights(
    tmp_path: Path, own_module: Path, preset: str, more: dict[str, Any]
) -> None:
    own_module.write_text(f"import keel\n\n\ndef loss(batch):\n    return keel.objective('{preset}')(batch)\n")
    reads = ["proximal"] if preset == "grpo" else []
    expected = train(tmp_path / "preset", objective__name=preset, **SHORT, **more)
    table = {"objective__name": "my_losses:loss", "objective__reads": reads, "objective__audit": "warn"}
    actual = train(tmp_path / "function", **table, **SHORT, **more)
    assert weights(tmp_path / "preset") == weights(tmp_path / "function")
    assert not more or any(step.get("computed_tokens", 0) > 100 for step in actual.steps.values())
    for name in ("loss", "is_masked", "kept_tokens", "mismatch_kl"):
        assert [step.get(name) for step in actual.steps.values()] == [
            step.get(name) for step in expected.steps.values()
        ]


def test_dropped_tokens_appear_in_metrics_and_records(tmp_path: Path) -> None:
    watcher = train(tmp_path / "run", objective=f"{MODULE}:narrow_with_reasons", trainer__optimizer_steps=2, **SHORT)
    assert sum(step["is_masked"] for step in watcher.steps.values()) > 0
    tables = [pq.read_table(step_path(tmp_path / "run" / "rollouts", step)) for step in watcher.steps]
    rows = [row or [] for table in tables for row in table["drop_reason"].to_pylist()]
    reasons = {reason for row in rows for reason in row if reason}
    assert reasons <= {"ratio fell", "ratio rose"} and reasons


def test_a_function_that_fails_the_audit_does_not_start_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--run", str(run), f"--objective={MODULE}:mean_of_kept"]) == 2
    assert "fails the audit:\nkeel:   a. masked values reach the loss" in capsys.readouterr().err
    assert not run.exists()
    table = {"objective__name": f"{MODULE}:mean_of_kept", "objective__audit": "warn"}
    notices = train(tmp_path / "warned", **table, **{**SHORT, "steps": 1}).notices
    assert any("fails the audit" in notice for notice in notices)


def test_a_resumed_run_refuses_a_changed_function(tmp_path: Path, own_module: Path) -> None:
    folder = tmp_path / "run"
    train(folder, objective="my_losses:loss", stop_after=1, **SHORT)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert list(resume(folder).steps) == [2, 3]
    own_module.write_text(own_module.read_text() + "# changed\n")
    with pytest.raises(ConfigError, match=r"my_losses:loss.*its file has changed.*--allow-changes"):
        resume(copy)
    assert list(go(RunFolder.open(copy, allow_changes=True)).steps) == [2, 3]
    assert weights(folder) == weights(copy)
