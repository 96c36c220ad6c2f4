"""Presets that must be equal, and compositions that are equal to a preset."""

from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from tests.support.strategies import batch, close, random_step, run

PresetCall = tuple[str, dict[str, Any]]


def assert_same(first: keel.Objective, second: keel.Objective, step: keel.TokenBatch, factor: float = 1.0) -> None:
    """Assert equal kept tokens, and equal loss and gradient up to a factor."""
    loss, gradient, result = run(first, step)
    other_loss, other_gradient, other = run(second, step)
    assert result.keep.tolist() == other.keep.tolist()
    close(loss, other_loss * factor)
    close(gradient, other_gradient * factor)
    assert gradient.abs().max() > 0


UNGATED = {"ratio_low": None, "ratio_high": None}
EQUAL: list[tuple[PresetCall, PresetCall]] = [
    (("grpo", {"reduction": "tokens"}), ("dapo", {"eps_high": 0.2})),
    (("grpo", {"eps_high": 0.28}), ("dapo", {"reduction": "sequences"})),
    (("ppo", {"dual_clip": None}), ("dapo", {"eps_high": 0.2})),
    (("ppo", {"dual_clip": 1e9}), ("dapo", {"eps_high": 0.2})),
    (("ipo_kl", {"kl_tau": 0.0}), ("icepop", {})),
    (("opsm", {"opsm_delta": 1e9}), ("dapo", {"eps_high": 0.2})),
    (("veto", {"rollout_min_ratio": None}), ("dapo", {"eps_high": 0.2})),
    (("dppo_tv", {"diff_low": 0.1, "diff_high": 0.1}), ("ipo", {"threshold": 0.1, "kl_tau": 0.0})),
    (("dr_grpo", {"reduction": "tokens"}), ("dapo", {"eps_high": 0.2})),
    (("luspo", {"reduction": "sequences"}), ("gspo", {})),
    (("gspo", {"reduction": "constant", "length": 1}), ("luspo", {})),
    (("tis", {"cap": 5.0}), ("decoupled_ppo", {})),
    (("tis", {"cap": 1e30}), ("mis", UNGATED)),
    (("on_policy_distillation", {}), ("icepop", UNGATED | {"adv_tau": 0.0, "teacher_tau": 1.0})),
    (("kpop", {"phi": 1e9}), ("icepop", UNGATED)),
    (("m2po", {"tau": 1e9}), ("icepop", UNGATED)),
    (("dppo_tv", {"diff_low": 1.0, "diff_high": 1.0}), ("icepop", {"ratio_low": 0.0, "ratio_high": 1e30})),
    (("dppo_kl", {"mask_low": 1.0, "mask_high": 1.0}), ("ipo", {"threshold": 1.0})),
    (("gmpo", {"token_clip": 1e9}), ("gspo", {"eps": 1e9, "eps_high": 1e9})),
]


@pytest.mark.parametrize(("first", "second"), EQUAL, ids=lambda preset: f"{preset[0]}({preset[1]})")
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_equal_presets(first: PresetCall, second: PresetCall, spread: float) -> None:
    assert_same(
        keel.objective(first[0], **first[1]),
        keel.objective(second[0], **second[1]),
        random_step(11, spread=spread),
    )


