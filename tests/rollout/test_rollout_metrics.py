"""Metrics of rollouts: each mean is over the rollouts that have the value, and nothing is reported without rollouts."""

from typing import Any

import pytest

from keel.common.sample import Sample
from keel.config import EpisodeLimits
from keel.inference.protocol import FinishReason, Generation
from keel.rollout.rollout import Rollout
from keel.rollout.rollout_metrics import completion_metrics, environment_means, mean_by_name, sample_metrics
from keel.rollout.trajectory import EpisodeTrajectory


def rollout(samples: int = 1, **fields: Any) -> Rollout:
    sample = Sample(token_ids=[1, 2], trainable=[False, True])
    return Rollout(environment="words", task_id="t", group="words#0", samples=(sample,) * samples, **fields)


def played(*finish_reasons: FinishReason, limits: EpisodeLimits | None = None) -> Rollout:
    """Return the rollout of an episode whose completions of three tokens ended for these reasons."""
    trajectory = EpisodeTrajectory()
    prompt = [1]
    for reason in finish_reasons:
        trajectory.add_turn(prompt, Generation((5, 6, 7), (-1.0,) * 3, (0,) * 3, reason, 1.0))
        prompt = [*prompt, 5, 6, 7, 1]
    built = trajectory.build_samples(limits or EpisodeLimits())
    return Rollout(environment="words", task_id="t", group="words#0", samples=built.samples, counts=built.counts)


def test_completion_length_is_over_all_turns_of_a_rollout() -> None:
    metrics = completion_metrics([played("stop"), played("stop", "stop", "stop")])
    assert metrics == {"completion_tokens": 6.0, "completion_tokens_max": 9.0, "truncated": 0.0}


def test_a_rollout_is_truncated_by_the_maximum_of_a_completion_or_of_a_sample() -> None:
    limited = EpisodeLimits(max_sequence_tokens=3)
    cut = limited.model_copy(update={"on_overlength": "truncate"})
    rollouts = [played("length", "stop"), played("stop", limits=limited), played("stop", limits=cut), played("stop")]
    assert [each.truncated for each in rollouts] == [True, True, True, False]
    assert completion_metrics(rollouts)["truncated"] == 0.75


def test_samples_and_split_reasons_are_counted() -> None:
    split = rollout(3, counts={"split_compaction": 2, "turns": 4})
    metrics = sample_metrics([split, rollout(1), rollout(2, counts={"split_compaction": 1, "split_tools": 0})])
    assert metrics == {"samples_per_rollout": 2.0, "split/compaction": 3.0, "split/tools": 0.0}


def test_a_mean_is_over_the_rollouts_that_reported_the_name() -> None:
    rollouts = [
        rollout(reward_components={"correct": 1.0, "style": 0.5}, metrics={"tries": 1.0}),
        rollout(reward_components={"correct": 0.0}),
    ]
    assert environment_means(rollouts, "words") == {
        "reward_components/words/correct": 0.5,
        "reward_components/words/style": 0.5,
        "environment_metrics/words/tries": 1.0,
    }
    assert environment_means(rollouts)["reward_components/correct"] == 0.5


def test_without_rollouts_there_are_no_metrics() -> None:
    assert completion_metrics([]) == sample_metrics([]) == environment_means([]) == mean_by_name([]) == {}


@pytest.mark.parametrize("counts", [{}, {"sampled_tokens": 4}])
def test_a_rollout_stored_before_the_counts_existed_is_not_truncated(counts: dict[str, int]) -> None:
    assert not rollout(counts=counts).truncated
