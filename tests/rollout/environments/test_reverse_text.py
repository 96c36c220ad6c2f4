"""The reward of reverse_text is the share of the longest common subsequence, and its demonstrations earn all of it."""

import asyncio
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.config import EnvironmentSettings
from keel.errors import ConfigError
from keel.rollout.environments.environment import EpisodeResult, Task
from keel.rollout.environments.registry import load_environment
from keel.rollout.environments.reverse_text import ReverseText, lcs_ratio

texts = st.text("abc", max_size=6)


@given(texts, texts)
def test_the_ratio_is_that_of_the_longest_common_subsequence(first: str, second: str) -> None:
    subsequences = [
        {"".join(chosen) for size in range(len(text) + 1) for chosen in combinations(text, size)}
        for text in (first, second)
    ]
    longest = max(map(len, subsequences[0] & subsequences[1]))
    assert lcs_ratio(first, second) == (2 * longest / (len(first) + len(second)) if first and second else 0.0)


def play(task: Task, text: str) -> EpisodeResult:
    async def chat(messages: list[dict[str, Any]]) -> SimpleNamespace:
        return SimpleNamespace(text=text)

    return asyncio.run(ReverseText().episode(task, SimpleNamespace(chat=chat)))  # type: ignore[arg-type]


def test_a_demonstration_earns_the_full_reward_and_partial_answers_a_part() -> None:
    environment = ReverseText()
    task = Task("t", {"text": "abcd", "answer": "dcba"})
    assert play(task, environment.demonstration(task)[-1]["content"]).reward == 1
    assert play(task, "<reversed_text>dcb</reversed_text>").reward == pytest.approx(6 / 7)
    assert play(task, "dcba") == EpisodeResult(0.0, metrics={"formatted": 0.0})


def test_tasks_are_deterministic_disjoint_and_of_the_configured_length() -> None:
    environment = ReverseText(min_length=3, max_length=5)
    train, held_out = ([task.data["text"] for task in environment.tasks(split)] for split in ("train", "eval"))
    assert train == [task.data["text"] for task in ReverseText(min_length=3, max_length=5).tasks("train")]
    assert not set(train) & set(held_out) and {len(text) for text in train} == {3, 4, 5}


def test_a_lower_maximum_than_minimum_is_an_error() -> None:
    table = EnvironmentSettings(name="reverse_text", options={"min_length": 9})
    with pytest.raises(ConfigError, match=r"environment\.options\.min_length = 9 must not be above"):
        load_environment(table)
