"""The rules for every objective (docs/objectives.md) as properties over random steps, for every preset.

Values are on a dyadic grid (see strategies.py), so that kept and dropped tokens can be compared exactly between two
layouts of the same step, and losses and gradients up to float64 rounding.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import keel
from keel.signal.gates import INVALID_LOGPROB, NOT_TRAINABLE
from tests.support.strategies import (
    CASES,
    FLOATS,
    IDS,
    assert_same_pairs,
    case_objective,
    chosen_from,
    close,
    compositions,
    masks_of,
    pairs,
    parts_of,
    permutations_of,
    random_step,
    run,
    steps,
    without_trainer_version,
)

every_case = pytest.mark.parametrize("case", CASES)
WITH_METRICS = [
    "icepop",
    "dppo_kl",
    "opsm",
    "m2po",
    "gmpo",
    "vespo",
    "decoupled_ppo_loglinear",
    "cross_entropy, roles",
    "icepop, rollout_min_ratio",
    "icepop, sequences, kept",
    "dapo, kl_penalty sampled",
    "gspo, gated, kept",
    "mis, geometric",
]
"""Cases with every kind of decision, table and term. All metrics are compared for these, which is slow."""
PENALISES_DROPPED = [
    case for case in CASES if any(p.scope == "all" for p in case_objective(case).composition.penalties)
]
READS_SAMPLER = [case for case in CASES if case_objective(case).composition.reads("sampler")]
GATED = [case for case in CASES if case_objective(case).composition.gates]


def test_the_cases_cover_both_kinds_of_penalty_scope() -> None:
    assert sorted(PENALISES_DROPPED) == ["dppo_kl", "dppo_kl, capped", "ipo"]
    assert [case for case in CASES if case not in READS_SAMPLER] == ["cross_entropy", "cross_entropy, roles"]


# Rules 3, 4 and 6: the layout never changes the result


@every_case
@given(data=st.data())
def test_the_order_of_tokens_changes_nothing(case: str, data: st.DataObject) -> None:
    step = data.draw(steps())
    order = data.draw(permutations_of(step))
    objective = case_objective(case)
    loss, gradient, result = run(objective, step)
    permuted_loss, permuted_gradient, permuted = run(objective, step.take(order))
    close(permuted_loss, loss)
    close(permuted_gradient, gradient[order])
    assert torch.equal(permuted.reasons, result.reasons[order])
    if case in WITH_METRICS:
        assert_same_pairs(pairs(permuted.metrics), pairs(result.metrics))


@every_case
@given(data=st.data())
def test_the_ids_of_sequences_change_nothing(case: str, data: st.DataObject) -> None:
    step = data.draw(steps())
    old, row = torch.unique(step.sequence, return_inverse=True)
    new = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=len(old), max_size=len(old), unique=True))
    objective = case_objective(case)
    loss, gradient, result = run(objective, step)
    renamed_loss, renamed_gradient, renamed = run(objective, step.replace(sequence=torch.tensor(new)[row]))
    close(renamed_loss, loss)
    close(renamed_gradient, gradient)
    assert torch.equal(renamed.reasons, result.reasons)


SEQUENCE_METRICS = ("sequence_chi_square", "masked_sequences", "masked_sequence_tokens/")
"""Prefixes of the metrics of sequences."""


def split(
    objective: keel.Objective, step: keel.TokenBatch, parts: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[keel.ObjectiveResult]]:
    """Return loss, gradient, reasons and results of a step in parts, each evaluated with the step's totals."""
    batches = [step.take(part) for part in parts]
    totals = objective.totals(batches)
    loss = torch.zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(step.logprobs)
    reasons = torch.zeros(len(step), dtype=torch.uint8)
    results = []
    for part, micro_batch in zip(parts, batches, strict=True):
        part_loss, part_gradient, result = run(objective, micro_batch, totals)
        loss += part_loss
        gradient[part] = part_gradient
        reasons[part] = result.reasons
        results.append(result)
    return loss, gradient, reasons, results


