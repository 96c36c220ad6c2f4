"""A trajectory loses no sampled token and trains none twice, whatever the conversation did."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import EpisodeLimits
from keel.inference.protocol import Generation
from keel.rollout.trajectory import EpisodeTrajectory

ROOMY = EpisodeLimits(max_sequence_tokens=100_000)


def generation(ids, *, first=0, version=0, temperature=1.0):
    """Tokens whose log-probs tell which they are: -n for the n-th token of the episode, from 1."""
    return Generation(
        token_ids=tuple(ids),
        logprobs=tuple(-float(first + place + 1) for place in range(len(ids))),
        versions=tuple([version] * len(ids)),
        finish_reason="stop",
        temperature=temperature,
    )


@st.composite
def episodes(draw):
    """Turns that extend an earlier one, share a part of one, or have nothing to do with any."""
    tokens = st.lists(st.integers(0, 3), max_size=4)
    turns = []
    count = 0
    for number in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["extend", "extend", "share", "new"])) if turns else "new"
        if kind == "new":
            prompt = [draw(st.integers(0, 3)), *draw(tokens)]
        else:
            prompt, answer = draw(st.sampled_from(turns))
            whole = [*prompt, *answer.token_ids]
            kept = len(whole) if kind == "extend" else draw(st.integers(1, len(whole)))
            prompt = [*whole[:kept], *draw(tokens)]
        ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        temperature = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5]))
        turns.append((prompt, generation(ids, first=count, version=number, temperature=temperature)))
        count += len(ids)
    return turns


def trajectory(turns):
    made = EpisodeTrajectory()
    for prompt, answer in turns:
        made.add_turn(prompt, answer)
    return made


def trained(samples):
    """(log-prob, version, temperature, sample, place) of every token that trains."""
    return [
        (sample.logprobs[place], sample.versions[place], sample.temperature, sample, place)
        for sample in samples
        for place in range(len(sample))
        if sample.trainable[place]
    ]


@given(episodes())
@settings(max_examples=300)
def test_every_sampled_token_trains_exactly_once_after_exactly_what_the_engine_saw(turns):
    made = trajectory(turns).build_samples(ROOMY)
    expected = {}
    for prompt, answer in turns:
        for offset in range(len(answer.token_ids)):
            context = (*prompt, *answer.token_ids[: offset + 1])
            expected[answer.logprobs[offset]] = (context, answer.versions[offset], answer.temperature)
    found = trained(made.samples)
    assert sorted(item[0] for item in found) == sorted(expected)
    for logprob, version, temperature, sample, place in found:
        assert (sample.token_ids[: place + 1], version, temperature) == expected[logprob]
    assert made.counts["trained_tokens"] == made.counts["sampled_tokens"] == len(expected)


@given(episodes())
@settings(max_examples=100)
def test_what_does_not_train_has_no_version_and_no_logprob(turns):
    for sample in trajectory(turns).build_samples(ROOMY).samples:
        assert not sample.trainable[0]
        for place in range(len(sample)):
            assert (sample.versions[place] >= 0) == sample.trainable[place]
            assert sample.trainable[place] or sample.logprobs[place] == 0.0


@given(episodes(), st.integers(1, 12), st.sampled_from(["drop", "truncate"]))
@settings(max_examples=300)
def test_no_sample_is_over_length_and_what_was_lost_is_counted(turns, limit, rule):
    made = trajectory(turns).build_samples(EpisodeLimits(max_sequence_tokens=limit, on_overlength=rule))
    found = [item[0] for item in trained(made.samples)]
    counts = made.counts
    assert all(len(sample) <= limit for sample in made.samples)
    assert len(found) == len(set(found)) == counts["trained_tokens"]
    assert counts["sampled_tokens"] == counts["trained_tokens"] + counts["dropped_tokens"] + counts["truncated_tokens"]
    # nothing is lost for any other reason than the length of what it stands in
    if counts["sampled_tokens"] > counts["trained_tokens"]:
        assert counts["dropped_samples"] + counts["truncated_samples"] > 0
    if rule == "truncate":
        within = sum(min(len(answer.token_ids), max(0, limit - len(prompt))) for prompt, answer in turns)
        assert counts["trained_tokens"] == within


@given(st.lists(st.booleans(), max_size=12))
def test_c_compactions_give_one_plus_c_samples(compactions):
    made = EpisodeTrajectory()
    before = [1, 2, 3]
    made.add_turn(before, generation([7]))
    before = [*before, 7]
    for number, compacts in enumerate(compactions):
        before = [1, 2, 100 + number] if compacts else [*before, 5]
        made.add_turn(before, generation([7, 8]), "compaction" if compacts else None)
        before = [*before, 7, 8]
    result = made.build_samples(ROOMY)
    assert len(result.samples) == 1 + sum(compactions)
    assert [sample.split_reason for sample in result.samples] == ["start"] + ["compaction"] * sum(compactions)
    assert result.counts.get("split_compaction", 0) == sum(compactions)


def test_tokens_shared_by_two_samples_train_in_the_first():
    made = EpisodeTrajectory()
    made.add_turn([1, 2], generation([3, 4, 5]))
    made.add_turn([1, 2, 3, 9], generation([6], first=3), "thinking")
    first, second = made.build_samples(ROOMY).samples
    assert first.trainable == (False, False, True, True, True)
    assert second.token_ids == (1, 2, 3, 9, 6)
    assert second.trainable == (False, False, False, False, True)


def test_shared_tokens_train_in_the_second_when_the_first_is_refused():
    made = EpisodeTrajectory()
    made.add_turn([1, 2], generation([3, 4, 5, 5, 5, 5]))
    made.add_turn([1, 2, 3, 9], generation([6], first=6), "thinking")
    result = made.build_samples(EpisodeLimits(max_sequence_tokens=5))
    assert [sample.trainable for sample in result.samples] == [(False, False, True, False, True)]
    assert result.counts["dropped_samples"] == 1
    assert result.counts["dropped_tokens"] == 5


def test_a_sample_cut_before_its_first_answer_is_left_out_and_counted():
    made = EpisodeTrajectory()
    made.add_turn([1, 2, 3], generation([4, 5]))
    result = made.build_samples(EpisodeLimits(max_sequence_tokens=3, on_overlength="truncate"))
    assert result.samples == ()
    assert (result.counts["truncated_samples"], result.counts["truncated_tokens"]) == (1, 2)


def test_an_answer_without_tokens_is_counted_and_gives_no_sample():
    made = EpisodeTrajectory()
    made.add_turn([1, 2], generation([]))
    result = made.build_samples(ROOMY)
    assert result.samples == ()
    assert result.counts["empty_samples"] == 1


def test_two_conversations_in_turns_stay_two_samples():
    made = EpisodeTrajectory()
    made.add_turn([1], generation([2]))
    made.add_turn([5], generation([6], first=1), "compaction")
    made.add_turn([1, 2, 3], generation([4], first=2))
    made.add_turn([5, 6, 7], generation([8], first=3))
    assert [sample.token_ids for sample in made.build_samples(ROOMY).samples] == [(1, 2, 3, 4), (5, 6, 7, 8)]


def test_another_temperature_begins_another_sample_and_says_so():
    made = EpisodeTrajectory()
    made.add_turn([1], generation([2]))
    made.add_turn([1, 2, 3], generation([4], first=1, temperature=0.5))
    first, second = made.build_samples(ROOMY).samples
    assert (first.temperature, second.temperature, second.split_reason) == (1.0, 0.5, "temperature")
    assert second.trainable == (False, False, False, True)


def test_a_prompt_that_does_not_extend_and_has_no_reason_is_called_rewritten():
    made = EpisodeTrajectory()
    made.add_turn([1], generation([2]))
    made.add_turn([1, 3], generation([4], first=1))
    assert made.build_samples(ROOMY).samples[1].split_reason == "rewritten"


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        EpisodeTrajectory().add_turn([], generation([1]))


def test_the_oldest_version_is_of_the_tokens_that_train():
    made = EpisodeTrajectory()
    made.add_turn([1], generation([2], version=3))
    made.add_turn([1, 2, 5], generation([4], first=1, version=7))
    (sample,) = made.build_samples(ROOMY).samples
    assert sample.oldest_version == 3
