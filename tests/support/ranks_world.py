"""Trainers on several real processes (gloo, one machine), and the same trainer in one, to compare them.

A crew of each size is started once and trains whatever it is given after that, since its start takes most of the time.
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
"""Of float32 sums in another order, five steps on: relative to the largest entry of a tensor."""
OPTIMIZER = OptimizerSettings(lr=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=2)
"""With an eps above most gradients: a step is not the sign of what a rounding left of zero."""
_OWN = ("seconds", "computed_tokens")
"""What a report says about how the step was computed, and not about what it was."""


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
    "step, LoRA, two updates": ("step", True, 64, {}, {"optimizer_steps": 2}),
    "activations computed again": ("token", False, 40, {"gradient_checkpointing": True}, {}),
    "each sequence for itself": ("sequence", False, 64, {}, {"share_prefixes": False}),
}


class Crews:
    """Crews by their size, started when first asked for."""

    def __init__(self) -> None:
        self._crews: dict[int, RankProcesses] = {}

    def trainer(self, ranks: int, model: ModelSettings, **settings: Any) -> Trainer:
        """A new trainer on so many ranks; whatever they trained before is gone."""
        chosen = TrainerSettings.model_validate({"ranks": ranks, "optimizer": OPTIMIZER, **settings})
        if ranks == 1:
            return Trainer(model, chosen)
        if ranks not in self._crews:
            for other in list(self._crews):
                self._crews.pop(other).close()  # a process is in one world at a time
            self._crews[ranks] = RankProcesses(chosen)
            self._crews[ranks].join()
        return Trainer(model, chosen, world=self._crews[ranks].world)

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()


def model(name: str = "tiny", *, lora: bool = False, **settings: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "device": "cpu", "lora": LORA if lora else None, **settings})


def rollouts() -> list[Sample]:
    """Uneven groups, one of them alone, as a sampler near the policy would have written them."""
    samples = [*branching_samples(version=2)[:10], *branching_samples(7, version=2)[3:4]]
    recorded = Trainer(model(), TrainerSettings()).logprobs(samples)
    chance = np.random.default_rng(5)
    return [
        dataclasses.replace(sample, sampler_logprobs=np.nan_to_num(found.numpy()) + chance.normal(0, 0.4, len(sample)))
        for sample, found in zip(samples, recorded, strict=True)
    ]


def numbers(report: StepReport) -> dict[str, float]:
    return {name: value for name, value in report.scalars().items() if name not in _OWN}


def moments(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    """The optimizer's means of gradients and of their squares, by a checkpoint that one process reads."""
    kept = Checkpoints(folder, CheckpointSettings())
    trainer.save(kept, 1)
    alone = Trainer(trainer.model.settings, TrainerSettings(optimizer=OPTIMIZER))
    alone.load(kept, 1)
    found = {}
    for name, weight in alone.model.parameters().items():
        found |= {f"{entry}.{name}": value for entry, value in alone.optimizer.state[weight].items()}
    return found


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return full_state_dict(trainer.model)


def assert_same_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        scale = max(float(expected.abs().max()), 1e-6)
        assert float((found[name] - expected).abs().max()) <= tolerance * scale, name


def assert_same_reports(found: Sequence[StepReport], wanted: Sequence[StepReport]) -> None:
    """Loss, metrics, and each token's log-prob, reason and gradient."""
    for one, other in zip(found, wanted, strict=True):
        here, there = numbers(one), numbers(other)
        assert here.keys() == there.keys()
        for name, value in there.items():
            # a mean over nothing is NaN on both sides
            assert here[name] == pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True), name
        assert torch.equal(one.tokens.reasons, other.tokens.reasons)
        for name, column in one.tokens.columns():
            torch.testing.assert_close(column, getattr(other.tokens, name), rtol=1e-4, atol=1e-5, msg=name)


def steps(trainer: Trainer, samples: list[Sample], rule: keel.Objective, count: int = STEPS) -> list[StepReport]:
    return [trainer.step(samples, rule, version=3) for _ in range(count)]


def assert_one_process(crews: Crews, ranks: int, case: str, folder: Path) -> None:
    """Loss, metrics, gradients and weights of five steps are those of one process with one micro-batch."""
    objective, lora, max_tokens, shape, more = CASES[case]
    rule, samples = OBJECTIVES[objective], rollouts()
    alone = crews.trainer(1, model(lora=lora), **more)
    wanted = steps(alone, samples, rule)
    assert any((report.tokens.dloss_dlogprob == 0).any() for report in wanted), (
        "nothing is dropped or clipped: a weak case"
    )
    trainer = crews.trainer(ranks, model(lora=lora, **shape), max_tokens_per_micro_batch=max_tokens, **more)
    assert_same_reports(steps(trainer, samples, rule), wanted)
    assert_same_tensors(weights(trainer), weights(alone))
    assert_same_tensors(moments(trainer, folder / "ranks"), moments(alone, folder / "alone"))


def assert_idle_ranks_take_part(crews: Crews, ranks: int, objective: str) -> None:
    """One sequence, and sequences that train nothing: all ranks but one have no work, or all have none."""
    (sample,) = rollouts()[1:2]
    silent = dataclasses.replace(sample, trainable=np.zeros(len(sample), bool))
    alone, trainer = crews.trainer(1, model()), crews.trainer(ranks, model())
    for samples in ([sample], [sample, silent, silent], [silent], []):
        wanted, found = (one.step(samples, OBJECTIVES[objective], version=3) for one in (alone, trainer))
        assert (found.stepped, found.skip_reason) == (wanted.stepped, wanted.skip_reason)
        assert_same_reports([found], [wanted])
    assert_same_tensors(weights(trainer), weights(alone))


def assert_gone_on_with(crews: Crews, before: int, after: int, lora: bool, folder: Path) -> None:
    """Two steps on some ranks, saved, and two more on others are four steps of one process."""
    samples, rule, kept = rollouts(), OBJECTIVES["sequence"], Checkpoints(folder, CheckpointSettings())
    alone = crews.trainer(1, model(lora=lora))
    wanted = steps(alone, samples, rule, 4)
    first = crews.trainer(before, model(lora=lora), max_tokens_per_micro_batch=64)
    steps(first, samples, rule, 2)
    first.save(kept, 2, {"epoch": 7})
    second = crews.trainer(after, model(lora=lora), max_tokens_per_micro_batch=64)
    assert second.load(kept, 2) == {"epoch": 7}
    assert second.steps == 2
    assert_same_reports(steps(second, samples, rule, 2), wanted[2:])
    assert_same_tensors(weights(second), weights(alone))