def merged_metrics(results: list[keel.ObjectiveResult], *, sequence: bool) -> dict[str, list[float]]:
    """Return the merged metrics of several parts of a step: those of sequences, or those of tokens."""
    metrics = sum((result.metrics for result in results), keel.Metrics())
    return {name: value for name, value in pairs(metrics).items() if name.startswith(SEQUENCE_METRICS) == sequence}


@every_case
@given(data=st.data())
def test_any_split_into_micro_batches_changes_nothing(case: str, data: st.DataObject) -> None:
    """Split at any token, also inside a sequence; parts may be empty or without trainable tokens."""
    step = data.draw(steps())
    objective = case_objective(case)
    loss, gradient, result = run(objective, step)
    parts_loss, parts_gradient, reasons, results = split(objective, step, data.draw(parts_of(step)))
    close(parts_loss, loss)
    close(parts_gradient, gradient)
    assert torch.equal(reasons, result.reasons)
    assert sum(part.kept_tokens for part in results) == result.kept_tokens
    if case in WITH_METRICS:
        assert_same_pairs(merged_metrics(results, sequence=False), merged_metrics([result], sequence=False))


@pytest.mark.parametrize("case", WITH_METRICS)
@given(data=st.data())
def test_metrics_of_sequences_add_up_over_micro_batches_of_complete_sequences(case: str, data: st.DataObject) -> None:
    step = data.draw(steps())
    objective = case_objective(case)
    results = split(objective, step, data.draw(parts_of(step, whole_sequences=True)))[3]
    assert_same_pairs(merged_metrics(results, sequence=True), merged_metrics([objective(step)], sequence=True))


@every_case
@given(data=st.data())
def test_totals_do_not_depend_on_the_order_of_micro_batches(case: str, data: st.DataObject) -> None:
    """The whole step, evaluated with the totals of its parts in reverse order, has the same loss and gradient."""
    step = data.draw(steps())
    objective = case_objective(case)
    batches = [step.take(part) for part in data.draw(parts_of(step))]
    loss, gradient, _ = run(objective, step)
    other_loss, other_gradient, _ = run(objective, step, objective.totals(batches[::-1]))
    close(other_loss, loss)
    close(other_gradient, gradient)


@every_case
def test_strides_and_integer_types_of_ids_change_nothing(case: str) -> None:
    step = random_step(31)
    step = step.replace(sequence=step.sequence % 11)
    strided = {name: torch.stack([value, value], dim=1)[:, 0] for name, value in step.tensors().items()}
    narrow = {
        name: value.to(dtype)
        for (name, value), dtype in zip(
            ((name, strided[name]) for name in IDS),
            (torch.uint8, torch.int32, torch.int16, torch.int32, torch.int8),
            strict=True,
        )
    }
    loss, gradient, result = run(case_objective(case), step)
    other_loss, other_gradient, other = run(case_objective(case), step.replace(**(strided | narrow)))
    close(other_loss, loss)
    close(other_gradient, gradient)
    assert torch.equal(other.reasons, result.reasons)
    assert_same_pairs(pairs(other.metrics), pairs(result.metrics))


# Rules 1, 2 and 5: dropped and untrainable tokens have no effect

INVALID_VALUES = [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0, 1000.0]


@every_case
@given(data=st.data())
def test_values_at_untrainable_tokens_change_nothing(case: str, data: st.DataObject) -> None:
    """In every field including ids: loss, gradient, decisions and metrics are bitwise equal."""
    step = data.draw(steps(min_size=2))
    replaced: dict[str, Tensor] = {}
    for name in (*FLOATS, *IDS):
        value = getattr(step, name).clone()
        choices = INVALID_VALUES if name in FLOATS else [0, -1, 2**62, -(2**62), 7]
        positions = (~step.trainable).nonzero().squeeze(1).tolist()
        drawn = data.draw(chosen_from(choices, len(positions)))
        for position, number in zip(positions, drawn, strict=True):
            value[position] = number
        replaced[name] = value
    objective = case_objective(case)
    assert_same_result(objective, step, step.replace(**replaced), metrics=case in WITH_METRICS)


