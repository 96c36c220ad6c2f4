"""Built-in rewards: each is a factory that takes options and returns `reward(completion, answer, **columns)`.

They run in worker processes (`workers.py`), so a pathological completion cannot stall a run. A completion is untrusted
text: nothing is evaluated or executed here, and sizes are bounded before parsing.
"""

import json
import re
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200_000
"""Longest completion that is parsed; a longer one scores 0."""
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+")

Reward = Callable[..., float | None]


def exact(*, strip: bool = True, ignore_case: bool = False) -> Reward:
    """1 when the completion equals the answer."""

    def reward(completion: str, answer: Any, **_: Any) -> float:
        text, expected = completion, str(answer)
        if strip:
            text, expected = text.strip(), expected.strip()
        if ignore_case:
            text, expected = text.casefold(), expected.casefold()
        return float(text == expected)

    return reward


def regex(*, pattern: str, group: int | str = 0, full: bool = False, ignore_case: bool = False) -> Reward:
    """1 when the pattern is found and, if there is an answer, the matched group equals it."""
    compiled = re.compile(pattern, (re.IGNORECASE if ignore_case else 0) | re.DOTALL)

    def reward(completion: str, answer: Any = None, **_: Any) -> float:
        text = completion[:MAX_CHARACTERS]
        match = compiled.fullmatch(text) if full else compiled.search(text)
        if match is None:
            return 0.0
        return 1.0 if answer is None else float((match[group] or "").strip() == str(answer).strip())

    return reward


def number(*, which: str = "last", tolerance: float = 0.0, relative: bool = False) -> Reward:
    """1 when the first or last number of the completion is the answer."""
    if which not in ("first", "last"):
        raise ValueError(f'which = "{which}" must be "first" or "last"')

    def reward(completion: str, answer: Any, **_: Any) -> float:
        numbers = NUMBER.findall(completion[:MAX_CHARACTERS])
        expected = NUMBER.search(str(answer))
        if expected is None:
            raise ValueError(f"the answer {str(answer)[:80]!r} holds no number")
        if not numbers:
            return 0.0
        number, value = (float(text.replace(",", "")) for text in (numbers[0 if which == "first" else -1], expected[0]))
        return float(abs(number - value) <= tolerance * (abs(value) if relative else 1.0))

    return reward


def choice(*, letters: str = "ABCD") -> Reward:
    """1 when the completion chooses the letter of the answer: `B`, `(b)`, `Answer: B`, or the last boxed one."""
    letter = f"[{re.escape(letters)}]"
    boxed = re.compile(rf"\\boxed\{{\s*\(?({letter})\)?\s*\}}", re.IGNORECASE)
    stated = re.compile(rf"answer\s*(?:is|:)?\s*\**\(?({letter})\)?(?![A-Za-z])", re.IGNORECASE)
    alone = re.compile(rf"(?<![A-Za-z])\(?({letter})\)?(?![A-Za-z])")

    def reward(completion: str, answer: Any, **_: Any) -> float:
        expected = str(answer).strip().strip("()").upper()
        if expected not in set(letters.upper()):
            raise ValueError(f"the answer {str(answer)[:40]!r} is not one of the letters {letters}")
        text = completion[:MAX_CHARACTERS]
        for pattern in (boxed, stated, alone):
            letters_found = pattern.findall(text)
            if letters_found:
                return float(letters_found[-1].upper() == expected)
        return 0.0

    return reward


def json_schema(*, schema: dict[str, Any] | None = None, column: str | None = None) -> Reward:
    """1 when the completion is JSON that satisfies a schema, given here or in a column of the data set."""
    if (schema is None) == (column is None):
        raise ValueError("give either schema or column")
    import jsonschema  # type: ignore[import-untyped]

    def reward(completion: str, **columns: Any) -> float:
        expected = schema if schema is not None else columns[str(column)]
        expected = json.loads(expected) if isinstance(expected, str) else expected
        try:
            value = json.loads(_without_fence(completion[:MAX_CHARACTERS]))
            jsonschema.validate(value, expected)
        except (ValueError, RecursionError, jsonschema.ValidationError):
            return 0.0
        return 1.0

    return reward


def _without_fence(text: str) -> str:
    match = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", text, re.DOTALL)
    return match[1] if match else text


def format(*, tags: tuple[str, ...] = ("think", "answer"), only: bool = True) -> Reward:
    """1 when the completion is the given tags in order, each once and closed; `only`: with nothing outside them."""
    names = list(tags)
    if not names or not all(re.fullmatch(r"[A-Za-z_][\w-]*", name) for name in names):
        raise ValueError(f"tags = {tags} must be names such as think and answer")

    def reward(completion: str, **_: Any) -> float:
        text, position = completion[:MAX_CHARACTERS], 0
        for name in names:
            start, end = text.find(f"<{name}>", position), text.find(f"</{name}>", position)
            if start < 0 or end < start or text.count(f"<{name}>") != 1 or text.count(f"</{name}>") != 1:
                return 0.0
            if only and text[position:start].strip():
                return 0.0
            position = end + len(name) + 3
        return float(not (only and text[position:].strip()))

    return reward


def length(*, max_tokens: int, buffer: int, penalty: float = 1.0) -> Reward:
    """DAPO's soft overlong penalty: 0 up to max_tokens - buffer, then linear to -penalty at max_tokens."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer = {buffer} must be between 1 and max_tokens = {max_tokens}")

    def reward(completion_tokens: int, **_: Any) -> float:
        return -penalty * min(max(completion_tokens - (max_tokens - buffer), 0) / buffer, 1.0)

    return reward


def math() -> Reward:
    """1 when math-verify finds the completion's final expression equal to the answer."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    def reward(completion: str, answer: Any, **_: Any) -> float:
        # math-verify's own time limit is a signal that works only in a main thread; the worker's limit is a kill
        expected = parse(_in_math(str(answer)), parsing_timeout=None)
        if not expected:
            raise ValueError(f"the answer {str(answer)[:80]!r} cannot be parsed as mathematics")
        parsed = parse(completion[-MAX_CHARACTERS:], parsing_timeout=None)
        return float(verify(expected, parsed, timeout_seconds=None))

    return reward


def _in_math(answer: str) -> str:
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


BUILTIN = dict.fromkeys(("exact", "regex", "number", "choice", "json_schema", "format", "length", "math"), __name__) | {
    "code": "keel.rollout.environments.rewards.code",
    "reward_model": "keel.rollout.model_rewards.reward_model",
    "judge": "keel.rollout.model_rewards.judge",
}
"""The module of each reward that settings accept by its name alone: a factory of that name, or the class `Judge`."""
