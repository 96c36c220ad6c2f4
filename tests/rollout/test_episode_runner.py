"""Every episode becomes one rollout with at most one error."""

import asyncio
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.config import EpisodeLimits
from keel.inference.protocol import EngineError
from keel.rollout.environments.environment import EpisodeResult, Task, run_episode
from tests.support.scripted_engine import END, ScriptedEngine, client, play


class Custom:
    """An environment whose episode is a function."""

    name = "custom"

    def __init__(self, episode=None):
        self._episode = episode

    def tasks(self, split):
        return [Task(f"custom/{split}", {})]

    async def episode(self, task, policy):
        return await self._episode(task, policy)


def run(episode, *script, **options):
    return play(Custom(episode), Task("custom/1", {}), ScriptedEngine(*script), **options)


async def one_turn(task, policy):
    await policy.chat([{"role": "user", "content": "hi"}])
    return EpisodeResult(1.0)


def test_a_successful_episode_becomes_a_rollout():
    rollout = run(one_turn, "yes" + END, attempt=2)
    assert (rollout.reward, rollout.error, rollout.error_kind, rollout.turns) == (1.0, None, None, 1)
    assert (rollout.environment, rollout.task_id, rollout.group, rollout.attempt) == ("custom", "custom/1", "g", 2)
    assert rollout.oldest_version == 0
    assert rollout.seconds >= 0


def test_an_exception_becomes_a_short_error_on_one_line():
    async def failing(task, policy):
        await one_turn(task, policy)
        raise RuntimeError("line one\nline two " + "x" * 1000)

    rollout = run(failing, "yes" + END)
    assert rollout.error_kind == "exception"
    assert rollout.reward is None
    assert rollout.error.startswith("RuntimeError: line one line two xxx")
    assert re.search(r"\.\.\. \(test_episode_runner\.py:\d+\)$", rollout.error)
    assert len(rollout.error) < 350
    assert "\n" not in rollout.error
    assert rollout.turns == 1


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError(), KeyError("x"), AssertionError()])
def test_no_exception_of_an_environment_propagates(raised):
    async def failing(task, policy):
        raise raised

    rollout = run(failing)
    assert rollout.error_kind == "exception"
    assert rollout.error.startswith(type(raised).__name__)


def test_a_timeout_is_recorded_as_an_error():
    rollout = run(one_turn, 60, limits=EpisodeLimits(timeout=0.05))
    assert (rollout.error_kind, rollout.error) == ("timeout", "limits.timeout = 0.05 ran out")
    assert rollout.seconds < 60


def test_an_environment_that_suppresses_the_cancellation_has_timed_out():
    async def stubborn(task, policy):
        await one_turn(task, policy)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return EpisodeResult(1.0)

    assert run(stubborn, "x" + END, limits=EpisodeLimits(timeout=0.2)).error_kind == "timeout"


def test_a_timeout_inside_the_environment_is_an_exception():
    async def impatient(task, policy):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)

    assert run(impatient).error_kind == "exception"


def test_an_engine_error_is_recorded_also_inside_a_task_group():
    async def parallel(task, policy):
        async with asyncio.TaskGroup() as group:
            group.create_task(one_turn(task, policy))
        return EpisodeResult(1.0)

    for episode in (one_turn, parallel):
        rollout = run(episode, EngineError("no room"))
        assert (rollout.error_kind, rollout.error) == ("engine", "no room")


def test_an_engine_error_swallowed_by_the_environment_is_recorded():
    async def swallows(task, policy):
        try:
            await one_turn(task, policy)
        except ValueError:
            return EpisodeResult(0.0)

    rollout = run(swallows, EngineError("no room"))
    assert (rollout.error_kind, rollout.error) == ("engine", "no room")


@pytest.mark.parametrize("script", [[], [""]])
def test_an_episode_without_sampled_tokens_is_empty(script):
    async def maybe(task, policy):
        if script:
            await one_turn(task, policy)
        return EpisodeResult(1.0)

    rollout = run(maybe, *script)
    assert (rollout.error_kind, rollout.samples, rollout.oldest_version) == ("empty", (), None)


def test_a_completion_of_only_the_end_token_trains():
    rollout = run(one_turn, END)
    assert (rollout.error_kind, rollout.counts["trained_tokens"]) == (None, 1)


