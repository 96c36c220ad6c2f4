"""Test AdamW against its closed form: learning rates, and weight decay on matrices only."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.config.trainer import OptimizerSettings, TrainerSettings
from keel.errors import ConfigError
from keel.training import Trainer
from keel.training.step.optimizer import build_optimizer, learning_rate, set_learning_rate
from tests.support.policy_strategies import tiny


def test_the_learning_rate_rises_linearly_to_its_peak_during_warmup() -> None:
    settings = OptimizerSettings(lr=0.5, warmup_steps=4)
    assert [learning_rate(settings, step) for step in range(7)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_a_constant_learning_rate_is_constant() -> None:
    assert {learning_rate(OptimizerSettings(lr=3e-4), step) for step in (0, 1, 10**6)} == {3e-4}


def test_a_linear_schedule_falls_linearly_to_its_minimum_and_stays() -> None:
    settings = OptimizerSettings(lr=1.0, lr_schedule="linear", total_steps=6, warmup_steps=2, min_lr_ratio=0.2)
    rates = [learning_rate(settings, step) for step in range(9)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_cosine_schedule_is_halfway_down_after_half_the_steps() -> None:
    settings = OptimizerSettings(lr=2.0, lr_schedule="cosine", total_steps=8, min_lr_ratio=0.1)
    assert learning_rate(settings, 0) == 2.0
    assert learning_rate(settings, 4) == pytest.approx(2.0 * 0.55)
    assert learning_rate(settings, 2) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2))
    assert learning_rate(settings, 8) == learning_rate(settings, 800) == pytest.approx(0.2)


def test_a_trainer_with_a_schedule_of_unknown_length_is_an_error_before_the_model_is_loaded() -> None:
    settings = TrainerSettings(optimizer=OptimizerSettings(lr_schedule="cosine"))
    with pytest.raises(ConfigError, match=r'^trainer.optimizer.lr_schedule = "cosine" needs trainer.optimizer.total_s'):
        Trainer("no-such-model", settings)


@given(
    st.sampled_from(["linear", "cosine"]),
    st.integers(0, 9),
    st.integers(1, 30),
    st.none() | st.floats(0, 1),
    st.integers(0, 60),
)
def test_the_learning_rate_never_exceeds_its_peak_and_never_rises_after_warmup(
    schedule: str, warmup: int, length: int, min_ratio: float | None, step: int
) -> None:
    settings = OptimizerSettings.model_validate(
        {
            "lr": 1.0,
            "lr_schedule": schedule,
            "warmup_steps": warmup,
            "total_steps": warmup + length,
            "min_lr_ratio": min_ratio,
        }
    )
    now, later = learning_rate(settings, step), learning_rate(settings, step + 1)
    assert 0 <= now <= 1 and (later > now if step < warmup else later <= now + 1e-12)
    assert step < warmup or now >= (min_ratio or 0) - 1e-12


def test_weight_decay_applies_to_matrices_but_not_to_norms_and_biases() -> None:
    model = tiny("tiny-qwen2")
    optimizer = build_optimizer(OptimizerSettings(lr=0.1, weight_decay=0.5), model.parameters().values())
    before = {name: weight.detach().clone() for name, weight in model.parameters().items()}
    for weight in model.parameters().values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    dimensions = set()
    for name, weight in model.parameters().items():
        dimensions.add(weight.dim())
        expected = before[name] * (1 - 0.1 * 0.5) if weight.dim() > 1 else before[name]
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=0)
    assert dimensions == {1, 2}


def test_the_optimizer_has_every_parameter_once_with_the_given_settings() -> None:
    model = tiny()
    settings = OptimizerSettings(lr=0.3, betas=(0.8, 0.7), eps=1e-5, weight_decay=0.2)
    optimizer = build_optimizer(settings, model.parameters().values())
    optimized = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(map(id, optimized)) == sorted(map(id, model.parameters().values()))
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (0.3, (0.8, 0.7), 1e-5)
    }
    set_learning_rate(optimizer, 0.01)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


def test_two_steps_match_adamw_written_out() -> None:
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    optimizer = build_optimizer(OptimizerSettings(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01), [weight])
    value, first, second = weight.detach().clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, row in enumerate(([0.5, -1.0], [-0.2, 3.0]), 1):
        gradient = torch.tensor([row], dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        value = value * (1 - 0.1 * 0.01)
        value -= 0.1 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), value.detach())
