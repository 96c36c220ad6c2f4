"""The update: whatever the objective and the cut into micro-batches, its gradient is that of plain autograd."""

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
from tests.support.strategies import CASES, objective

Gradients = dict[str, Tensor | None]


def near(model: Model, samples: list[Sample], seed: int = 2) -> list[Sample]:
    """The samples with everything recorded: samplers and teachers that are close, and now and then far off."""
    chance, made = np.random.default_rng(seed), []
    for number, sample in enumerate(samples):
        size, at = len(sample), np.asarray(sample.trainable)
        fields = {"sampler_logprobs": np.full(size, np.nan), "teacher_logprobs": np.full(size, np.nan)}
        with torch.no_grad():
            found = own_logprobs(model, sample).double().numpy()
        for value in fields.values():
            spread = np.where(chance.random(len(found)) < 0.2, 1.5, 0.15)
            value[at] = np.minimum(found + spread * chance.normal(size=len(found)), -1e-3)
        made.append(
            replace(
                sample,
                **fields,
                version=chance.integers(2, 6, size),
                role=chance.integers(0, 3, size),
                advantage=np.where(chance.random() < 0.5, 1.0, -0.7) * (1 + 0.1 * number)
                + 0.1 * chance.normal(size=size),
            )
        )
    return made


def batch_of(samples: list[Sample], logprobs: Tensor, **more: Tensor) -> keel.TokenBatch:
    """The step as an objective reads it, laid out here by hand."""

    def flat(name: str) -> Tensor:
        return torch.cat([torch.tensor(np.asarray(getattr(one, name)))[torch.tensor(one.trainable)] for one in samples])

    def each(values: list[int]) -> Tensor:
        counts = torch.tensor([int(np.sum(one.trainable)) for one in samples])
        return torch.tensor(values).repeat_interleave(counts)

    floats = {name: flat(name).to(logprobs.dtype) for name in ("sampler_logprobs", "teacher_logprobs")}
    return keel.TokenBatch(
        logprobs=logprobs,
        advantages=flat("advantage").to(logprobs.dtype),
        trainable=torch.ones(len(logprobs), dtype=torch.bool),
        sequence=each(list(range(len(samples)))),
        group=each([one.group for one in samples]),
        version=flat("version"),
        role=flat("role"),
        trainer_version=6,
        **floats,
        **more,
    )


def every_logprob(model: Model, samples: list[Sample]) -> Tensor:
    return torch.cat([own_logprobs(model, sample) for sample in samples if np.any(sample.trainable)])


def naive(model: Model, samples: list[Sample], rule: keel.Objective, logprobs: Tensor, **more: Tensor) -> Gradients:
    """Autograd from the objective's loss through the model's own forward of each sample alone."""
    values = {"proximal_logprobs": logprobs.detach()} | more
    loss = rule(batch_of(samples, logprobs, **values)).loss
    weights = model.parameters()
    found = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, allow_unused=True)
    return dict(zip(weights, found, strict=True))


@contextmanager
def caught(trainer: Trainer, *, step: Callable[[], None] | None = None) -> Iterator[list[Gradients]]:
    """The gradients that the optimizer was given, at each of its steps; it takes none unless told what comes after."""
    seen: list[Gradients] = []
    real = trainer.optimizer.step

    def catch() -> None:
        seen.append(gradients(trainer.model))
        if step is not None:
            real()
            step()

    trainer.optimizer.step = catch  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        trainer.optimizer.step = real  # type: ignore[method-assign]


def frozen(*models: Model, weights: tuple[float, ...] = (1.0,)) -> References:
    return References(
        [
            Reference(f"r{place}", weight, "", model, nullcontext)
            for place, (model, weight) in enumerate(zip(models, weights, strict=True))
        ]
    )


