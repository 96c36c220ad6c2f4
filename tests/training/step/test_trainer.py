"""The trainer: it learns, it accounts for every token, and what it refuses leaves everything as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import keel
from keel.config import CheckpointSettings, LoraSettings, TrainerSettings
from keel.errors import BatchError, ConfigError, SignalRefused, StepRefused
from keel.training import Checkpoints, Model, Sample, Trainer
from tests.support.policy_strategies import LORA, branching_samples, own_logprobs, tiny

OPEN = keel.objective("icepop", ratio_low=0.0, ratio_high=1e9)
"""Refuses nothing."""
WHOLE = keel.objective("gspo", eps=100.0, eps_high=100.0)
"""Needs the whole step first, and clips nothing."""


def trainer_of(model: Model | None = None, **settings: Any) -> Trainer:
    given = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}} | settings
    return Trainer(model or tiny(), TrainerSettings.model_validate(given))


def on_policy(model: Model, samples: list[Sample]) -> list[Sample]:
    """The samples as if the model had just sampled them."""
    made = []
    for sample in samples:
        recorded = np.zeros(len(sample))
        with torch.no_grad():
            recorded[np.asarray(sample.trainable)] = own_logprobs(model, sample).double().numpy()
        made.append(replace(sample, sampler_logprobs=recorded))
    return made


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Every bit that a step could move."""
    found: dict[str, Any] = {name: weight.detach().clone() for name, weight in trainer.model.network.named_parameters()}
    for place, moments in enumerate(trainer.optimizer.state.values()):
        found |= {f"{place} {name}": torch.as_tensor(value).clone() for name, value in moments.items()}
    return found | {"steps": torch.tensor(trainer.steps)}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def no_gradients(trainer: Trainer) -> bool:
    return all(weight.grad is None for weight in trainer.model.network.parameters())


# learning


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_few_steps_raise_what_was_good_and_lower_what_was_bad(lora: LoraSettings | None) -> None:
    model = tiny(lora=lora)
    samples = on_policy(model, branching_samples(temperature=1.0)[:9])
    samples = [replace(one, advantage=1.0 if number % 2 else -1.0) for number, one in enumerate(samples)]
    trainer = trainer_of(model, optimizer={"lr": 5e-3 if lora else 5e-4})
    before = trainer.logprobs(samples)
    reports = [trainer.step(samples, "icepop") for _ in range(4)]
    change = [float((now - old).nanmean()) for old, now in zip(before, trainer.logprobs(samples), strict=True)]
    assert all(report.stepped for report in reports) and trainer.steps == 4
    assert min(change[1::2]) > 0.05 and max(change[::2]) < -0.05
    assert reports[-1].loss < reports[0].loss


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_a_model_in_half_precision_shares_tokens_and_learns_from_float32_logprobs(name: str) -> None:
    trainer, samples = trainer_of(tiny(name, dtype="bfloat16")), branching_samples()
    assert trainer.forward.packing == "shared"
    exact = torch.cat([found[~found.isnan()] for found in trainer_of(tiny(name)).logprobs(samples)])
    report = trainer.step(samples, OPEN)
    assert report.stepped and report.tokens.logprobs.dtype == torch.float32
    assert float((report.tokens.logprobs - exact).abs().mean()) < 0.05


