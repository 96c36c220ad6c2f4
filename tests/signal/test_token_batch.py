"""Validation of a batch: each mistake is an error that names the field and the value."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from tests.support.strategies import IDS, batch, close, random_step

FLOATS = ("logprobs", "sampler_logprobs", "advantages", "proximal_logprobs", "reference_logprobs", "teacher_logprobs")


def fields(size: int = 3) -> dict[str, Tensor]:
    """Return valid values of every field."""
    values: dict[str, Tensor] = {name: torch.full((size,), -1.0) for name in (*FLOATS, "entropy")}
    values |= {name: torch.zeros(size, dtype=torch.int64) for name in IDS}
    return values | {"trainable": torch.ones(size, dtype=torch.bool)}


def make_batch(**changes: Any) -> keel.TokenBatch:
    return keel.TokenBatch(**(fields() | changes))


def test_a_valid_batch_is_accepted() -> None:
    assert len(make_batch()) == 3
    assert make_batch(trainer_version=4).trainer_version == 4


# Shapes, types and devices


@pytest.mark.parametrize("name", [name for name in fields() if name != "logprobs"])
def test_a_wrong_length_is_an_error(name: str) -> None:
    value = fields()[name]
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} has shape \[2\].*batch\.logprobs, \[3\]"):
        make_batch(**{name: value[:2]})


@pytest.mark.parametrize("name", fields())
def test_more_than_one_dimension_is_an_error(name: str) -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.\w+ has shape \[.*one-dimensional"):
        make_batch(**{name: fields()[name][:, None]})


def test_two_dimensional_batches_are_an_error_even_if_all_fields_agree() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.logprobs has shape \[3, 2\]"):
        keel.TokenBatch(**{name: torch.stack([value, value], 1) for name, value in fields().items()})


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_ids_that_are_not_integers_are_an_error(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} has dtype {dtype}; ids must be integers"):
        make_batch(**{name: torch.zeros(3, dtype=dtype)})


@pytest.mark.parametrize("name", [*FLOATS, "entropy"])
def test_values_that_are_not_floating_point_are_an_error(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} has dtype torch.int64; it must be floating point"):
        make_batch(**{name: torch.zeros(3, dtype=torch.int64)})


@pytest.mark.parametrize("name", [name for name in fields() if name != "logprobs"])
def test_mixed_devices_are_an_error(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} is on meta and batch\.logprobs on cpu"):
        make_batch(**{name: fields()[name].to("meta")})


@pytest.mark.parametrize("name", ["logprobs", "advantages", "trainable", "sequence"])
def test_a_missing_required_field_is_an_error(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} is missing"):
        make_batch(**{name: None})


@pytest.mark.parametrize("name", fields())
def test_a_list_instead_of_a_tensor_is_an_error(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} is a list; it must be a torch tensor"):
        make_batch(**{name: [0, 0, 0]})


def test_trainable_may_be_zeros_and_ones() -> None:
    assert make_batch(trainable=torch.tensor([0, 1, 1])).trainable.tolist() == [False, True, True]
    assert make_batch(trainable=torch.tensor([0, 1, 1], dtype=torch.uint8)).trainable.dtype == torch.bool


def test_a_trainable_value_other_than_0_and_1_is_an_error() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.trainable contains 2; it must be bool, or 0 and 1"):
        make_batch(trainable=torch.tensor([0, 2, 1]))
    with pytest.raises(keel.BatchError, match=r"batch\.trainable contains -1;"):
        make_batch(trainable=torch.tensor([0, 1, -1]))
    with pytest.raises(keel.BatchError, match=r"batch\.trainable has dtype torch.float32; it must be bool"):
        make_batch(trainable=torch.tensor([0.0, 1.0, 0.5]))


def test_trainer_version_without_versions_is_an_error() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.trainer_version = 4 needs batch\.version"):
        make_batch(version=None, trainer_version=4)


def test_two_trainer_versions_in_one_step_are_an_error() -> None:
    parts = [make_batch(trainer_version=4), make_batch(trainer_version=5)]
    with pytest.raises(keel.BatchError, match=r"batch\.trainer_version differs within the step: \[4, 5\]"):
        keel.objective("icepop").totals(parts)


# Values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_a_value_of_a_trainable_token_that_is_not_finite_is_an_error(name: str, value: float) -> None:
    values = torch.full((3,), -1.0)
    values[1] = value
    step = make_batch(**{name: values})
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}\[1\] = {value}: a trainable token needs a finite value"):
        keel.objective("icepop")(step)
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}\[1\]"):
        keel.objective("icepop").totals([step])


def test_an_error_names_the_position_in_the_batch() -> None:
    step = make_batch(
        logprobs=torch.tensor([math.nan, -1.0, math.nan]),
        trainable=torch.tensor([False, True, True]),
    )
    with pytest.raises(keel.BatchError, match=r"batch\.logprobs\[2\] = nan"):
        keel.objective("icepop")(step)


@pytest.mark.parametrize(
    ("name", "preset", "parameters"),
    [
        ("proximal_logprobs", "decoupled_ppo", {}),
        ("reference_logprobs", "icepop", {"kl_penalty_coef": 0.1}),
        ("reference_logprobs", "grpo", {"reference_kl_coef": 0.1}),
        ("teacher_logprobs", "icepop", {"teacher_tau": 0.1}),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_an_objective_reads_must_be_finite(
    name: str, preset: str, parameters: dict[str, Any], value: float
) -> None:
    values = torch.full((3,), -1.0)
    values[2] = value
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}\[2\] = {value}"):
        keel.objective(preset, **parameters)(make_batch(**{name: values}))


@pytest.mark.parametrize(
    ("name", "preset", "parameters"),
    [
        ("sampler_logprobs", "icepop", {}),
        ("sampler_logprobs", "reinforce", {}),
        ("proximal_logprobs", "tis", {}),
        ("proximal_logprobs", "mis", {}),
        ("proximal_logprobs", "decoupled_ppo", {}),
        ("proximal_logprobs", "grpo", {"anchor": "proximal"}),
        ("reference_logprobs", "icepop", {"kl_penalty_coef": 0.1}),
        ("reference_logprobs", "icepop", {"kl_penalty_coef": 0.1, "kl_penalty_source": "sampled"}),
        ("reference_logprobs", "grpo", {"reference_kl_coef": 0.1}),
        ("teacher_logprobs", "on_policy_distillation", {}),
        ("teacher_logprobs", "icepop", {"teacher_tau": 0.1}),
        ("role", "cross_entropy", {"roles": [1]}),
        ("version", "decoupled_ppo_loglinear", {}),
    ],
)
def test_a_missing_field_that_an_objective_reads_is_an_error(
    name: str, preset: str, parameters: dict[str, Any]
) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}"):
        keel.objective(preset, **parameters)(make_batch(**{name: None}))


@pytest.mark.parametrize("name", ["proximal_logprobs", "reference_logprobs", "teacher_logprobs", "entropy", *IDS[1:]])
def test_a_field_that_an_objective_does_not_read_may_be_missing(name: str) -> None:
    close(keel.objective("icepop")(make_batch(**{name: None})).loss, keel.objective("icepop")(make_batch()).loss)


@pytest.mark.parametrize("name", ["proximal_logprobs", "reference_logprobs", "teacher_logprobs"])
def test_a_field_that_an_objective_does_not_read_may_be_nan(name: str) -> None:
    result, expected = (
        keel.objective("icepop")(step) for step in (make_batch(**{name: torch.full((3,), math.nan)}), make_batch())
    )
    close(result.loss, expected.loss)
    assert result.metrics["mismatch_kl"].mean == expected.metrics["mismatch_kl"].mean


# Totals


def test_totals_of_other_batches_are_an_error() -> None:
    objective = keel.objective("gspo")
    totals = objective.totals([make_batch()])
    with pytest.raises(keel.KeelError, match=r"batch\.sequence contains 77.*other batches"):
        objective(make_batch(sequence=torch.tensor([0, 0, 77])), totals)


def test_totals_of_another_objective_are_an_error() -> None:
    """Otherwise the gates of the other objective would be applied silently."""
    step = make_batch()
    totals = keel.objective("icepop", ratio_high=1.5).totals([step])
    with pytest.raises(keel.KeelError, match="totals"):
        keel.objective("icepop", ratio_high=8.0)(step, totals)


def test_totals_of_an_equal_objective_are_accepted() -> None:
    step = make_batch()
    totals = keel.objective("icepop", ratio_high=1.5).totals([step])
    objective = keel.objective("icepop", ratio_high=1.5)
    assert objective(step, totals).loss == objective(step).loss


# take, cat and replace


def test_take_and_cat_are_inverse_and_differentiable() -> None:
    step = random_step(1)
    leaf = step.logprobs.nan_to_num(0.0).requires_grad_()
    step = step.replace(logprobs=leaf)
    order = torch.arange(len(step))
    concatenated = keel.TokenBatch.cat([step.take(order[:5]), step.take(order[5:5]), step.take(order[5:])])
    for name, value in step.tensors().items():
        torch.testing.assert_close(concatenated.tensors()[name], value, rtol=0, atol=0, equal_nan=True)
    assert concatenated.trainer_version == step.trainer_version
    concatenated.logprobs.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 1).all()


def test_concatenating_batches_with_different_fields_is_an_error() -> None:
    with pytest.raises(keel.BatchError, match="only some have entropy, role"):
        keel.TokenBatch.cat([make_batch(), make_batch(entropy=None, role=None)])


def test_replace_validates_the_new_batch() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.advantages has shape \[2\]"):
        make_batch().replace(advantages=torch.zeros(2))


def test_evaluating_an_objective_does_not_modify_the_batch() -> None:
    step = random_step(2)
    before = {name: value.clone() for name, value in step.tensors().items()}
    for name in ("icepop", "opsm", "gspo", "vespo", "m2po", "dppo_kl"):
        transforms = {} if name == "gspo" else {"kl_penalty_coef": 0.1, "teacher_tau": 0.1}
        result = keel.objective(name, **transforms, reference_kl_coef=0.1)(step)
        assert len(result.metrics) > 10
    for name, value in step.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_policy_log_prob_above_zero_is_an_error_that_names_the_token() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.logprobs\[1\] = 0\.5: a log-prob is at most 0"):
        keel.objective("icepop")(batch([-1.0, 0.5], [-1.0, -1.0]))
    assert keel.objective("icepop")(batch([1e-6], [0.0])).kept_tokens == 1  # rounding


def test_a_policy_log_prob_above_zero_of_an_untrainable_token_is_not_read() -> None:
    step = batch([-1.0, 0.5], [-1.0, -1.0], trainable=[True, False])
    assert keel.objective("icepop")(step).loss.item() == -1.0


def test_a_loss_that_overflows_is_an_error_that_names_the_advantage() -> None:
    step = batch([-1.0, -1.0], [-1.0, -61.0], advantages=[1.0, -1e23])
    single = step.replace(**{n: v.float() for n, v in step.tensors().items() if v.is_floating_point()})
    with pytest.raises(keel.BatchError, match=r"overflows float32: batch\.advantages\[1\] = -1e\+23"):
        keel.objective("icepop", ratio_high=None)(single)
    assert keel.objective("icepop", ratio_high=None)(step).loss.isfinite()


def test_a_batch_on_the_meta_device_is_an_error() -> None:
    step = batch([-1.0], [-1.0])
    with pytest.raises(keel.BatchError, match=r"batch\.logprobs is on the meta device"):
        step.replace(**{name: value.to("meta") for name, value in step.tensors().items()})


def test_a_batch_of_one_token_is_valid() -> None:
    assert keel.objective("icepop")(batch([-1.0], [-1.0])).loss.item() == -1.0
