"""From trajectories to training samples, by what the server recorded and nothing else.

Guarantees that every trained token has the id, the log-prob and the version that were sampled, after exactly the
tokens that the engine saw. A trajectory that lacks any of it, or was sampled by another model or from a distribution
that the trainer cannot replay, is refused by its place and name. Nothing is tokenised here.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from keel.api.trajectories import Trajectory, TrajectoryGroup, get_field
from keel.common.sample import Sample
from keel.config import EpisodeLimits, Sampling
from keel.config.run import AdvantageSettings
from keel.errors import BatchError, KeelError
from keel.inference.protocol import FinishReason, Generation
from keel.rollout.trajectory import EpisodeTrajectory as Episode
from keel.rollout.trajectory import TrajectorySamples
from keel.signal import MovingBaseline, advantages

REQUIRED_CHOICE_FIELDS = ("token_ids", "prompt_token_ids", "versions", "logprobs", "sampling", "model")
"""What a choice of an exact server carries."""
COUNTED_METRICS = ("turns", "sampled_tokens")
"""Of what a trajectory says of its samples; the rest is about limits, of which there are none here."""
_NO_LIMITS = EpisodeLimits(max_sequence_tokens=2**62)
"""None: whether a sample fits is the trainer's question, which names it."""
_FINISH_REASONS: dict[str, FinishReason] = {"length": "length", "abort": "cancelled"}


