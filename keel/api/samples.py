"""Build training samples from trajectories, using only what the endpoint recorded.

Every trained token has the id, the log-prob and the version it was sampled with, after exactly the tokens the engine
saw. A trajectory that lacks any of these, or was sampled by another model or from a distribution that the trainer
cannot reproduce, is an error that names it. Nothing is tokenised here.
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
from keel.run.records import SampleRecord, trained_samples
from keel.run.scoring import ZERO_VARIANCE
from keel.signal import MovingBaseline, advantages

REQUIRED_CHOICE_FIELDS = ("token_ids", "prompt_token_ids", "versions", "logprobs", "sampling", "model")
"""Fields of a choice that training needs."""
COUNTED_METRICS = ("turns", "sampled_tokens")
"""Counts of a trajectory that become metrics; the others concern limits, which do not apply here."""
_NO_LIMITS = EpisodeLimits(max_sequence_tokens=2**62)
"""No limit: the trainer checks whether a sample fits and names one that does not."""
_FINISH_REASONS: dict[str, FinishReason] = {"length": "length", "abort": "abort"}


@dataclass
class SampleBatch:
    """The samples of a call of `train`, and their metrics."""

    rows: list[SampleRecord] = field(default_factory=list)
    """One row per sample, dropped ones included, and one per failed trajectory."""
    metrics: dict[str, float] = field(default_factory=dict)
    skip_reason: str = ""
    """Why there is nothing to train on; empty if there is."""

    @property
    def samples(self) -> list[Sample]:
        """The samples to train on."""
        return trained_samples(self.rows)


def build_batch(
    groups: Sequence[TrajectoryGroup],
    *,
    model: str,
    step: int,
    estimator: AdvantageSettings,
    moving_baseline: MovingBaseline,
    first_group: int = 0,
) -> SampleBatch:
    """Return the samples of all groups with their advantages. `step` is the version being trained.

    Groups are recorded under the numbers from `first_group`.

    A group whose advantages are all zero is dropped or trained according to `estimator.zero_variance_groups`, and
    counted in both cases.
    """
    episodes = _read_episodes(groups, model, step)
    rewards = [float(trajectory.reward or 0.0) for group in groups for trajectory in group.trajectories]
    owners = [index for index, group in enumerate(groups) for _ in group.trajectories]
    if estimator.name == "moving_baseline":
        # a moving baseline belongs to an agent, and this model is one agent
        values = advantages(estimator, rewards, [0] * len(rewards), moving=moving_baseline)
    else:
        values = advantages(estimator, rewards, owners)
    zero_variance = {index for index in range(len(groups)) if not _has_signal(values, owners, index)}
    batch, counts = SampleBatch(), Counter[str](zero_variance_tokens=0)
    for episode, owner, advantage in zip(episodes, owners, values.tolist(), strict=True):
        of_episode = episode.samples.counts
        counts.update(
            {name: n for name, n in of_episode.items() if name in COUNTED_METRICS or name.startswith("split_")}
        )
        dropped = owner in zero_variance and estimator.zero_variance_groups == "drop"
        if dropped:
            counts["zero_variance_tokens"] += of_episode["sampled_tokens"]
        key = _group_key(groups[owner], first_group + owner)
        batch.rows += _sample_rows(key, episode, owner, advantage, ZERO_VARIANCE if dropped else None)
    batch.rows += [
        SampleRecord(
            *_group_key(group, first_group + owner),
            member=len(group.trajectories) + index,
            attempt=0,
            reason="exception",
            error=f"{type(error).__name__}: {error}",
        )
        for owner, group in enumerate(groups)
        for index, error in enumerate(group.exceptions)
    ]
    batch.metrics = _trajectory_metrics(groups, rewards, len(zero_variance)) | {
        f"rollout/{name}": float(count) for name, count in counts.items()
    }
    if not batch.samples:
        batch.skip_reason = f"nothing to train on: {len(groups)} groups, {len(rewards)} trajectories" + (
            f", and in {len(zero_variance)} groups all advantages are zero" if zero_variance else ""
        )
    return batch


@dataclass(frozen=True)
class _EpisodeSamples:
    label: str
    member: int
    """Index of the trajectory in its group."""
    trajectory: Trajectory
    samples: TrajectorySamples


def _group_key(group: TrajectoryGroup, number: int) -> tuple[str, str, str]:
    """Return id, environment and task of a group in the records."""
    name = f"{group.environment}#{number}"
    return name, group.environment, group.task_id or name


def _sample_rows(
    key: tuple[str, str, str], episode: _EpisodeSamples, group: int, advantage: float, drop_reason: str | None
) -> list[SampleRecord]:
    rows = []
    for index, sample in enumerate(episode.samples.samples):
        name = f"{episode.label}, sample {index}" if index else episode.label
        rows.append(
            SampleRecord(
                *key,
                member=episode.member,
                attempt=0,
                sample=index,
                sequence=replace(sample, advantage=advantage, group=group, name=name),
                outcome="trained" if drop_reason is None else "dropped",
                reason=drop_reason,
                reward=episode.trajectory.reward,
                environment_metrics={label: float(value) for label, value in episode.trajectory.metrics.items()},
                turns=episode.samples.counts["turns"],
            )
        )
    return rows


def _read_episodes(groups: Sequence[TrajectoryGroup], model: str, step: int) -> list[_EpisodeSamples]:
    episodes, errors = [], []
    for group_index, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            name = f" ({trajectory.name})" if trajectory.name else ""
            label = f"group {group_index}, trajectory {index}{name}"
            try:
                samples = _read_trajectory(trajectory, model, step).build_samples(_NO_LIMITS)
                episodes.append(_EpisodeSamples(label, index, trajectory, samples))
            except KeelError as error:
                errors.append(f"{label}: {error}")
    if errors:
        rest = f"\n... and {len(errors) - 3} more" if len(errors) > 3 else ""
        raise BatchError(f"{len(errors)} trajectories cannot be trained on\n" + "\n".join(errors[:3]) + rest)
    return episodes


def _read_trajectory(trajectory: Trajectory, model: str, step: int) -> Episode:
    """Return a trajectory token by token; raise an error that names what is wrong with it."""
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise BatchError(f"reward = {trajectory.reward} must be a finite number")
    choices = trajectory.choices
    if not choices:
        raise BatchError("it has no choices, only messages: append the choices of the responses themselves")
    if len({id(choice) for choice in choices}) < len(choices):
        raise BatchError("it contains the same choice twice, which would train twice")
    episode = Episode()
    for index, choice in enumerate(choices):
        try:
            prompt, generation = _read_choice(choice, model, step)
        except KeelError as error:
            raise BatchError(f"choice {index} {error}") from error
        episode.add_turn(prompt, generation, get_field(choice, "prompt_reason"))
    return episode


def _read_choice(choice: Any, model: str, step: int) -> tuple[list[int], Generation]:
    """Return the prompt and the completion of a choice, as sampled."""
    missing = [name for name in REQUIRED_CHOICE_FIELDS if get_field(choice, name) is None]
    content = get_field(get_field(choice, "logprobs"), "content") if "logprobs" not in missing else []
    if content is None:
        missing.append("logprobs.content")
    if missing:
        raise BatchError(
            f"lacks {', '.join(missing)}: it was not sampled by a model of this backend, or something on the way"
            " removed them. Without them it could only be trained as if it were on-policy, which is not allowed; use"
            " model.openai_client() and append the choices unchanged"
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
        raise BatchError(
            f"has tokens of version {max(versions)}, but the model is at step {step}: it is from another run"
        )
    finish = _FINISH_REASONS.get(str(get_field(choice, "finish_reason")), "stop")
    return prompt, Generation(tuple(tokens), tuple(logprobs), tuple(versions), finish, sampling.temperature)


def _int_list(choice: Any, name: str) -> list[int]:
    values = get_field(choice, name)
    if not isinstance(values, Sequence) or not all(type(value) is int and value >= 0 for value in values):
        raise BatchError(f"has {name} = {str(values)[:60]}; it must be a list of integers from 0")
    return list(values)


def _has_signal(values: torch.Tensor, owners: Sequence[int], group: int) -> bool:
    return any(value != 0 for value, owner in zip(values.tolist(), owners, strict=True) if owner == group)


def _trajectory_metrics(
    groups: Sequence[TrajectoryGroup], rewards: Sequence[float], zero_variance_count: int
) -> dict[str, float]:
    """Return the metrics of the trajectories; those of the trainer are separate."""
    result = {
        "groups": float(len(groups)),
        "groups_zero_variance": float(zero_variance_count),
        "trajectories": float(len(rewards)),
        "exceptions": float(sum(len(group.exceptions) for group in groups)),
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        result["reward"] = mean
        result["reward_std"] = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    own: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                own.setdefault(f"metrics/{name}", []).append(float(value))
    return result | {name: sum(values) / len(values) for name, values in own.items()}
