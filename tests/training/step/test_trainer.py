"""Test that the trainer learns, reports on every token, and leaves its state unchanged when a step raises."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import keel
from keel.config import CheckpointSettings, LoraSettings, TrainerSettings
from keel.errors import BatchError, ConfigError, InvalidSignalError, StepSkippedError
from keel.training import Checkpoints, Model, Sample, Trainer
from tests.support.policy_strategies import LORA, branching_samples, own_logprobs, tiny

NO_DROPS = keel.objective("icepop", ratio_low=0.0, ratio_high=1e9)
"""An objective that drops no token."""
NEEDS_FULL_STEP = keel.objective("gspo", eps=100.0, eps_high=100.0)
"""An objective that is not token-local and clips nothing."""


def make_trainer(model: Model | None = None, **settings: Any) -> Trainer:
    values = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}} | settings
    return Trainer(model or tiny(), TrainerSettings.model_validate(values))


def on_policy(model: Model, samples: list[Sample]) -> list[Sample]:
    """Return the samples with the model's own log-probs as the sampler's."""
    result = []
    for sample in samples:
        recorded = np.zeros(len(sample))
        with torch.no_grad():
            recorded[np.asarray(sample.trainable)] = own_logprobs(model, sample).double().numpy()
        result.append(replace(sample, sampler_logprobs=recorded))
    return result


def training_state(trainer: Trainer) -> dict[str, Any]:
    """Return a copy of everything a step could change: weights, moments and step count."""
    state: dict[str, Any] = {name: weight.detach().clone() for name, weight in trainer.model.network.named_parameters()}
    for index, moments in enumerate(trainer.optimizer.state.values()):
        state |= {f"{index} {name}": torch.as_tensor(value).clone() for name, value in moments.items()}
    return state | {"steps": torch.tensor(trainer.steps)}


def equal_states(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def has_no_gradients(trainer: Trainer) -> bool:
    return all(weight.grad is None for weight in trainer.model.network.parameters())


# learning


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_few_steps_raise_logprobs_with_positive_advantage_and_lower_the_others(lora: LoraSettings | None) -> None:
    model = tiny(lora=lora)
    samples = on_policy(model, branching_samples(temperature=1.0)[:9])
    samples = [replace(sample, advantage=1.0 if index % 2 else -1.0) for index, sample in enumerate(samples)]
    trainer = make_trainer(model, optimizer={"lr": 5e-3 if lora else 5e-4})
    before = trainer.logprobs(samples)
    reports = [trainer.step(samples, "icepop") for _ in range(4)]
    change = [float((now - old).nanmean()) for old, now in zip(before, trainer.logprobs(samples), strict=True)]
    assert all(report.stepped for report in reports) and trainer.steps == 4
    assert min(change[1::2]) > 0.05 and max(change[::2]) < -0.05
    assert reports[-1].loss < reports[0].loss


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_a_half_precision_model_shares_prefixes_and_trains_on_float32_logprobs(name: str) -> None:
    trainer, samples = make_trainer(tiny(name, dtype="bfloat16")), branching_samples()
    assert trainer.forward.packing == "shared"
    exact = torch.cat([logprobs[~logprobs.isnan()] for logprobs in make_trainer(tiny(name)).logprobs(samples)])
    report = trainer.step(samples, NO_DROPS)
    assert report.stepped and report.tokens.logprobs.dtype == torch.float32
    assert float((report.tokens.logprobs - exact).abs().mean()) < 0.05


def test_the_first_step_matches_the_closed_form_of_adamw() -> None:
    trainer = make_trainer(max_grad_norm=None, optimizer={"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6})
    before = {name: weight.detach().clone() for name, weight in trainer.model.parameters().items()}
    grads: dict[str, Tensor] = {}
    original = trainer.optimizer.step

    def capture() -> None:
        grads.update({name: weight.grad.clone() for name, weight in trainer.model.parameters().items()})
        original()

    trainer.optimizer.step = capture  # type: ignore[method-assign]
    trainer.step(branching_samples(), NO_DROPS)
    for name, weight in trainer.model.parameters().items():
        decay = 0.1 if weight.dim() > 1 else 0.0
        expected = before[name] * (1 - 1e-3 * decay) - 1e-3 * grads[name] / (grads[name].abs() + 1e-6)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_clipped_to_max_grad_norm_only_if_they_exceed_it() -> None:
    samples, norms, grads = branching_samples(), {}, {}
    for limit in (None, 0.01, 1e6):
        trainer = make_trainer(max_grad_norm=limit)

        def capture(trainer: Trainer = trainer, limit: float | None = limit) -> None:
            grads[limit] = torch.cat([weight.grad.flatten() for weight in trainer.model.parameters().values()])

        trainer.optimizer.step = capture  # type: ignore[method-assign]
        norms[limit] = trainer.step(samples, NO_DROPS).grad_norm
    assert norms[None] == norms[0.01] == norms[1e6] == pytest.approx(float(grads[None].norm()), rel=1e-5)
    assert torch.equal(grads[None], grads[1e6])
    torch.testing.assert_close(grads[0.01], grads[None] * 0.01 / norms[None])


def test_the_learning_rate_follows_the_optimizer_steps_taken() -> None:
    schedule = {"lr": 1e-3, "warmup_steps": 1, "lr_schedule": "linear", "total_steps": 5}
    trainer, samples = make_trainer(optimizer=schedule), branching_samples()
    no_signal = [replace(sample, advantage=0.0) for sample in samples]
    rates = []
    for step in (samples, no_signal, samples, no_signal, samples):
        report = trainer.step(step, NO_DROPS)
        rates += [report.lr] if report.stepped else []
    assert rates == pytest.approx([5e-4, 1e-3, 7.5e-4]) and trainer.steps == 3
    assert all(group["lr"] == rates[-1] for group in trainer.optimizer.param_groups)


# steps without a gradient


WITHOUT_GRADIENT = {
    "no sample has a trainable token": lambda sample: replace(sample, trainable=np.zeros(len(sample), bool)),
    "every token was dropped by the objective": lambda sample: replace(
        sample, sampler_logprobs=np.full(len(sample), -50.0)
    ),
    "no token has a gradient": lambda sample: replace(sample, advantage=0.0),
}


@pytest.mark.parametrize("rule", ["icepop", "veto"])
@pytest.mark.parametrize("reason", WITHOUT_GRADIENT)
def test_a_step_without_a_gradient_changes_nothing_and_reports_why(reason: str, rule: str) -> None:
    parameters = {"gates": [{"statistic": "ratio", "low": 0.2, "high": 5.0}]} if rule == "veto" else {}
    trainer, samples = make_trainer(), branching_samples()
    trainer.step(samples, NO_DROPS)
    before = training_state(trainer)
    assert len(before) > 3
    without_gradient = [WITHOUT_GRADIENT[reason](sample) for sample in samples]
    report = trainer.step(without_gradient, keel.objective(rule, **parameters))
    assert not report.stepped and report.skip_reason == reason and report.grad_norm == 0.0
    assert equal_states(training_state(trainer), before) and has_no_gradients(trainer)
    assert trainer.step(samples, NO_DROPS).stepped


@pytest.mark.parametrize("reduction", [{}, {"reduction": "sequences"}, {"reduction": "constant", "length": 8}])
def test_a_penalty_on_dropped_tokens_has_no_gradient_if_no_token_is_kept_in_the_divisor(
    reduction: dict[str, Any],
) -> None:
    trainer = make_trainer()
    dropped = [WITHOUT_GRADIENT["every token was dropped by the objective"](sample) for sample in branching_samples()]
    ratio_gate = [{"statistic": "ratio", "low": 0.2, "high": 5.0}]
    report = trainer.step(dropped, keel.objective("ipo", denominator="kept", gates=ratio_gate, **reduction))
    assert not report.stepped and report.skip_reason == "every token was dropped by the objective"
    assert (report.loss, report.grad_norm) == (0.0, 0.0)


def test_a_step_without_samples_changes_nothing() -> None:
    trainer = make_trainer()
    before = training_state(trainer)
    report = trainer.step([], NO_DROPS)
    assert not report.stepped and report.skip_reason == "no sample has a trainable token"
    assert equal_states(training_state(trainer), before)


# non-finite values


RULES = pytest.mark.parametrize("rule", [NO_DROPS, NEEDS_FULL_STEP], ids=["token-local", "full-step"])


@RULES
@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_the_error_names_only_the_sample_with_non_finite_logprobs(rule: keel.Objective, max_tokens: int) -> None:
    samples = branching_samples()
    ids = np.array(samples[4].token_ids)
    ids[-2] = 250  # no other sample has it
    samples[4] = replace(samples[4], token_ids=ids)
    model = tiny("tiny-llama-untied")
    trainer = make_trainer(model, max_tokens_per_micro_batch=max_tokens)
    trainer.step(samples, rule)
    with torch.no_grad():
        model.network.get_input_embeddings().weight[250] = torch.nan
    before = training_state(trainer)
    with pytest.raises(StepSkippedError, match="not finite for sample s4") as raised:
        trainer.step(samples, rule)
    assert raised.value.samples == [4]
    after = training_state(trainer)
    assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before)
    assert has_no_gradients(trainer)
    assert trainer.step(samples[:4] + samples[5:], rule).stepped


@RULES
@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_the_error_names_only_the_sample_with_a_non_finite_gradient(rule: keel.Objective, max_tokens: int) -> None:
    samples = branching_samples()
    samples[3] = replace(samples[3], advantage=2e37, name="")
    trainer = make_trainer(max_tokens_per_micro_batch=max_tokens)
    before = training_state(trainer)
    with pytest.raises(StepSkippedError, match="gradient is not finite, from sample number 3;") as raised:
        trainer.step(samples, rule)
    assert raised.value.samples == [3]
    assert equal_states(training_state(trainer), before) and has_no_gradients(trainer)
    assert trainer.step(samples[:3] + samples[4:], rule).stepped


@RULES
def test_a_step_with_too_many_invalid_logprobs_raises_and_changes_nothing(rule: keel.Objective) -> None:
    samples = branching_samples()
    samples[2] = replace(samples[2], sampler_logprobs=np.full(len(samples[2]), np.nan))
    trainer = make_trainer()
    before = training_state(trainer)
    with pytest.raises(InvalidSignalError):
        trainer.step(samples, rule)
    assert equal_states(training_state(trainer), before) and has_no_gradients(trainer)


def test_the_error_for_a_non_finite_head_names_every_sample() -> None:
    trainer = make_trainer(tiny("tiny-llama-untied"))
    with torch.no_grad():
        trainer.model.network.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(StepSkippedError, match=r"samples s0, s1, .* and 4 more") as raised:
        trainer.step(branching_samples(), NO_DROPS)
    assert raised.value.samples == list(range(12))


# log-probs and invalid samples


def test_logprobs_are_computed_for_trainable_tokens_at_the_temperature_of_the_sample() -> None:
    model, samples = tiny(dtype="float64"), branching_samples()
    for sample, logprobs in zip(samples, make_trainer(model).logprobs(samples), strict=True):
        assert logprobs.shape == (len(sample),)
        assert torch.equal(logprobs.isnan(), ~torch.tensor(sample.trainable))
        torch.testing.assert_close(logprobs[torch.tensor(sample.trainable)], own_logprobs(model, sample).detach())


def test_a_sample_that_is_too_long_or_has_an_unknown_token_raises_before_anything_changes() -> None:
    trainer = make_trainer(max_tokens_per_micro_batch=40)
    before = training_state(trainer)
    long = Sample(
        token_ids=np.arange(42), trainable=np.arange(42) > 3, advantage=1.0, name="long", sampler_logprobs=np.zeros(42)
    )
    with pytest.raises(ConfigError, match=r"sample long has 41 tokens .*max_tokens_per_micro_batch = 40"):
        trainer.step([long], NO_DROPS)
    invalid = replace(long, token_ids=np.full(42, 999), trainable=np.arange(42) == 5, name="invalid")
    with pytest.raises(ConfigError, match="sample invalid has token id 999"):
        trainer.logprobs([invalid])
    assert equal_states(training_state(trainer), before)


def test_with_fewer_groups_than_optimizer_steps_each_group_gets_one() -> None:
    trainer = make_trainer(optimizer_steps=4)
    assert trainer.step(branching_samples(), NO_DROPS).steps == trainer.steps == 3


# the report


@pytest.mark.parametrize("optimizer_steps", [1, 2])
@pytest.mark.parametrize("rule", ["icepop", "opsm"])
def test_the_report_has_every_trainable_token_once_with_its_reason(rule: str, optimizer_steps: int) -> None:
    model, samples = tiny(), branching_samples()
    rng = np.random.default_rng(0)
    samples = [
        replace(sample, sampler_logprobs=np.asarray(sample.sampler_logprobs) + 2 * rng.normal(size=len(sample)))
        for sample in on_policy(model, samples)
    ]
    report = make_trainer(model, optimizer_steps=optimizer_steps).step(samples, rule)
    tokens = report.tokens
    expected = [(index, position) for index, s in enumerate(samples) for position in np.flatnonzero(s.trainable)]
    assert list(zip(tokens.sample.tolist(), tokens.position.tolist(), strict=True)) == expected
    assert report.samples == len(samples) and report.kept_tokens == int((tokens.reasons == 0).sum())
    assert 0 < report.kept_tokens < len(tokens)
    assert not tokens.dloss_dlogprob[tokens.reasons != 0].any() and tokens.dloss_dlogprob[tokens.reasons == 0].any()
    assert set(tokens.reasons.tolist()) <= set(range(len(report.reasons)))
    columns = tokens.for_sample(3)
    assert columns["position"].tolist() == np.flatnonzero(samples[3].trainable).tolist()
    if optimizer_steps == 1:
        result = keel.objective(rule)(_batch(samples, tokens.logprobs))
        assert torch.equal(tokens.reasons, result.reasons)
        torch.testing.assert_close(tokens.dloss_dlogprob, result.gradient)
        assert report.loss == pytest.approx(float(result.loss), rel=1e-5)


def _batch(samples: list[Sample], logprobs: Tensor) -> keel.TokenBatch:
    flat = {
        name: torch.tensor(np.concatenate([np.asarray(getattr(s, name))[s.trainable] for s in samples])).float()
        for name in ("sampler_logprobs", "advantage")
    }
    counts = torch.tensor([int(np.sum(sample.trainable)) for sample in samples])
    return keel.TokenBatch(
        logprobs=logprobs,
        sampler_logprobs=flat["sampler_logprobs"],
        advantages=flat["advantage"],
        trainable=torch.ones(len(logprobs), dtype=torch.bool),
        sequence=torch.arange(len(samples)).repeat_interleave(counts),
    )


def test_the_report_counts_shared_tokens_once_and_has_the_unshared_count() -> None:
    samples = branching_samples()
    shared, unshared = (make_trainer(share_prefixes=share).step(samples, NO_DROPS) for share in (True, False))
    prefixes = {tuple(s.inputs[: size + 1].tolist()) for s in samples for size in range(len(s.inputs))}
    assert shared.computed_tokens == len(prefixes) < shared.unshared_tokens
    assert unshared.computed_tokens == unshared.unshared_tokens == shared.unshared_tokens
    scalars = shared.scalars()
    assert scalars["computed_tokens"] == len(prefixes) and scalars["loss/policy"] == pytest.approx(shared.loss)
    assert scalars["steps"] == 1 and scalars["grad_norm"] == shared.grad_norm


# reproducibility


def _run(trainer: Trainer, steps: range) -> list[float]:
    samples = branching_samples()
    return [trainer.step(samples, NEEDS_FULL_STEP if step % 2 else NO_DROPS).loss for step in steps]


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_two_runs_are_bit_identical_and_so_is_one_resumed_from_a_checkpoint(
    lora: LoraSettings | None, tmp_path: Path
) -> None:
    settings = {
        "optimizer": {"lr": 1e-2, "lr_schedule": "cosine", "total_steps": 6, "warmup_steps": 2},
        "max_tokens_per_micro_batch": 64,
    }
    first, second = (make_trainer(tiny(lora=lora), **settings) for _ in range(2))
    checkpoints = Checkpoints(tmp_path, CheckpointSettings())
    losses = _run(first, range(4))
    assert _run(second, range(2)) == losses[:2]
    second.save(checkpoints, 2, {"next": 2})
    third = make_trainer(tiny(lora=lora), **settings)
    assert third.load(checkpoints, 2) == {"next": 2} and third.steps == 2
    assert _run(second, range(2, 4)) == losses[2:] == _run(third, range(2, 4))
    assert equal_states(training_state(first), training_state(second)) and equal_states(
        training_state(first), training_state(third)
    )


def test_a_step_without_gradient_does_not_change_generation() -> None:
    model, prompt = tiny("tiny-gemma2"), torch.tensor([[1, 2, 3]])

    def generate() -> list[int]:
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
        return model.network.generate(prompt, **options)[0].tolist()

    before = generate()
    trainer = make_trainer(model)
    report = trainer.step([replace(sample, advantage=0.0) for sample in branching_samples()], NO_DROPS)
    assert not report.stepped and generate() == before


def test_the_teacher_scores_samples_without_teacher_logprobs() -> None:
    samples = branching_samples()
    rule = keel.objective("icepop", ratio_low=0.0, ratio_high=1e9, teacher_tau=0.5)
    teacher_logprobs = make_trainer(tiny("tiny-qwen3")).logprobs(samples)
    recorded = [
        replace(sample, teacher_logprobs=logprobs.nan_to_num(9.0))
        for sample, logprobs in zip(samples, teacher_logprobs, strict=True)
    ]
    gradient = Trainer(tiny(), teacher=tiny("tiny-qwen3")).step(samples, rule).tokens.dloss_dlogprob
    torch.testing.assert_close(gradient, make_trainer().step(recorded, rule).tokens.dloss_dlogprob)
    assert not torch.allclose(gradient, make_trainer().step(samples, NO_DROPS).tokens.dloss_dlogprob)
    with pytest.raises(BatchError, match="teacher"):
        make_trainer().step(samples, rule)


def test_an_objective_may_be_a_table_and_a_function_is_refused_with_what_to_pass() -> None:
    losses = []
    for rule in ("icepop", {"name": "icepop"}, keel.objective("icepop").composition):
        trainer = make_trainer()
        losses.append(trainer.step(branching_samples(), rule).loss)
    assert losses[0] == losses[1] == losses[2]
    before = training_state(trainer)
    with pytest.raises(ConfigError, match=r"objective is a function, and Trainer.step needs .* pass a keel.Objective"):
        trainer.step(branching_samples(), lambda batch: batch.logprobs.sum())  # type: ignore[arg-type]
    assert equal_states(before, training_state(trainer))
