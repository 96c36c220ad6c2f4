"""The ten rules that hold for every objective, as properties over invented steps, for every recipe.

Values lie on a dyadic grid (see strategies.py), so that kept and dropped tokens can be compared exactly between two
layouts of the same step, and losses and gradients to float64 rounding.
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
    chosen_from,
    close,
    compositions,
    masks_of,
    objective,
    pairs,
    parts_of,
    permutations_of,
    random_step,
    run,
    steps,
    without_trainer_version,
)

every_case = pytest.mark.parametrize("case", CASES)
ACCOUNTED = [
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
"""Cases with every kind of decision, table and term; accounts are compared in full, which is slow, for these."""
PAYS_AFTER_REFUSAL = [case for case in CASES if any(p.scope == "all" for p in objective(case).composition.penalties)]
READS_SAMPLER = [case for case in CASES if objective(case).composition.reads("sampler")]
GATED = [case for case in CASES if objective(case).composition.gates]


def test_the_cases_cover_both_kinds_of_penalty_scope() -> None:
    assert sorted(PAYS_AFTER_REFUSAL) == ["dppo_kl", "ipo"]
    assert [case for case in CASES if case not in READS_SAMPLER] == ["cross_entropy", "cross_entropy, roles"]


# --- rules 3, 4 and 6: layout never changes the signal


@every_case
@given(data=st.data())
def test_order_of_tokens_changes_nothing(case: str, data: st.DataObject) -> None:
    step = data.draw(steps())
    order = data.draw(permutations_of(step))
    rule = objective(case)
    loss, gradient, result = run(rule, step)
    moved_loss, moved_gradient, moved = run(rule, step.take(order))
    close(moved_loss, loss)
    close(moved_gradient, gradient[order])
    assert torch.equal(moved.reasons, result.reasons[order])
    if case in ACCOUNTED:
        assert_same_pairs(pairs(moved.metrics), pairs(result.metrics))


@every_case
@given(data=st.data())
def test_names_of_the_sequences_change_nothing(case: str, data: st.DataObject) -> None:
    step = data.draw(steps())
    old, row = torch.unique(step.sequence, return_inverse=True)
    new = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=len(old), max_size=len(old), unique=True))
    rule = objective(case)
    loss, gradient, result = run(rule, step)
    renamed_loss, renamed_gradient, renamed = run(rule, step.replace(sequence=torch.tensor(new)[row]))
    close(renamed_loss, loss)
    close(renamed_gradient, gradient)
    assert torch.equal(renamed.reasons, result.reasons)


SEQUENCE_METRICS = ("sequence_chi_square", "masked_sequences", "masked_sequence_tokens/")
"""Metrics about whole sequences."""


def split(
    rule: keel.Objective, step: keel.TokenBatch, parts: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[keel.ObjectiveResult]]:
    """Loss, gradient, reasons and results of a step given in parts, each part scored with the step's totals."""
    batches = [step.take(part) for part in parts]
    totals = rule.totals(batches)
    loss = torch.zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(step.logprobs)
    reasons = torch.zeros(len(step), dtype=torch.uint8)
    results = []
    for part, micro_batch in zip(parts, batches, strict=True):
        part_loss, part_gradient, result = run(rule, micro_batch, totals)
        loss += part_loss
        gradient[part] = part_gradient
        reasons[part] = result.reasons
        results.append(result)
    return loss, gradient, reasons, results


def added(results: list[keel.ObjectiveResult], *, sequence: bool) -> dict[str, list[float]]:
    """The metrics of several parts of a step, added; those about sequences or those about tokens."""
    metrics = sum((result.metrics for result in results), keel.Metrics())
    return {name: value for name, value in pairs(metrics).items() if name.startswith(SEQUENCE_METRICS) == sequence}


