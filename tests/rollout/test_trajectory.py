"""A trajectory loses no sampled token and trains none twice, whatever the turns look like."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import EpisodeLimits
from keel.inference.protocol import Generation
from keel.rollout.trajectory import EpisodeTrajectory

NO_LIMIT = EpisodeLimits(max_sequence_tokens=100_000)


def generation(ids, *, first=0, version=0, temperature=1.0):
    """Return tokens identified by their log-probs: -n for the n-th token of the episode, from 1."""
    return Generation(
        token_ids=tuple(ids),
        logprobs=tuple(-float(first + index + 1) for index in range(len(ids))),
        versions=tuple([version] * len(ids)),
        finish_reason="stop",
        temperature=temperature,
    )


@st.composite
def episodes(draw):
    """Draw turns that extend an earlier one, share a prefix with one, or are unrelated."""
    tokens = st.lists(st.integers(0, 3), max_size=4)
    turns = []
    count = 0
    for number in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["extend", "extend", "share", "new"])) if turns else "new"
        if kind == "new":
            prompt = [draw(st.integers(0, 3)), *draw(tokens)]
        else:
            prompt, completion = draw(st.sampled_from(turns))
            full = [*prompt, *completion.token_ids]
            shared = len(full) if kind == "extend" else draw(st.integers(1, len(full)))
            prompt = [*full[:shared], *draw(tokens)]
        ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        temperature = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5]))
        turns.append((prompt, generation(ids, first=count, version=number, temperature=temperature)))
        count += len(ids)
    return turns


def trajectory(turns):
    episode = EpisodeTrajectory()
    for prompt, completion in turns:
        episode.add_turn(prompt, completion)
    return episode


def trained(samples):
    """Return (log-prob, version, temperature, sample, position) of every token that trains."""
    return [
        (sample.sampler_logprobs[position], sample.version[position], sample.temperature, sample, position)
        for sample in samples
        for position in range(len(sample))
        if sample.trainable[position]
    ]


@given(episodes())
@settings(max_examples=300)
def test_every_sampled_token_trains_once_after_exactly_the_tokens_the_engine_saw(turns):
    result = trajectory(turns).build_samples(NO_LIMIT)
    expected = {}
    for prompt, completion in turns:
        for offset in range(len(completion.token_ids)):
            context = (*prompt, *completion.token_ids[: offset + 1])
            expected[completion.logprobs[offset]] = (context, completion.versions[offset], completion.temperature)
    tokens = trained(result.samples)
    assert sorted(item[0] for item in tokens) == sorted(expected)
    for logprob, version, temperature, sample, position in tokens:
        assert (tuple(sample.token_ids[: position + 1]), version, temperature) == expected[logprob]
    assert result.counts["trained_tokens"] == result.counts["sampled_tokens"] == len(expected)


@given(episodes())
@settings(max_examples=100)
def test_tokens_that_do_not_train_have_no_version_and_no_logprob(turns):
    for sample in trajectory(turns).build_samples(NO_LIMIT).samples:
        assert not sample.trainable[0]
        for position in range(len(sample)):
            assert (sample.version[position] >= 0) == sample.trainable[position]
            assert sample.trainable[position] or sample.sampler_logprobs[position] == 0.0


@given(episodes(), st.integers(1, 12), st.sampled_from(["drop", "truncate"]))
@settings(max_examples=300)
def test_no_sample_is_over_length_and_lost_tokens_are_counted(turns, limit, rule):
    result = trajectory(turns).build_samples(EpisodeLimits(max_sequence_tokens=limit, on_overlength=rule))
    logprobs = [item[0] for item in trained(result.samples)]
    counts = result.counts
    assert all(len(sample) <= limit for sample in result.samples)
    assert len(logprobs) == len(set(logprobs)) == counts["trained_tokens"]
    assert counts["sampled_tokens"] == counts["trained_tokens"] + counts["dropped_tokens"] + counts["truncated_tokens"]
    # tokens are lost only because their sample is too long
    if counts["sampled_tokens"] > counts["trained_tokens"]:
        assert counts["dropped_samples"] + counts["truncated_samples"] > 0
    if rule == "truncate":
        within = sum(min(len(completion.token_ids), max(0, limit - len(prompt))) for prompt, completion in turns)
        assert counts["trained_tokens"] == within


@given(st.lists(st.booleans(), max_size=12))
def test_c_compactions_give_one_plus_c_samples(compactions):
    episode = EpisodeTrajectory()
    before = [1, 2, 3]
    episode.add_turn(before, generation([7]))
    before = [*before, 7]
    for number, compacts in enumerate(compactions):
        before = [1, 2, 100 + number] if compacts else [*before, 5]
        episode.add_turn(before, generation([7, 8]), "compaction" if compacts else None)
        before = [*before, 7, 8]
    result = episode.build_samples(NO_LIMIT)
    assert len(result.samples) == 1 + sum(compactions)
    assert [sample.split_reason for sample in result.samples] == ["start"] + ["compaction"] * sum(compactions)
    assert result.counts.get("split_compaction", 0) == sum(compactions)


def test_tokens_shared_by_two_samples_train_in_the_first():
    episode = EpisodeTrajectory()
    episode.add_turn([1, 2], generation([3, 4, 5]))
    episode.add_turn([1, 2, 3, 9], generation([6], first=3), "thinking")
    first, second = episode.build_samples(NO_LIMIT).samples
    assert first.trainable.tolist() == [False, False, True, True, True]
    assert second.token_ids.tolist() == [1, 2, 3, 9, 6]
    assert second.trainable.tolist() == [False, False, False, False, True]


def test_shared_tokens_train_in_the_second_sample_if_the_first_is_dropped():
    episode = EpisodeTrajectory()
    episode.add_turn([1, 2], generation([3, 4, 5, 5, 5, 5]))
    episode.add_turn([1, 2, 3, 9], generation([6], first=6), "thinking")
    result = episode.build_samples(EpisodeLimits(max_sequence_tokens=5))
    assert [sample.trainable.tolist() for sample in result.samples] == [[False, False, True, False, True]]
    assert result.counts["dropped_samples"] == 1
    assert result.counts["dropped_tokens"] == 5


def test_a_sample_truncated_before_its_first_completion_is_dropped_and_counted():
    episode = EpisodeTrajectory()
    episode.add_turn([1, 2, 3], generation([4, 5]))
    result = episode.build_samples(EpisodeLimits(max_sequence_tokens=3, on_overlength="truncate"))
    assert result.samples == ()
    assert (result.counts["truncated_samples"], result.counts["truncated_tokens"]) == (1, 2)


def test_an_empty_completion_is_counted_and_gives_no_sample():
    episode = EpisodeTrajectory()
    episode.add_turn([1, 2], generation([]))
    result = episode.build_samples(NO_LIMIT)
    assert result.samples == ()
    assert result.counts["empty_samples"] == 1


def test_two_interleaved_conversations_stay_two_samples():
    episode = EpisodeTrajectory()
    episode.add_turn([1], generation([2]))
    episode.add_turn([5], generation([6], first=1), "compaction")
    episode.add_turn([1, 2, 3], generation([4], first=2))
    episode.add_turn([5, 6, 7], generation([8], first=3))
    assert [sample.token_ids.tolist() for sample in episode.build_samples(NO_LIMIT).samples] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
    ]


def test_another_temperature_starts_another_sample_with_that_reason():
    episode = EpisodeTrajectory()
    episode.add_turn([1], generation([2]))
    episode.add_turn([1, 2, 3], generation([4], first=1, temperature=0.5))
    first, second = episode.build_samples(NO_LIMIT).samples
    assert (first.temperature, second.temperature, second.split_reason) == (1.0, 0.5, "temperature")
    assert second.trainable.tolist() == [False, False, False, True]


def test_a_prompt_that_extends_nothing_and_has_no_reason_is_rewritten():
    episode = EpisodeTrajectory()
    episode.add_turn([1], generation([2]))
    episode.add_turn([1, 3], generation([4], first=1))
    assert episode.build_samples(NO_LIMIT).samples[1].split_reason == "rewritten"


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="at least one token"):
        EpisodeTrajectory().add_turn([], generation([1]))


def test_the_oldest_version_is_that_of_the_trainable_tokens():
    episode = EpisodeTrajectory()
    episode.add_turn([1], generation([2], version=3))
    episode.add_turn([1, 2, 5], generation([4], first=1, version=7))
    (sample,) = episode.build_samples(NO_LIMIT).samples
    assert sample.oldest_version == 3
