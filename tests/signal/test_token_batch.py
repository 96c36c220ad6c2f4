"""What a batch must be: each mistake is an error that names the field and the value."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from tests.support.strategies import IDS, batch, close, random_step

FLOATS = ("logprobs", "sampler_logprobs", "advantages", "proximal_logprobs", "reference_logprobs", "teacher_logprobs")


def fields(size: int = 3) -> dict[str, Tensor]:
    """Every field, well formed."""
    values: dict[str, Tensor] = {name: torch.full((size,), -1.0) for name in (*FLOATS, "entropy")}
    values |= {name: torch.zeros(size, dtype=torch.int64) for name in IDS}
    return values | {"trainable": torch.ones(size, dtype=torch.bool)}


def make(**changes: Any) -> keel.TokenBatch:
    return keel.TokenBatch(**(fields() | changes))


def test_well_formed_batch_is_accepted() -> None:
    assert len(make()) == 3
    assert make(trainer_version=4).trainer_version == 4


# --- shapes, types and devices


@pytest.mark.parametrize("name", [name for name in fields() if name != "logprobs"])
def test_wrong_length_is_refused(name: str) -> None:
    value = fields()[name]
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} has shape \[2\].*batch\.logprobs, \[3\]"):
        make(**{name: value[:2]})


@pytest.mark.parametrize("name", fields())
def test_more_than_one_dimension_is_refused(name: str) -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.\w+ has shape \[.*one-dimensional"):
        make(**{name: fields()[name][:, None]})


def test_padded_rectangles_are_refused_even_when_all_fields_agree() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.logprobs has shape \[3, 2\]"):
        keel.TokenBatch(**{name: torch.stack([value, value], 1) for name, value in fields().items()})


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_ids_that_are_not_integers_are_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} has dtype {dtype}; ids must be integers"):
        make(**{name: torch.zeros(3, dtype=dtype)})


@pytest.mark.parametrize("name", [*FLOATS, "entropy"])
def test_numbers_that_are_not_floating_point_are_refused(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} has dtype torch.int64; it must be floating point"):
        make(**{name: torch.zeros(3, dtype=torch.int64)})


@pytest.mark.parametrize("name", [name for name in fields() if name != "logprobs"])
def test_mixed_devices_are_refused(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} is on meta and batch\.logprobs on cpu"):
        make(**{name: fields()[name].to("meta")})


@pytest.mark.parametrize("name", ["logprobs", "advantages", "trainable", "sequence"])
def test_missing_field_is_refused(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} is missing"):
        make(**{name: None})


@pytest.mark.parametrize("name", fields())
def test_lists_are_not_tensors(name: str) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name} is a list; it must be a torch tensor"):
        make(**{name: [0, 0, 0]})


def test_trainable_may_be_zeros_and_ones() -> None:
    assert make(trainable=torch.tensor([0, 1, 1])).trainable.tolist() == [False, True, True]
    assert make(trainable=torch.tensor([0, 1, 1], dtype=torch.uint8)).trainable.dtype == torch.bool


def test_trainable_that_is_not_zero_or_one_is_refused() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.trainable contains 2; it must be bool, or 0 and 1"):
        make(trainable=torch.tensor([0, 2, 1]))
    with pytest.raises(keel.BatchError, match=r"batch\.trainable contains -1;"):
        make(trainable=torch.tensor([0, 1, -1]))
    with pytest.raises(keel.BatchError, match=r"batch\.trainable has dtype torch.float32; it must be bool"):
        make(trainable=torch.tensor([0.0, 1.0, 0.5]))


def test_trainer_version_needs_versions() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.trainer_version = 4 needs batch\.version"):
        make(version=None, trainer_version=4)


def test_two_trainer_versions_in_one_step_are_refused() -> None:
    parts = [make(trainer_version=4), make(trainer_version=5)]
    with pytest.raises(keel.BatchError, match=r"batch\.trainer_version differs within the step: \[4, 5\]"):
        keel.objective("icepop").totals(parts)


# --- values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_trainable_token_needs_a_finite_value(name: str, value: float) -> None:
    numbers = torch.full((3,), -1.0)
    numbers[1] = value
    step = make(**{name: numbers})
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}\[1\] = {value}: a trainable token needs a finite value"):
        keel.objective("icepop")(step)
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}\[1\]"):
        keel.objective("icepop").totals([step])


def test_error_names_the_position_in_the_batch_and_not_among_the_trainable_tokens() -> None:
    step = make(
        logprobs=torch.tensor([math.nan, -1.0, math.nan]),
        trainable=torch.tensor([False, True, True]),
    )
    with pytest.raises(keel.BatchError, match=r"batch\.logprobs\[2\] = nan"):
        keel.objective("icepop")(step)


@pytest.mark.parametrize(
    ("name", "rule", "parameters"),
    [
        ("proximal_logprobs", "decoupled_ppo", {}),
        ("reference_logprobs", "icepop", {"kl_penalty_coef": 0.1}),
        ("reference_logprobs", "grpo", {"reference_kl_coef": 0.1}),
        ("teacher_logprobs", "icepop", {"teacher_tau": 0.1}),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_an_objective_reads_must_be_finite(
    name: str, rule: str, parameters: dict[str, Any], value: float
) -> None:
    numbers = torch.full((3,), -1.0)
    numbers[2] = value
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}\[2\] = {value}"):
        keel.objective(rule, **parameters)(make(**{name: numbers}))


@pytest.mark.parametrize(
    ("name", "rule", "parameters"),
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
def test_missing_field_that_an_objective_reads_is_an_error_naming_it(
    name: str, rule: str, parameters: dict[str, Any]
) -> None:
    with pytest.raises(keel.BatchError, match=rf"batch\.{name}"):
        keel.objective(rule, **parameters)(make(**{name: None}))


@pytest.mark.parametrize("name", ["proximal_logprobs", "reference_logprobs", "teacher_logprobs", "entropy", *IDS[1:]])
def test_field_that_an_objective_does_not_read_may_be_absent(name: str) -> None:
    close(keel.objective("icepop")(make(**{name: None})).loss, keel.objective("icepop")(make()).loss)


@pytest.mark.parametrize("name", ["proximal_logprobs", "reference_logprobs", "teacher_logprobs"])
def test_field_that_an_objective_does_not_read_may_hold_anything(name: str) -> None:
    result, clean = (keel.objective("icepop")(step) for step in (make(**{name: torch.full((3,), math.nan)}), make()))
    close(result.loss, clean.loss)
    assert result.metrics["mismatch_kl"].mean == clean.metrics["mismatch_kl"].mean


# --- totals that do not belong


def test_totals_of_other_batches_are_refused() -> None:
    rule = keel.objective("gspo")
    totals = rule.totals([make()])
    with pytest.raises(keel.KeelError, match=r"batch\.sequence holds 77.*other batches"):
        rule(make(sequence=torch.tensor([0, 0, 77])), totals)


def test_totals_of_another_objective_are_refused() -> None:
    """Otherwise the other objective's rule would be applied without a word."""
    step = make()
    totals = keel.objective("icepop", ratio_high=1.5).totals([step])
    with pytest.raises(keel.KeelError, match="totals"):
        keel.objective("icepop", ratio_high=8.0)(step, totals)