@every_case
@given(data=st.data())
def test_any_split_into_micro_batches_changes_nothing(case: str, data: st.DataObject) -> None:
    """Cut at any token, also inside a sequence; parts may be empty or hold nothing trainable."""
    step = data.draw(steps())
    rule = objective(case)
    loss, gradient, result = run(rule, step)
    parts_loss, parts_gradient, reasons, results = split(rule, step, data.draw(parts_of(step)))
    close(parts_loss, loss)
    close(parts_gradient, gradient)
    assert torch.equal(reasons, result.reasons)
    assert sum(part.kept_tokens for part in results) == result.kept_tokens
    if case in ACCOUNTED:
        assert_same_pairs(added(results, sequence=False), added([result], sequence=False))


@pytest.mark.parametrize("case", ACCOUNTED)
@given(data=st.data())
def test_metrics_of_sequences_add_up_over_parts_of_whole_sequences(case: str, data: st.DataObject) -> None:
    step = data.draw(steps())
    rule = objective(case)
    results = split(rule, step, data.draw(parts_of(step, whole_sequences=True)))[3]
    assert_same_pairs(added(results, sequence=True), added([rule(step)], sequence=True))


@every_case
@given(data=st.data())
def test_totals_need_every_part_in_any_order(case: str, data: st.DataObject) -> None:
    """The totals of the parts, listed backwards, score the whole step as it scores itself."""
    step = data.draw(steps())
    rule = objective(case)
    batches = [step.take(part) for part in data.draw(parts_of(step))]
    loss, gradient, _ = run(rule, step)
    other_loss, other_gradient, _ = run(rule, step, rule.totals(batches[::-1]))
    close(other_loss, loss)
    close(other_gradient, gradient)


@every_case
def test_layout_of_memory_and_width_of_ids_change_nothing(case: str) -> None:
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
    loss, gradient, result = run(objective(case), step)
    other_loss, other_gradient, other = run(objective(case), step.replace(**(strided | narrow)))
    close(other_loss, loss)
    close(other_gradient, gradient)
    assert torch.equal(other.reasons, result.reasons)
    assert_same_pairs(pairs(other.metrics), pairs(result.metrics))


# --- rules 1, 2 and 5: what left is gone

JUNK = [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0, 1000.0]


@every_case
@given(data=st.data())
def test_junk_in_untrainable_slots_changes_nothing(case: str, data: st.DataObject) -> None:
    """In every field, the ids included: bit for bit the same loss, gradient, decisions and accounts."""
    step = data.draw(steps(min_size=2))
    junk: dict[str, Tensor] = {}
    for name in (*FLOATS, *IDS):
        value = getattr(step, name).clone()
        choices = JUNK if name in FLOATS else [0, -1, 2**62, -(2**62), 7]
        slots = (~step.trainable).nonzero().squeeze(1).tolist()
        picked = data.draw(chosen_from(choices, len(slots)))
        for slot, number in zip(slots, picked, strict=True):
            value[slot] = number
        junk[name] = value
    rule = objective(case)
    assert_untouched_by(rule, step, step.replace(**junk), accounts=case in ACCOUNTED)


def assert_untouched_by(
    rule: keel.Objective, step: keel.TokenBatch, changed: keel.TokenBatch, accounts: bool = True
) -> None:
    loss, gradient, result = run(rule, step)
    other_loss, other_gradient, other = run(rule, changed)
    assert torch.equal(other_loss, loss)
    assert torch.equal(other_gradient, gradient)
    assert torch.equal(other.reasons, result.reasons)
    if accounts:
        assert pairs(other.metrics) == pairs(result.metrics)


@pytest.mark.parametrize("case", ["icepop", "decoupled_ppo_loglinear"])
def test_version_of_an_untrainable_token_does_not_make_the_others_stale(case: str) -> None:
    """Without trainer_version staleness counts from the newest version, and a prompt has none."""
    step = without_trainer_version(random_step(32))
    version = step.version.clone()
    version[~step.trainable] = 1000
    assert_untouched_by(objective(case), step, step.replace(version=version))


