"""`keel compare --model`: gradients with respect to weights equal those of a training step."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keel
from keel.cli import main
from keel.config import ModelSettings
from keel.errors import KeelError
from keel.tools.compare import Comparison, Recording, parse_candidates
from keel.tools.compare.weight_gradients import WeightGradients, evenly_spaced_steps, to_samples
from keel.training import Model, Trainer, load_model
from tests.support.recorded_rows import row, write_json


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(ModelSettings(name="tiny"))


def write_recording(path: Path, model: Model) -> Path:
    """Write sequences that the model scored, with sampler log-probs that differ by up to 2 nats."""
    rng, rows = np.random.default_rng(0), []
    trainer = Trainer(model)
    for number in range(6):
        ids = rng.integers(0, 256, 12).tolist()
        record = row([1.0] * 8, float(rng.normal()), prompt=4, token_ids=ids, step=1 + number // 3, temperature=0.7)
        sample = keel.Sample(token_ids=ids, trainable=np.array(record["trainable"]), advantage=0.0, temperature=0.7)
        (scores,) = trainer.logprobs([sample])
        record["logprobs"] = [None if math.isnan(score) else score for score in scores.tolist()]
        record["sampler_logprobs"] = [
            0.0 if math.isnan(score) else min(score + float(rng.uniform(-2, 2)), 0.0) for score in scores.tolist()
        ]
        rows.append(record)
    return write_json(path, rows)


def test_the_gradient_norm_equals_that_of_a_training_step_and_no_weight_changes(tmp_path: Path, model: Model) -> None:
    path = write_recording(tmp_path / "t.jsonl", model)
    before = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    weights = WeightGradients(model)
    comparison = Comparison(parse_candidates("icepop,opsm,icepop(adv_tau=-1)"))
    step = next(Recording(path).steps())
    weights.add(comparison.add(step))
    summary = weights.summary(comparison.names)
    assert all(torch.equal(weight, before[name]) for name, weight in model.parameters().items())
    assert all(weight.grad is None for weight in model.parameters().values())
    assert summary.logprob_difference < 1e-5
    assert summary.cosine[0] == pytest.approx([1.0, summary.cosine[0][1], -1.0], abs=1e-6)
    assert abs(summary.cosine[0][1]) < 0.999
    for index, name in enumerate(("icepop", "opsm")):
        trained = Trainer(load_model(ModelSettings(name="tiny")))
        report = trained.step(_samples(step), keel.objective(name), version=3)
        assert summary.gradient_norm[index] == pytest.approx(report.grad_norm, rel=1e-4)


def _samples(step: Any) -> list[keel.Sample]:
    """Return the step as samples for the trainer."""
    plain, samples = to_samples(step), []
    for sample, advantage, sampler in zip(
        plain, step.rows["advantage"].to_pylist(), step.rows["sampler_logprobs"].to_pylist(), strict=True
    ):
        samples.append(
            keel.Sample(
                token_ids=sample.token_ids,
                trainable=sample.trainable,
                advantage=advantage,
                sampler_logprobs=np.array(sampler, np.float64),
                version=3,
                temperature=sample.temperature,
            )
        )
    return samples


def test_the_command_selects_steps_and_prints_cosines(tmp_path: Path, model: Model, capsys: Any) -> None:
    path = write_recording(tmp_path / "t.jsonl", model)
    args = ["compare", str(path), "--objectives", "icepop,opsm", "--model", "tiny", "--model-steps", "1"]
    assert main([*args, "--html", str(tmp_path / "r.html")]) == 0
    shown = capsys.readouterr().out
    assert "cosine of the gradients by weight, tiny, steps 2" in shown
    assert "90,688 weights; log-probs differ from the recorded ones by" in shown
    assert "Gradients by weight" in (tmp_path / "r.html").read_text()


def test_a_model_needs_token_ids(tmp_path: Path, model: Model) -> None:
    record = row([1.0], 1.0, prompt=1)
    del record["token_ids"]
    step = next(Recording(write_json(tmp_path / "t.jsonl", [record])).steps())
    compared = Comparison(parse_candidates("icepop")).add(step)
    with pytest.raises(KeelError, match="no token_ids"):
        WeightGradients(model).add(compared)


@pytest.mark.parametrize(("count", "expected"), [(1, [3]), (2, [1, 5]), (3, [1, 3, 5]), (9, [1, 2, 3, 4, 5])])
def test_selected_steps_are_evenly_spaced(count: int, expected: list[int]) -> None:
    assert evenly_spaced_steps([1, 2, 3, 4, 5], count) == expected
