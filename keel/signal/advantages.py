"""From rewards to advantages, by group id and for groups of any size.

A rollout that is not valid (failed, empty, refused) has no vote: it moves no baseline and no scale, and its own
advantage is 0. Order and stride mean nothing; only ids do.
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
    """A baseline per agent that follows its rewards: b <- decay * b + (1 - decay) * R, then A = R - b (2506.24119).

    It keeps its state between steps; `state` can be saved and given back.
    """

    def __init__(self, state: dict[int, float] | None = None) -> None:
        self.state = dict(state or {})

    def update(self, agent: int, reward: float, decay: float) -> float:
        """The advantage of one reward, after the baseline has taken it in."""
        baseline = decay * self.state.get(agent, 0.0) + (1 - decay) * reward
        self.state[agent] = baseline
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
    """One advantage per rollout.

    group_mean: R - mean. group_mean_std: (R - mean) / std, 0 where they are equal. leave_one_out: R minus
    the mean of the others. mean_normalised: (R - mean) / mean, 0 where the mean is 0 (2602.02710). moving_baseline: R
    minus the agent's own moving baseline, with `group` as the agent's id and `moving` as its state. constant: R minus
    `baseline`. In a group with one valid rollout there is nothing to compare: group estimators give 0.
    """
    if isinstance(name, AdvantageSettings):
        settings = name
    else:
        if "zero_variance_groups" in parameters:
            raise ConfigError(
                f"zero_variance_groups = {parameters['zero_variance_groups']!r} has no effect on advantages: every"
                " rollout gets one; it decides which groups a run or LocalBackend.train trains on"
            )
        try:
            settings = AdvantageSettings.model_validate({"name": name, **parameters})
        except ValidationError as error:
            raise to_config_error(error, ("advantages",)) from None
    reward, ids, votes = _check_inputs(rewards, group, valid)
    if moving is not None and settings.name != "moving_baseline":
        raise BatchError(f'moving cannot act: it belongs to "moving_baseline", not to "{settings.name}"')
    result = torch.zeros_like(reward)
    if settings.name == "moving_baseline":
        if moving is None:
            raise BatchError('"moving_baseline" needs moving=MovingBaseline(), which keeps the baselines between steps')
        decay = 0.95 if settings.decay is None else settings.decay
        for place in votes.nonzero().squeeze(1).tolist():
            result[place] = moving.update(int(ids[place]), float(reward[place]), decay)
        return result
    chosen = reward[votes]
    if settings.name == "constant":
        result[votes] = chosen - (settings.baseline or 0.0)
        return result
    segments = Segments(ids[votes])
    count = segments.count().to(reward.dtype)
    mean = segments.sum(chosen) / count
    centred = chosen - segments.expand(mean)
    if settings.name == "group_mean_std":
        deviation = (segments.sum(centred.square()) / (count - 1).clamp(min=1)).sqrt()
        # rewards that are equal up to rounding carry no signal; dividing by their spread would invent one
        flat = deviation <= 1e-6 * mean.abs().clamp(min=1e-6)
        centred = centred * segments.expand(torch.where(flat, 0.0, 1 / deviation.masked_fill(flat, 1.0)))
    elif settings.name == "leave_one_out":
        centred = centred * segments.expand(count / (count - 1).clamp(min=1))
    elif settings.name == "mean_normalised":
        zero = mean == 0
        centred = centred * segments.expand(torch.where(zero, 0.0, 1 / mean.masked_fill(zero, 1.0)))
    result[votes] = centred.masked_fill(segments.expand(count) < 2, 0.0)
    return result


def _check_inputs(rewards: Any, group: Any, valid: Any) -> tuple[Tensor, Tensor, Tensor]:
    reward = torch.as_tensor(rewards)
    if not reward.is_floating_point() or reward.dtype in (torch.bfloat16, torch.float16):
        reward = reward.float()
    reward = reward.detach()
    ids = torch.as_tensor(group, device=reward.device)
    votes = torch.ones_like(reward, dtype=torch.bool) if valid is None else torch.as_tensor(valid, device=reward.device)
    if len(reward) == 0 and ids.is_floating_point():
        ids = ids.long()
    for what, value in (("rewards", reward), ("group", ids), ("valid", votes)):
        if value.shape != reward.shape or value.dim() != 1:
            raise BatchError(
                f"{what} has shape {list(value.shape)}; it must be one-dimensional, like rewards {list(reward.shape)}"
            )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise BatchError(f"group has dtype {ids.dtype}; ids must be integers")
    if votes.dtype != torch.bool:
        raise BatchError(f"valid has dtype {votes.dtype}; it must be bool")
    bad = (~reward.isfinite() & votes).nonzero()
    if len(bad):
        place = int(bad[0])
        raise BatchError(
            f"rewards[{place}] = {reward[place].item()}; mark the rollout as not valid, or give it a finite reward"
        )
    return reward, ids, votes