def test_the_first_step_is_the_closed_form_of_adamw() -> None:
    trainer = trainer_of(max_grad_norm=None, optimizer={"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6})
    before = {name: weight.detach().clone() for name, weight in trainer.model.parameters().items()}
    seen: dict[str, Tensor] = {}
    real = trainer.optimizer.step

    def keep() -> None:
        seen.update({name: weight.grad.clone() for name, weight in trainer.model.parameters().items()})
        real()

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    trainer.step(branching_samples(), OPEN)
    for name, weight in trainer.model.parameters().items():
        decay = 0.1 if weight.dim() > 1 else 0.0
        wanted = before[name] * (1 - 1e-3 * decay) - 1e-3 * seen[name] / (seen[name].abs() + 1e-6)
        torch.testing.assert_close(weight.detach(), wanted, rtol=1e-5, atol=1e-7)


def test_gradients_are_clipped_to_their_norm_and_no_further() -> None:
    samples, norms, given = branching_samples(), {}, {}
    for limit in (None, 0.01, 1e6):
        trainer = trainer_of(max_grad_norm=limit)

        def keep(trainer: Trainer = trainer, limit: float | None = limit) -> None:
            given[limit] = torch.cat([weight.grad.flatten() for weight in trainer.model.parameters().values()])

        trainer.optimizer.step = keep  # type: ignore[method-assign]
        norms[limit] = trainer.step(samples, OPEN).grad_norm
    assert norms[None] == norms[0.01] == norms[1e6] == pytest.approx(float(given[None].norm()), rel=1e-5)
    assert torch.equal(given[None], given[1e6])
    torch.testing.assert_close(given[0.01], given[None] * 0.01 / norms[None])


def test_the_rate_is_that_of_the_optimizer_steps_that_were_taken() -> None:
    schedule = {"lr": 1e-3, "warmup_steps": 1, "lr_schedule": "linear", "total_steps": 5}
    trainer, samples = trainer_of(optimizer=schedule), branching_samples()
    nothing = [replace(sample, advantage=0.0) for sample in samples]
    rates = []
    for step in (samples, nothing, samples, nothing, samples):
        report = trainer.step(step, OPEN)
        rates += [report.lr] if report.stepped else []
    assert rates == pytest.approx([5e-4, 1e-3, 7.5e-4]) and trainer.steps == 3
    assert all(group["lr"] == rates[-1] for group in trainer.optimizer.param_groups)


# nothing to learn


NOTHING = {
    "no sample has a trainable token": lambda one: replace(one, trainable=np.zeros(len(one), bool)),
    "every token was refused by the objective": lambda one: replace(one, sampler_logprobs=np.full(len(one), -50.0)),
    "no token has a gradient": lambda one: replace(one, advantage=0.0),
}


@pytest.mark.parametrize("rule", ["icepop", "veto"])
@pytest.mark.parametrize("why", NOTHING)
def test_a_step_without_anything_to_learn_moves_nothing_and_says_why(why: str, rule: str) -> None:
    parameters = {"gates": [{"statistic": "ratio", "low": 0.2, "high": 5.0}]} if rule == "veto" else {}
    trainer, samples = trainer_of(), branching_samples()
    trainer.step(samples, OPEN)
    before = state_of(trainer)
    assert len(before) > 3
    report = trainer.step([NOTHING[why](sample) for sample in samples], keel.objective(rule, **parameters))
    assert not report.stepped and report.skip_reason == why and report.grad_norm == 0.0
    assert same(state_of(trainer), before) and no_gradients(trainer)
    assert trainer.step(samples, OPEN).stepped


def test_a_step_without_samples_moves_nothing() -> None:
    trainer = trainer_of()
    before = state_of(trainer)
    report = trainer.step([], OPEN)
    assert not report.stepped and report.skip_reason == "no sample has a trainable token"
    assert same(state_of(trainer), before)


# not finite


RULES = pytest.mark.parametrize("rule", [OPEN, WHOLE], ids=["token-local", "whole"])


@RULES
@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_a_sample_whose_logprobs_are_not_finite_is_named_and_only_that(rule: keel.Objective, max_tokens: int) -> None:
    samples = branching_samples()
    ids = np.array(samples[4].token_ids)
    ids[-2] = 250  # no other sample has it
    samples[4] = replace(samples[4], token_ids=ids)
    model = tiny("tiny-llama-untied")
    trainer = trainer_of(model, max_tokens_per_micro_batch=max_tokens)
    trainer.step(samples, rule)
    with torch.no_grad():
        model.network.get_input_embeddings().weight[250] = torch.nan
    before = state_of(trainer)
    with pytest.raises(StepRefused, match="not finite for sample s4") as refusal:
        trainer.step(samples, rule)
    assert refusal.value.samples == [4]
    after = state_of(trainer)
    assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before)
    assert no_gradients(trainer)
    assert trainer.step(samples[:4] + samples[5:], rule).stepped


@RULES
@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_a_sample_whose_gradient_is_not_finite_is_named_and_only_that(rule: keel.Objective, max_tokens: int) -> None:
    samples = branching_samples()
    samples[3] = replace(samples[3], advantage=2e37, name="")
    trainer = trainer_of(max_tokens_per_micro_batch=max_tokens)
    before = state_of(trainer)
    with pytest.raises(StepRefused, match="gradient is not finite, from sample number 3;") as refusal:
        trainer.step(samples, rule)
    assert refusal.value.samples == [3]
    assert same(state_of(trainer), before) and no_gradients(trainer)
    assert trainer.step(samples[:3] + samples[4:], rule).stepped


@RULES
def test_a_step_with_too_many_unusable_records_is_refused_and_moves_nothing(rule: keel.Objective) -> None:
    samples = branching_samples()
    samples[2] = replace(samples[2], sampler_logprobs=np.full(len(samples[2]), np.nan))
    trainer = trainer_of()
    before = state_of(trainer)
    with pytest.raises(SignalRefused):
        trainer.step(samples, rule)
    assert same(state_of(trainer), before) and no_gradients(trainer)


def test_an_infinite_head_names_every_sample() -> None:
    trainer = trainer_of(tiny("tiny-llama-untied"))
    with torch.no_grad():
        trainer.model.network.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(StepRefused, match=r"samples s0, s1, .* and 4 more") as refusal:
        trainer.step(branching_samples(), OPEN)
    assert refusal.value.samples == list(range(12))


# log-probs and refusals


def test_logprobs_are_given_at_trainable_tokens_at_the_temperature_of_the_sample() -> None:
    model, samples = tiny(dtype="float64"), branching_samples()
    for sample, found in zip(samples, trainer_of(model).logprobs(samples), strict=True):
        assert found.shape == (len(sample),)
        assert torch.equal(found.isnan(), ~torch.tensor(sample.trainable))
        torch.testing.assert_close(found[torch.tensor(sample.trainable)], own_logprobs(model, sample).detach())


def test_a_sample_over_the_budget_or_with_an_unknown_token_is_refused_before_anything_moves() -> None:
    trainer = trainer_of(max_tokens_per_micro_batch=40)
    before = state_of(trainer)
    long = Sample(
        token_ids=np.arange(42), trainable=np.arange(42) > 3, advantage=1.0, name="long", sampler_logprobs=np.zeros(42)
    )
    with pytest.raises(ConfigError, match=r"sample long has 41 tokens .*max_tokens_per_micro_batch = 40"):
        trainer.step([long], OPEN)
    odd = replace(long, token_ids=np.full(42, 999), trainable=np.arange(42) == 5, name="odd")
    with pytest.raises(ConfigError, match="sample odd has token id 999"):
        trainer.logprobs([odd])
    assert same(state_of(trainer), before)


def test_a_step_of_fewer_groups_than_updates_has_an_update_for_each_group() -> None:
    trainer = trainer_of(optimizer_steps=4)
    assert trainer.step(branching_samples(), OPEN).steps == trainer.steps == 3


# the report


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("rule", ["icepop", "opsm"])
def test_every_trainable_token_is_in_the_account_once_with_its_reason(rule: str, updates: int) -> None:
    model, samples = tiny(), branching_samples()
    chance = np.random.default_rng(0)
    samples = [
        replace(one, sampler_logprobs=np.asarray(one.sampler_logprobs) + 2 * chance.normal(size=len(one)))
        for one in on_policy(model, samples)
    ]
    report = trainer_of(model, optimizer_steps=updates).step(samples, rule)
    account = report.tokens
    places = [(number, place) for number, one in enumerate(samples) for place in np.flatnonzero(one.trainable)]
    assert list(zip(account.sample.tolist(), account.position.tolist(), strict=True)) == places
    assert report.samples == len(samples) and report.kept_tokens == int((account.reasons == 0).sum())
    assert 0 < report.kept_tokens < len(account)
    assert not account.dloss_dlogprob[account.reasons != 0].any() and account.dloss_dlogprob[account.reasons == 0].any()
    assert set(account.reasons.tolist()) <= set(range(len(report.reasons)))
    mine = account.for_sample(3)
    assert mine["position"].tolist() == np.flatnonzero(samples[3].trainable).tolist()
    if updates == 1:
        result = keel.objective(rule)(_batch(samples, account.logprobs))
        assert torch.equal(account.reasons, result.reasons)
        torch.testing.assert_close(account.dloss_dlogprob, result.gradient)
        assert report.loss == pytest.approx(float(result.loss), rel=1e-5)


def _batch(samples: list[Sample], logprobs: Tensor) -> keel.TokenBatch:
    flat = {
        name: torch.tensor(np.concatenate([np.asarray(getattr(one, name))[one.trainable] for one in samples])).float()
        for name in ("sampler_logprobs", "advantage")
    }
    counts = torch.tensor([int(np.sum(one.trainable)) for one in samples])
    return keel.TokenBatch(
        logprobs=logprobs,
        sampler_logprobs=flat["sampler_logprobs"],
        advantages=flat["advantage"],
        trainable=torch.ones(len(logprobs), dtype=torch.bool),
        sequence=torch.arange(len(samples)).repeat_interleave(counts),
    )


def test_shared_tokens_are_counted_once_and_the_report_says_what_was_saved() -> None:
    samples = branching_samples()
    shared, plain = (trainer_of(share_prefixes=share).step(samples, OPEN) for share in (True, False))
    distinct = {tuple(one.inputs[: size + 1].tolist()) for one in samples for size in range(len(one.inputs))}
    assert shared.computed_tokens == len(distinct) < shared.unshared_tokens
    assert plain.computed_tokens == plain.unshared_tokens == shared.unshared_tokens
    numbers = shared.scalars()
    assert numbers["computed_tokens"] == len(distinct) and numbers["loss/policy"] == pytest.approx(shared.loss)
    assert numbers["steps"] == 1 and numbers["grad_norm"] == shared.grad_norm


# the same again


def _run(trainer: Trainer, steps: range) -> list[float]:
    samples = branching_samples()
    return [trainer.step(samples, WHOLE if step % 2 else OPEN).loss for step in steps]


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_two_runs_are_the_same_to_the_bit_and_so_is_one_that_was_saved_and_loaded(
    lora: LoraSettings | None, tmp_path: Path
) -> None:
    settings = {
        "optimizer": {"lr": 1e-2, "lr_schedule": "cosine", "total_steps": 6, "warmup_steps": 2},
        "max_tokens_per_micro_batch": 64,
    }
    first, second = (trainer_of(tiny(lora=lora), **settings) for _ in range(2))
    checkpoints = Checkpoints(tmp_path, CheckpointSettings())
    losses = _run(first, range(4))
    assert _run(second, range(2)) == losses[:2]
    second.save(checkpoints, 2, {"next": 2})
    third = trainer_of(tiny(lora=lora), **settings)
    assert third.load(checkpoints, 2) == {"next": 2} and third.steps == 2
    assert _run(second, range(2, 4)) == losses[2:] == _run(third, range(2, 4))
    assert same(state_of(first), state_of(second)) and same(state_of(first), state_of(third))


def test_generation_is_the_models_own_before_and_after_a_step() -> None:
    model, prompt = tiny("tiny-gemma2"), torch.tensor([[1, 2, 3]])

    def generate() -> list[int]:
        given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
        return model.network.generate(prompt, **given)[0].tolist()

    before = generate()
    trainer = trainer_of(model)
    report = trainer.step([replace(one, advantage=0.0) for one in branching_samples()], OPEN)
    assert not report.stepped and generate() == before


def test_a_teacher_scores_samples_that_bring_no_logprobs_of_one() -> None:
    samples = branching_samples()
    rule = keel.objective("icepop", ratio_low=0.0, ratio_high=1e9, teacher_tau=0.5)
    brought = trainer_of(tiny("tiny-qwen3")).logprobs(samples)
    given = [replace(one, teacher_logprobs=found.nan_to_num(9.0)) for one, found in zip(samples, brought, strict=True)]
    taught = Trainer(tiny(), teacher=tiny("tiny-qwen3")).step(samples, rule).tokens.dloss_dlogprob
    torch.testing.assert_close(taught, trainer_of().step(given, rule).tokens.dloss_dlogprob)
    assert not torch.allclose(taught, trainer_of().step(samples, OPEN).tokens.dloss_dlogprob)
    with pytest.raises(BatchError, match="teacher"):
        trainer_of().step(samples, rule)