def assert_same_result(
    objective: keel.Objective, step: keel.TokenBatch, changed: keel.TokenBatch, metrics: bool = True
) -> None:
    loss, gradient, result = run(objective, step)
    other_loss, other_gradient, other = run(objective, changed)
    assert torch.equal(other_loss, loss)
    assert torch.equal(other_gradient, gradient)
    assert torch.equal(other.reasons, result.reasons)
    if metrics:
        assert pairs(other.metrics) == pairs(result.metrics)


@pytest.mark.parametrize("case", ["icepop", "decoupled_ppo_loglinear"])
def test_the_version_of_an_untrainable_token_does_not_change_staleness(case: str) -> None:
    """Without trainer_version, staleness is measured from the newest version of a trainable token."""
    step = without_trainer_version(random_step(32))
    version = step.version.clone()
    version[~step.trainable] = 1000
    assert_same_result(case_objective(case), step, step.replace(version=version))


@every_case
@given(data=st.data())
def test_removing_untrainable_tokens_changes_nothing(case: str, data: st.DataObject) -> None:
    step = data.draw(steps(min_size=2))
    trainable = step.trainable.nonzero().squeeze(1)
    objective = case_objective(case)
    loss, gradient, result = run(objective, step)
    short_loss, short_gradient, short = run(objective, step.take(trainable))
    close(short_loss, loss)
    close(short_gradient, gradient[trainable])
    assert torch.equal(short.reasons, result.reasons[trainable])
    assert (result.reasons[~step.trainable] == NOT_TRAINABLE).all()
    assert (gradient[~step.trainable] == 0).all()
    if case in WITH_METRICS:
        assert_same_pairs(pairs(short.metrics), pairs(result.metrics))