class Step:
    """A step of one model, with its log-probs in a graph, and trainers that cut it differently."""

    def __init__(self, model: Model, reference: Model, tolerance: float) -> None:
        self.model, self.reference, self.tolerance = model, reference, tolerance
        self.samples = near(model, branching_samples())
        self.logprobs = every_logprob(model, self.samples)
        with torch.no_grad():
            self.reference_logprobs = every_logprob(reference, self.samples)
        self.trainers = {
            "whole": self.trainer(max_tokens_per_micro_batch=4096),
            "cut": self.trainer(max_tokens_per_micro_batch=40),
            "unshared": self.trainer(max_tokens_per_micro_batch=90, share_prefixes=False, compute_entropy=False),
        }
        self.wanted: dict[str, Gradients] = {}

    def trainer(self, **settings: Any) -> Trainer:
        given = TrainerSettings.model_validate({"max_grad_norm": None} | settings)
        return Trainer(self.model, given, references=frozen(self.reference))

    def check(self, case: str, cut: str, order: list[int] | None = None) -> None:
        rule, trainer = objective(case), self.trainers[cut]
        if case not in self.wanted:
            more = {"reference_logprobs": self.reference_logprobs}
            self.wanted[case] = naive(self.model, self.samples, rule, self.logprobs, **more)
        with caught(trainer) as seen:
            report = trainer.step(
                [self.samples[number] for number in order or range(len(self.samples))], rule, version=6
            )
        assert len(seen) == 1 and report.stepped
        assert report.micro_batches > 2 if cut != "whole" else report.micro_batches == 1
        assert difference(seen[0], self.wanted[case]) < self.tolerance


@pytest.fixture(scope="module")
def exact() -> Step:
    return Step(tiny(dtype="float64"), tiny(dtype="float64", seed=5), 1e-9)


ORDERS = {"whole": None, "cut": [7, 0, 12, 3, 9, 1, 11, 5, 2, 10, 8, 6, 4], "unshared": list(range(13))[::-1]}


