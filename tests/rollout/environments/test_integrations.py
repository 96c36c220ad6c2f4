"""Environments of other libraries are scored by their own rules, or refused."""

import pytest

from keel.config import EpisodeLimits, Sampling
from keel.errors import ConfigError
from tests.support.scripted_engine import END, ScriptedEngine, load, play

# ---- reasoning-gym

SOME = ["letter_counting", "gcd", "count_primes", "leg_counting", "word_sorting", "spell_backward", "chain_sum"]


def some_tasks():
    """A third of them, and one whose scorer raises at what it cannot read: all of them take a minute."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return [pytest.param("", marks=pytest.mark.skip(reason="reasoning-gym is not installed"))]
    # composite is a mixture that the user has to name, and three search for seconds to make one puzzle
    names = sorted(set(DATASETS) - {"composite", "knight_swap", "futoshiki", "rubiks_cube"})
    return [name for number, name in enumerate(names) if number % 3 == 0 or name == "prime_factorization"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", some_tasks())
def test_reasoning_gym_tasks_are_made_offline_and_survive_any_answer(task):
    environment = load(f"reasoning_gym:{task}", train_tasks=1)
    (asked,) = environment.tasks("train")
    right = asked.data["entry"]["answer"]
    for text in ("qqq", "", "<answer></answer>", "0", str(right)):
        engine, roomy = ScriptedEngine(text + END), EpisodeLimits(max_sequence_tokens=100_000)
        rollout = play(environment, asked, engine, limits=roomy, sampling=Sampling(max_tokens=10_000))
        assert rollout.error is None
        assert rollout.reward == rollout.metrics["score"]
    # a few have no model answer
    assert right is None or rollout.reward == 1.0


@pytest.mark.parametrize("task", SOME)
def test_a_reasoning_gym_task_is_scored_by_its_own_scorer(task):
    pytest.importorskip("reasoning_gym")
    environment = load(f"reasoning_gym:{task}", train_tasks=5, eval_tasks=5)
    for split in ("train", "eval"):
        for asked in environment.tasks(split):
            right = asked.data["entry"]["answer"]
            for text in (right, f"I think\n<answer>{right}</answer>"):
                rollout = play(environment, asked, ScriptedEngine(text + END))
                assert (rollout.reward, rollout.metrics["correct"]) == (1.0, 1.0)
            assert play(environment, asked, ScriptedEngine("qqq" + END)).metrics["correct"] == 0.0


def test_reasoning_gym_splits_never_meet_and_are_stable():
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
    almost = f"it is {task.data['entry']['answer']}, I would say"
    rollout = play(environment, task, ScriptedEngine(almost + END))
    assert 0 < rollout.metrics["score"] < 1
    assert rollout.reward == 0.0


# ---- verifiers

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sums(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class SumTasks(vf.Taskset[Sums]):
    def load(self):
        for number in range(64):
            data = Data(prompt=f"{number} + 1?", system_prompt="Be short.", answer=str(number + 1))
            yield Sums(data, self.config.task)

__all__ = ["SumTasks"]
"""
NEEDS = """
class NeedsMore(Sums):
    {what}

class MoreTasks(vf.Taskset[NeedsMore]):
    def load(self):
        yield NeedsMore(Data(prompt="?", answer="!"), self.config.task)

__all__ = ["MoreTasks"]
"""


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """Writes a taskset module and gives its name."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return f"verifiers:{name}"

    return write


def test_a_verifiers_taskset_is_played_and_scored_by_its_own_rewards(taskset):
    environment = load(taskset("keel_sums", TASKSET))
    splits = {split: list(environment.tasks(split)) for split in ("train", "eval")}
    assert sum(map(len, splits.values())) == 64
    assert all(splits.values())
    task = splits["train"][0]
    engine = ScriptedEngine(task.data["task"].data.answer + END, "no" + END)
    rollout = play(environment, task, engine)
    assert (rollout.reward, rollout.reward_components, rollout.error) == (2.0, {"right": 2.0}, None)
    assert "<|im_start|>system\nBe short.<|im_end|>" in engine.tokenizer.decode(engine.requests[0][0])
    wrong = play(environment, task, engine)
    assert (wrong.reward, wrong.metrics) == (0.0, {"length": 2.0})
    limited = load("verifiers:keel_sums", train_tasks=3)
    assert len(list(limited.tasks("train"))) == 3


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("container", "NEEDS_CONTAINER = True", "need a container"),
        ("setup", "async def setup(self, trace, runtime): ...", "have a setup step"),
        ("tools", "@classmethod\n    def toolsets(cls, config): return [object()]", "tool servers"),
        ("runtime", "@vf.reward\n    async def other(self, runtime): return 0.0", "other needs a runtime"),
    ],
)
def test_a_taskset_of_which_something_would_be_left_out_is_refused(taskset, name, what, why):
    path = taskset(f"keel_needs_{name}", TASKSET.rpartition("__all__")[0] + NEEDS.format(what=what))
    with pytest.raises(ConfigError, match=why):
        list(load(path).tasks("train"))
