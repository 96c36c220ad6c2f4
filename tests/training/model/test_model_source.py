"""The folder of a run is a model: its newest checkpoint, or the adapter of that checkpoint merged into its base."""

from pathlib import Path

import pytest
import torch

from keel.config import CheckpointSettings, LoraSettings, ModelSettings
from keel.errors import ModelError
from keel.training import Checkpoints, Model, Trainer, load_model
from keel.training.model.model_source import resolve_model
from tests.support.policy_strategies import tiny

IDS = torch.arange(40, 60)[None]


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.network(input_ids=IDS, use_cache=False).logits


def save_run(run: Path, model: Model, *steps: int) -> None:
    checkpoints = Checkpoints(run / "checkpoints", CheckpointSettings())
    for step in steps:
        with torch.no_grad():
            for weight in model.parameters().values():
                weight.mul_(1.01)
        Trainer(model).save(checkpoints, step)


def test_a_run_stands_for_its_newest_checkpoint_with_its_tokenizer(tmp_path: Path) -> None:
    model = tiny()
    model.tokenizer.chat_template = "{{ 'changed' }}"
    save_run(tmp_path / "run", model, 5, 12)
    loaded = load_model(ModelSettings(name=str(tmp_path / "run")))
    assert loaded.source.folder == (tmp_path / "run/checkpoints/step_12").resolve()
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.tokenizer.chat_template == "{{ 'changed' }}"


def test_an_adapter_is_merged_once_into_the_cache_and_not_into_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(lora=LoraSettings(rank=4))
    save_run(tmp_path / "run", model, 3)
    before = sorted(tmp_path.rglob("*"))
    for name in ("run", "run/checkpoints/step_3"):
        loaded = load_model(ModelSettings(name=str(tmp_path / name)))
        assert torch.allclose(logits(loaded), logits(model), atol=1e-4)
        assert loaded.source.folder.name.startswith("merged-")
    assert sorted(tmp_path.rglob("*")) == before
    again = load_model(ModelSettings(name=str(tmp_path / "run"), lora=LoraSettings(rank=2)))  # train on top of it
    assert torch.allclose(logits(again), logits(model), atol=1e-4)


def test_a_run_without_a_checkpoint_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="is not a checkpoint"):
        resolve_model(str(tmp_path / "run"))
