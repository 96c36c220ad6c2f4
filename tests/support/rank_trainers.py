"""Run trainers on several real processes (gloo, one machine) and compare them with a trainer in one process.

The ranks of each world size are started once and reused by several tests, because starting them takes most of the time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import keel
from keel.config import CheckpointSettings, ModelSettings, OptimizerSettings, TrainerSettings
from keel.training import Checkpoints, Sample, StepReport, Trainer
from keel.training.distributed.rank_processes import RankProcesses
from keel.training.model.weights_io import full_state_dict
from tests.support.policy_strategies import LORA, branching_samples

STEPS = 5
TOLERANCE = 2e-5
"""Relative to the largest entry of a tensor, after five steps of float32 sums in another order."""
OPTIMIZER = OptimizerSettings(lr=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=2)
"""eps is above most gradients, so that a step is not the sign of a rounding error."""
_NOT_COMPARED = ("seconds", "computed_tokens")
"""Fields of a report that depend on how the step was computed."""


OBJECTIVES: dict[str, keel.Objective] = {
    "token": keel.objective("icepop", ratio_low=0.6, ratio_high=1.6),
    "token, by kept": keel.objective("icepop", ratio_low=0.6, ratio_high=1.6, denominator="kept"),
    "sequence": keel.objective("gspo", eps=0.05, eps_high=0.05),
    "step": keel.objective("m2po", tau=0.04),
}
# objective, full weights or LoRA, tokens of a micro-batch, more settings of model and trainer
CASES: dict[str, tuple[str, bool, int, dict[str, Any], dict[str, Any]]] = {
    "token, small micro-batches": ("token", False, 40, {}, {}),
    "token, one micro-batch": ("token", False, 4096, {}, {}),
    "token, LoRA": ("token", True, 64, {}, {}),
    "token, divided by kept": ("token, by kept", False, 64, {}, {}),
    "sequence, small micro-batches": ("sequence", False, 40, {}, {}),
    "sequence, one micro-batch, LoRA": ("sequence", True, 4096, {}, {}),
    "step, small micro-batches": ("step", False, 40, {}, {}),
    "step, LoRA, two optimizer steps": ("step", True, 64, {}, {"optimizer_steps": 2}),
    "gradient checkpointing": ("token", False, 40, {"gradient_checkpointing": True}, {}),
    "unshared prefixes": ("sequence", False, 64, {}, {"share_prefixes": False}),
}


class RankPool:
    """Rank processes by world size, started on first use."""

    def __init__(self) -> None:
        self._processes: dict[int, RankProcesses] = {}

    def trainer(self, ranks: int, model: ModelSettings, **settings: Any) -> Trainer:
        """Return a new trainer on that many ranks, replacing the previous one."""
        trainer_settings = TrainerSettings.model_validate({"ranks": ranks, "optimizer": OPTIMIZER, **settings})
        if ranks == 1:
            return Trainer(model, trainer_settings)
        if ranks not in self._processes:
            for size in list(self._processes):
                self._processes.pop(size).close()  # a process can only be in one world at a time
            self._processes[ranks] = RankProcesses(trainer_settings)
            self._processes[ranks].join()
        return Trainer(model, trainer_settings, world=self._processes[ranks].world)

    def close(self) -> None:
        for processes in self._processes.values():
            processes.close()


def model(name: str = "tiny", *, lora: bool = False, **settings: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "device": "cpu", "lora": LORA if lora else None, **settings})


def rollouts() -> list[Sample]:
    """Return samples of uneven groups, one of a single sample, with sampler log-probs near the policy's."""
    samples = [*branching_samples(version=2)[:10], *branching_samples(7, version=2)[3:4]]
    logprobs = Trainer(model(), TrainerSettings()).logprobs(samples)
    rng = np.random.default_rng(5)
    return [
        dataclasses.replace(sample, sampler_logprobs=np.nan_to_num(values.numpy()) + rng.normal(0, 0.4, len(sample)))
        for sample, values in zip(samples, logprobs, strict=True)
    ]


def compared_scalars(report: StepReport) -> dict[str, float]:
    return {name: value for name, value in report.scalars().items() if name not in _NOT_COMPARED}


