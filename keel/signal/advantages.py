"""Compute advantages from rewards, by group id and for groups of any size.

An invalid rollout (failed, empty or dropped) affects no baseline and no scale, and its own advantage is 0. Groups are
identified by id; order and stride do not matter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from pydantic import ValidationError
from torch import Tensor

from keel.common.settings import to_config_error
from keel.config.run import AdvantageSettings
from keel.errors import BatchError, ConfigError
from keel.signal.segments import Segments


class MovingBaseline:
    """A moving baseline per agent: A = R - b, then b <- decay * b + (1 - decay) * R (arXiv 2506.24119).

    It keeps its state between steps. `state` can be saved and passed to a new instance.
    """

    def __init__(self, state: dict[int, float] | None = None) -> None:
        self.state = dict(state or {})

    def update(self, agent: int, reward: float, decay: float) -> float:
        """Return the advantage of a reward against the agent's baseline, and update the baseline with it."""
        baseline = self.state.get(agent, 0.0)
        self.state[agent] = decay * baseline + (1 - decay) * reward
        return reward - baseline


def advantages(
    name: str | AdvantageSettings,
    rewards: Float[Tensor, "R"] | Sequence[float],
    group: Int[Tensor, "R"] | Sequence[int],
    *,
    valid: Bool[Tensor, "R"] | Sequence[bool] | None = None,
    moving: MovingBaseline | None = None,
    **parameters: Any,
) -> Float[Tensor, "R"]:
    """Return one advantage per rollout.

    group_mean: R - mean. group_mean_std: (R - mean) / std, 0 if all rewards are equal. leave_one_out: R minus the mean
    of the other rollouts. mean_normalised: (R - mean) / mean, 0 if the mean is 0; rewards must not be negative, since
    the mean stands for the probability of success (arXiv 2602.02710). moving_baseline: R minus the agent's moving
    baseline before R, with `group` as the agent's id and `moving` as the state. constant: R minus `baseline`. In a
    group with a single valid rollout, group estimators return 0.
    """
    if isinstance(name, AdvantageSettings):
        settings = name
    else:
        if "zero_variance_groups" in parameters:
            raise ConfigError(
                f"zero_variance_groups = {parameters['zero_variance_groups']!r} has no effect on advantages: every"
                " rollout gets an advantage; it determines which groups a run or LocalBackend.train trains on"
            )
        try:
            settings = AdvantageSettings.model_validate({"name": name, **parameters})
        except ValidationError as error:
            raise to_config_error(error, ("advantages",)) from None
    reward, ids, is_valid = _check_inputs(rewards, group, valid)
    if moving is not None and settings.name != "moving_baseline":
        raise BatchError(f'moving has no effect: it belongs to "moving_baseline", not to "{settings.name}"')
    result = torch.zeros_like(reward)
    if settings.name == "moving_baseline":
        if moving is None:
            raise BatchError('"moving_baseline" needs moving=MovingBaseline(), which keeps the baselines between steps')
        decay = 0.95 if settings.decay is None else settings.decay
        for index in is_valid.nonzero().squeeze(1).tolist():
            result[index] = moving.update(int(ids[index]), float(reward[index]), decay)
        return result
    valid_reward = reward[is_valid]
    if settings.name == "constant":
        result[is_valid] = valid_reward - (settings.baseline or 0.0)
        return result
    segments = Segments(ids[is_valid])
    count = segments.count().to(reward.dtype)
    mean = segments.sum(valid_reward) / count
    centred = valid_reward - segments.expand(mean)
    if settings.name == "group_mean_std":
        deviation = (segments.sum(centred.square()) / (count - 1).clamp(min=1)).sqrt()
        # rewards that are equal up to rounding carry no signal; dividing by their deviation would amplify the rounding
        flat = deviation <= 1e-6 * mean.abs().clamp(min=1e-6)
        centred = centred * segments.expand(torch.where(flat, 0.0, 1 / deviation.masked_fill(flat, 1.0)))
    elif settings.name == "leave_one_out":
        centred = centred * segments.expand(count / (count - 1).clamp(min=1))
    elif settings.name == "mean_normalised":
        _check_not_negative(reward, is_valid)
        zero = mean == 0
        centred = centred * segments.expand(torch.where(zero, 0.0, 1 / mean.masked_fill(zero, 1.0)))
    result[is_valid] = centred.masked_fill(segments.expand(count) < 2, 0.0)
    return result


def _check_not_negative(reward: Tensor, is_valid: Tensor) -> None:
    negative = ((reward < 0) & is_valid).nonzero()
    if len(negative):
        index = int(negative[0])
        raise BatchError(
            f'rewards[{index}] = {reward[index].item():g}, but advantages.name = "mean_normalised" divides by the mean'
            " reward of the group as a probability of success: a negative mean would reverse the sign of every"
            ' advantage; use rewards of at least 0, or advantages.name = "group_mean_std"'
        )


def _check_inputs(rewards: Any, group: Any, valid: Any) -> tuple[Tensor, Tensor, Tensor]:
    reward = torch.as_tensor(rewards)
    if not reward.is_floating_point() or reward.dtype in (torch.bfloat16, torch.float16):
        reward = reward.float()
    reward = reward.detach()
    ids = torch.as_tensor(group, device=reward.device)
    is_valid = (
        torch.ones_like(reward, dtype=torch.bool) if valid is None else torch.as_tensor(valid, device=reward.device)
    )
    if len(reward) == 0 and ids.is_floating_point():
        ids = ids.long()
    for name, value in (("rewards", reward), ("group", ids), ("valid", is_valid)):
        if value.shape != reward.shape or value.dim() != 1:
            raise BatchError(
                f"{name} has shape {list(value.shape)}; it must be one-dimensional, like rewards {list(reward.shape)}"
            )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise BatchError(f"group has dtype {ids.dtype}; ids must be integers")
    if is_valid.dtype != torch.bool:
        raise BatchError(f"valid has dtype {is_valid.dtype}; it must be bool")
    not_finite = (~reward.isfinite() & is_valid).nonzero()
    if len(not_finite):
        index = int(not_finite[0])
        raise BatchError(
            f"rewards[{index}] = {reward[index].item()}; mark the rollout as not valid, or give it a finite reward"
        )
    return reward, ids, is_valid
