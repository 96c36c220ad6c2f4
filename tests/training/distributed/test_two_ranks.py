"""The trainer on two real processes: the same losses, gradients, metrics and weights, and the same refusals."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import keel
from keel.config import CheckpointSettings, ReferenceSettings, TrainerSettings
from keel.errors import ConfigError, StepRefused
from keel.training import Checkpoints, Trainer
from keel.training.model.export import export
from keel.training.model.optimizer_state import read_tensors
from tests.support.ranks_world import (
    CASES,
    OBJECTIVES,
    Crews,
    assert_gone_on_with,
    assert_idle_ranks_take_part,
    assert_one_process,
    assert_same_reports,
    assert_same_tensors,
    model,
    rollouts,
    steps,
    weights,
)


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    made = Crews()
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_and_any_micro_batches_are_one_process(case: str, crews: Crews, tmp_path: Path) -> None:
    assert_one_process(crews, 2, case, tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_rank_without_a_trainable_token_takes_part(objective: str, crews: Crews) -> None:
    assert_idle_ranks_take_part(crews, 2, objective)


@pytest.mark.parametrize("name", ["tiny-llama-untied", "tiny-qwen3-moe", "tiny-gpt-oss", "tiny-gemma2", "tiny-mamba"])
def test_other_families_too(name: str, crews: Crews) -> None:
    """Untied heads, experts that one rank sends nothing to, sinks, soft caps, and sequences that are computed alone."""
    samples, rule = rollouts(), OBJECTIVES["sequence"]
    alone, trainer = crews.trainer(1, model(name)), crews.trainer(2, model(name), max_tokens_per_micro_batch=64)
    assert_same_reports(steps(trainer, samples, rule, 2), steps(alone, samples, rule, 2))
    assert_same_tensors(weights(trainer), weights(alone), 1e-4)


def test_log_probs_are_those_of_one_process(crews: Crews) -> None:
    samples = rollouts()
    wanted, found = (crews.trainer(ranks, model(), max_tokens_per_micro_batch=48).logprobs(samples) for ranks in (1, 2))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


# references and refusals


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_references_are_the_same_on_all_ranks_and_leave_the_policy_as_it_was(
    lora: bool, crews: Crews, tmp_path: Path
) -> None:
    samples, rule = rollouts(), keel.objective("icepop", kl_penalty_coef=0.1)
    reports = []
    for ranks in (1, 2):
        kept = Checkpoints(tmp_path / str(ranks), CheckpointSettings())
        trainer = crews.trainer(ranks, model(lora=lora), max_tokens_per_micro_batch=64)
        first = trainer.step(samples, OBJECTIVES["token"])
        trainer.save(kept, 1)
        trainer.set_references({"base": ReferenceSettings(), "first": ReferenceSettings(source="step:1")}, kept)
        reports.append([first, *steps(trainer, samples, rule, 3)])
    assert_same_reports(reports[1], reports[0])
    drift = reports[1][-1].references
    assert drift["base"].mean != drift["first"].mean


@pytest.mark.parametrize("objective", ["token", "sequence"])
def test_a_sample_that_is_not_finite_is_named_by_all_ranks_and_the_rest_trains(
    objective: str, crews: Crews, tmp_path: Path
) -> None:
    samples, rule = rollouts(), OBJECTIVES[objective]
    ids = np.array(samples[4].token_ids)
    ids[-2] = 250  # no other sample has it
    samples[4] = dataclasses.replace(samples[4], token_ids=ids)
    poisoned, kept = crews.trainer(1, model("tiny-llama-untied")), Checkpoints(tmp_path, CheckpointSettings())
    with torch.no_grad():
        poisoned.model.network.get_input_embeddings().weight[250] = torch.nan
    poisoned.save(kept, 1)
    trainer = crews.trainer(2, model("tiny-llama-untied"), max_tokens_per_micro_batch=64)
    trainer.load(kept, 1)
    with pytest.raises(StepRefused, match="not finite for sample s4") as refusal:
        trainer.step(samples, rule)
    assert refusal.value.samples == [4]
    assert trainer.step(samples[:4] + samples[5:], rule).stepped
    huge = [
        dataclasses.replace(sample, advantage=2e37) if number == 3 else sample for number, sample in enumerate(samples)
    ]
    trainer = crews.trainer(2, model(), max_tokens_per_micro_batch=64)
    before = weights(trainer)
    with pytest.raises(StepRefused, match="gradient is not finite, from sample s3;"):
        trainer.step(huge, keel.objective("reinforce"))
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_what_cannot_act_is_refused(crews: Crews) -> None:
    for setting in ({"ranks": 2}, {"master_weights": True}, {"reduce_dtype": "bfloat16"}, {"rank_timeout": 5.0}):
        with pytest.raises(ConfigError, match=f"trainer.{next(iter(setting))} = .* cannot act"):
            Trainer(model(), TrainerSettings.model_validate(setting))
    with pytest.raises(ConfigError, match="dtype is float32 already"):
        crews.trainer(2, model(), master_weights=True)
    with pytest.raises(ConfigError, match="give their settings"):
        Trainer(crews.trainer(1, model()).model, world=crews.trainer(2, model()).world)


# precision


def test_master_weights_hold_what_bfloat16_would_lose(crews: Crews, tmp_path: Path) -> None:
    samples, rule = rollouts(), OBJECTIVES["sequence"]
    small = {"optimizer": {"lr": 1e-6}, "max_tokens_per_micro_batch": 64}
    plain = crews.trainer(2, model(dtype="bfloat16"), **small)
    losses = [report.loss for report in steps(plain, samples, rule, 2)]
    lost = moved(plain, tmp_path / "plain")
    kept = crews.trainer(2, model(dtype="bfloat16"), master_weights=True, **small)
    assert [report.loss for report in steps(kept, samples, rule, 2)] == pytest.approx(losses, abs=0.02)
    alone = crews.trainer(1, model(dtype="bfloat16"))
    assert alone.step(samples, rule).loss == pytest.approx(losses[0], abs=0.02)
    assert moved(kept, tmp_path / "kept") > 0.9 > 0.5 > lost


def test_adapters_in_float32_on_a_base_in_bfloat16(crews: Crews) -> None:
    samples, rule = rollouts(), OBJECTIVES["sequence"]
    reports = [crews.trainer(ranks, model(dtype="bfloat16", lora=True)).step(samples, rule) for ranks in (1, 2)]
    assert reports[1].stepped and reports[1].loss == pytest.approx(reports[0].loss, abs=0.02)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=0.1)


def moved(trainer: Trainer, folder: Path) -> float:
    """The share of a matrix that training has changed, as its shards on the disk have it."""
    before = transformers.AutoModelForCausalLM.from_pretrained(trainer.model.source.folder, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    trainer.save(Checkpoints(folder, CheckpointSettings()), 1)
    files = sorted((folder / "step_1" / "training" / "shards").iterdir())
    found = [read_tensors(file)[0][f"weight.{name}"].float() for file in files]
    return float((torch.cat(found) != before.state_dict()[name].float()).float().mean())


# checkpoints


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_checkpoint_is_gone_on_with_on_another_number_of_ranks(
    lora: bool, before: int, after: int, crews: Crews, tmp_path: Path
) -> None:
    assert_gone_on_with(crews, before, after, lora, tmp_path)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_going_on_with_as_many_ranks_is_bit_for_bit_not_having_stopped(
    lora: bool, crews: Crews, tmp_path: Path
) -> None:
    samples, rule, kept = rollouts(), OBJECTIVES["token"], Checkpoints(tmp_path, CheckpointSettings())
    trainer = crews.trainer(2, model(lora=lora), max_tokens_per_micro_batch=64)
    steps(trainer, samples, rule, 2)
    trainer.save(kept, 2)
    steps(trainer, samples, rule, 2)
    straight = weights(trainer)
    trainer = crews.trainer(2, model(lora=lora), max_tokens_per_micro_batch=64)
    trainer.load(kept, 2)
    steps(trainer, samples, rule, 2)
    assert all(torch.equal(value, straight[name]) for name, value in weights(trainer).items())


def test_nothing_in_a_checkpoint_of_several_ranks_is_pickled_and_damage_is_found(crews: Crews, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, CheckpointSettings())
    trainer = crews.trainer(2, model())
    trainer.step(rollouts(), OBJECTIVES["token"])
    trainer.save(kept, 1)
    folder = kept.path(1)
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja"}
    shards = sorted((folder / "training" / "shards").iterdir())
    assert len(shards) == 2, "each rank has written its own"
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{shards[1].name} has .* bytes instead of"):
        assert kept.latest() is None


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_checkpoint_of_several_ranks_is_exported(lora: bool, crews: Crews, tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "checkpoints", CheckpointSettings())
    trainer = crews.trainer(2, model(lora=lora))
    steps(trainer, rollouts(), OBJECTIVES["token"], 2)
    trainer.save(kept, 2)
    done = export(kept.path(2), tmp_path / "out")
    assert done.kind == ("adapter" if lora else "full") and done.max_logprob_difference < 1e-4
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if not lora:
        found = network.state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights(trainer).items())
