"""The client records every turn and enforces the limits of the episode."""

import asyncio

import pytest

from keel.config import EpisodeLimits, Sampling
from keel.errors import ConfigError
from keel.inference.protocol import EngineError, Generation
from keel.rollout.policy_client import EpisodeLimitReached, derive_seed
from tests.support.scripted_engine import END, ScriptedEngine, client


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_is_recorded_token_by_token():
    engine = ScriptedEngine("one" + END, "two" + END)

    async def chat():
        policy = client(engine)
        messages = [user("a")]
        reply = await policy.chat(messages)
        assert (reply.text, reply.message) == ("one", {"role": "assistant", "content": "one"})
        await policy.chat([*messages, reply.message, user("b")])
        return policy

    policy = asyncio.run(chat())
    built = policy.trajectory.build_samples(EpisodeLimits())
    (sample,) = built.samples
    assert sample.token_ids.tolist() == [*engine.requests[1][0], *engine.tokenizer.encode("two" + END)]
    assert built.counts["sampled_tokens"] == built.counts["trained_tokens"] == 8


def test_requests_carry_the_group_the_stop_ids_and_the_smaller_max_tokens():
    engine = ScriptedEngine(*["x" + END] * 3)

    async def chat():
        policy = client(engine, sampling=Sampling(max_tokens=20, stop_token_ids=(7,)), group="task-1")
        for max_tokens in (None, 5, 100):
            await policy.chat([user("a")], max_tokens=max_tokens)

    asyncio.run(chat())
    assert [sampling.max_tokens for _, sampling, _ in engine.requests] == [20, 5, 20]
    assert {group for *_, group in engine.requests} == {"task-1"}
    assert engine.requests[0][1].stop_token_ids == (7, 258)


def test_each_turn_has_its_own_seed_and_none_without_a_seed():
    def seeds(seed):
        engine = ScriptedEngine("x" + END, "y" + END)

        async def chat():
            policy = client(engine, sampling=Sampling(seed=seed))
            await policy.chat([user("a")])
            await policy.chat([user("b")])

        asyncio.run(chat())
        return [sampling.seed for _, sampling, _ in engine.requests]

    assert seeds(None) == [None, None]
    first, second = seeds(3)
    assert first != second
    assert seeds(3) == [first, second] != seeds(4)
    assert derive_seed(0, "g", 1) != derive_seed(0, "g", 2)


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_sampling_that_cannot_be_trained_on_is_rejected_except_for_evaluation(setting):
    name, value = next(iter(setting.items()))
    with pytest.raises(ConfigError, match=rf"sampling.{name} = {value:g}"):
        client(ScriptedEngine(), sampling=Sampling(**setting))
    client(ScriptedEngine(), sampling=Sampling(**setting), evaluation=True)


def test_the_turn_limit_is_enforced():
    async def chat():
        policy = client(ScriptedEngine("x" + END, "y" + END), limits=EpisodeLimits(max_turns=1))
        assert policy.turns_left == 1
        await policy.chat([user("a")])
        assert policy.turns_left == 0
        with pytest.raises(EpisodeLimitReached, match=r"limits.max_turns = 1"):
            await policy.chat([user("b")])
        assert len(policy.trajectory.turns) == 1

    asyncio.run(chat())


def test_a_prompt_without_room_for_a_completion_is_not_sent():
    async def chat():
        engine = ScriptedEngine("x" + END)
        policy = client(engine, limits=EpisodeLimits(max_sequence_tokens=40))
        with pytest.raises(EpisodeLimitReached, match=r"prompt of \d+ tokens .* limits.max_sequence_tokens = 40"):
            await policy.chat([user("a" * 40)])
        assert engine.requests == []

    asyncio.run(chat())


def test_an_engine_error_is_recorded_until_a_later_request_succeeds():
    async def chat():
        policy = client(ScriptedEngine(EngineError("gone"), "x" + END))
        with pytest.raises(EngineError, match="gone"):
            await policy.chat([user("a")])
        assert str(policy.engine_error) == "gone"
        await policy.chat([user("a")])
        assert policy.engine_error is None
        assert len(policy.trajectory.turns) == 1

    asyncio.run(chat())


def test_an_aborted_completion_is_an_engine_error():
    class AbortingEngine(ScriptedEngine):
        async def generate(self, prompt, sampling, *, group=None):
            return Generation((1,), (0.0,), (0,), "abort", 1.0)

    with pytest.raises(EngineError, match="aborted the request"):
        asyncio.run(client(AbortingEngine()).chat([user("a")]))


@pytest.mark.parametrize(
    ("messages", "error_message"),
    [
        ([], "at least one message"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user", "content": 3}], "content of type int"),
    ],
)
def test_malformed_messages_are_rejected(messages, error_message):
    with pytest.raises(ValueError, match=error_message):
        asyncio.run(client(ScriptedEngine("x")).chat(messages))


def test_images_are_rejected():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ConfigError, match="type image_url; only text"):
        asyncio.run(client(ScriptedEngine("x")).chat([image]))


def test_later_changes_to_messages_do_not_affect_the_trajectory():
    engine = ScriptedEngine("one" + END, "two" + END)

    async def chat():
        policy = client(engine)
        messages = [user("a")]
        reply = await policy.chat(messages)
        messages += [dict(reply.message), user("b")]
        reply.message["content"] = "changed"
        await policy.chat(messages)
        return policy

    policy = asyncio.run(chat())
    assert len(policy.trajectory.build_samples(EpisodeLimits()).samples) == 1