@dataclass
class SampleBatch:
    """What a call of `train` has to train on, and the numbers about it."""

    samples: list[Sample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    skip_reason: str = ""
    """Why there is nothing to train on."""


def build_batch(
    groups: Sequence[TrajectoryGroup],
    *,
    model: str,
    step: int,
    estimator: AdvantageSettings,
    moving_baseline: MovingBaseline,
) -> SampleBatch:
    """The samples of all groups with their advantages. `step`: the version being trained.

    A group whose advantages are all zero is dropped or trained, as `estimator.zero_variance_groups` says, and counted
    in either case.
    """
    episodes = _read_episodes(groups, model, step)
    rewards = [float(one.reward or 0.0) for group in groups for one in group.trajectories]
    owners = [number for number, group in enumerate(groups) for _ in group.trajectories]
    if estimator.name == "moving_baseline":
        # its baseline is of an agent, and this is one
        found = advantages(estimator, rewards, [0] * len(rewards), moving=moving_baseline)
    else:
        found = advantages(estimator, rewards, owners)
    flat = {number for number in range(len(groups)) if not _has_signal(found, owners, number)}
    batch, counts = SampleBatch(), Counter[str](zero_variance_tokens=0)
    for episode, owner, advantage in zip(episodes, owners, found.tolist(), strict=True):
        said = episode.samples.counts
        counts.update({name: said[name] for name in said if name in COUNTED_METRICS or name.startswith("split_")})
        if owner in flat and estimator.zero_variance_groups == "drop":
            counts["zero_variance_tokens"] += said["sampled_tokens"]
            continue
        for number, one in enumerate(episode.samples.samples):
            name = f"{episode.label}, sample {number}" if number else episode.label
            batch.samples.append(replace(one, advantage=advantage, group=owner, name=name))
    batch.metrics = _trajectory_metrics(groups, rewards, len(flat)) | {
        f"rollout/{name}": float(count) for name, count in counts.items()
    }
    if not batch.samples:
        batch.skip_reason = f"nothing to train on: {len(groups)} groups, {len(rewards)} trajectories" + (
            f", and in {len(flat)} groups all advantages are zero" if flat else ""
        )
    return batch


@dataclass(frozen=True)
class _EpisodeSamples:
    label: str
    samples: TrajectorySamples


def _read_episodes(groups: Sequence[TrajectoryGroup], model: str, step: int) -> list[_EpisodeSamples]:
    found, wrong = [], []
    for number, group in enumerate(groups):
        for place, trajectory in enumerate(group.trajectories):
            name = f" ({trajectory.name})" if trajectory.name else ""
            where = f"group {number}, trajectory {place}{name}"
            try:
                found.append(
                    _EpisodeSamples(where, _read_trajectory(trajectory, model, step).build_samples(_NO_LIMITS))
                )
            except KeelError as error:
                wrong.append(f"{where}: {error}")
    if wrong:
        rest = f"\n... and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BatchError(f"{len(wrong)} trajectories cannot be trained on\n" + "\n".join(wrong[:3]) + rest)
    return found


def _read_trajectory(trajectory: Trajectory, model: str, step: int) -> Episode:
    """A trajectory token by token, or an error that says what is wrong with it."""
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise BatchError(f"reward = {trajectory.reward} must be a finite number")
    choices = trajectory.choices
    if not choices:
        raise BatchError("it has no choices, only messages: append the choices of the responses themselves")
    if len({id(choice) for choice in choices}) < len(choices):
        raise BatchError("a choice is in it twice, and would train twice")
    episode = Episode()
    for number, choice in enumerate(choices):
        try:
            prompt, generation = _read_choice(choice, model, step)
        except KeelError as error:
            raise BatchError(f"choice {number} {error}") from error
        episode.add_turn(prompt, generation, get_field(choice, "prompt_reason"))
    return episode


def _read_choice(choice: Any, model: str, step: int) -> tuple[list[int], Generation]:
    """The prompt and the answer of a choice, as sampled."""
    missing = [name for name in REQUIRED_CHOICE_FIELDS if get_field(choice, name) is None]
    content = get_field(get_field(choice, "logprobs"), "content") if "logprobs" not in missing else []
    if content is None:
        missing.append("logprobs.content")
    if missing:
        raise BatchError(
            f"lacks {', '.join(missing)}: it was not sampled by a model that is trained here, or something on the way"
            " took them off. Without them it could only be trained as if it were on-policy, which is refused; use"
            " model.openai_client() and append the choices as they come"
        )
    if get_field(choice, "model") != model:
        raise BatchError(f'was sampled by "{get_field(choice, "model")}", and "{model}" is trained')
    sampling = Sampling.model_validate(dict(get_field(choice, "sampling")))
    sampling.check_trainable()
    tokens, prompt = _int_list(choice, "token_ids"), _int_list(choice, "prompt_token_ids")
    versions, logprobs = _int_list(choice, "versions"), [float(get_field(entry, "logprob")) for entry in content]
    if not len(tokens) == len(versions) == len(logprobs):
        raise BatchError(f"has {len(tokens)} token_ids, {len(versions)} versions and {len(logprobs)} logprobs")
    if not tokens or not prompt:
        raise BatchError(f"has {len(prompt)} prompt_token_ids and {len(tokens)} token_ids; neither may be empty")
    if not all(map(math.isfinite, logprobs)):
        raise BatchError("has a logprob that is not finite")
    if max(versions) > step:
        raise BatchError(f"has tokens of version {max(versions)}, and the model is at step {step}: of another run")
    finish = _FINISH_REASONS.get(str(get_field(choice, "finish_reason")), "stop")
    return prompt, Generation(tuple(tokens), tuple(logprobs), tuple(versions), finish, sampling.temperature)


def _int_list(choice: Any, name: str) -> list[int]:
    values = get_field(choice, name)
    if not isinstance(values, Sequence) or not all(type(value) is int and value >= 0 for value in values):
        raise BatchError(f"has {name} = {str(values)[:60]}; it must be a list of whole numbers from 0")
    return list(values)


def _has_signal(values: torch.Tensor, owners: Sequence[int], group: int) -> bool:
    return any(value != 0 for value, owner in zip(values.tolist(), owners, strict=True) if owner == group)


def _trajectory_metrics(
    groups: Sequence[TrajectoryGroup], rewards: Sequence[float], zero_variance_count: int
) -> dict[str, float]:
    """The numbers that are about trajectories; the trainer's come beside them."""
    found = {
        "groups": float(len(groups)),
        "groups_zero_variance": float(zero_variance_count),
        "trajectories": float(len(rewards)),
        "exceptions": float(sum(len(group.exceptions) for group in groups)),
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        found["reward"] = mean
        found["reward_std"] = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    own: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                own.setdefault(f"metrics/{name}", []).append(float(value))
    return found | {name: sum(values) / len(values) for name, values in own.items()}
