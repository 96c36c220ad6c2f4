"""reasoning-gym tasks are generated offline, split by question and scored by the library's own scorers."""

import pytest

from keel.config import EpisodeLimits, Sampling
from tests.support.scripted_engine import END, ScriptedEngine, load, play

SCORED_TASKS = ["letter_counting", "gcd", "count_primes", "leg_counting", "word_sorting", "spell_backward", "chain_sum"]


def sampled_tasks():
    """Return a third of all tasks, and one whose scorer raises on text it cannot parse; all of them take a minute."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return [pytest.param("", marks=pytest.mark.skip(reason="reasoning-gym is not installed"))]
    # composite needs options, and the other three take seconds to generate one puzzle
    names = sorted(set(DATASETS) - {"composite", "knight_swap", "futoshiki", "rubiks_cube"})
    return [name for index, name in enumerate(names) if index % 3 == 0 or name == "prime_factorization"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", sampled_tasks())
def test_tasks_are_generated_offline_and_any_completion_is_scored(task):
    environment = load(f"reasoning_gym:{task}", train_tasks=1)
    (question,) = environment.tasks("train")
    reference = question.data["entry"]["answer"]
    for text in ("qqq", "", "<answer></answer>", "0", str(reference)):
        engine, limits = ScriptedEngine(text + END), EpisodeLimits(max_sequence_tokens=100_000)
        rollout = play(environment, question, engine, limits=limits, sampling=Sampling(max_tokens=10_000))
        assert rollout.error is None
        assert rollout.reward == rollout.metrics["score"]
    # a few tasks have no reference answer
    assert reference is None or rollout.reward == 1.0


@pytest.mark.parametrize("task", SCORED_TASKS)
def test_a_task_is_scored_by_the_librarys_scorer(task):
    pytest.importorskip("reasoning_gym")
    environment = load(f"reasoning_gym:{task}", train_tasks=5, eval_tasks=5)
    for split in ("train", "eval"):
        for question in environment.tasks(split):
            reference = question.data["entry"]["answer"]
            for text in (reference, f"I think\n<answer>{reference}</answer>"):
                rollout = play(environment, question, ScriptedEngine(text + END))
                assert (rollout.reward, rollout.metrics["correct"]) == (1.0, 1.0)
            assert play(environment, question, ScriptedEngine("qqq" + END)).metrics["correct"] == 0.0


def test_splits_are_disjoint_and_stable():
    pytest.importorskip("reasoning_gym")
    environment = load("reasoning_gym:gcd", train_tasks=60, eval_tasks=20)
    train, held_out = ([task.data["question"] for task in environment.tasks(split)] for split in ("train", "eval"))
    other = load("reasoning_gym:gcd", train_tasks=60, seed=1)
    assert len(set(train)) == 60
    assert len(set(held_out)) == 20
    assert set(held_out).isdisjoint(train)
    assert set(held_out).isdisjoint(task.data["question"] for task in other.tasks("train"))
    assert [task.id for task in environment.tasks("train")] == [task.id for task in environment.tasks("train")]


def test_without_partial_credit_only_full_marks_count():
    pytest.importorskip("reasoning_gym")
    environment = load("reasoning_gym:chain_sum", partial_credit=False, train_tasks=1)
    (task,) = environment.tasks("train")
    partly_correct = f"it is {task.data['entry']['answer']}, I would say"
    rollout = play(environment, task, ScriptedEngine(partly_correct + END))
    assert 0 < rollout.metrics["score"] < 1
    assert rollout.reward == 0.0