def test_an_episode_with_only_overlong_samples_is_over_length():
    rollout = run(one_turn, "x" * 50 + END, limits=EpisodeLimits(max_sequence_tokens=60))
    assert rollout.error_kind == "over_length"
    assert rollout.reward == 1.0
    assert rollout.counts["dropped_tokens"] == 51
    truncated = run(one_turn, "x" * 50 + END, limits=EpisodeLimits(max_sequence_tokens=60, on_overlength="truncate"))
    assert truncated.error_kind is None
    assert len(truncated.samples[0]) == 60
    assert truncated.counts["truncated_tokens"] > 0


def test_a_first_prompt_without_room_for_a_completion_is_too_long():
    rollout = run(one_turn, "x" + END, limits=EpisodeLimits(max_sequence_tokens=2))
    assert (rollout.error_kind, rollout.turns) == ("prompt_too_long", 0)
    assert "leaves no room for a completion within limits.max_sequence_tokens = 2" in rollout.error


def test_a_later_prompt_without_room_is_over_length_because_it_depends_on_the_completions():
    async def two_turns(task, policy):
        await one_turn(task, policy)
        await policy.chat([{"role": "user", "content": "y" * 200}])

    rollout = run(two_turns, "x" + END, "x" + END, limits=EpisodeLimits(max_sequence_tokens=100))
    assert (rollout.error_kind, rollout.turns) == ("over_length", 1)


def test_an_uncaught_turn_limit_is_over_length():
    async def greedy(task, policy):
        while True:
            await one_turn(task, policy)

    rollout = run(greedy, *["x" + END] * 5, limits=EpisodeLimits(max_turns=3))
    assert (rollout.error_kind, rollout.turns) == ("over_length", 3)
    assert rollout.error == "the episode has used all limits.max_turns = 3 turns"


@pytest.mark.parametrize(
    ("result", "error_message"),
    [
        (None, "an episode returns an EpisodeResult or a number, not NoneType"),
        (EpisodeResult(math.nan), "reward = nan is not finite"),
        (EpisodeResult(1.0, metrics={"speed": math.inf}), "speed = inf is not finite"),
        (EpisodeResult(1.0, reward_components={"style": -math.inf}), "style = -inf is not finite"),
    ],
)
def test_an_invalid_result_is_an_exception(result, error_message):
    async def odd(task, policy):
        await one_turn(task, policy)
        return result

    rollout = run(odd, "x" + END)
    assert rollout.error_kind == "exception"
    assert error_message in rollout.error


def test_names_of_components_become_text_and_values_floats():
    async def numbered(task, policy):
        await one_turn(task, policy)
        return EpisodeResult(1, {1: True}, {2: 3})

    rollout = run(numbered, "x" + END)
    assert (rollout.reward_components, rollout.metrics) == ({"1": 1.0}, {"2": 3.0})


def test_a_plain_number_is_a_valid_result():
    async def plain(task, policy):
        await one_turn(task, policy)
        return True

    rollout = run(plain, "x" + END)
    assert (rollout.reward, type(rollout.reward)) == (1.0, float)


def test_cancellation_of_the_run_propagates():
    async def main():
        engine = ScriptedEngine(60)
        running = asyncio.create_task(run_episode(Custom(one_turn), Task("t", {}), client(engine)))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


@given(st.lists(st.sampled_from(["complete", "raise", "engine", "sleep", "empty", "long"]), max_size=6))
def test_any_episode_becomes_one_rollout_with_at_most_one_error(steps):
    responses = {"complete": "ok" + END, "engine": EngineError("e"), "empty": "", "long": "x" * 400}

    async def episode(task, policy):
        for step in steps:
            if step == "raise":
                raise ValueError("raised")
            if step == "sleep":
                await asyncio.sleep(30)
            else:
                await policy.chat([{"role": "user", "content": "q"}])
        return EpisodeResult(0.5)

    script = [responses[step] for step in steps if step in responses]
    rollout = run(episode, *script, limits=EpisodeLimits(timeout=0.02, max_sequence_tokens=200))
    assert (rollout.error is None) == (rollout.error_kind is None)
    counts = rollout.counts
    assert counts["sampled_tokens"] == counts["trained_tokens"] + counts["dropped_tokens"]
    if rollout.error_kind is None:
        assert rollout.reward == 0.5
        assert rollout.samples
