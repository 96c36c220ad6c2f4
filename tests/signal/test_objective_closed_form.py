"""Values and gradients computed by hand: the main objectives, reductions, transforms and KL terms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from tests.support.strategies import batch, close, run

LOG2, LOG5 = math.log(2), math.log(5)


def single_token(
    log_ratio: float, advantage: float, *, sampler: float = 0.0, dtype: torch.dtype = torch.float64
) -> keel.TokenBatch:
    """Return one token with this log-ratio, which is exact if the sampler's log-prob is 0.

    A policy log-prob is at most 0, so a positive log-ratio lowers the sampler's in its place.
    """
    lowered = max(sampler + log_ratio, 0.0) if sampler == 0 else 0.0
    step = batch([sampler + log_ratio - lowered], [sampler - lowered], advantages=[advantage])
    return step.replace(
        **{name: value.to(dtype) for name, value in step.tensors().items() if value.is_floating_point()}
    )


def token_with_probabilities(p: float, q: float, advantage: float) -> keel.TokenBatch:
    """Return one token with these probabilities under policy and sampler."""
    return batch([math.log(p)], [math.log(q)], advantages=[advantage])


def evaluate(objective: keel.Objective, step: keel.TokenBatch) -> tuple[float, list[float], list[bool]]:
    loss, gradient, result = run(objective, step)
    return loss.item(), gradient.tolist(), result.keep.tolist()


# icepop


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [0.2, 5.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_icepop_keeps_a_token_on_its_bound(bound: float, advantage: float, dtype: torch.dtype) -> None:
    loss, (gradient,), keep = evaluate(keel.objective("icepop"), single_token(math.log(bound), advantage, dtype=dtype))
    assert keep == [True]
    assert loss == pytest.approx(-advantage * bound, rel=1e-6)
    assert gradient == pytest.approx(-advantage * bound, rel=1e-6)


@pytest.mark.parametrize("ratio", [0.2 * (1 - 1e-9), 5.0 * (1 + 1e-9), 1e-9, 1e9])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_icepop_drops_a_token_outside_the_band_for_any_advantage(ratio: float, advantage: float) -> None:
    assert evaluate(keel.objective("icepop"), single_token(math.log(ratio), advantage)) == (0.0, [0.0], [False])


def test_icepop_is_minus_advantage_times_ratio_inside_the_band() -> None:
    step = batch([-1.0, -2.0, -0.5], [-1.5, -1.5, -0.5], advantages=[2.0, -1.0, 0.5])
    loss, gradient, _ = run(keel.objective("icepop"), step)
    expected = torch.tensor([-2.0 * math.exp(0.5), math.exp(-0.5), -0.5], dtype=torch.float64) / 3
    close(gradient, expected)
    close(loss, expected.sum())


def test_dropped_tokens_count_in_the_divisor() -> None:
    step = batch([0.0, 0.0], [-3.0, 0.0], advantages=[1.0, 1.0])
    loss, gradient, keep = evaluate(keel.objective("icepop"), step)
    assert keep == [False, True]
    assert loss == -0.5
    assert gradient == [0.0, -0.5]


def test_rollout_min_ratio_drops_only_the_sequence_with_a_small_ratio() -> None:
    step = batch(
        [-9.0, -1.0, -1.0, -1.0], [-1.0, -1.0, -1.0, -1.0], sequence=[5, 5, 2, 2], advantages=[1.0, 1.0, 1.0, -1.0]
    )
    without = keel.objective("icepop", ratio_low=None)(step)
    assert without.keep.tolist() == [True, True, True, True]
    result = keel.objective("icepop", ratio_low=None, rollout_min_ratio=1e-3)(step)
    assert result.keep.tolist() == [False, False, True, True]
    assert result.metrics["masked_sequences"].mean == 0.5


def test_rollout_min_ratio_keeps_a_sequence_on_the_bound_and_ignores_untrainable_tokens() -> None:
    objective = keel.objective("icepop", ratio_low=None, rollout_min_ratio=0.25)
    on_bound = batch([math.log(0.25), 0.0], [0.0, 0.0])
    assert objective(on_bound).keep.tolist() == [True, True]
    below = batch([math.log(0.25) - 1e-9, 0.0], [0.0, 0.0])
    assert objective(below).keep.tolist() == [False, False]
    assert objective(below.replace(trainable=torch.tensor([False, True]))).keep.tolist() == [False, True]


# ipo_kl


def test_ipo_kl_adds_the_squared_log_ratio_of_kept_tokens() -> None:
    loss, (gradient,), _ = evaluate(keel.objective("ipo_kl", kl_tau=0.1), single_token(0.5, 2.0))
    assert loss == pytest.approx(-2 * math.exp(0.5) + 0.1 * 0.25)
    assert gradient == pytest.approx(-2 * math.exp(0.5) + 0.1 * 2 * 0.5)


def test_ipo_kl_has_no_penalty_on_dropped_tokens() -> None:
    assert evaluate(keel.objective("ipo_kl", kl_tau=0.1), single_token(3.0, 1.0)) == (0.0, [0.0], [False])


@pytest.mark.parametrize("bound", [0.2, 5.0])
def test_ipo_kl_keeps_a_token_on_its_bound(bound: float) -> None:
    assert evaluate(keel.objective("ipo_kl"), single_token(math.log(bound), -1.0))[2] == [True]


# dppo_tv


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_dppo_tv_drops_by_probability_difference_for_any_advantage(advantage: float) -> None:
    objective = keel.objective("dppo_tv", diff_low=0.1, diff_high=0.3)
    kept = {(0.5, 0.45), (0.5, 0.25), (0.5, 0.55)}
    dropped = {(0.5, 0.19), (0.5, 0.65)}
    for p, q in kept:
        loss, (gradient,), keep = evaluate(objective, token_with_probabilities(p, q, advantage))
        assert keep == [True]
        assert loss == pytest.approx(-advantage * p / q)
        assert gradient == pytest.approx(-advantage * p / q)
    for p, q in dropped:
        assert evaluate(objective, token_with_probabilities(p, q, advantage)) == (0.0, [0.0], [False])


def test_dppo_tv_keeps_a_token_on_its_bound() -> None:
    """p = 1 and q = 1/2 are exact, and so is their difference."""
    up, down = batch([0.0], [-LOG2]), batch([-LOG2], [0.0])
    assert keel.objective("dppo_tv", diff_high=0.5)(up).keep.tolist() == [True]
    assert keel.objective("dppo_tv", diff_high=math.nextafter(0.5, 0))(up).keep.tolist() == [False]
    assert keel.objective("dppo_tv", diff_low=0.5)(down).keep.tolist() == [True]
    assert keel.objective("dppo_tv", diff_low=math.nextafter(0.5, 0))(down).keep.tolist() == [False]


# dppo_kl and ipo


@pytest.mark.parametrize(
    ("p", "q", "advantage", "keep"),
    [
        (0.6, 0.3, 1.0, False),  # too high, with a positive advantage
        (0.6, 0.3, -1.0, True),
        (0.6, 0.3, 0.0, True),
        (0.3, 0.6, -1.0, False),  # too low, with a negative advantage
        (0.3, 0.6, 1.0, True),
        (0.3, 0.6, 0.0, True),
        (0.4, 0.3, 1.0, True),
        (0.3, 0.4, -1.0, True),
    ],
)
def test_dppo_kl_drops_by_the_sign_of_the_advantage_and_penalises_all_tokens(
    p: float, q: float, advantage: float, keep: bool
) -> None:
    d = math.log(p / q)
    loss, (gradient,), kept = evaluate(keel.objective("dppo_kl", kl_tau=0.1), token_with_probabilities(p, q, advantage))
    assert kept == [keep]
    assert loss == pytest.approx(-keep * advantage * p / q + 0.1 * d * d)
    assert gradient == pytest.approx(-keep * advantage * p / q + 0.2 * d)


def test_dppo_kl_keeps_a_token_on_its_bound() -> None:
    up, down = batch([0.0], [-LOG2]), batch([-LOG2], [0.0], advantages=[-1.0])
    assert keel.objective("dppo_kl", mask_high=0.5)(up).keep.tolist() == [True]
    assert keel.objective("dppo_kl", mask_high=0.49999)(up).keep.tolist() == [False]
    assert keel.objective("dppo_kl", mask_low=0.5)(down).keep.tolist() == [True]
    assert keel.objective("dppo_kl", mask_low=0.49999)(down).keep.tolist() == [False]


def test_ipo_drops_by_absolute_difference_and_penalises_all_tokens() -> None:
    for p, q, keep in [(0.5, 0.45, True), (0.45, 0.5, True), (0.5, 0.39, False), (0.39, 0.5, False)]:
        for advantage in (-1.0, 1.0):
            d = math.log(p / q)
            loss, (gradient,), kept = evaluate(
                keel.objective("ipo", kl_tau=0.1), token_with_probabilities(p, q, advantage)
            )
            assert kept == [keep]
            assert loss == pytest.approx(-keep * advantage * p / q + 0.1 * d * d)
            assert gradient == pytest.approx(-keep * advantage * p / q + 0.2 * d)


# opsm and the clipped surrogate


def test_opsm_keeps_sequences_of_positive_or_zero_advantage_at_any_kl() -> None:
    step = batch([-4.0] * 4, [-1.0] * 4, advantages=[1.0, -0.5, 1.0, -1.0], sequence=[1, 1, 2, 2])
    assert keel.objective("opsm")(step).keep.all()


def test_opsm_keeps_a_negative_sequence_that_became_more_likely() -> None:
    assert keel.objective("opsm")(batch([-1.0] * 2, [-2.0] * 2, advantages=[-1.0, -1.0])).keep.all()


def test_opsm_measures_the_kl_against_the_sampler_even_with_a_proximal_anchor() -> None:
    step = batch([-2.0], [-1.0], advantages=[-1.0], proximal_logprobs=[-2.0])
    assert not keel.objective("opsm", anchor="proximal")(step).keep.any()


CLIPPED = [
    # ratio, advantage, value, gradient, with eps 0.2 and eps_high 0.4
    (1.1, 1.0, -1.1, -1.1),
    (1.39, 1.0, -1.39, -1.39),
    (1.5, 1.0, -1.4, 0.0),
    (0.5, 1.0, -0.5, -0.5),
    (0.9, -2.0, 1.8, 1.8),
    (0.5, -2.0, 1.6, 0.0),
    (4.0, -2.0, 8.0, 8.0),
    (7.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize("name", ["dapo", "grpo", "ppo", "veto", "opsm"])
@pytest.mark.parametrize(("ratio", "advantage", "value", "expected_gradient"), CLIPPED)
def test_the_clipped_surrogate_by_hand(
    name: str, ratio: float, advantage: float, value: float, expected_gradient: float
) -> None:
    extra: dict[str, Any] = {"ppo": {"dual_clip": None}, "opsm": {"opsm_delta": 1e9}}.get(name, {})
    objective = keel.objective(name, eps=0.2, eps_high=0.4, **extra)
    loss, (gradient,), _ = evaluate(objective, single_token(math.log(ratio), advantage))
    assert loss == pytest.approx(value)
    assert gradient == pytest.approx(expected_gradient)


def test_eps_high_defaults_to_eps() -> None:
    assert evaluate(keel.objective("grpo", eps=0.3), single_token(math.log(2.0), 1.0))[0] == pytest.approx(-1.3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "expected_gradient"),
    [(2.9, -2.0, 5.8, 5.8), (3.1, -2.0, 6.0, 0.0), (3.1, 2.0, -2.4, 0.0), (1e6, -2.0, 6.0, 0.0)],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(
    ratio: float, advantage: float, value: float, expected_gradient: float
) -> None:
    loss, (gradient,), _ = evaluate(keel.objective("ppo", dual_clip=3.0), single_token(math.log(ratio), advantage))
    assert loss == pytest.approx(value)
    assert gradient == pytest.approx(expected_gradient)


# Other surrogates and weights, on one token


def test_reinforce_has_no_ratio() -> None:
    assert evaluate(keel.objective("reinforce"), single_token(0.5, 2.0, sampler=-1.5))[:2] == (2.0, [-2.0])


@pytest.mark.parametrize(("ratio", "weight"), [(2.0, 2.0), (9.0, 5.0), (0.01, 0.5)])
def test_cispo_trains_a_token_with_a_capped_weight(ratio: float, weight: float) -> None:
    step = single_token(math.log(ratio), 3.0, sampler=-4.0)
    loss, (gradient,), keep = evaluate(keel.objective("cispo", ratio_low=0.5), step)
    assert loss == pytest.approx(-3 * weight * (math.log(ratio) - 4))
    assert gradient == pytest.approx(-3 * weight)
    assert keep == [True]


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
def test_sapo_is_a_sigmoid_with_one_temperature_per_sign(advantage: float, tau: float) -> None:
    gate = 1 / (1 + math.exp(-tau * (1.5 - 1)))
    loss, (gradient,), _ = evaluate(keel.objective("sapo"), single_token(math.log(1.5), advantage))
    assert loss == pytest.approx(-advantage * gate * 4 / tau)
    assert gradient == pytest.approx(-advantage * 4 * gate * (1 - gate) * 1.5)


def test_sapo_on_policy_is_the_plain_policy_gradient() -> None:
    assert evaluate(keel.objective("sapo"), single_token(0.0, -3.0))[1] == pytest.approx([3.0])


def test_gspo_uses_the_geometric_mean_ratio_of_the_sequence() -> None:
    step = batch([-1.0, -1.0, -3.0], [-1.2, -1.4, -3.0], advantages=[1.0, 1.0, 2.0], sequence=[4, 4, 1])
    loss, gradient, _ = run(keel.objective("gspo", eps=0.5, eps_high=0.5), step)
    long = -math.exp(0.3) / 2
    close(gradient, torch.tensor([long / 2, long / 2, -1.0], dtype=torch.float64))
    assert loss.item() == pytest.approx(long - 1.0)


def test_gmpo_clips_each_token_in_the_direction_of_its_advantage() -> None:
    step = batch([0.0, 0.0], [-1.0, 1.0], advantages=[2.0, 2.0])
    loss, gradient, _ = run(keel.objective("gmpo", token_clip=0.4), step)
    value = -2 * math.exp((0.4 - 1.0) / 2)
    assert loss.item() == pytest.approx(value)
    close(gradient, torch.tensor([0.0, value / 2], dtype=torch.float64))


def test_tis_truncates_a_weight_for_which_mis_drops_the_token() -> None:
    step = batch([-1.0], [-3.0], advantages=[2.0], proximal_logprobs=[-1.0])
    assert evaluate(keel.objective("tis", cap=2.0), step) == (pytest.approx(-4.0), [pytest.approx(-4.0)], [True])
    assert evaluate(keel.objective("mis", ratio_high=2.0), step) == (0.0, [0.0], [False])
    inside_band = step.replace(proximal_logprobs=torch.tensor([-2.5], dtype=torch.float64))
    expected = -2 * math.exp(0.5) * 1.2
    assert evaluate(keel.objective("mis"), inside_band)[0] == pytest.approx(expected)
    assert evaluate(keel.objective("tis"), inside_band)[0] == pytest.approx(expected)


def test_the_loglinear_proximal_policy_is_interpolated_by_staleness() -> None:
    """At staleness 4, o = b + 3/4 (l - b); the weight is exp(o - b) and the ratio exp(l - o)."""
    step = batch([-1.0], [-1.4], version=[6], trainer_version=10)
    loss, (gradient,), _ = evaluate(keel.objective("decoupled_ppo_loglinear"), step)
    assert loss == pytest.approx(-math.exp(0.3) * math.exp(0.1))
    assert gradient == pytest.approx(loss)


def test_the_vespo_weight_is_gamma_shaped() -> None:
    step = batch([-1.0, -1.0], [-1.25, -1.25], advantages=[-1.0, -1.0])
    w = math.exp(0.5)
    expected = w**3 * math.exp(2 * (1 - w))
    loss, gradient, _ = run(keel.objective("vespo"), step)
    close(gradient, torch.full((2,), expected / 2, dtype=torch.float64))
    assert loss.item() == pytest.approx(-expected)


@pytest.mark.parametrize(("tau", "kept"), [(0.25, 3), (0.2, 2), (1e-4, 1), (0.0, 1), (1e9, 4)])
def test_m2po_keeps_the_smallest_squares_whose_mean_is_within_tau(tau: float, kept: int) -> None:
    """d^2 = 0, 0.25, 0.49, 4: the means of the smallest are 0, 0.125, 0.247 and 1.185."""
    step = batch([0.0, -0.5, -0.7, -2.0], [0.0] * 4)
    result = keel.objective("m2po", tau=tau)(step)
    assert result.keep.tolist() == [True] * kept + [False] * (4 - kept)


def test_m2po_drops_equal_squares_together() -> None:
    step = batch([0.0, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, -1.0])
    result = keel.objective("m2po", tau=0.13)(step)
    assert result.keep.tolist() == [True, False, False, False]


def test_cross_entropy_ignores_advantage_and_sampler() -> None:
    step = batch([-1.0, -3.0], None, advantages=[torch.nan, torch.inf])
    loss, gradient, _ = run(keel.objective("cross_entropy"), step)
    assert loss.item() == 2.0
    assert gradient.tolist() == [-0.5, -0.5]


def test_roles_select_the_tokens_of_an_objective() -> None:
    step = batch([-1.0, -3.0, -5.0], None, role=[0, 1, 2])
    objective = keel.objective("cross_entropy", roles=[0, 2])
    loss, gradient, result = run(objective, step)
    assert loss.item() == 3.0
    assert gradient.tolist() == [-0.5, 0.0, -0.5]
    assert [objective.reasons[code] for code in result.reasons.tolist()] == ["trained", "other role", "trained"]


# Gates on the binary KL


def bernoulli_kl(a: float, b: float) -> float:
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.4), (0.4, 0.9), (0.05, 0.2)])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_kpop_drops_if_the_binary_kl_is_large_in_either_direction(p: float, q: float, advantage: float) -> None:
    distance = max(bernoulli_kl(p, q), bernoulli_kl(q, p))
    step = token_with_probabilities(p, q, advantage)
    assert keel.objective("kpop", phi=distance * 1.0001)(step).keep.tolist() == [True]
    assert keel.objective("kpop", phi=distance * 0.9999)(step).keep.tolist() == [False]


def test_dppo_binary_kl_drops_only_changes_in_the_direction_of_the_advantage() -> None:
    objective = keel.objective("dppo_binary_kl", mask_low=0.05, mask_high=0.05)
    assert objective(token_with_probabilities(0.8, 0.3, 1.0)).keep.tolist() == [False]
    assert objective(token_with_probabilities(0.8, 0.3, -1.0)).keep.tolist() == [True]
    assert objective(token_with_probabilities(0.3, 0.8, -1.0)).keep.tolist() == [False]
    assert objective(token_with_probabilities(0.3, 0.8, 1.0)).keep.tolist() == [True]
    assert objective(token_with_probabilities(0.8, 0.3, 0.0)).keep.tolist() == [True]


# Reductions


def loss_of_three_sequences(**parameters: Any) -> float:
    """Return the loss of sequences with 3, 1 and 2 tokens, where the second and one token of the last are dropped."""
    step = batch(
        [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0],
        [-1.0, -1.0, -1.0, -9.0, -1.0, -9.0],
        advantages=[1.0, 2.0, 3.0, 7.0, 5.0, 7.0],
        sequence=[30, 30, 30, 10, 20, 20],
    )
    loss, _, result = run(keel.objective("icepop", **parameters), step)
    assert result.keep.tolist() == [True, True, True, False, True, False]
    return loss.item()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"reduction": "tokens"}, -(1 + 2 + 3 + 5) / 6),
        ({"reduction": "tokens", "denominator": "kept"}, -(1 + 2 + 3 + 5) / 4),
        ({"reduction": "sequences"}, -(6 / 3 + 0 / 1 + 5 / 2) / 3),
        ({"reduction": "sequences", "denominator": "kept"}, -(6 / 3 + 5 / 1) / 2),
        ({"reduction": "constant", "length": 8}, -(6 + 5) / (3 * 8)),
        ({"reduction": "constant", "length": 8, "denominator": "kept"}, -(6 + 5) / (2 * 8)),
    ],
)
def test_reductions_by_hand(parameters: dict[str, Any], expected: float) -> None:
    assert loss_of_three_sequences(**parameters) == pytest.approx(expected)


@pytest.mark.parametrize("reduction", [{}, {"reduction": "sequences"}, {"reduction": "constant", "length": 8}])
def test_a_step_without_a_kept_token_has_no_loss_if_kept_tokens_are_the_divisor(reduction: dict[str, Any]) -> None:
    dropped = batch([-3.0, -4.0, -5.0], [-0.1, -0.1, -0.1], advantages=[1.0, 1.0, 1.0], sequence=[0, 0, 1])
    loss, gradient, result = run(keel.objective("ipo", denominator="kept", **reduction), dropped)
    assert (result.kept_tokens, loss.item(), gradient.tolist()) == (0, 0.0, [0.0, 0.0, 0.0])
    penalised, _, _ = run(keel.objective("ipo", **reduction), dropped)
    assert penalised.item() > 0  # with all trainable tokens as the divisor, dropped tokens keep their penalty


def test_a_sequence_without_a_kept_token_has_no_penalty_in_a_mean_over_kept_sequences() -> None:
    step = batch([-1.0, -4.0, -5.0], [-1.0, -0.1, -0.1], advantages=[1.0, 1.0, 1.0], sequence=[0, 1, 1])
    _, gradient, result = run(keel.objective("ipo", reduction="sequences", denominator="kept"), step)
    assert result.keep.tolist() == [True, False, False]
    assert gradient.tolist() == [-1.0, 0.0, 0.0]
    _, gradient, _ = run(keel.objective("ipo", denominator="kept"), step)
    assert gradient.tolist() == pytest.approx([-1.0, -2e-3 * 3.9, -2e-3 * 4.9])  # one kept token in the divisor


def test_untrainable_tokens_and_sequences_do_not_count_in_the_divisor() -> None:
    step = batch(
        [-1.0, -1.0, -1.0, -1.0],
        [-1.0, -1.0, -1.0, -1.0],
        advantages=[1.0, 3.0, 9.0, 9.0],
        sequence=[1, 2, 2, 3],
        trainable=[True, True, False, False],
    )
    for parameters in ({}, {"reduction": "sequences"}, {"reduction": "constant", "length": 1}):
        assert run(keel.objective("icepop", **parameters), step)[0].item() == -2.0


# Transforms


def test_adv_tau_scales_the_policy_term_only() -> None:
    objective = keel.objective("ipo_kl", adv_tau=0.5, kl_tau=0.1)
    loss, (gradient,), _ = evaluate(objective, single_token(0.5, 2.0))
    assert loss == pytest.approx(-math.exp(0.5) + 0.025)
    assert gradient == pytest.approx(-math.exp(0.5) + 0.1)


def test_the_teacher_term_is_added_to_the_advantage_without_gradient() -> None:
    step = batch([-1.0], [-1.5], advantages=[2.0], teacher_logprobs=[-0.25])
    loss, (gradient,), _ = evaluate(keel.objective("icepop", teacher_tau=0.4, adv_tau=0.5), step)
    assert loss == pytest.approx(-(0.5 * 2 + 0.4 * 0.75) * math.exp(0.5))
    assert gradient == pytest.approx(loss)


def test_the_teacher_term_can_change_the_sign_that_a_gate_uses() -> None:
    step = batch([math.log(0.6)], [math.log(0.3)], advantages=[1.0], teacher_logprobs=[math.log(0.6) - 3.0])
    assert not keel.objective("dppo_kl")(step).keep.any()
    assert keel.objective("dppo_kl", teacher_tau=1.0)(step).keep.all()


@pytest.mark.parametrize("source", ["policy", "sampled"])
def test_the_kl_penalty_uses_the_centred_log_ratio_of_its_source(source: str) -> None:
    policy = torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64)
    sampler = torch.tensor([-1.25, -1.75, -1.5], dtype=torch.float64)
    reference = torch.tensor([-1.5, -1.0, -3.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    step = batch(policy, sampler, advantages=advantage, reference_logprobs=reference)
    k = (policy if source == "policy" else sampler) - reference
    adjusted = advantage + 0.2 * (k.mean() - k)
    objective = keel.objective("icepop", kl_penalty_coef=0.2, kl_penalty_source=source)
    loss, gradient, _ = run(objective, step)
    expected = -adjusted * (policy - sampler).exp() / 3
    close(gradient, expected)
    close(loss, expected.sum())


@pytest.mark.parametrize("source", ["policy", "sampled"])
def test_kl_policy_ref_is_the_mean_of_k(source: str) -> None:
    step = batch([-1.0, -2.0], [-1.5, -1.75], reference_logprobs=[-1.25, -0.5])
    k = {"policy": [0.25, -1.5], "sampled": [-0.25, -1.25]}[source]
    result = keel.objective("icepop", kl_penalty_coef=0.2, kl_penalty_source=source)(step)
    assert result.metrics["kl_policy_ref"].mean == pytest.approx(sum(k) / 2)


def test_adv_tau_scales_the_kl_penalty_too() -> None:
    step = batch([-1.0, -1.0], [-1.0, -1.0], advantages=[0.0, 0.0], reference_logprobs=[-2.0, -1.0])
    gradient = run(keel.objective("icepop", kl_penalty_coef=0.2, adv_tau=3.0), step)[1]
    close(gradient, torch.tensor([0.6 * 0.5, -0.6 * 0.5], dtype=torch.float64) / 2)


# KL to a reference in the loss


def kl_estimates(x: Tensor) -> dict[str, Tensor]:
    return {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) + x - 1}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_kl_by_hand(estimator: str, corrected: bool) -> None:
    if estimator == "k1" and not corrected:
        with pytest.raises(keel.ConfigError, match=r'"k1" cannot be combined with .*reference_kl_correction = false'):
            keel.objective("icepop", reference_kl_coef=0.5, reference_kl_estimator="k1")
        return
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-1.5, -1.75], dtype=torch.float64)
    reference = torch.tensor([-1.25, -0.5], dtype=torch.float64)
    value = kl_estimates(policy - reference)[estimator]
    expected = 0.5 * (value * (policy - sampler).exp() if corrected else value).mean()
    (expected_gradient,) = torch.autograd.grad(expected, policy)
    objective = keel.objective(
        "icepop",
        adv_tau=0.0,
        reference_kl_coef=0.5,
        reference_kl_estimator=estimator,
        reference_kl_correction=corrected,
    )
    loss, gradient, _ = run(objective, batch(policy.detach(), sampler, reference_logprobs=reference))
    close(loss, expected.detach())
    close(gradient, expected_gradient)


def test_a_dropped_token_has_no_reference_kl() -> None:
    step = batch([-1.0, -1.0], [-4.0, -1.0], advantages=[1.0, 0.0], reference_logprobs=[-3.0, -1.0])
    loss, gradient, _ = run(keel.objective("icepop", reference_kl_coef=0.5), step)
    assert loss.item() == 0.0
    assert gradient.tolist() == [0.0, 0.0]


# Results


def test_reasons_explain_every_token() -> None:
    objective = keel.objective("icepop", rollout_min_ratio=1e-3, max_invalid_logprob_fraction=1.0)
    step = batch(
        [-1.0, -1.0, -1.0, -1.0, -3.0, -9.5, -1.0],
        [-1.0, -1.0, torch.nan, -4.0, -1.0, -0.5, -1.0],
        sequence=[1, 1, 1, 1, 1, 2, 2],
        trainable=[True, False, True, True, True, True, True],
    )
    names = [objective.reasons[code] for code in objective(step).reasons.tolist()]
    assert names == [
        "trained",
        "not trainable",
        "invalid sampler log-prob",
        "gate 0 (ratio) high",
        "gate 0 (ratio) low",
        "gate 0 (ratio) low",
        "gate 1 (ratio, sequence) low",
    ]


def test_the_loss_is_differentiable_with_respect_to_the_inputs_of_the_logprobs() -> None:
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    step = batch([-1.0, -2.0], [-1.0, -1.5], advantages=[1.0, -1.0])
    base = step.logprobs * 2
    result = keel.objective("icepop")(step.replace(logprobs=weight * base))
    (3 * result.loss).backward()
    assert weight.grad is not None
    close(weight.grad, 3 * (result.gradient * base).sum())


def test_only_the_policy_logprobs_receive_a_gradient() -> None:
    step = batch([-1.0], [-1.2], proximal_logprobs=[-1.1], reference_logprobs=[-1.0], teacher_logprobs=[-0.5])
    fields = {
        name: value.clone().requires_grad_() for name, value in step.tensors().items() if value.is_floating_point()
    }
    objective = keel.objective("decoupled_ppo", kl_penalty_coef=0.1, teacher_tau=0.2, reference_kl_coef=0.1)
    objective(step.replace(**fields)).loss.backward()
    assert [name for name, value in fields.items() if value.grad is not None] == ["logprobs"]