EXTREME_LOGPROBS = (-1000.0, -999.0, -1.0, 0.0)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=5)
@given(data=st.data())
def test_log_ratios_of_a_thousand_give_finite_results(case: str, dtype: torch.dtype, data: st.DataObject) -> None:
    step = data.draw(steps(all_trainable=True))
    size = len(step)
    extreme = {
        name: torch.tensor(data.draw(chosen_from(EXTREME_LOGPROBS, size)), dtype=dtype)
        for name in FLOATS
        if name.endswith("logprobs")
    }
    step = step.replace(**extreme, advantages=step.advantages.to(dtype), entropy=step.entropy.to(dtype))
    loss, gradient, result = run(case_objective(case), step)
    assert loss.dtype == dtype
    assert loss.isfinite()
    assert gradient.isfinite().all()
    for name, values in pairs(result.metrics).items():
        assert all(map(math.isfinite, values)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [50.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_gamma_weight_without_decay_is_finite(log_ratio: float, advantage: float, dtype: torch.dtype) -> None:
    """rate = 0 is allowed, and then the power alone could overflow."""
    objective = keel.objective("vespo", rate_positive=0.0, rate_negative=0.0)
    step = keel.TokenBatch(
        logprobs=torch.tensor([-1.0], dtype=dtype),
        sampler_logprobs=torch.tensor([-1.0 - log_ratio], dtype=dtype),
        advantages=torch.tensor([advantage], dtype=dtype),
        trainable=torch.tensor([True]),
        sequence=torch.tensor([0]),
    )
    loss, gradient, _ = run(objective, step)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@every_case
@given(step=steps())
def test_a_dropped_token_has_zero_gradient_in_every_term_it_is_dropped_from(case: str, step: keel.TokenBatch) -> None:
    objective = case_objective(case, **({"denominator": "kept"} if case in READS_SAMPLER else {}))
    _, gradient, result = run(objective, step)
    if case in PENALISES_DROPPED:
        d = step.logprobs - step.sampler_logprobs
        dropped = step.trainable & ~result.keep
        close(gradient[dropped], 2e-3 * d[dropped] / max(result.kept_tokens, 1))
    else:
        assert (gradient[~result.keep] == 0).all()


@pytest.mark.parametrize(
    "case", [case for case in GATED if case_objective(case).composition.gates[0].scope == "sequence"]
)
@given(step=steps())
def test_a_sequence_gate_drops_all_trainable_tokens_of_a_sequence_or_none(case: str, step: keel.TokenBatch) -> None:
    keep = case_objective(case)(step).keep
    for name in step.sequence.unique():
        assert len(keep[(step.sequence == name) & step.trainable].unique()) <= 1


@every_case
@given(step=steps())
def test_loss_and_gradient_are_zero_if_all_tokens_are_dropped(case: str, step: keel.TokenBatch) -> None:
    drop_all = [{"statistic": "ratio", "low": 1e30}]
    objective = case_objective(case, gates=[*CASES[case][1].get("gates", []), *drop_all])
    loss, gradient, result = run(objective, step)
    assert result.kept_tokens == 0
    assert not result.keep.any()
    if case in PENALISES_DROPPED:
        d = (step.logprobs - step.sampler_logprobs)[step.trainable]
        close(loss, 1e-3 * d.square().sum() / max(len(d), 1))
    else:
        assert loss.item() == 0.0
        assert (gradient == 0).all()


@every_case
def test_a_step_without_trainable_tokens_has_zero_loss_and_gradient(case: str) -> None:
    step = random_step(33)
    step = step.replace(trainable=torch.zeros_like(step.trainable))
    loss, gradient, result = run(case_objective(case), step)
    assert loss.item() == 0.0
    assert (gradient == 0).all()
    assert result.kept_tokens == 0
    assert result.metrics["is_masked"].count == 0


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_empty_step_is_valid(case: str, dtype: torch.dtype) -> None:
    empty = random_step(34).take(torch.zeros(0, dtype=torch.int64))
    empty = empty.replace(**{name: value.to(dtype) for name, value in empty.tensors().items() if name in FLOATS})
    loss, gradient, result = run(case_objective(case), empty)
    assert loss.item() == 0.0
    assert gradient.shape == (0,)
    assert gradient.dtype == dtype
    assert result.kept_tokens == 0
    assert result.keep.shape == result.reasons.shape == (0,)
    full = case_objective(case)(random_step(34))
    assert_same_pairs(pairs(result.metrics + full.metrics), pairs(full.metrics))


# Rule 7: invalid sampler log-probs


@pytest.mark.parametrize("case", READS_SAMPLER)
@given(data=st.data())
def test_a_token_with_an_invalid_sampler_logprob_is_dropped_and_counted(case: str, data: st.DataObject) -> None:
    step = data.draw(steps(min_size=2, all_trainable=True))
    invalid = data.draw(masks_of(step))
    invalid_logprobs = torch.tensor(
        data.draw(chosen_from([math.nan, math.inf, -math.inf], len(step))), dtype=torch.float64
    )
    sampler = torch.where(invalid, invalid_logprobs, step.sampler_logprobs)
    objective = case_objective(case, max_invalid_logprob_fraction=1.0)
    loss, gradient, result = run(objective, step.replace(sampler_logprobs=sampler))
    trainable = torch.ones(len(step), dtype=torch.bool)
    if objective.composition.roles is not None:
        trainable = torch.isin(step.role, torch.tensor(objective.composition.roles))
    invalid &= trainable
    assert loss.isfinite()
    assert (gradient[invalid] == 0).all()
    assert (result.reasons[invalid] == INVALID_LOGPROB).all()
    assert not (result.reasons[~invalid] == INVALID_LOGPROB).any()
    metric = result.metrics["signal/invalid_logprob_tokens"]
    assert (metric.sum, metric.count) == (int(invalid.sum()), int(trainable.sum()))
    if objective.composition.reduction.over == "tokens" and objective.composition.reduction.denominator == "trainable":
        # as if it were not trainable, except that it still counts in the divisor
        rest_loss, rest_gradient, _ = run(objective, step.replace(trainable=~invalid))
        factor = int((trainable & ~invalid).sum()) / max(int(trainable.sum()), 1)
        close(loss, rest_loss * factor)
        close(gradient, rest_gradient * factor)


@pytest.mark.parametrize("case", READS_SAMPLER)
def test_too_many_invalid_sampler_logprobs_are_an_error(case: str) -> None:
    step = random_step(35, lengths=(60, 70, 5, 80))
    step = step.replace(role=torch.zeros_like(step.role))
    num_trainable = int(step.trainable.sum())
    assert num_trainable > 100
    sampler = step.sampler_logprobs.clone()
    first, second = step.trainable.nonzero().squeeze(1)[:2].tolist()
    sampler[first] = math.nan
    assert case_objective(case)(step.replace(sampler_logprobs=sampler)).loss.isfinite()
    sampler[second] = -math.inf
    with pytest.raises(
        keel.InvalidSignalError,
        match=rf"2 of {num_trainable} trainable .* objective\.max_invalid_logprob_fraction = 0\.01",
    ):
        case_objective(case)(step.replace(sampler_logprobs=sampler))
    assert case_objective(case, max_invalid_logprob_fraction=2 / num_trainable)(
        step.replace(sampler_logprobs=sampler)
    ).loss.isfinite()


def test_the_invalid_logprob_fraction_is_that_of_the_whole_step() -> None:
    step = random_step(36, lengths=(60, 70, 5, 80))
    position = int(step.trainable.nonzero()[0])
    sampler = step.sampler_logprobs.clone()
    sampler[position] = math.nan
    step = step.replace(sampler_logprobs=sampler)
    inside = torch.zeros(len(step), dtype=torch.bool)
    inside[max(position - 3, 0) : position + 3] = True
    batches = [step.take(inside.nonzero().squeeze(1)), step.take((~inside).nonzero().squeeze(1))]
    objective = keel.objective("icepop")
    with pytest.raises(keel.InvalidSignalError):
        objective(batches[0])
    totals = objective.totals(batches)
    losses = sum(objective(micro_batch, totals).loss for micro_batch in batches)
    close(losses, objective(step).loss)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_cross_entropy_does_not_read_the_sampler_logprobs(value: float) -> None:
    step = random_step(37)
    invalid = step.replace(sampler_logprobs=torch.full_like(step.logprobs, value))
    close(run(keel.objective("cross_entropy"), invalid)[1], run(keel.objective("cross_entropy"), step)[1])


# Rules 6 and 8: totals and centring


@pytest.mark.parametrize("source", ["policy", "sampled"])
@given(step=steps())
def test_the_kl_penalty_sums_to_zero_over_the_step(source: str, step: keel.TokenBatch) -> None:
    """The gradient of an ungated on-policy linear term is minus the advantage over N."""
    on_policy = {"sampler_logprobs": step.logprobs, "advantages": torch.zeros_like(step.advantages)}
    objective = keel.objective("icepop", ratio_low=None, ratio_high=None, kl_penalty_coef=0.7, kl_penalty_source=source)
    _, gradient, _ = run(objective, step.replace(**on_policy))
    assert gradient.sum().item() == pytest.approx(0.0, abs=1e-12)


@every_case
def test_a_rank_without_batches_takes_part_in_every_exchange(case: str) -> None:
    """A rank without a micro-batch must still call gather equally often, with empty parts."""
    calls: dict[str, int] = {}

    def counting(rank: str) -> Any:
        def gather(part: Any) -> list[Any]:
            calls[rank] = calls.get(rank, 0) + 1
            return [part]

        return gather

    objective = case_objective(case)
    objective.totals([random_step(38)], counting("busy"))
    objective.totals([random_step(38).take(torch.zeros(0, dtype=torch.int64))], counting("idle"))
    assert calls["idle"] == calls["busy"]
    assert objective.totals([], counting("without batches")).num_trainable == 0
    assert calls["without batches"] == calls["busy"]


# Rule 9: metrics


@every_case
@given(step=steps())
def test_metrics_are_consistent(case: str, step: keel.TokenBatch) -> None:
    result = case_objective(case)(step)
    metrics = result.metrics
    masked, low, high = metrics["is_masked"], metrics["is_masked_low"], metrics["is_masked_high"]
    assert low.sum + high.sum == masked.sum
    trainable = step.trainable
    roles = case_objective(case).composition.roles
    if roles is not None:
        trainable = trainable & torch.isin(step.role, torch.tensor(roles))
    assert masked.count == low.count == high.count == int(trainable.sum())
    assert masked.sum == int((trainable & ~result.keep).sum())
    assert result.kept_tokens == int(result.keep.sum()) == masked.count - masked.sum
    for sign in ("adv_pos", "adv_neg"):
        assert 0 <= metrics[f"is_masked_{sign}"].sum <= metrics[f"is_masked_{sign}"].count
    for name in ("masked_sequences", "masked_sequence_tokens"):
        assert metrics[name].count == 0 or 0 <= metrics[name].mean <= 1
    assert sum(metrics.dropped_tokens.values()) == masked.sum


# Types


@every_case
@given(step=steps())
@example(step=random_step(39))
def test_float32_arithmetic_agrees_with_float64(case: str, step: keel.TokenBatch) -> None:
    objective = case_objective(case)
    single = step.replace(**{name: value.float() for name, value in step.tensors().items() if name in FLOATS})
    rounded = single.replace(**{name: value.double() for name, value in single.tensors().items() if name in FLOATS})
    loss, gradient, result = run(objective, rounded)
    single_loss, single_gradient, single_result = run(objective, single)
    assert single_loss.dtype == single_gradient.dtype == torch.float32
    assert torch.equal(single_result.reasons, result.reasons)
    close(single_loss.double(), loss, rtol=2e-5, atol=2e-6)
    close(single_gradient.double(), gradient, rtol=2e-5, atol=2e-6)


@every_case
@given(step=steps())
def test_bfloat16_inputs_are_computed_in_float32(case: str, step: keel.TokenBatch) -> None:
    """The grid is exact in bfloat16, so only the returned gradient is rounded to it."""
    objective = case_objective(case)
    half = step.replace(**{name: value.bfloat16() for name, value in step.tensors().items() if name in FLOATS})
    loss, gradient, result = run(objective, step)
    half_loss, half_gradient, half_result = run(objective, half)
    assert half_loss.dtype == torch.float32
    assert half_gradient.dtype == torch.bfloat16
    assert half_result.gradient.dtype == torch.float32
    assert torch.equal(half_result.reasons, result.reasons)
    close(half_loss.double(), loss, rtol=2e-5, atol=2e-6)
    close(half_result.gradient.double(), gradient, rtol=2e-5, atol=2e-6)
    close(half_gradient.double(), gradient, rtol=2**-8, atol=2e-6)


# Random compositions


@settings(max_examples=100)
@given(data=st.data(), table=compositions())
def test_layout_and_untrainable_values_change_nothing_in_any_composition(
    table: dict[str, Any], data: st.DataObject
) -> None:
    step, objective = data.draw(steps(min_size=2)), keel.objective(table)
    loss, gradient, result = run(objective, step)
    order = data.draw(permutations_of(step))
    permuted_loss, permuted_gradient, permuted = run(objective, step.take(order))
    close(permuted_loss, loss)
    close(permuted_gradient, gradient[order])
    assert torch.equal(permuted.reasons, result.reasons[order])
    parts_loss, parts_gradient, reasons, _ = split(objective, step, data.draw(parts_of(step)))
    close(parts_loss, loss)
    close(parts_gradient, gradient)
    assert torch.equal(reasons, result.reasons)
    replaced = {
        name: value.masked_fill(~step.trainable, math.nan) for name, value in step.tensors().items() if name in FLOATS
    }
    assert_same_result(objective, step, step.replace(**replaced), metrics=False)


@settings(max_examples=100)
@given(data=st.data(), table=compositions())
def test_dropped_tokens_of_any_composition_are_counted_and_have_no_gradient(
    table: dict[str, Any], data: st.DataObject
) -> None:
    step, objective = data.draw(steps()), keel.objective(table)
    _, gradient, result = run(objective, step)
    masked, low, high = (result.metrics[name].sum for name in ("is_masked", "is_masked_low", "is_masked_high"))
    assert low + high == masked == int((step.trainable & ~result.keep).sum())
    assert (gradient[~step.trainable] == 0).all()
    if all(penalty["scope"] == "kept" for penalty in table["penalties"]):
        assert (gradient[~result.keep] == 0).all()


@settings(max_examples=100)
@given(data=st.data(), table=compositions())
def test_log_ratios_of_a_thousand_give_finite_results_in_any_composition(
    table: dict[str, Any], data: st.DataObject
) -> None:
    step = data.draw(steps(all_trainable=True))
    extreme = {
        name: torch.tensor(data.draw(chosen_from(EXTREME_LOGPROBS, len(step))), dtype=torch.float64)
        for name in FLOATS
        if name.endswith("logprobs")
    }
    loss, gradient, _ = run(keel.objective(table), step.replace(**extreme))
    assert loss.isfinite()
    assert gradient.isfinite().all()


@settings(max_examples=60)
@given(table=compositions())
def test_the_gradient_of_any_composition_without_detached_terms_is_the_derivative_of_its_loss(
    table: dict[str, Any],
) -> None:
    constant_weights = [weight for weight in table["weights"] if weight["between"] == "proximal/sampler"]
    objective = keel.objective(table | {"weights": constant_weights, "teacher_tau": 0.0})
    step, width = random_step(61, lengths=(3, 2, 3, 4), spread=0.6), 1e-6
    gradient = objective(step).gradient
    for t in step.trainable.nonzero().squeeze(1).tolist():
        losses = []
        for sign in (1, -1):
            shifted = step.logprobs.clone()
            shifted[t] += sign * width
            losses.append(objective(step.replace(logprobs=shifted)).loss.item())
        assert gradient[t].item() == pytest.approx((losses[0] - losses[1]) / (2 * width), rel=1e-5, abs=1e-8)


def test_fields_may_have_different_precisions() -> None:
    step = random_step(60)
    mixed = step.replace(
        logprobs=step.logprobs.float(),
        sampler_logprobs=step.sampler_logprobs.bfloat16(),
        advantages=step.advantages.float(),
        entropy=step.entropy.half(),
        proximal_logprobs=None,
        reference_logprobs=None,
        teacher_logprobs=None,
    )
    loss, gradient, result = run(keel.objective("icepop"), mixed)
    exact = step.replace(
        logprobs=mixed.logprobs.double(),
        sampler_logprobs=mixed.sampler_logprobs.double(),
        advantages=mixed.advantages.double(),
    )
    assert gradient.dtype == torch.float32
    close(gradient.double(), run(keel.objective("icepop"), exact)[1], rtol=1e-5, atol=1e-7)
    assert loss.dtype == torch.float32
    assert result.metrics["entropy"].mean == pytest.approx(step.entropy[step.trainable].mean().item(), rel=1e-3)
