"""Built-in rewards on right, wrong and hostile completions."""

import time
from typing import Any

import pytest

from keel.rollout.environments.rewards import builtin

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42.", "42", 0.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "Yes", "yes", 1.0),
        ({"strip": False}, " 42", "42", 0.0),
        ({}, "42", 42, 1.0),
    ],
)
def test_exact(options: dict[str, Any], completion: str, answer: Any, expected: float) -> None:
    assert builtin.exact(**options)(completion=completion, answer=answer) == expected


def test_regex_compares_the_group_with_the_answer() -> None:
    reward = builtin.regex(pattern=r"answer: (\w+)", group=1)
    assert reward("the answer: blue", "blue") == 1.0
    assert reward("the answer: red", "blue") == 0.0
    assert reward("no", "blue") == 0.0
    assert builtin.regex(pattern=r"\d+", full=True)("12a") == 0.0
    with pytest.raises(Exception, match=r"unterminated|missing"):
        builtin.regex(pattern="(")


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The result is 1,234.50", "1234.5", 1.0),
        ("first 3 then 7", "7", 1.0),
        ("first 3 then 7", "3", 0.0),
        ("-5", "5", 0.0),
        ("1e3", "1000", 1.0),
        ("nothing here", "7", 0.0),
        ("∞ NaN inf", "7", 0.0),
        ("7" * 5000, "7", 0.0),
    ],
)
def test_number_reads_the_last_number(completion: str, answer: str, expected: float) -> None:
    assert builtin.number()(completion, answer) == expected


def test_number_options_and_answers_without_a_number() -> None:
    assert builtin.number(which="first")("3 then 7", "3") == 1.0
    assert builtin.number(tolerance=0.01, relative=True)("100.5", "100") == 1.0
    assert builtin.number(tolerance=0.01)("100.5", "100") == 0.0
    with pytest.raises(ValueError, match="holds no number"):
        builtin.number()("7", "seven")
    with pytest.raises(ValueError, match='which = "middle"'):
        builtin.number(which="middle")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("B", 1.0),
        ("(b)", 0.0),
        ("The answer is B.", 1.0),
        ("Answer: **B**", 1.0),
        ("A or B? The answer is C", 0.0),
        ("\\boxed{B}", 1.0),
        ("First A, so \\boxed{b}", 1.0),
        ("Because", 0.0),
        ("A B C D", 0.0),
    ],
)
def test_choice(completion: str, expected: float) -> None:
    assert builtin.choice()(completion, "B") == expected


def test_choice_needs_a_letter_as_answer() -> None:
    with pytest.raises(ValueError, match="not one of the letters ABCD"):
        builtin.choice()("A", "Paris")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"n": 3}', 1.0),
        ('```json\n{"n": 3}\n```', 1.0),
        ('{"n": "3"}', 0.0),
        ("{}", 0.0),
        ("not json", 0.0),
        ("[" * 100_000, 0.0),
        ('{"n": 3} trailing', 0.0),
    ],
)
def test_json_schema(completion: str, expected: float) -> None:
    assert builtin.json_schema(schema=SCHEMA)(completion=completion) == expected
    assert builtin.json_schema(column="schema")(completion=completion, schema=SCHEMA) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think><think>a</think></think><answer>b</answer>", 0.0),
        ("<think>" * 10_000, 0.0),
    ],
)
def test_format(completion: str, expected: float) -> None:
    assert builtin.format()(completion=completion) == expected


def test_format_may_allow_text_outside_and_checks_tags() -> None:
    assert builtin.format(tags=("answer",), only=False)(completion="so <answer>b</answer>!") == 1.0
    with pytest.raises(ValueError, match="must be names"):
        builtin.format(tags=("a b",))


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_length_is_dapos_soft_overlong_penalty(tokens: int, expected: float) -> None:
    assert builtin.length(max_tokens=100, buffer=20)(completion_tokens=tokens) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is $2x + 2$", "$2(x+1)$", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math(completion: str, answer: str, expected: float) -> None:
    assert builtin.math()(completion=completion, answer=answer) == expected


def test_a_hostile_completion_is_bounded_in_size() -> None:
    start = time.monotonic()
    huge = "<think>1,2 A " * 200_000
    assert builtin.number()(huge, "99") == 0.0
    assert builtin.choice()(huge, "B") == 0.0
    assert builtin.format()(completion=huge) == 0.0
    assert time.monotonic() - start < 10
