"""Built-in environments have disjoint splits, deterministic tasks and the documented rewards."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.config import EpisodeLimits
from keel.rollout.environments import builtin
from keel.rollout.environments.environment import Environment
from keel.rollout.environments.task_splits import split_of
from tests.support.scripted_engine import END, ScriptedEngine, load, play

BUILTIN = sorted(builtin.ENVIRONMENTS)


# ---- loading


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_environments_load_by_name(name):
    environment = load(name)
    assert isinstance(environment, Environment)
    assert environment.name == name


# ---- tasks


@pytest.mark.parametrize("name", BUILTIN)
@given(first=st.integers(0, 1000), second=st.integers(0, 1000))
def test_eval_tasks_are_disjoint_from_train_tasks_for_any_seeds(name, first, second):
    train = load(name, seed=first, train_tasks=300).tasks("train")
    held_out = load(name, seed=second, eval_tasks=100).tasks("eval")
    assert train and held_out
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert len({task.id for task in train}) == len(train)


def test_swapped_numbers_count_as_the_same_question():
    pairs = [
        {
            tuple(sorted(map(int, re.findall(r"\d+", task.data["question"]))))
            for task in load("larger_number").tasks(split)
        }
        for split in ("train", "eval")
    ]
    assert pairs[0].isdisjoint(pairs[1])


@pytest.mark.parametrize("name", BUILTIN)
def test_tasks_depend_only_on_the_seed(name):
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


def test_the_split_of_a_question_is_fixed_and_one_in_eight_is_eval():
    assert [split_of(f"question {number}") for number in range(8)].count("eval") <= 4
    assert split_of("larger_number/12-34") == split_of("larger_number/12-34")
    share = sum(split_of(str(number)) == "eval" for number in range(8000)) / 8000
    assert abs(share - 1 / 8) < 0.02


# ---- episodes


@pytest.mark.parametrize("name", ["larger_number", "count_letters", "arithmetic"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_only_the_correct_number_is_rewarded(name, split):
    environment = load(name, train_tasks=20, eval_tasks=20)
    for task in environment.tasks(split):
        correct = task.data["answer"]
        completions = {
            correct: 1.0,
            f" {correct}.": 1.0,
            f"{correct} it is": 1.0,
            str(int(correct) + 1): 0.0,
            "none": 0.0,
        }
        for text, reward in completions.items():
            rollout = play(environment, task, ScriptedEngine(text + END))
            assert (rollout.reward, rollout.error) == (reward, None)
            assert rollout.metrics["answered"] == float(text != "none")


def test_the_reference_answers_are_correct():
    for task in load("larger_number").tasks("train")[:50]:
        assert int(task.data["answer"]) == max(map(int, re.findall(r"\d+", task.data["question"])))
    for task in load("arithmetic").tasks("train")[:50]:
        assert int(task.data["answer"]) == eval(re.search(r"\d+ [-+] \d+", task.data["question"])[0])
    for task in load("count_letters").tasks("train")[:50]:
        letter, word = re.findall(r'"(\w+)"', task.data["question"])
        assert int(task.data["answer"]) == word.count(letter)


def test_binary_search_finds_the_number_in_one_sample():
    environment = load("guess_number", highest=100, guesses=8)
    for task in environment.tasks("train")[:10]:

        def bisect(prompt):
            low, high = 1, 100
            for guess, hint in re.findall(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(Higher|Lower)", prompt):
                low, high = (int(guess) + 1, high) if hint == "Higher" else (low, int(guess) - 1)
            return f"{(low + high) // 2}{END}"

        rollout = play(environment, task, ScriptedEngine(answer=bisect))
        assert rollout.metrics["found"] == 1
        assert rollout.reward == pytest.approx(1 - (rollout.turns - 1) / 8)
        assert len(rollout.samples) == 1


def test_wrong_guesses_have_reward_0_and_text_without_a_number_gets_a_hint():
    environment = load("guess_number", guesses=3)
    engine = ScriptedEngine("well" + END, "0" + END, "101" + END)
    rollout = play(environment, environment.tasks("train")[0], engine)
    assert (rollout.reward, rollout.turns, rollout.error) == (0.0, 3, None)
    assert "Answer with one number." in engine.tokenizer.decode(engine.requests[1][0])
    assert "Higher." in engine.tokenizer.decode(engine.requests[2][0])


@pytest.mark.parametrize("limits", [EpisodeLimits(max_turns=2), EpisodeLimits(max_sequence_tokens=330)])
def test_a_game_that_reaches_a_limit_has_reward_0_and_no_error(limits):
    environment = load("guess_number")
    rollout = play(environment, environment.tasks("train")[0], ScriptedEngine(*["0" + END] * 8), limits=limits)
    assert (rollout.reward, rollout.error) == (0.0, None)
    assert 0 < rollout.turns < 8
    assert len(rollout.samples) == 1


def test_the_calculator_returns_results_that_are_not_trained_on():
    environment = load("calculator")
    task = environment.tasks("train")[0]
    expression = task.data["question"].removeprefix("What is ").removesuffix("?")
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>' + END
    engine = ScriptedEngine(call, f"It is {task.data['answer']}{END}")
    rollout = play(environment, task, engine)
    assert rollout.reward_components == {"correct": 1.0, "called": 0.1}
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
def test_malformed_calls_get_an_error_message_and_no_reward(call):
    environment = load("calculator")
    engine = ScriptedEngine(f"<tool_call>{call}</tool_call>{END}", "no idea" + END)
    rollout = play(environment, environment.tasks("train")[0], engine)
    assert (rollout.reward, rollout.error) == (0.0, None)
    assert rollout.metrics == {"calls": 1.0, "failed_calls": 1.0}
    assert "error: give an expression" in engine.tokenizer.decode(engine.requests[1][0])


def test_the_number_of_calls_is_limited():
    environment = load("calculator", calls=2)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>' + END
    rollout = play(environment, environment.tasks("train")[0], ScriptedEngine(*[call] * 9))
    assert (rollout.turns, rollout.reward_components["correct"], rollout.reward_components["called"]) == (3, 0.0, 0.1)