def test_totals_belong_to_equal_objectives() -> None:
    step = make()
    totals = keel.objective("icepop", ratio_high=1.5).totals([step])
    rule = keel.objective("icepop", ratio_high=1.5)
    assert rule(step, totals).loss == rule(step).loss


# --- taking batches apart and joining them


def test_take_and_cat_are_inverse_and_let_gradients_through() -> None:
    step = random_step(1)
    leaf = step.logprobs.nan_to_num(0.0).requires_grad_()
    step = step.replace(logprobs=leaf)
    order = torch.arange(len(step))
    joined = keel.TokenBatch.cat([step.take(order[:5]), step.take(order[5:5]), step.take(order[5:])])
    for name, value in step.tensors().items():
        torch.testing.assert_close(joined.tensors()[name], value, rtol=0, atol=0, equal_nan=True)
    assert joined.trainer_version == step.trainer_version
    joined.logprobs.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 1).all()


def test_batches_with_different_fields_do_not_join() -> None:
    with pytest.raises(keel.BatchError, match="only some have entropy, role"):
        keel.TokenBatch.cat([make(), make(entropy=None, role=None)])


def test_replace_checks_again() -> None:
    with pytest.raises(keel.BatchError, match=r"batch\.advantages has shape \[2\]"):
        make().replace(advantages=torch.zeros(2))


def test_evaluating_leaves_the_batch_as_it_was() -> None:
    step = random_step(2)
    before = {name: value.clone() for name, value in step.tensors().items()}
    for name in ("icepop", "opsm", "gspo", "vespo", "m2po", "dppo_kl"):
        result = keel.objective(name, kl_penalty_coef=0.1, teacher_tau=0.1, reference_kl_coef=0.1)(step)
        assert len(result.metrics) > 10
    for name, value in step.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_one_batch_of_one_token_works() -> None:
    assert keel.objective("icepop")(batch([-1.0], [-1.0])).loss.item() == -1.0
