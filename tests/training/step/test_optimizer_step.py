"""Test that the gradient of an optimizer step equals autograd for every objective and micro-batch size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import keel
from keel.config import LoraSettings, ModelSettings, ReferenceSettings, TrainerSettings
from keel.errors import ConfigError
from keel.training import Model, References, Sample, Trainer, load_model, load_references
from keel.training.model.references import Reference
from keel.training.step import lm_head
from tests.support.policy_strategies import LORA, branching_samples, difference, gradients, own_logprobs, tiny
from tests.support.strategies import CASES
from tests.support.strategies import case_objective as objective

Gradients = dict[str, Tensor | None]


def with_recorded_fields(model: Model, samples: list[Sample], seed: int = 2) -> list[Sample]:
    """Return the samples with all fields; sampler and teacher are close to the model, except for a few tokens."""
    rng, result = np.random.default_rng(seed), []
    for index, sample in enumerate(samples):
        size, trainable = len(sample), np.asarray(sample.trainable)
        fields = {"sampler_logprobs": np.full(size, np.nan), "teacher_logprobs": np.full(size, np.nan)}
        with torch.no_grad():
            logprobs = own_logprobs(model, sample).double().numpy()
        for value in fields.values():
            scale = np.where(rng.random(len(logprobs)) < 0.2, 1.5, 0.15)
            value[trainable] = np.minimum(logprobs + scale * rng.normal(size=len(logprobs)), -1e-3)
        result.append(
            replace(
                sample,
                **fields,
                version=rng.integers(2, 6, size),
                role=rng.integers(0, 3, size),
                advantage=np.where(rng.random() < 0.5, 1.0, -0.7) * (1 + 0.1 * index) + 0.1 * rng.normal(size=size),
            )
        )
    return result


def token_batch(samples: list[Sample], logprobs: Tensor, **extra: Tensor) -> keel.TokenBatch:
    """Build the token batch of a step by hand."""

    def flat(name: str) -> Tensor:
        columns = [
            (torch.tensor(np.asarray(getattr(sample, name))), torch.tensor(sample.trainable)) for sample in samples
        ]
        return torch.cat([values[trainable] for values, trainable in columns])

    def per_token(values: list[int]) -> Tensor:
        counts = torch.tensor([int(np.sum(sample.trainable)) for sample in samples])
        return torch.tensor(values).repeat_interleave(counts)

    floats = {name: flat(name).to(logprobs.dtype) for name in ("sampler_logprobs", "teacher_logprobs")}
    return keel.TokenBatch(
        logprobs=logprobs,
        advantages=flat("advantage").to(logprobs.dtype),
        trainable=torch.ones(len(logprobs), dtype=torch.bool),
        sequence=per_token(list(range(len(samples)))),
        group=per_token([sample.group for sample in samples]),
        version=flat("version"),
        role=flat("role"),
        trainer_version=6,
        **floats,
        **extra,
    )


def all_logprobs(model: Model, samples: list[Sample]) -> Tensor:
    return torch.cat([own_logprobs(model, sample) for sample in samples if np.any(sample.trainable)])


def autograd_gradients(
    model: Model, samples: list[Sample], rule: keel.Objective, logprobs: Tensor, **extra: Tensor
) -> Gradients:
    """Differentiate the objective's loss through the model's own forward of separate samples."""
    values = {"proximal_logprobs": logprobs.detach()} | extra
    loss = rule(token_batch(samples, logprobs, **values)).loss
    weights = model.parameters()
    grads = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, allow_unused=True)
    return dict(zip(weights, grads, strict=True))


@contextmanager
def captured_gradients(trainer: Trainer, *, step: Callable[[], None] | None = None) -> Iterator[list[Gradients]]:
    """Capture the gradients at each optimizer step; the weights are updated only if `step` is given."""
    captured: list[Gradients] = []
    original = trainer.optimizer.step

    def capture() -> None:
        captured.append(gradients(trainer.model))
        if step is not None:
            original()
            step()

    trainer.optimizer.step = capture  # type: ignore[method-assign]
    try:
        yield captured
    finally:
        trainer.optimizer.step = original  # type: ignore[method-assign]


def frozen_references(*models: Model, weights: tuple[float, ...] = (1.0,)) -> References:
    return References(
        [
            Reference(f"r{index}", weight, "", model, nullcontext)
            for index, (model, weight) in enumerate(zip(models, weights, strict=True))
        ]
    )


class Step:
    """A step of one model, with its log-probs in a graph, and trainers that split it differently."""

    def __init__(self, model: Model, reference: Model, tolerance: float) -> None:
        self.model, self.reference, self.tolerance = model, reference, tolerance
        self.samples = with_recorded_fields(model, branching_samples())
        self.logprobs = all_logprobs(model, self.samples)
        with torch.no_grad():
            self.reference_logprobs = all_logprobs(reference, self.samples)
        self.trainers = {
            "one": self.trainer(max_tokens_per_micro_batch=4096),
            "several": self.trainer(max_tokens_per_micro_batch=40),
            "unshared": self.trainer(max_tokens_per_micro_batch=90, share_prefixes=False, compute_entropy=False),
        }
        self.expected: dict[str, Gradients] = {}

    def trainer(self, **settings: Any) -> Trainer:
        trainer_settings = TrainerSettings.model_validate({"max_grad_norm": None} | settings)
        return Trainer(self.model, trainer_settings, references=frozen_references(self.reference))

    def check(self, case: str, split: str, order: list[int] | None = None) -> None:
        rule, trainer = objective(case), self.trainers[split]
        if case not in self.expected:
            reference = {"reference_logprobs": self.reference_logprobs}
            self.expected[case] = autograd_gradients(self.model, self.samples, rule, self.logprobs, **reference)
        with captured_gradients(trainer) as captured:
            samples = [self.samples[index] for index in order or range(len(self.samples))]
            report = trainer.step(samples, rule, version=6)
        assert len(captured) == 1 and report.stepped
        assert report.micro_batches > 2 if split != "one" else report.micro_batches == 1
        assert difference(captured[0], self.expected[case]) < self.tolerance


@pytest.fixture(scope="module")
def exact() -> Step:
    return Step(tiny(dtype="float64"), tiny(dtype="float64", seed=5), 1e-9)


ORDERS = {"one": None, "several": [7, 0, 12, 3, 9, 1, 11, 5, 2, 10, 8, 6, 4], "unshared": list(range(13))[::-1]}
"""Sample order for each split into micro-batches."""


@pytest.mark.parametrize("split", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_equals_autograd_for_any_micro_batches_and_sample_order(
    case: str, split: str, exact: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split == "several":
        # chunks of the head that end inside samples
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", 7 * 260 * 8)
    exact.check(case, split, ORDERS[split])


RULES = ("icepop, kept", "gspo, wide", "m2po", "grpo, k3")


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gpt-oss"])
def test_the_gradient_equals_autograd_in_float32_and_with_adapters(name: str, lora: LoraSettings | None) -> None:
    step = Step(tiny(name, lora=lora), tiny(name, seed=5), 1e-4)
    for case in RULES:
        for split, order in ORDERS.items():
            step.check(case, split, order)


def test_the_gradient_equals_autograd_with_gradient_checkpointing() -> None:
    step = Step(tiny(gradient_checkpointing=True), tiny(seed=5), 1e-4)
    for case in RULES:
        step.check(case, "several")


# several optimizer steps


@pytest.mark.parametrize("case", ["dapo", "grpo", "decoupled_ppo", "gspo, wide"])
def test_each_of_two_optimizer_steps_uses_its_own_groups_and_the_proximal_policy_before_both(case: str) -> None:
    model = tiny(dtype="float64")
    halves = [with_recorded_fields(model, branching_samples(seed, group=seed), seed) for seed in (1, 2)]
    parameters = {} if case == "decoupled_ppo" else {"anchor": "proximal"}
    rule = objective(case, **parameters)
    settings = TrainerSettings.model_validate(
        {"max_grad_norm": None, "optimizer_steps": 2, "max_tokens_per_micro_batch": 64, "optimizer": {"lr": 1e-3}}
    )
    trainer = Trainer(model, settings)
    initial = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    middle: list[dict[str, Tensor]] = []
    with captured_gradients(
        trainer, step=lambda: middle.append({k: v.detach().clone() for k, v in model.parameters().items()})
    ) as captured:
        report = trainer.step([*halves[0], *halves[1]], rule, version=6)
    assert report.steps == trainer.steps == 2 and len(captured) == 2
    set_weights(model, initial)
    with torch.no_grad():
        proximal = [all_logprobs(model, half) for half in halves]
    for weights, half, old, actual in zip([initial, middle[0]], halves, proximal, captured, strict=True):
        set_weights(model, weights)
        expected = autograd_gradients(model, half, rule, all_logprobs(model, half), proximal_logprobs=old)
        assert difference(actual, expected) < 1e-9
    # the policy changed before the second optimizer step
    assert not torch.equal(all_logprobs(model, halves[1]).detach(), proximal[1])


def set_weights(model: Model, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in model.parameters().items():
            weight.copy_(weights[name])


# references


def test_kl_is_measured_from_the_weighted_mean_of_all_references(exact: Step) -> None:
    models = [tiny(dtype="float64", seed=seed) for seed in (5, 6)]
    references = frozen_references(*models, weights=(0.75, 0.25))
    trainer = Trainer(exact.model, TrainerSettings(max_grad_norm=None), references=references)
    with torch.no_grad():
        logprobs = [all_logprobs(model, exact.samples) for model in models]
    rule = objective("grpo, k3")
    with captured_gradients(trainer) as captured:
        report = trainer.step(exact.samples, rule, version=6)
    mean = 0.75 * logprobs[0] + 0.25 * logprobs[1]
    expected = autograd_gradients(exact.model, exact.samples, rule, exact.logprobs, reference_logprobs=mean)
    assert difference(captured[0], expected) < 1e-9
    torch.testing.assert_close(report.tokens.reference_logprobs, mean)
    kl = {name: metric.mean for name, metric in report.reference_kl.items()}
    policy = exact.logprobs.detach()
    assert kl == pytest.approx({f"r{index}": float((policy - values).mean()) for index, values in enumerate(logprobs)})


def test_a_policy_with_a_fresh_adapter_has_zero_kl_to_its_base() -> None:
    model = load_model(ModelSettings(name="tiny", lora=LORA, device="cpu"))
    references = load_references({"base": ReferenceSettings()}, model)
    samples = branching_samples()
    trainer = Trainer(model, TrainerSettings.model_validate({"optimizer": {"lr": 1e-2}}), references=references)
    rule = keel.objective("icepop", reference_kl_coef=0.1, ratio_low=0.0, ratio_high=1e9)
    first, second = (trainer.step(samples, rule) for _ in range(2))
    assert first.reference_kl["base"].sum == 0.0 and torch.equal(first.tokens.logprobs, first.tokens.reference_logprobs)
    # the reference stays fixed while the policy moves away from it
    assert torch.equal(first.tokens.reference_logprobs, second.tokens.reference_logprobs)
    assert abs(second.reference_kl["base"].mean) > 1e-3


def test_with_full_training_the_base_reference_is_a_fixed_copy() -> None:
    model = load_model(ModelSettings(name="tiny-llama-untied", device="cpu"))
    trainer = Trainer(model, references=load_references({"base": ReferenceSettings()}, model))
    rule = keel.objective("icepop", reference_kl_coef=0.1, ratio_low=0.0, ratio_high=1e9)
    first, second = (trainer.step(branching_samples(), rule) for _ in range(2))
    assert torch.equal(first.tokens.reference_logprobs, second.tokens.reference_logprobs)
    assert first.reference_kl["base"].sum == 0.0 and second.reference_kl["base"].sum != 0.0


def test_an_objective_with_a_reference_raises_without_one(exact: Step) -> None:
    trainer = Trainer(exact.model)
    with pytest.raises(ConfigError, match="compares with a reference and the trainer has none"):
        trainer.step(exact.samples, keel.objective("grpo", reference_kl_coef=0.1), version=6)
    assert trainer.steps == 0


# cost


def test_samples_without_a_gradient_are_not_computed_again(exact: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = keel.objective("gspo", eps=10.0, eps_high=10.0)
    samples = [replace(sample, advantage=float(index == 4)) for index, sample in enumerate(exact.samples)]
    trainer, sizes = exact.trainers["several"], []
    hidden = trainer.forward.hidden
    monkeypatch.setattr(trainer.forward, "hidden", lambda batch: (sizes.append(len(batch)), hidden(batch))[1])
    with captured_gradients(trainer):
        report = trainer.step(samples, rule, version=6)
    assert sizes[: report.micro_batches] == sizes[:-1] and sizes[-1] == len(samples[4].inputs)


def test_a_token_local_objective_computes_every_micro_batch_once(exact: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, sizes = exact.trainers["several"], []
    hidden = trainer.forward.hidden
    monkeypatch.setattr(trainer.forward, "hidden", lambda batch: (sizes.append(len(batch)), hidden(batch))[1])
    with captured_gradients(trainer):
        report = trainer.step(exact.samples, objective("icepop, kept"), version=6)
    assert len(sizes) == report.micro_batches and sum(sizes) == report.computed_tokens