@every_case
@given(data=st.data())
def test_untrainable_tokens_may_as_well_be_absent(case: str, data: st.DataObject) -> None:
    step = data.draw(steps(min_size=2))
    present = step.trainable.nonzero().squeeze(1)
    rule = objective(case)
    loss, gradient, result = run(rule, step)
    short_loss, short_gradient, short = run(rule, step.take(present))
    close(short_loss, loss)
    close(short_gradient, gradient[present])
    assert torch.equal(short.reasons, result.reasons[present])
    assert (result.reasons[~step.trainable] == NOT_TRAINABLE).all()
    assert (gradient[~step.trainable] == 0).all()
    if case in ACCOUNTED:
        assert_same_pairs(pairs(short.metrics), pairs(result.metrics))


FAR = (-1000.0, -999.0, -1.0, 0.0)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=5)
@given(data=st.data())
def test_log_ratios_of_a_thousand_give_finite_numbers(case: str, dtype: torch.dtype, data: st.DataObject) -> None:
    step = data.draw(steps(all_trainable=True))
    size = len(step)
    far = {
        name: torch.tensor(data.draw(chosen_from(FAR, size)), dtype=dtype)
        for name in FLOATS
        if name.endswith("logprobs")
    }
    step = step.replace(**far, advantages=step.advantages.to(dtype), entropy=step.entropy.to(dtype))
    loss, gradient, result = run(objective(case), step)
    assert loss.dtype == dtype
    assert loss.isfinite()
    assert gradient.isfinite().all()
    for name, numbers in pairs(result.metrics).items():
        assert all(map(math.isfinite, numbers)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [50.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_gamma_weight_without_decay_stays_finite(log_ratio: float, advantage: float, dtype: torch.dtype) -> None:
    """rate = 0 is allowed, and then only the power is left to overflow."""
    rule = keel.objective("vespo", rate_positive=0.0, rate_negative=0.0)
    step = keel.TokenBatch(
        logprobs=torch.tensor([-1.0], dtype=dtype),
        sampler_logprobs=torch.tensor([-1.0 - log_ratio], dtype=dtype),
        advantages=torch.tensor([advantage], dtype=dtype),
        trainable=torch.tensor([True]),
        sequence=torch.tensor([0]),
    )
    loss, gradient, _ = run(rule, step)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@every_case
@given(step=steps())
def test_dropped_token_has_zero_gradient_in_every_term_it_leaves(case: str, step: keel.TokenBatch) -> None:
    rule = objective(case, **({"denominator": "kept"} if case in READS_SAMPLER else {}))
    _, gradient, result = run(rule, step)
    if case in PAYS_AFTER_REFUSAL:
        d = step.logprobs - step.sampler_logprobs
        refused = step.trainable & ~result.keep
        close(gradient[refused], 2e-3 * d[refused] / max(result.kept_tokens, 1))
    else:
        assert (gradient[~result.keep] == 0).all()


@pytest.mark.parametrize("case", [case for case in GATED if objective(case).composition.gates[0].scope == "sequence"])
@given(step=steps())
def test_sequence_decision_holds_for_all_its_trainable_tokens(case: str, step: keel.TokenBatch) -> None:
    keep = objective(case)(step).keep
    for name in step.sequence.unique():
        assert len(keep[(step.sequence == name) & step.trainable].unique()) <= 1


@every_case
@given(step=steps())
def test_when_no_token_survives_there_is_no_loss_and_no_gradient(case: str, step: keel.TokenBatch) -> None:
    refuse_all = [{"statistic": "ratio", "low": 1e30}]
    rule = objective(case, gates=[*CASES[case][1].get("gates", []), *refuse_all])
    loss, gradient, result = run(rule, step)
    assert result.kept_tokens == 0
    assert not result.keep.any()
    if case in PAYS_AFTER_REFUSAL:
        d = (step.logprobs - step.sampler_logprobs)[step.trainable]
        close(loss, 1e-3 * d.square().sum() / max(len(d), 1))
    else:
        assert loss.item() == 0.0
        assert (gradient == 0).all()


@every_case
def test_step_without_trainable_tokens_is_empty_but_sound(case: str) -> None:
    step = random_step(33)
    step = step.replace(trainable=torch.zeros_like(step.trainable))
    loss, gradient, result = run(objective(case), step)
    assert loss.item() == 0.0
    assert (gradient == 0).all()
    assert result.kept_tokens == 0
    assert result.metrics["is_masked"].count == 0


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_step_of_no_tokens_works(case: str, dtype: torch.dtype) -> None:
    nothing = random_step(34).take(torch.zeros(0, dtype=torch.int64))
    nothing = nothing.replace(**{name: value.to(dtype) for name, value in nothing.tensors().items() if name in FLOATS})
    loss, gradient, result = run(objective(case), nothing)
    assert loss.item() == 0.0
    assert gradient.shape == (0,)
    assert gradient.dtype == dtype
    assert result.kept_tokens == 0
    assert result.keep.shape == result.reasons.shape == (0,)
    full = objective(case)(random_step(34))
    assert_same_pairs(pairs(result.metrics + full.metrics), pairs(full.metrics))


# --- rule 7: a sampler log-prob that is not there


@pytest.mark.parametrize("case", READS_SAMPLER)
@given(data=st.data())
def test_token_without_a_sampler_logprob_is_dropped_and_counted(case: str, data: st.DataObject) -> None:
    step = data.draw(steps(min_size=2, all_trainable=True))
    lost = data.draw(masks_of(step))
    missing = torch.tensor(data.draw(chosen_from([math.nan, math.inf, -math.inf], len(step))), dtype=torch.float64)
    sampler = torch.where(lost, missing, step.sampler_logprobs)
    rule = objective(case, max_invalid_logprob_fraction=1.0)
    loss, gradient, result = run(rule, step.replace(sampler_logprobs=sampler))
    members = torch.ones(len(step), dtype=torch.bool)
    if rule.composition.roles is not None:
        members = torch.isin(step.role, torch.tensor(rule.composition.roles))
    lost &= members
    assert loss.isfinite()
    assert (gradient[lost] == 0).all()
    assert (result.reasons[lost] == INVALID_LOGPROB).all()
    assert not (result.reasons[~lost] == INVALID_LOGPROB).any()
    unusable = result.metrics["signal/invalid_logprob_tokens"]
    assert (unusable.sum, unusable.count) == (int(lost.sum()), int(members.sum()))
    if rule.composition.reduction.over == "tokens" and rule.composition.reduction.denominator == "trainable":
        # as if it had never been trainable, except that it still divides
        rest_loss, rest_gradient, _ = run(rule, step.replace(trainable=~lost))
        share = int((members & ~lost).sum()) / max(int(members.sum()), 1)
        close(loss, rest_loss * share)
        close(gradient, rest_gradient * share)


@pytest.mark.parametrize("case", READS_SAMPLER)
def test_step_is_refused_above_the_share_of_unusable_tokens(case: str) -> None:
    step = random_step(35, lengths=(60, 70, 5, 80))
    step = step.replace(role=torch.zeros_like(step.role))
    members = int(step.trainable.sum())
    assert members > 100
    sampler = step.sampler_logprobs.clone()
    first, second = step.trainable.nonzero().squeeze(1)[:2].tolist()
    sampler[first] = math.nan
    assert objective(case)(step.replace(sampler_logprobs=sampler)).loss.isfinite()
    sampler[second] = -math.inf
    with pytest.raises(
        keel.SignalRefused, match=rf"2 of {members} trainable .* objective\.max_invalid_logprob_fraction = 0\.01"
    ):
        objective(case)(step.replace(sampler_logprobs=sampler))
    assert objective(case, max_invalid_logprob_fraction=2 / members)(
        step.replace(sampler_logprobs=sampler)
    ).loss.isfinite()


def test_refusal_looks_at_the_whole_step_and_not_at_one_micro_batch() -> None:
    step = random_step(36, lengths=(60, 70, 5, 80))
    place = int(step.trainable.nonzero()[0])
    sampler = step.sampler_logprobs.clone()
    sampler[place] = math.nan
    step = step.replace(sampler_logprobs=sampler)
    inside = torch.zeros(len(step), dtype=torch.bool)
    inside[max(place - 3, 0) : place + 3] = True
    batches = [step.take(inside.nonzero().squeeze(1)), step.take((~inside).nonzero().squeeze(1))]
    rule = keel.objective("icepop")
    with pytest.raises(keel.SignalRefused):
        rule(batches[0])
    totals = rule.totals(batches)
    losses = sum(rule(micro_batch, totals).loss for micro_batch in batches)
    close(losses, rule(step).loss)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_cross_entropy_does_not_read_the_sampler(junk: float) -> None:
    step = random_step(37)
    junked = step.replace(sampler_logprobs=torch.full_like(step.logprobs, junk))
    close(run(keel.objective("cross_entropy"), junked)[1], run(keel.objective("cross_entropy"), step)[1])


# --- rules 6 and 8: totals and centring


@pytest.mark.parametrize("source", ["policy", "sampled"])
@given(step=steps())
def test_kl_penalty_adds_nothing_over_the_step(source: str, step: keel.TokenBatch) -> None:
    """Read off the gradient of an ungated on-policy linear term, whose slope is minus the advantage over N."""
    same = {"sampler_logprobs": step.logprobs, "advantages": torch.zeros_like(step.advantages)}
    rule = keel.objective("icepop", ratio_low=None, ratio_high=None, kl_penalty_coef=0.7, kl_penalty_source=source)
    _, gradient, _ = run(rule, step.replace(**same))
    assert gradient.sum().item() == pytest.approx(0.0, abs=1e-12)


@every_case
def test_rank_without_batches_takes_part_in_the_totals(case: str) -> None:
    """A rank that received no micro-batch this step must still join every exchange, with empty parts."""
    calls: dict[str, int] = {}

    def counting(rank: str) -> Any:
        def gather(part: Any) -> list[Any]:
            calls[rank] = calls.get(rank, 0) + 1
            return [part]

        return gather

    rule = objective(case)
    rule.totals([random_step(38)], counting("busy"))
    rule.totals([random_step(38).take(torch.zeros(0, dtype=torch.int64))], counting("idle"))
    assert calls["idle"] == calls["busy"]
    assert rule.totals([], counting("without batches")).num_trainable == 0
    assert calls["without batches"] == calls["busy"]


# --- rule 9: accounts


@every_case
@given(step=steps())
def test_accounts_are_consistent(case: str, step: keel.TokenBatch) -> None:
    result = objective(case)(step)
    metrics = result.metrics
    masked, low, high = metrics["is_masked"], metrics["is_masked_low"], metrics["is_masked_high"]
    assert low.sum + high.sum == masked.sum
    members = step.trainable
    roles = objective(case).composition.roles
    if roles is not None:
        members = members & torch.isin(step.role, torch.tensor(roles))
    assert masked.count == low.count == high.count == int(members.sum())
    assert masked.sum == int((members & ~result.keep).sum())
    assert result.kept_tokens == int(result.keep.sum()) == masked.count - masked.sum
    for sign in ("adv_pos", "adv_neg"):
        assert 0 <= metrics[f"is_masked_{sign}"].sum <= metrics[f"is_masked_{sign}"].count
    for name in ("masked_sequences", "masked_sequence_tokens"):
        assert metrics[name].count == 0 or 0 <= metrics[name].mean <= 1
    assert sum(metrics.dropped_tokens.values()) == masked.sum


# --- any dtype


@every_case
@given(step=steps())
@example(step=random_step(39))
def test_float32_arithmetic_agrees_with_float64(case: str, step: keel.TokenBatch) -> None:
    rule = objective(case)
    single = step.replace(**{name: value.float() for name, value in step.tensors().items() if name in FLOATS})
    rounded = single.replace(**{name: value.double() for name, value in single.tensors().items() if name in FLOATS})
    loss, gradient, result = run(rule, rounded)
    single_loss, single_gradient, single_result = run(rule, single)
    assert single_loss.dtype == single_gradient.dtype == torch.float32
    assert torch.equal(single_result.reasons, result.reasons)
    close(single_loss.double(), loss, rtol=2e-5, atol=2e-6)
    close(single_gradient.double(), gradient, rtol=2e-5, atol=2e-6)


@every_case
@given(step=steps())
def test_bfloat16_inputs_are_computed_in_float32(case: str, step: keel.TokenBatch) -> None:
    """The grid is exact in bfloat16, so only the gradient that is handed back may be rounded to it."""
    rule = objective(case)
    half = step.replace(**{name: value.bfloat16() for name, value in step.tensors().items() if name in FLOATS})
    loss, gradient, result = run(rule, step)
    half_loss, half_gradient, half_result = run(rule, half)
    assert half_loss.dtype == torch.float32
    assert half_gradient.dtype == torch.bfloat16
    assert half_result.gradient.dtype == torch.float32
    assert torch.equal(half_result.reasons, result.reasons)
    close(half_loss.double(), loss, rtol=2e-5, atol=2e-6)
    close(half_result.gradient.double(), gradient, rtol=2e-5, atol=2e-6)
    close(half_gradient.double(), gradient, rtol=2**-8, atol=2e-6)


# --- not only the recipes: any composition


@settings(max_examples=100)
@given(data=st.data(), table=compositions())
def test_layout_and_junk_change_nothing_in_any_composition(table: dict[str, Any], data: st.DataObject) -> None:
    step, rule = data.draw(steps(min_size=2)), keel.objective(table)
    loss, gradient, result = run(rule, step)
    order = data.draw(permutations_of(step))
    moved_loss, moved_gradient, moved = run(rule, step.take(order))
    close(moved_loss, loss)
    close(moved_gradient, gradient[order])
    assert torch.equal(moved.reasons, result.reasons[order])
    parts_loss, parts_gradient, reasons, _ = split(rule, step, data.draw(parts_of(step)))
    close(parts_loss, loss)
    close(parts_gradient, gradient)
    assert torch.equal(reasons, result.reasons)
    junk = {
        name: value.masked_fill(~step.trainable, math.nan) for name, value in step.tensors().items() if name in FLOATS
    }
    assert_untouched_by(rule, step, step.replace(**junk), accounts=False)


@settings(max_examples=100)
@given(data=st.data(), table=compositions())
def test_dropped_tokens_of_any_composition_leave_the_terms_they_should(
    table: dict[str, Any], data: st.DataObject
) -> None:
    step, rule = data.draw(steps()), keel.objective(table)
    _, gradient, result = run(rule, step)
    masked, low, high = (result.metrics[name].sum for name in ("is_masked", "is_masked_low", "is_masked_high"))
    assert low + high == masked == int((step.trainable & ~result.keep).sum())
    assert (gradient[~step.trainable] == 0).all()
    if all(penalty["scope"] == "kept" for penalty in table["penalties"]):
        assert (gradient[~result.keep] == 0).all()


@settings(max_examples=100)
@given(data=st.data(), table=compositions())
def test_log_ratios_of_a_thousand_give_finite_numbers_in_any_composition(
    table: dict[str, Any], data: st.DataObject
) -> None:
    step = data.draw(steps(all_trainable=True))
    far = {
        name: torch.tensor(data.draw(chosen_from(FAR, len(step))), dtype=torch.float64)
        for name in FLOATS
        if name.endswith("logprobs")
    }
    loss, gradient, _ = run(keel.objective(table), step.replace(**far))
    assert loss.isfinite()
    assert gradient.isfinite().all()


@settings(max_examples=60)
@given(table=compositions())
def test_gradient_of_any_composition_without_stops_is_the_finite_difference_of_its_loss(table: dict[str, Any]) -> None:
    still = [weight for weight in table["weights"] if weight["between"] == "proximal/sampler"]
    rule = keel.objective(table | {"weights": still, "teacher_tau": 0.0})
    step, width = random_step(61, lengths=(3, 2, 3, 4), spread=0.6), 1e-6
    gradient = rule(step).gradient
    for t in step.trainable.nonzero().squeeze(1).tolist():
        ends = []
        for sign in (1, -1):
            moved = step.logprobs.clone()
            moved[t] += sign * width
            ends.append(rule(step.replace(logprobs=moved)).loss.item())
        assert gradient[t].item() == pytest.approx((ends[0] - ends[1]) / (2 * width), rel=1e-5, abs=1e-8)


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