@pytest.mark.parametrize("name", ["tis", "mis", "decoupled_ppo"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_corrections_between_sampler_and_proximal_vanish_if_the_two_are_equal(name: str, level: str) -> None:
    step = random_step(12)
    step = step.replace(proximal_logprobs=step.sampler_logprobs)
    parameters = {} if name == "decoupled_ppo" else {"level": level}
    assert_same(keel.objective(name, **parameters), keel.objective("grpo", reduction="tokens"), step)


def test_decoupled_loglinear_without_staleness_is_ppo_on_the_sampler() -> None:
    step = random_step(13)
    step = step.replace(version=torch.full_like(step.sequence, 7))
    assert_same(keel.objective("decoupled_ppo_loglinear"), keel.objective("dapo", eps_high=0.2), step)


def test_decoupled_loglinear_is_decoupled_ppo_with_interpolated_proximal_logprobs() -> None:
    step = random_step(14)
    fraction = 1 - 1 / (8 - step.version).clamp(min=1).double()
    interpolated = step.sampler_logprobs + fraction * (step.logprobs - step.sampler_logprobs)
    recorded = step.replace(proximal_logprobs=interpolated)
    loss, gradient, _ = run(keel.objective("decoupled_ppo_loglinear"), step)
    other_loss, other_gradient, _ = run(keel.objective("decoupled_ppo"), recorded)
    close(loss, other_loss)
    close(gradient, other_gradient)


def test_luspo_is_gspo_times_the_length_if_all_sequences_have_the_same_length() -> None:
    step = random_step(15, lengths=(6, 6, 6, 6))
    ids, row = torch.unique(step.sequence, return_inverse=True)
    first_five = torch.cat([(row == i).nonzero().squeeze(1)[:5] for i in range(len(ids))])
    equal = step.take(first_five)
    finite = {name: value.nan_to_num(-0.7) for name, value in equal.tensors().items() if value.is_floating_point()}
    equal = equal.replace(**finite, trainable=torch.ones(len(equal), dtype=torch.bool))
    wide = {"eps": 0.3, "eps_high": 0.3}
    assert_same(keel.objective("luspo", **wide), keel.objective("gspo", **wide), equal, factor=5.0)


def test_gspo_weights_sequences_equally_and_luspo_by_their_length() -> None:
    step = batch([-1.0] * 5, [-1.0] * 5, advantages=[1.0, 2.0, 2.0, 2.0, 2.0], sequence=[1, 2, 2, 2, 2])
    assert run(keel.objective("gspo"), step)[0].item() == pytest.approx(-(1 + 2) / 2)
    assert run(keel.objective("luspo"), step)[0].item() == pytest.approx(-(1 + 4 * 2) / 2)


def test_gspo_on_sequences_of_one_token_is_grpo() -> None:
    step = random_step(16)
    single_tokens = step.replace(sequence=torch.randperm(len(step)))
    wide = {"eps": 0.2, "eps_high": 0.3}
    assert_same(keel.objective("gspo", **wide), keel.objective("grpo", **wide), single_tokens)


def test_distillation_is_icepop_without_gates_and_with_the_teacher_as_advantage() -> None:
    step = random_step(17)
    signal = step.teacher_logprobs - step.logprobs
    loss, gradient, _ = run(keel.objective("on_policy_distillation"), step)
    ungated = keel.objective("icepop", ratio_low=None, ratio_high=None)
    other_loss, other_gradient, _ = run(ungated, step.replace(advantages=signal))
    close(loss, other_loss)
    close(gradient, other_gradient)


def test_uncapped_cispo_has_the_gradient_of_the_plain_ratio() -> None:
    step = random_step(18)
    close(
        run(keel.objective("cispo", ratio_high=None), step)[1],
        run(keel.objective("icepop", ratio_low=None, ratio_high=None), step)[1],
    )


@pytest.mark.parametrize("name", ["icepop", "dapo", "ppo", "opsm", "cispo", "kpop", "m2po", "dppo_tv", "decoupled_ppo"])
def test_every_policy_gradient_is_reinforce_on_policy(name: str) -> None:
    step = random_step(19)
    on_policy = step.replace(sampler_logprobs=step.logprobs, proximal_logprobs=step.logprobs)
    close(run(keel.objective(name), on_policy)[1], run(keel.objective("reinforce"), on_policy)[1])


def test_dr_grpo_is_the_token_sum_over_sequences_times_length() -> None:
    step = random_step(20)
    sequences = torch.unique(step.sequence[step.trainable])
    factor = int(step.trainable.sum()) / (len(sequences) * 100)
    assert_same(keel.objective("dr_grpo", length=100), keel.objective("dapo", eps_high=0.2), step, factor)


def test_the_kl_penalty_equals_an_adjusted_advantage() -> None:
    step = random_step(21)
    k = (step.logprobs - step.reference_logprobs)[step.trainable]
    adjusted = step.advantages.clone()
    adjusted[step.trainable] += 0.25 * (k.mean() - k)
    for name in ("icepop", "opsm", "sapo", "m2po", "vespo"):
        loss, gradient, result = run(keel.objective(name, kl_penalty_coef=0.25), step)
        other_loss, other_gradient, other = run(keel.objective(name), step.replace(advantages=adjusted))
        assert result.keep.tolist() == other.keep.tolist()
        close(loss, other_loss)
        close(gradient, other_gradient)


COMPOSITIONS: dict[str, tuple[dict[str, Any], PresetCall]] = {
    "icepop": (
        {"gates": [{"statistic": "ratio", "low": 0.2, "high": 5.0}], "policy": {"surrogate": "linear"}},
        ("icepop", {}),
    ),
    "icepop with rollout_min_ratio": (
        {
            "gates": [
                {"statistic": "ratio", "low": 0.2, "high": 5.0},
                {"statistic": "ratio", "low": 0.3, "scope": "sequence"},
            ]
        },
        ("icepop", {"rollout_min_ratio": 0.3}),
    ),
    "ipo_kl": (
        {
            "gates": [{"statistic": "ratio", "low": 0.2, "high": 5.0}],
            "penalties": [{"estimator": "log_ratio_squared", "coef": 1e-3, "scope": "kept"}],
            "reduction": {"over": "tokens", "denominator": "trainable"},
        },
        ("ipo_kl", {}),
    ),
    "dppo_tv": (
        {"gates": [{"statistic": "probability_difference", "low": -0.2, "high": 0.2}]},
        ("dppo_tv", {}),
    ),
    "dppo_kl": (
        {
            "gates": [
                {"statistic": "probability_difference", "high": 0.2, "when": "positive_advantage"},
                {"statistic": "probability_difference", "low": -0.2, "when": "negative_advantage"},
            ],
            "penalties": [{"estimator": "log_ratio_squared", "coef": 1e-3, "scope": "all"}],
        },
        ("dppo_kl", {}),
    ),
    "opsm": (
        {
            "gates": [{"statistic": "sequence_kl", "high": 1e-4, "when": "negative_advantage"}],
            "policy": {"surrogate": "clip", "eps": 0.2},
        },
        ("opsm", {}),
    ),
    "gspo, kept": (
        {
            "policy": {"surrogate": "clip", "level": "sequence", "eps": 0.2, "eps_high": 0.3},
            "reduction": {"over": "sequences", "denominator": "kept"},
        },
        ("gspo", {"eps": 0.2, "eps_high": 0.3, "denominator": "kept"}),
    ),
    "cispo": (
        {"weights": [{"high": 5.0}], "policy": {"surrogate": "log_prob", "anchor": "none"}},
        ("cispo", {}),
    ),
    "tis, sequence": (
        {
            "weights": [{"between": "proximal/sampler", "level": "sequence", "high": 2.0}],
            "policy": {"surrogate": "clip", "anchor": "proximal", "eps": 0.2},
        },
        ("tis", {"level": "sequence"}),
    ),
    "m2po": ({"gates": [{"statistic": "second_moment", "high": 0.04}]}, ("m2po", {})),
    "sapo": (
        {
            "policy": {"surrogate": "soft", "tau_positive": 1.0, "tau_negative": 1.05},
            "reduction": {"over": "sequences"},
        },
        ("sapo", {}),
    ),
    "dr_grpo": (
        {"policy": {"surrogate": "clip", "eps": 0.2}, "reduction": {"over": "constant", "length": 1024}},
        ("dr_grpo", {}),
    ),
    "grpo with its reference KL": (
        {
            "policy": {"surrogate": "clip", "eps": 0.2},
            "penalties": [{"estimator": "k3", "coef": 0.04}],
            "reduction": {"over": "sequences"},
        },
        ("grpo", {"reference_kl_coef": 0.04}),
    ),
    "transforms": (
        {"adv_tau": 0.5, "teacher_tau": 0.25, "kl_penalty_coef": 0.1, "kl_penalty_source": "sampled", "roles": [0, 1]},
        (
            "icepop",
            {
                "ratio_low": None,
                "ratio_high": None,
                "adv_tau": 0.5,
                "teacher_tau": 0.25,
                "kl_penalty_coef": 0.1,
                "kl_penalty_source": "sampled",
                "roles": [0, 1],
            },
        ),
    ),
    "a preset by name in a table": ({"name": "icepop", "ratio_low": 0.5}, ("icepop", {"ratio_low": 0.5})),
}


@pytest.mark.parametrize("case", COMPOSITIONS)
def test_a_composition_equals_its_preset(case: str) -> None:
    table, (name, parameters) = COMPOSITIONS[case]
    assert_same(keel.objective(table), keel.objective(name, **parameters), random_step(22, spread=1.2))


def test_a_preset_with_an_extra_gate_equals_a_composition_with_both_gates() -> None:
    step = random_step(23, spread=1.5)
    gate = {"statistic": "sequence_kl", "high": 1e-4, "when": "negative_advantage"}
    extended = keel.objective("icepop", gates=[gate])
    composed = keel.objective({"gates": [{"statistic": "ratio", "low": 0.2, "high": 5.0}, gate]})
    assert_same(extended, composed, step)
    kept: Tensor = extended(step).keep
    assert torch.equal(kept, keel.objective("icepop")(step).keep & keel.objective("opsm")(step).keep)
    assert kept.sum() < keel.objective("icepop")(step).keep.sum()


def test_a_composition_object_equals_its_table() -> None:
    table = {"gates": [{"statistic": "ratio", "high": 2.0}], "adv_tau": 2.0}
    composition = keel.Composition(gates=[keel.Gate(statistic="ratio", high=2.0)], adv_tau=2.0)
    assert_same(keel.objective(composition), keel.objective(table), random_step(24))


def test_a_mistake_in_a_table_is_a_config_error_that_names_the_setting() -> None:
    with pytest.raises(keel.ConfigError, match=r"objective\.gats is not a setting; did you mean gates"):
        keel.objective({"gats": []})
    with pytest.raises(
        keel.ConfigError, match=r"objective\.gates\.0\.low = 6\.0 must be below objective\.gates\.0\.high"
    ):
        keel.objective({"gates": [{"statistic": "ratio", "low": 6.0, "high": 5.0}]})


def test_a_low_bound_above_its_high_bound_is_an_error_with_the_parameters_of_the_preset() -> None:
    with pytest.raises(
        keel.ConfigError, match=r"objective\.ratio_low = 6\.0 must be below objective\.ratio_high = 5\.0"
    ):
        keel.objective("icepop", ratio_low=6.0)


def test_parameters_in_addition_to_a_composition_are_an_error() -> None:
    with pytest.raises(TypeError, match="kl_tau"):
        keel.objective({"gates": []}, kl_tau=0.1)
