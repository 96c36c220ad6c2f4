"""Built-in environments, small enough for a model with 135 million parameters to learn on a laptop.

Three ask one question, one is played over several turns, one has a tool, one asks for a format
(`keel.rollout.environments.reverse_text`). Rewards are exact and documented per class.
They also serve as examples to copy; `docs/environments.md` builds an environment from scratch.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from keel.inference.protocol import Message
from keel.rollout.environments.environment import Environment, EpisodeResult, Split, Task
from keel.rollout.environments.reverse_text import ReverseText
from keel.rollout.environments.task_splits import TaskSetOptions, sample_tasks
from keel.rollout.policy_client import EpisodeLimitReached, PolicyClient

_NUMBER = re.compile(r"-?\d+")


class QuestionOptions(TaskSetOptions):
    """Options of environments that ask one question."""

    shots: Annotated[int, Field(ge=0, le=8)] = 2
    """Solved examples shown before the question. They come from the train split and are not tasks themselves."""


class NumberOptions(QuestionOptions):
    digits: Annotated[int, Field(ge=1, le=9)] = 2
    """The maximum number of digits of a number."""


class QuestionEnvironment:
    """One question per episode: reward 1 if the first number of the completion is correct, else 0.

    Subclasses implement `sample_question`, which returns a question and its correct answer.
    """

    name = "question"
    system = ""
    Options: type[QuestionOptions] = QuestionOptions

    def __init__(self, **options: Any) -> None:
        self.options = self.Options(**options)

    def sample_question(self, rng: random.Random) -> tuple[str, str]:
        raise NotImplementedError

    def dedup_key(self, question: str) -> str:
        """Return the identity of a question; questions that reveal each other's answer share one."""
        return question

    def tasks(self, split: Split) -> Sequence[Task]:
        drawn = sample_tasks(
            self.sample_question, lambda pair: f"{self.name}/{self.dedup_key(pair[0])}", split, self.options
        )
        shots = sample_tasks(
            self.sample_question,
            lambda pair: f"{self.name}/{self.dedup_key(pair[0])}",
            "train",
            TaskSetOptions(seed=-1 - self.options.seed, train_tasks=self.options.shots or 1),
        )[: self.options.shots]
        examples = [
            message
            for question, answer in shots
            for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        ]
        shot_keys = {self.dedup_key(question) for question, _ in shots}
        return [
            Task(f"{self.name}/{question}", {"question": question, "answer": answer, "examples": examples})
            for question, answer in drawn
            if self.dedup_key(question) not in shot_keys
        ]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        system = [{"role": "system", "content": self.system}]
        reply = await client.chat([*system, *task.data["examples"], {"role": "user", "content": task.data["question"]}])
        number = _NUMBER.search(reply.text)
        correct = number is not None and number[0] == task.data["answer"]
        return EpisodeResult(float(correct), metrics={"answered": float(number is not None)})


class LargerNumber(QuestionEnvironment):
    """Name the larger of two different numbers."""

    name = "larger_number"
    system = "Answer with one number."

    Options = NumberOptions
    options: NumberOptions

    def sample_question(self, rng: random.Random) -> tuple[str, str]:
        first, second = rng.sample(range(10**self.options.digits), 2)
        return f"Which is larger, {first} or {second}?", str(max(first, second))

    def dedup_key(self, question: str) -> str:
        # the same pair in the other order is not a new question
        return "-".join(sorted(_NUMBER.findall(question)))


class ArithmeticOptions(NumberOptions):
    operations: Annotated[tuple[Literal["add", "subtract"], ...], Field(min_length=1)] = ("add", "subtract")


class Arithmetic(QuestionEnvironment):
    """Compute a sum or a difference; results are never negative."""

    name = "arithmetic"
    system = "Answer with one number."

    Options = ArithmeticOptions
    options: ArithmeticOptions

    def sample_question(self, rng: random.Random) -> tuple[str, str]:
        first, second = (rng.randrange(10**self.options.digits) for _ in range(2))
        if rng.choice(self.options.operations) == "add":
            return f"What is {first} + {second}?", str(first + second)
        return f"What is {max(first, second)} - {min(first, second)}?", str(abs(first - second))

    def dedup_key(self, question: str) -> str:
        return "+".join(sorted(_NUMBER.findall(question))) if "+" in question else question


_WORDS = (
    "banana apple cherry letter pepper coffee button summer winter yellow purple orange window garden kitten puppy"
    " rabbit tomato potato cookie bottle ribbon hammer ladder mirror pillow blanket carpet butter cheese sugar"
    " pencil paper school teacher student lesson number planet rocket engine wheel bridge tunnel forest river"
    " mountain valley ocean island desert castle village market basket feather leather balloon raccoon giraffe"
    " elephant tiger zebra monkey donkey camel lizard turtle parrot pigeon sparrow beetle spider insect flower"
    " cactus bamboo willow maple cedar guitar violin trumpet piano drummer singer dancer painter baker farmer"
)


class CountLetters(QuestionEnvironment):
    """Count the occurrences of a letter in a word."""

    name = "count_letters"
    system = "Answer with one number."

    def sample_question(self, rng: random.Random) -> tuple[str, str]:
        word = rng.choice(_WORDS.split())
        # mostly letters that occur in the word: otherwise always answering 0 would score well
        letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        return f'How many times does the letter "{letter}" appear in "{word}"?', str(word.count(letter))


