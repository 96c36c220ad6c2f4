"""Advantages by group id: closed forms, groups of any size and order, and invalid rollouts."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import keel

GROUPED = ["group_mean", "group_mean_std", "leave_one_out", "mean_normalised"]
grouped = pytest.mark.parametrize("name", GROUPED)


def advantages(name: str, rewards: list[float], group: list[int], **options: Any) -> list[float]:
    return keel.advantages(name, torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), **options).tolist()


CLOSED_FORMS = {
    # one group with rewards 1, 2, 6: mean 3, deviation sqrt(7)
    "group_mean": [-2.0, -1.0, 3.0],
    "group_mean_std": [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)],
    "leave_one_out": [1 - 4.0, 2 - 3.5, 6 - 1.5],
    "mean_normalised": [-2 / 3, -1 / 3, 1.0],
    "constant": [1.0, 2.0, 6.0],
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form(name: str) -> None:
    assert advantages(name, [1.0, 2.0, 6.0], [4, 4, 4]) == pytest.approx(CLOSED_FORMS[name])


def test_constant_baseline_is_subtracted() -> None:
    assert advantages("constant", [1.0, 2.0, 6.0], [4, 1, 4], baseline=0.5) == [0.5, 1.5, 5.5]


def naive(name: str, rewards: list[float], group: list[int], valid: list[bool]) -> list[float]:
    """Compute advantages in a loop, from the definition."""
    result = []
    for reward, group_id, is_valid in zip(rewards, group, valid, strict=True):
        in_group = [r for r, g, v in zip(rewards, group, valid, strict=True) if g == group_id and v]
        if not is_valid or len(in_group) < 2 or len(set(in_group)) == 1:
            result.append(0.0)
            continue
        mean = sum(in_group) / len(in_group)
        if name == "group_mean":
            result.append(reward - mean)
        elif name == "group_mean_std":
            deviation = math.sqrt(sum((other - mean) ** 2 for other in in_group) / (len(in_group) - 1))
            result.append((reward - mean) / deviation)
        elif name == "leave_one_out":
            result.append(reward - (sum(in_group) - reward) / (len(in_group) - 1))
        else:
            result.append(0.0 if mean == 0 else (reward - mean) / mean)
    return result


rollouts = st.lists(st.tuples(st.integers(-8, 8), st.integers(-2, 3), st.booleans()), min_size=1, max_size=25)


def rewards_of(name: str, rows: list[tuple[int, int, bool]]) -> list[float]:
    """Return rewards of both signs, or of at least 0 for the estimator that takes no others."""
    return [(abs(reward) if name == "mean_normalised" else reward) / 4 for reward, _, _ in rows]


@grouped
@given(rows=rollouts)
def test_uneven_groups_in_any_order_equal_a_loop(name: str, rows: list[tuple[int, int, bool]]) -> None:
    rewards, group = rewards_of(name, rows), [group_id for _, group_id, _ in rows]
    valid = [is_valid for _, _, is_valid in rows]
    result = advantages(name, rewards, group, valid=torch.tensor(valid))
    assert result == pytest.approx(naive(name, rewards, group, valid), abs=1e-12)


@grouped
@given(data=st.data(), rows=rollouts)
def test_the_order_of_rollouts_and_the_ids_of_groups_change_nothing(
    name: str, data: st.DataObject, rows: list[tuple[int, int, bool]]
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    rewards, group = rewards_of(name, rows), [group_id for _, group_id, _ in rows]
    permuted = advantages(name, [rewards[i] for i in order], [group[i] * -1000 + 5 for i in order])
    expected = advantages(name, rewards, group)
    assert permuted == pytest.approx([expected[i] for i in order], abs=1e-12)


@grouped
def test_an_invalid_rollout_does_not_affect_its_group(name: str) -> None:
    """If it counted, a reward of -100 would change the mean of its group from 2 to -32."""
    clean = advantages(name, [1.0, 3.0, 2.0, 2.5], [0, 0, 1, 1])
    valid = torch.tensor([True, False, True, True, True])
    assert advantages(name, [1.0, -100.0, 3.0, 2.0, 2.5], [0, 0, 0, 1, 1], valid=valid) == [
        clean[0],
        0.0,
        *clean[1:],
    ]


@grouped
@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf])
def test_the_reward_of_an_invalid_rollout_is_never_read(name: str, invalid: float) -> None:
    valid = torch.tensor([True, False, True])
    result = advantages(name, [1.0, invalid, 3.0], [0, 0, 0], valid=valid)
    assert result == advantages(name, [1.0, 0.0, 3.0], [0, 0, 0], valid=valid)
    assert result[1] == 0.0


@grouped
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e6])
def test_equal_rewards_give_zero_advantages(name: str, reward: float) -> None:
    if name == "mean_normalised":
        reward = abs(reward)
    assert advantages(name, [reward] * 7 + [5.0, 6.0], [0] * 7 + [1, 1])[:7] == pytest.approx([0.0] * 7, abs=1e-9)


def test_rounding_errors_of_equal_float32_rewards_are_not_amplified() -> None:
    """Sevenths do not sum exactly, and the rounding error must not be divided by itself."""
    rewards = torch.full((7,), 1 / 7, dtype=torch.float32)
    result = keel.advantages("group_mean_std", rewards, torch.zeros(7, dtype=torch.int64))
    assert result.tolist() == [0.0] * 7


@grouped
def test_a_group_with_one_valid_rollout_gets_zero(name: str) -> None:
    assert advantages(name, [5.0, 1.0, 2.0], [9, 1, 1])[0] == 0.0
    valid = torch.tensor([True, False, True, True])
    assert advantages(name, [5.0, 7.0, 1.0, 2.0], [9, 9, 1, 1], valid=valid)[:2] == [0.0, 0.0]


def test_mean_normalised_is_zero_if_the_mean_is_zero() -> None:
    assert advantages("mean_normalised", [0.0, 0.0, 1.0, 3.0], [0, 0, 1, 1]) == [0.0, 0.0, -0.5, 0.5]


def test_mean_normalised_refuses_negative_rewards_which_would_reverse_the_signs() -> None:
    with pytest.raises(keel.BatchError, match=r"rewards\[0\] = -1, but .*mean_normalised.*group_mean_std"):
        advantages("mean_normalised", [-1.0, -3.0], [0, 0])
    valid = torch.tensor([False, True, True])
    assert advantages("mean_normalised", [-1.0, 1.0, 3.0], [0, 0, 0], valid=valid) == [0.0, -0.5, 0.5]


@grouped
@given(rows=rollouts)
def test_a_better_reward_never_has_a_smaller_advantage(name: str, rows: list[tuple[int, int, bool]]) -> None:
    rewards = rewards_of(name, rows)
    result = advantages(name, rewards, [0] * len(rewards))
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(result[low] <= result[high] + 1e-12 for low, high in itertools.pairwise(order))
    mean = sum(rewards) / len(rewards)
    if len(set(rewards)) > 1:
        assert all((value > 0) == (reward > mean) for value, reward in zip(result, rewards, strict=True))


@pytest.mark.parametrize("name", [*GROUPED, "constant"])
@pytest.mark.parametrize("invalid", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error_that_names_the_rollout(name: str, invalid: float) -> None:
    with pytest.raises(keel.BatchError, match=rf"rewards\[1\] = {invalid}"):
        advantages(name, [1.0, invalid], [0, 0])


@pytest.mark.parametrize("name", [*GROUPED, "constant"])
def test_advantages_of_no_rollouts_are_empty(name: str) -> None:
    assert keel.advantages(name, [], []).shape == (0,)


def test_lists_integers_and_bfloat16_are_accepted() -> None:
    assert keel.advantages("group_mean", [1, 3], [0, 0]).tolist() == [-1.0, 1.0]
    half = keel.advantages("group_mean", torch.tensor([1.0, 3.0], dtype=torch.bfloat16), torch.tensor([0, 0]))
    assert half.dtype == torch.float32
    assert half.tolist() == [-1.0, 1.0]


def test_advantages_carry_no_gradient() -> None:
    rewards = torch.tensor([1.0, 3.0], requires_grad=True)
    assert not keel.advantages("group_mean", rewards, torch.tensor([0, 0])).requires_grad


# Moving baseline


def test_each_agent_has_its_own_moving_baseline() -> None:
    """A = R - b and then b <- 0.5 b + 0.5 R: for agent 7, b = 0, then 2, then 3."""
    moving = keel.MovingBaseline()
    result = advantages("moving_baseline", [4.0, 1.0, 4.0], [7, 2, 7], moving=moving, decay=0.5)
    assert result == [4.0, 1.0, 2.0]
    assert moving.state == {7: 3.0, 2: 0.5}


def test_a_moving_baseline_keeps_its_state_between_steps_and_when_restored() -> None:
    moving = keel.MovingBaseline()
    advantages("moving_baseline", [4.0], [7], moving=moving)
    assert moving.state == {7: pytest.approx(0.2)}
    restored = keel.MovingBaseline(moving.state)
    assert advantages("moving_baseline", [4.0], [7], moving=restored) == advantages(
        "moving_baseline", [4.0], [7], moving=moving
    )
    assert restored.state == moving.state == {7: pytest.approx(0.39)}


def test_a_restored_baseline_copies_its_state() -> None:
    state = {1: 2.0}
    keel.MovingBaseline(state).update(1, 10.0, 0.5)
    assert state == {1: 2.0}


def test_an_invalid_rollout_does_not_update_the_moving_baseline() -> None:
    moving = keel.MovingBaseline()
    result = advantages(
        "moving_baseline", [4.0, math.nan], [7, 7], valid=torch.tensor([True, False]), moving=moving, decay=0.5
    )
    assert result == [4.0, 0.0]
    assert moving.state == {7: 2.0}


def test_a_moving_baseline_without_decay_is_the_previous_reward() -> None:
    moving = keel.MovingBaseline()
    assert advantages("moving_baseline", [4.0, 1.0, 3.0], [0, 0, 0], moving=moving, decay=0.0) == [4.0, -3.0, 2.0]


def test_only_moving_baseline_takes_a_state_and_it_requires_one() -> None:
    with pytest.raises(keel.BatchError, match="moving=MovingBaseline"):
        advantages("moving_baseline", [1.0], [0])
    with pytest.raises(keel.BatchError, match=r'moving .* "group_mean"'):
        advantages("group_mean", [1.0], [0], moving=keel.MovingBaseline())


# Errors


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("group_means", {}, "advantages.name"),
        ("group_mean", {"decay": 0.5}, r"advantages\.decay = 0\.5 .*moving_baseline"),
        ("group_mean", {"baseline": 0.5}, r"advantages\.baseline = 0\.5 .*constant"),
        ("moving_baseline", {"decay": 1.5}, r"advantages\.decay = 1\.5"),
        ("group_mean", {"decoy": 0.5}, r"advantages\.decoy is not a setting; did you mean decay"),
    ],
)
def test_invalid_settings_are_errors_that_name_the_setting(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(keel.ConfigError, match=message):
        advantages(name, [1.0, 2.0], [0, 0], **options)


@pytest.mark.parametrize(
    ("rewards", "group", "valid", "message"),
    [
        (torch.ones(3), torch.zeros(2, dtype=torch.int64), None, r"group has shape \[2\]"),
        (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), None, r"rewards has shape \[2, 1\]"),
        (torch.ones(2), torch.zeros(2), None, "group has dtype torch.float32"),
        (torch.ones(2), torch.zeros(2, dtype=torch.bool), None, "group has dtype torch.bool"),
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), "valid has dtype torch.float32"),
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(3, dtype=torch.bool), r"valid has shape \[3\]"),
    ],
)
def test_invalid_inputs_are_errors_that_name_the_input(
    rewards: Tensor, group: Tensor, valid: Tensor | None, message: str
) -> None:
    with pytest.raises(keel.BatchError, match=message):
        keel.advantages("group_mean", rewards, group, valid=valid)


def test_zero_variance_groups_is_an_error_because_it_has_no_effect() -> None:
    with pytest.raises(keel.ConfigError, match="zero_variance_groups = 'train' has no effect on advantages"):
        keel.advantages("group_mean", [1.0, 1.0], [0, 0], zero_variance_groups="train")