def moments(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    """Return the optimizer's moments, by a checkpoint that one process reads."""
    checkpoints = Checkpoints(folder, CheckpointSettings())
    trainer.save(checkpoints, 1)
    single = Trainer(trainer.model.settings, TrainerSettings(optimizer=OPTIMIZER))
    single.load(checkpoints, 1)
    result = {}
    for name, weight in single.model.parameters().items():
        result |= {f"{entry}.{name}": value for entry, value in single.optimizer.state[weight].items()}
    return result


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return full_state_dict(trainer.model)


def assert_same_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(float(tensor.abs().max()), 1e-6)
        assert float((actual[name] - tensor).abs().max()) <= tolerance * scale, name


def assert_same_reports(actual: Sequence[StepReport], expected: Sequence[StepReport]) -> None:
    """Assert equal losses, metrics, and log-prob, reason and gradient of each token."""
    for report, expected_report in zip(actual, expected, strict=True):
        scalars, expected_scalars = compared_scalars(report), compared_scalars(expected_report)
        assert scalars.keys() == expected_scalars.keys()
        for name, value in expected_scalars.items():
            # the mean of no values is NaN in both
            assert scalars[name] == pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True), name
        assert torch.equal(report.tokens.reasons, expected_report.tokens.reasons)
        for name, column in report.tokens.columns():
            torch.testing.assert_close(column, getattr(expected_report.tokens, name), rtol=1e-4, atol=1e-5, msg=name)


def steps(trainer: Trainer, samples: list[Sample], rule: keel.Objective, count: int = STEPS) -> list[StepReport]:
    return [trainer.step(samples, rule, version=3) for _ in range(count)]


def assert_matches_one_process(pool: RankPool, ranks: int, case: str, folder: Path) -> None:
    """Assert that five steps equal those of one process with one micro-batch: reports, weights and moments."""
    objective, lora, max_tokens, model_options, trainer_options = CASES[case]
    rule, samples = OBJECTIVES[objective], rollouts()
    single = pool.trainer(1, model(lora=lora), **trainer_options)
    expected = steps(single, samples, rule)
    assert any((report.tokens.dloss_dlogprob == 0).any() for report in expected), (
        "nothing is dropped or clipped: a weak case"
    )
    settings = {"max_tokens_per_micro_batch": max_tokens, **trainer_options}
    trainer = pool.trainer(ranks, model(lora=lora, **model_options), **settings)
    assert_same_reports(steps(trainer, samples, rule), expected)
    assert_same_tensors(weights(trainer), weights(single))
    assert_same_tensors(moments(trainer, folder / "ranks"), moments(single, folder / "single"))


def assert_idle_ranks_take_part(pool: RankPool, ranks: int, objective: str) -> None:
    """Assert that steps are correct when all ranks but one, or all ranks, have no work."""
    (sample,) = rollouts()[1:2]
    untrainable = dataclasses.replace(sample, trainable=np.zeros(len(sample), bool))
    single, trainer = pool.trainer(1, model()), pool.trainer(ranks, model())
    for samples in ([sample], [sample, untrainable, untrainable], [untrainable], []):
        expected, actual = (each.step(samples, OBJECTIVES[objective], version=3) for each in (single, trainer))
        assert (actual.stepped, actual.skip_reason) == (expected.stepped, expected.skip_reason)
        assert_same_reports([actual], [expected])
    assert_same_tensors(weights(trainer), weights(single))


def assert_resumes_on_other_ranks(pool: RankPool, before: int, after: int, lora: bool, folder: Path) -> None:
    """Assert that two steps, a checkpoint and two more on other ranks equal four steps of one process."""
    samples, rule, checkpoints = rollouts(), OBJECTIVES["sequence"], Checkpoints(folder, CheckpointSettings())
    single = pool.trainer(1, model(lora=lora))
    expected = steps(single, samples, rule, 4)
    first = pool.trainer(before, model(lora=lora), max_tokens_per_micro_batch=64)
    steps(first, samples, rule, 2)
    first.save(checkpoints, 2, {"epoch": 7})
    second = pool.trainer(after, model(lora=lora), max_tokens_per_micro_batch=64)
    assert second.load(checkpoints, 2) == {"epoch": 7}
    assert second.steps == 2
    assert_same_reports(steps(second, samples, rule, 2), expected[2:])
    assert_same_tensors(weights(second), weights(single))