class GuessOptions(TaskSetOptions):
    highest: Annotated[int, Field(ge=32)] = 100
    """The largest possible number; the smallest is 1. With fewer than 32 numbers a split could be empty."""
    guesses: Annotated[int, Field(ge=1)] = 8


class GuessNumber:
    """Guess a number over several turns, with the hint "higher" or "lower" after each wrong guess.

    The reward is 1 if the first guess is correct, 1 / guesses less for every further guess, and 0 if none is correct.
    """

    name = "guess_number"

    def __init__(self, **options: Any) -> None:
        self.options = GuessOptions(**options)

    def tasks(self, split: Split) -> Sequence[Task]:
        highest = self.options.highest
        numbers = sample_tasks(
            lambda rng: rng.randint(1, highest), lambda n: f"{self.name}/{n} of {highest}", split, self.options
        )
        return [Task(f"{self.name}/{n} of {highest}", {"number": n, "highest": highest}) for n in numbers]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        number, guesses = task.data["number"], self.options.guesses
        instruction = (
            f"I think of a number between 1 and {task.data['highest']}. Guess it with one number; I will say higher or"
            " lower. What is your guess?"
        )
        messages: list[Message] = [{"role": "user", "content": instruction}]
        for turn in range(guesses):
            try:
                reply = await client.chat(messages)
            except EpisodeLimitReached:
                return EpisodeResult(0.0, metrics={"guesses": turn, "found": 0})
            guess = _NUMBER.search(reply.text)
            if guess and int(guess[0]) == number:
                return EpisodeResult(1 - turn / guesses, metrics={"guesses": turn + 1, "found": 1})
            hint = "Answer with one number." if not guess else "Higher." if int(guess[0]) < number else "Lower."
            messages += [reply.message, {"role": "user", "content": f"{hint} What is your guess?"}]
        return EpisodeResult(0.0, metrics={"guesses": guesses, "found": 0})


class CalculatorOptions(TaskSetOptions):
    digits: Annotated[int, Field(ge=1, le=9)] = 3
    calls: Annotated[int, Field(ge=1)] = 3
    """The maximum number of turns with tool calls before the final answer."""


class Calculator:
    """Compute with a tool: `<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>`.

    Reward components: `correct` is 1 if the last number of the final completion is correct, `called` is 0.1 for at
    least one successful tool call. The tool is described in the system message, since not every chat template supports
    tools.
    """

    name = "calculator"
    system = (
        "You have a calculator. To use it, answer with exactly\n"
        '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call>\n'
        "and wait for the result. Then answer with one number."
    )

    def __init__(self, **options: Any) -> None:
        self.options = CalculatorOptions(**options)

    def _sample_question(self, rng: random.Random) -> tuple[int, str, int]:
        first, second = (rng.randrange(10**self.options.digits) for _ in range(2))
        return first, rng.choice("+-*"), second

    def tasks(self, split: Split) -> Sequence[Task]:
        def task_id(operation: tuple[int, str, int]) -> str:
            return f"{self.name}/{_format_operation(operation)}"

        return [
            Task(task_id(each), {"question": f"What is {_format_operation(each)}?", "answer": _compute(*each)})
            for each in sample_tasks(self._sample_question, task_id, split, self.options)
        ]

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        messages: list[Message] = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": task.data["question"]},
        ]
        num_succeeded = num_calls = 0
        text = ""
        for _ in range(self.options.calls + 1):
            try:
                reply = await client.chat(messages)
            except EpisodeLimitReached:
                text = ""
                break
            text = reply.text
            calls = reply.message.get("tool_calls", [])
            if not calls:
                break
            messages.append(reply.message)
            for call in calls:
                result = _run_calculator(call["function"])
                num_calls, num_succeeded = num_calls + 1, num_succeeded + (result is not None)
                content = "error: give an expression of two numbers, as 2 * 3" if result is None else str(result)
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": self.name, "content": content})
        numbers = _NUMBER.findall(text.replace(",", ""))
        rewards = {
            "correct": float(bool(numbers) and int(numbers[-1]) == task.data["answer"]),
            "called": 0.1 * (num_succeeded > 0),
        }
        metrics = {"calls": num_calls, "failed_calls": num_calls - num_succeeded}
        return EpisodeResult(sum(rewards.values()), rewards, metrics)


def _run_calculator(function: Message) -> int | None:
    """Return the calculator's result, or None if the call is malformed or for another tool."""
    try:
        arguments = json.loads(function["arguments"])
        match = re.fullmatch(r"\s*(-?\d{1,18})\s*([-+*])\s*(-?\d{1,18})\s*", arguments["expression"])
    except (ValueError, KeyError, TypeError):
        return None
    if function["name"] != Calculator.name or match is None:
        return None
    return _compute(int(match[1]), match[2], int(match[3]))


def _format_operation(operation: tuple[int, str, int]) -> str:
    return " ".join(map(str, operation))


def _compute(first: int, operation: str, second: int) -> int:
    return {"+": first + second, "-": first - second, "*": first * second}[operation]


ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    kind.name: kind for kind in (LargerNumber, CountLetters, Arithmetic, GuessNumber, Calculator, ReverseText)
}
