"""verifiers tasksets are scored by their own rewards, or rejected if they cannot be played in this process."""

import pytest

from keel.errors import ConfigError
from tests.support.scripted_engine import END, ScriptedEngine, load, play

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
NEEDS_MORE = """
class NeedsMore(Sums):
    {requirement}

class MoreTasks(vf.Taskset[NeedsMore]):
    def load(self):
        yield NeedsMore(Data(prompt="?", answer="!"), self.config.task)

__all__ = ["MoreTasks"]
"""


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """Return a function that writes a taskset module and returns the name of its environment."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return f"verifiers:{name}"

    return write


def test_a_taskset_is_scored_by_its_own_rewards(taskset):
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
    ("name", "requirement", "error_message"),
    [
        ("container", "NEEDS_CONTAINER = True", "need a container"),
        ("setup", "async def setup(self, trace, runtime): ...", "have a setup step"),
        ("tools", "@classmethod\n    def toolsets(cls, config): return [object()]", "tool servers"),
        ("runtime", "@vf.reward\n    async def other(self, runtime): return 0.0", "other needs a runtime"),
    ],
)
def test_a_taskset_with_unsupported_requirements_is_rejected(taskset, name, requirement, error_message):
    path = taskset(f"keel_needs_{name}", TASKSET.rpartition("__all__")[0] + NEEDS_MORE.format(requirement=requirement))
    with pytest.raises(ConfigError, match=error_message):
        list(load(path).tasks("train"))
