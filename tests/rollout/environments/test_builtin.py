"""Environments load by name, their splits never meet, and the built-in ones pay for what they say."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.config import EpisodeLimits
from keel.errors import ConfigError
from keel.rollout.environments import builtin
from keel.rollout.environments.environment import Environment
from keel.rollout.environments.task_splits import split_of
from tests.support.scripted import END, ScriptedEngine, load, play

BUILTIN = sorted(builtin.ENVIRONMENTS)


# ---- loading


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_environments_load_and_are_environments(name):
    environment = load(name)
    assert isinstance(environment, Environment)
    assert environment.name == name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("larger_numbers", {}, 'environment.name = "larger_numbers" is not known; did you mean larger_number?'),
        ("qqq", {}, '"module:attribute"'),
        ("larger_number", {"digit": 3}, "environment.options.digit is not a setting; did you mean digits?"),
        ("larger_number", {"digits": 0}, "environment.options.digits = 0: input should be greater than or equal to 1"),
        ("count_letters", {"digits": 2}, "environment.options.digits is not a setting"),
        ("arithmetic", {"operations": ["divide"]}, 'environment.options.operations.0 = "divide"'),
        ("no_such_module:Thing", {}, "cannot be imported: No module named 'no_such_module'"),
        ("math:nothing", {}, "cannot be imported: module 'math' has no attribute 'nothing'"),
        ("math:pi", {}, "is a float, not a class or function"),
        (
            "tests.rollout.test_episode_runner:Custom",
            {"wrong": 1},
            "do not fit tests.rollout.test_episode_runner:Custom",
        ),
        ("collections:OrderedDict", {}, "gave a OrderedDict; an environment has a name, tasks(split)"),
        ("reasoning_gym:letter_countin", {}, "did you mean letter_counting?"),
        ("reasoning_gym:letter_counting", {"config": {"min_words": -1}}, "does not fit letter_counting"),
        ("verifiers:no_such_taskset", {}, 'environment.name = "verifiers:no_such_taskset" cannot be loaded'),
    ],
)
def test_what_cannot_be_loaded_says_what_and_why(name, options, message):
    if name.partition(":")[0] in ("reasoning_gym", "verifiers"):
        pytest.importorskip(name.partition(":")[0])
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(name, **options)


def test_a_missing_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        load("reasoning_gym:gcd")
    with pytest.raises(ConfigError, match="pip install verifiers"):
        load("verifiers:x")


def test_one_of_your_own_loads_by_import_path():
    assert load("tests.rollout.test_episode_runner:Custom").name == "custom"


# ---- tasks


@pytest.mark.parametrize("name", BUILTIN)
@given(first=st.integers(0, 1000), second=st.integers(0, 1000))
def test_no_task_of_any_evaluation_is_trained_on_whatever_the_seeds(name, first, second):
    train = load(name, seed=first, train_tasks=300).tasks("train")
    held_out = load(name, seed=second, eval_tasks=100).tasks("eval")
    assert train and held_out
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert len({task.id for task in train}) == len(train)


def test_the_same_numbers_in_another_order_are_the_same_question():
    pairs = [
        {
            tuple(sorted(map(int, re.findall(r"\d+", task.data["question"]))))
            for task in load("larger_number").tasks(split)
        }
        for split in ("train", "eval")
    ]
    assert pairs[0].isdisjoint(pairs[1])


@pytest.mark.parametrize("name", BUILTIN)
def test_tasks_are_a_function_of_the_seed(name):
    def ids(seed):
        return [task.id for task in load(name, seed=seed, train_tasks=50).tasks("train")]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_examples_are_never_tasks():
    environment = load("larger_number", digits=1)
    for split in ("train", "eval"):
        tasks = environment.tasks(split)
        examples = {message["content"] for message in tasks[0].data["examples"]}
        assert len(tasks[0].data["examples"]) == 4
        assert examples.isdisjoint(task.data["question"] for task in tasks)
    assert load("larger_number", shots=0).tasks("train")[0].data["examples"] == []


def test_a_question_belongs_to_one_split_for_ever():
    assert [split_of(f"question {number}") for number in range(8)].count("eval") <= 4
    assert split_of("larger_number/12-34") == split_of("larger_number/12-34")
    share = sum(split_of(str(number)) == "eval" for number in range(8000)) / 8000
    assert abs(share - 1 / 8) < 0.02


# ---- playing the built-in ones


@pytest.mark.parametrize("name", ["larger_number", "count_letters", "arithmetic"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_questions_pay_for_the_right_number_and_for_no_other(name, split):
    environment = load(name, train_tasks=20, eval_tasks=20)
    for task in environment.tasks(split):
        right = task.data["answer"]
        answers = {right: 1.0, f" {right}.": 1.0, f"{right} it is": 1.0, str(int(right) + 1): 0.0, "none": 0.0}
        for text, reward in answers.items():
            rollout = play(environment, task, ScriptedEngine(text + END))
            assert (rollout.reward, rollout.error) == (reward, None)
            assert rollout.metrics["answered"] == float(text != "none")


def test_the_answers_are_right():
    for task in load("larger_number").tasks("train")[:50]:
        assert int(task.data["answer"]) == max(map(int, re.findall(r"\d+", task.data["question"])))
    for task in load("arithmetic").tasks("train")[:50]:
        assert int(task.data["answer"]) == eval(re.search(r"\d+ [-+] \d+", task.data["question"])[0])
    for task in load("count_letters").tasks("train")[:50]:
        letter, word = re.findall(r'"(\w+)"', task.data["question"])
        assert int(task.data["answer"]) == word.count(letter)


def test_guessing_by_halves_finds_the_number_and_makes_one_sample():
    environment = load("guess_number", highest=100, guesses=8)
    for task in environment.tasks("train")[:10]:

        def halve(prompt):
            low, high = 1, 100
            for guess, hint in re.findall(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(Higher|Lower)", prompt):
                low, high = (int(guess) + 1, high) if hint == "Higher" else (low, int(guess) - 1)
            return f"{(low + high) // 2}{END}"

        rollout = play(environment, task, ScriptedEngine(answer=halve))
        assert rollout.metrics["found"] == 1
        assert rollout.reward == pytest.approx(1 - (rollout.turns - 1) / 8)
        assert len(rollout.samples) == 1


def test_never_guessing_it_pays_nothing_and_a_word_is_asked_again():
    environment = load("guess_number", guesses=3)
    engine = ScriptedEngine("well" + END, "0" + END, "101" + END)
    rollout = play(environment, environment.tasks("train")[0], engine)
    assert (rollout.reward, rollout.turns, rollout.error) == (0.0, 3, None)
    assert "Answer with one number." in engine.tokenizer.decode(engine.requests[1][0])
    assert "Higher." in engine.tokenizer.decode(engine.requests[2][0])


@pytest.mark.parametrize("limits", [EpisodeLimits(turns=2), EpisodeLimits(tokens=330)])
def test_a_game_that_reaches_a_limit_is_scored_as_it_stands(limits):
    environment = load("guess_number")
    rollout = play(environment, environment.tasks("train")[0], ScriptedEngine(*["0" + END] * 8), limits=limits)
    assert (rollout.reward, rollout.error) == (0.0, None)
    assert 0 < rollout.turns < 8
    assert len(rollout.samples) == 1


def test_the_calculator_answers_and_the_tool_result_is_not_trained():
    environment = load("calculator")
    task = environment.tasks("train")[0]
    expression = task.data["question"].removeprefix("What is ").removesuffix("?")
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>' + END
    engine = ScriptedEngine(call, f"It is {task.data['answer']}{END}")
    rollout = play(environment, task, engine)
    assert rollout.rewards == {"correct": 1.0, "called": 0.1}
    assert rollout.reward == pytest.approx(1.1)
    assert rollout.metrics == {"calls": 1.0, "failed_calls": 0.0}
    (sample,) = rollout.samples
    trained = [token for token, trains in zip(sample.token_ids, sample.trainable, strict=True) if trains]
    assert engine.tokenizer.decode(trained) == call + f"It is {task.data['answer']}{END}"
    assert f"<|im_start|>tool\n{task.data['answer']}<|im_end|>" in engine.tokenizer.decode(list(sample.token_ids))


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "calculator", "arguments": {"expression": "__import__(1)"}}',
        '{"name": "calculator", "arguments": {"expression": 3}}',
        '{"name": "calculator", "arguments": []}',
        '{"name": "calculator"}',
        '{"name": "other", "arguments": {"expression": "1 + 1"}}',
        '{"name": "calculator", "arguments": {"expression": "9 * 99999999999999999999"}}',
    ],
)
def test_bad_calls_are_told_so_and_pay_nothing(call):
    environment = load("calculator")
    engine = ScriptedEngine(f"<tool_call>{call}</tool_call>{END}", "no idea" + END)
    rollout = play(environment, environment.tasks("train")[0], engine)
    assert (rollout.reward, rollout.error) == (0.0, None)
    assert rollout.metrics == {"calls": 1.0, "failed_calls": 1.0}
    assert "error: give an expression" in engine.tokenizer.decode(engine.requests[1][0])


def test_calling_for_ever_is_ended():
    environment = load("calculator", calls=2)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>' + END
    rollout = play(environment, environment.tasks("train")[0], ScriptedEngine(*[call] * 9))
    assert (rollout.turns, rollout.rewards["correct"], rollout.rewards["called"]) == (3, 0.0, 0.1)