@pytest.mark.parametrize("cut", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_autograd_however_the_step_is_cut_and_ordered(
    case: str, cut: str, exact: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut == "cut":
        # chunks of the head that end inside samples
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", 7 * 260 * 8)
    exact.check(case, cut, ORDERS[cut])


RULES = ("icepop, kept", "gspo, wide", "m2po", "grpo, k3")


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gpt-oss"])
def test_in_float32_and_with_adapters_the_gradient_is_that_of_autograd(name: str, lora: LoraSettings | None) -> None:
    step = Step(tiny(name, lora=lora), tiny(name, seed=5), 1e-4)
    for case in RULES:
        for cut in ORDERS:
            step.check(case, cut, ORDERS[cut])


def test_with_gradient_checkpointing_the_gradient_is_that_of_autograd() -> None:
    step = Step(tiny(gradient_checkpointing=True), tiny(seed=5), 1e-4)
    for case in RULES:
        step.check(case, "cut")


# several updates


@pytest.mark.parametrize("case", ["dapo", "grpo", "decoupled_ppo", "gspo, wide"])
def test_each_of_two_updates_has_the_gradient_of_its_groups_against_the_policy_before_both(case: str) -> None:
    model = tiny(dtype="float64")
    halves = [near(model, branching_samples(seed, group=seed), seed) for seed in (1, 2)]
    parameters = {} if case == "decoupled_ppo" else {"anchor": "proximal"}
    rule = objective(case, **parameters)
    settings = TrainerSettings.model_validate(
        {"max_grad_norm": None, "optimizer_steps": 2, "max_tokens_per_micro_batch": 64, "optimizer": {"lr": 1e-3}}
    )
    trainer = Trainer(model, settings)
    begin = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    middle: list[dict[str, Tensor]] = []
    with caught(
        trainer, step=lambda: middle.append({k: v.detach().clone() for k, v in model.parameters().items()})
    ) as seen:
        report = trainer.step([*halves[0], *halves[1]], rule, version=6)
    assert report.steps == trainer.steps == 2 and len(seen) == 2
    set_weights(model, begin)
    with torch.no_grad():
        proximal = [every_logprob(model, half) for half in halves]
    for weights, half, old, found in zip([begin, middle[0]], halves, proximal, seen, strict=True):
        set_weights(model, weights)
        wanted = naive(model, half, rule, every_logprob(model, half), proximal_logprobs=old)
        assert difference(found, wanted) < 1e-9
    # the second update saw a policy that had moved
    assert not torch.equal(every_logprob(model, halves[1]).detach(), proximal[1])


def set_weights(model: Model, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in model.parameters().items():
            weight.copy_(weights[name])


# references


def test_the_drift_is_measured_from_the_weighted_mean_of_all_references(exact: Step) -> None:
    others = [tiny(dtype="float64", seed=seed) for seed in (5, 6)]
    references = frozen(*others, weights=(0.75, 0.25))
    trainer = Trainer(exact.model, TrainerSettings(max_grad_norm=None), references=references)
    with torch.no_grad():
        found = [every_logprob(other, exact.samples) for other in others]
    rule = objective("grpo, k3")
    with caught(trainer) as seen:
        report = trainer.step(exact.samples, rule, version=6)
    mean = 0.75 * found[0] + 0.25 * found[1]
    wanted = naive(exact.model, exact.samples, rule, exact.logprobs, reference_logprobs=mean)
    assert difference(seen[0], wanted) < 1e-9
    torch.testing.assert_close(report.tokens.reference_logprobs, mean)
    drifts = {name: metric.mean for name, metric in report.reference_kl.items()}
    own = exact.logprobs.detach()
    assert drifts == pytest.approx({f"r{place}": float((own - one).mean()) for place, one in enumerate(found)})


def test_a_policy_with_an_adapter_that_does_nothing_yet_has_no_drift_from_its_base() -> None:
    model = load_model(ModelSettings(name="tiny", lora=LORA, device="cpu"))
    references = load_references({"base": ReferenceSettings()}, model)
    samples = branching_samples()
    trainer = Trainer(model, TrainerSettings.model_validate({"optimizer": {"lr": 1e-2}}), references=references)
    rule = keel.objective("icepop", reference_kl_coef=0.1, ratio_low=0.0, ratio_high=1e9)
    first, second = (trainer.step(samples, rule) for _ in range(2))
    assert first.reference_kl["base"].sum == 0.0 and torch.equal(first.tokens.logprobs, first.tokens.reference_logprobs)
    # the reference stayed where it was, and the policy moved away from it
    assert torch.equal(first.tokens.reference_logprobs, second.tokens.reference_logprobs)
    assert abs(second.reference_kl["base"].mean) > 1e-3


def test_a_base_of_fully_trained_weights_is_a_copy_that_stays() -> None:
    model = load_model(ModelSettings(name="tiny-llama-untied", device="cpu"))
    trainer = Trainer(model, references=load_references({"base": ReferenceSettings()}, model))
    rule = keel.objective("icepop", reference_kl_coef=0.1, ratio_low=0.0, ratio_high=1e9)
    first, second = (trainer.step(branching_samples(), rule) for _ in range(2))
    assert torch.equal(first.tokens.reference_logprobs, second.tokens.reference_logprobs)
    assert first.reference_kl["base"].sum == 0.0 and second.reference_kl["base"].sum != 0.0


def test_an_objective_that_needs_a_reference_is_refused_without_one(exact: Step) -> None:
    trainer = Trainer(exact.model)
    with pytest.raises(ConfigError, match="compares with a reference and the trainer has none"):
        trainer.step(exact.samples, keel.objective("grpo", reference_kl_coef=0.1), version=6)
    assert trainer.steps == 0


# cost


def test_samples_that_nothing_is_learned_from_are_not_computed_again(
    exact: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = keel.objective("gspo", eps=10.0, eps_high=10.0)
    samples = [replace(sample, advantage=float(number == 4)) for number, sample in enumerate(exact.samples)]
    trainer, passed = exact.trainers["cut"], []
    hidden = trainer.forward.hidden
    monkeypatch.setattr(trainer.forward, "hidden", lambda batch: (passed.append(len(batch)), hidden(batch))[1])
    with caught(trainer):
        report = trainer.step(samples, rule, version=6)
    assert passed[: report.micro_batches] == passed[:-1] and passed[-1] == len(samples[4].inputs)


def test_a_token_local_rule_computes_every_micro_batch_once(exact: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, passed = exact.trainers["cut"], []
    hidden = trainer.forward.hidden
    monkeypatch.setattr(trainer.forward, "hidden", lambda batch: (passed.append(len(batch)), hidden(batch))[1])
    with caught(trainer):
        report = trainer.step(exact.samples, objective("icepop, kept"), version=6)
    assert len(passed) == report.micro_batches and sum(passed) == report.computed_tokens
