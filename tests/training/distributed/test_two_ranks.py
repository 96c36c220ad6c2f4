"""Test that the trainer on two real processes has the losses, metrics, weights and errors of one process."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import keel
from keel.config import CheckpointSettings, ReferenceSettings, TrainerSettings
from keel.errors import ConfigError, StepSkippedError
from keel.training import Checkpoints, Trainer
from keel.training.model.export import export
from keel.training.model.optimizer_state import read_tensors
from tests.support.rank_trainers import (
    CASES,
    OBJECTIVES,
    RankPool,
    assert_idle_ranks_take_part,
    assert_matches_one_process,
    assert_resumes_on_other_ranks,
    assert_same_reports,
    assert_same_tensors,
    model,
    rollouts,
    steps,
    weights,
)

pytestmark = pytest.mark.process


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_any_micro_batches_match_one_process(case: str, pool: RankPool, tmp_path: Path) -> None:
    assert_matches_one_process(pool, 2, case, tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_rank_without_a_trainable_token_takes_part(objective: str, pool: RankPool) -> None:
    assert_idle_ranks_take_part(pool, 2, objective)


@pytest.mark.parametrize("name", ["tiny-llama-untied", "tiny-qwen3-moe", "tiny-gpt-oss", "tiny-gemma2", "tiny-mamba"])
def test_two_ranks_match_one_process_for_other_model_families(name: str, pool: RankPool) -> None:
    """Cover untied heads, experts without tokens on one rank, sinks, soft caps and sequential computation."""
    samples, rule = rollouts(), OBJECTIVES["sequence"]
    single, trainer = pool.trainer(1, model(name)), pool.trainer(2, model(name), max_tokens_per_micro_batch=64)
    assert_same_reports(steps(trainer, samples, rule, 2), steps(single, samples, rule, 2))
    assert_same_tensors(weights(trainer), weights(single), 1e-4)


def test_logprobs_match_one_process(pool: RankPool) -> None:
    samples = rollouts()
    single, two_ranks = (
        pool.trainer(ranks, model(), max_tokens_per_micro_batch=48).logprobs(samples) for ranks in (1, 2)
    )
    for actual, expected in zip(two_ranks, single, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


# references and errors


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_references_match_one_process_and_leave_the_policy_unchanged(
    lora: bool, pool: RankPool, tmp_path: Path
) -> None:
    samples, rule = rollouts(), keel.objective("icepop", kl_penalty_coef=0.1)
    reports = []
    for ranks in (1, 2):
        checkpoints = Checkpoints(tmp_path / str(ranks), CheckpointSettings())
        trainer = pool.trainer(ranks, model(lora=lora), max_tokens_per_micro_batch=64)
        first = trainer.step(samples, OBJECTIVES["token"])
        trainer.save(checkpoints, 1)
        trainer.set_references({"base": ReferenceSettings(), "first": ReferenceSettings(source="step:1")}, checkpoints)
        reports.append([first, *steps(trainer, samples, rule, 3)])
    assert_same_reports(reports[1], reports[0])
    kl = reports[1][-1].reference_kl
    assert kl["base"].mean != kl["first"].mean


@pytest.mark.parametrize("objective", ["token", "sequence"])
def test_all_ranks_name_a_non_finite_sample_and_the_others_train(
    objective: str, pool: RankPool, tmp_path: Path
) -> None:
    samples, rule = rollouts(), OBJECTIVES[objective]
    ids = np.array(samples[4].token_ids)
    ids[-2] = 250  # no other sample has it
    samples[4] = dataclasses.replace(samples[4], token_ids=ids)
    poisoned, checkpoints = pool.trainer(1, model("tiny-llama-untied")), Checkpoints(tmp_path, CheckpointSettings())
    with torch.no_grad():
        poisoned.model.network.get_input_embeddings().weight[250] = torch.nan
    poisoned.save(checkpoints, 1)
    trainer = pool.trainer(2, model("tiny-llama-untied"), max_tokens_per_micro_batch=64)
    trainer.load(checkpoints, 1)
    with pytest.raises(StepSkippedError, match="not finite for sample s4") as raised:
        trainer.step(samples, rule)
    assert raised.value.samples == [4]
    assert trainer.step(samples[:4] + samples[5:], rule).stepped
    huge = [
        dataclasses.replace(sample, advantage=2e37) if index == 3 else sample for index, sample in enumerate(samples)
    ]
    trainer = pool.trainer(2, model(), max_tokens_per_micro_batch=64)
    before = weights(trainer)
    with pytest.raises(StepSkippedError, match="gradient is not finite, from sample s3;"):
        trainer.step(huge, keel.objective("reinforce"))
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_settings_without_effect_raise(pool: RankPool) -> None:
    for setting in ({"ranks": 2}, {"master_weights": True}, {"reduce_dtype": "bfloat16"}, {"rank_timeout": 5.0}):
        with pytest.raises(ConfigError, match=f"trainer.{next(iter(setting))} = .* has no effect"):
            Trainer(model(), TrainerSettings.model_validate(setting))
    with pytest.raises(ConfigError, match="dtype is already float32"):
        pool.trainer(2, model(), master_weights=True)
    with pytest.raises(ConfigError, match="pass ModelSettings instead"):
        Trainer(pool.trainer(1, model()).model, world=pool.trainer(2, model()).world)


# precision


def test_master_weights_keep_updates_that_bfloat16_would_lose(pool: RankPool, tmp_path: Path) -> None:
    samples, rule = rollouts(), OBJECTIVES["sequence"]
    small = {"optimizer": {"lr": 1e-6}, "max_tokens_per_micro_batch": 64}
    plain = pool.trainer(2, model(dtype="bfloat16"), **small)
    losses = [report.loss for report in steps(plain, samples, rule, 2)]
    plain_fraction = changed_fraction(plain, tmp_path / "plain")
    master = pool.trainer(2, model(dtype="bfloat16"), master_weights=True, **small)
    assert [report.loss for report in steps(master, samples, rule, 2)] == pytest.approx(losses, abs=0.02)
    single = pool.trainer(1, model(dtype="bfloat16"))
    assert single.step(samples, rule).loss == pytest.approx(losses[0], abs=0.02)
    assert changed_fraction(master, tmp_path / "master") > 0.9 > 0.5 > plain_fraction


def test_float32_adapters_train_on_a_bfloat16_base(pool: RankPool) -> None:
    samples, rule = rollouts(), OBJECTIVES["sequence"]
    reports = [pool.trainer(ranks, model(dtype="bfloat16", lora=True)).step(samples, rule) for ranks in (1, 2)]
    assert reports[1].stepped and reports[1].loss == pytest.approx(reports[0].loss, abs=0.02)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=0.1)


def changed_fraction(trainer: Trainer, folder: Path) -> float:
    """Return the fraction of a matrix that training has changed, read from its shards on disk."""
    before = transformers.AutoModelForCausalLM.from_pretrained(trainer.model.source.folder, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    trainer.save(Checkpoints(folder, CheckpointSettings()), 1)
    files = sorted((folder / "step_1" / "training" / "shards").iterdir())
    shards = [read_tensors(file)[0][f"weight.{name}"].float() for file in files]
    return float((torch.cat(shards) != before.state_dict()[name].float()).float().mean())


# checkpoints


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    lora: bool, before: int, after: int, pool: RankPool, tmp_path: Path
) -> None:
    assert_resumes_on_other_ranks(pool, before, after, lora, tmp_path)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_resuming_on_the_same_number_of_ranks_is_bit_identical(lora: bool, pool: RankPool, tmp_path: Path) -> None:
    samples, rule, checkpoints = rollouts(), OBJECTIVES["token"], Checkpoints(tmp_path, CheckpointSettings())
    trainer = pool.trainer(2, model(lora=lora), max_tokens_per_micro_batch=64)
    steps(trainer, samples, rule, 2)
    trainer.save(checkpoints, 2)
    steps(trainer, samples, rule, 2)
    uninterrupted = weights(trainer)
    trainer = pool.trainer(2, model(lora=lora), max_tokens_per_micro_batch=64)
    trainer.load(checkpoints, 2)
    steps(trainer, samples, rule, 2)
    assert all(torch.equal(value, uninterrupted[name]) for name, value in weights(trainer).items())


def test_a_checkpoint_of_several_ranks_has_no_pickle_and_damage_is_detected(pool: RankPool, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointSettings())
    trainer = pool.trainer(2, model())
    trainer.step(rollouts(), OBJECTIVES["token"])
    trainer.save(checkpoints, 1)
    folder = checkpoints.path(1)
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja"}
    shards = sorted((folder / "training" / "shards").iterdir())
    assert len(shards) == 2, "each rank writes its own"
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{shards[1].name} has .* bytes instead of"):
        assert checkpoints.latest() is None


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_checkpoint_of_several_ranks_can_be_exported(lora: bool, pool: RankPool, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointSettings())
    trainer = pool.trainer(2, model(lora=lora))
    steps(trainer, rollouts(), OBJECTIVES["token"], 2)
    trainer.save(checkpoints, 2)
    result = export(checkpoints.path(2), tmp_path / "out")
    assert result.kind == ("adapter" if lora else "full") and result.max_logprob_difference < 1e-4
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if not lora:
        state = network.state_dict()
        assert all(torch.equal(state[name], value) for name, value in weights(trainer).items())
