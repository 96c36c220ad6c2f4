"""Rewards over the whole group: one call for all completions, in scoring, evaluation, `keel reward` and a real run."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.config.rollout import EnvironmentSettings, EpisodeLimits, Sampling
from keel.errors import ConfigError, FatalEnvironmentError
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.environment import EpisodeResult, Task
from keel.rollout.environments.group_rewards import awaits_group, score_group
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rollout import Rollout
from keel.run.evaluation.evaluate import evaluate
from keel.run.ledger import Ledger
from tests.support.scripted_engine import END, ScriptedEngine

REWARDS = """
import asyncio, json

def rank(prompts, completions, answer, level, **columns):
    assert len({len(prompts), len(completions), len(answer), len(level)}) == 1
    order = sorted(set(map(len, completions)))
    return [order.index(len(text)) / max(len(order) - 1, 1) for text in completions]

async def group_size(completions, **columns):
    await asyncio.sleep(0)
    return [{"reward": float(len(completions)), "metrics": {"characters": len(text)}} for text in completions]

def length(completion):
    return float(len(completion))

def abstains_from_short(completions, **columns):
    return [None if len(text) < 3 else 1.0 for text in completions]

def too_few(completions, **columns):
    return [1.0]

def broken(completions, **columns):
    raise KeyError("no such key")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "group_functions.py").write_text(REWARDS)
    rows = [{"prompt": f"Question {n}?", "answer": str(n), "level": n % 3} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def environment(*rewards: Any) -> DatasetEnvironment:
    expanded = [f"group_functions:{reward}" if isinstance(reward, str) else reward for reward in rewards]
    table = {"name": "x", "dataset": "train.jsonl", "rewards": expanded}
    return DatasetEnvironment(EnvironmentSettings.model_validate(table))


def unscored(*completions: str, components: dict[str, float] | None = None) -> list[Rollout]:
    return [
        Rollout(
            environment="x",
            task_id="t",
            group="g",
            reward_components=components or {},
            group_inputs={"completion": text, "completion_tokens": len(text)},
        )
        for text in completions
    ]


def scored(loaded: DatasetEnvironment, rollouts: Sequence[Rollout]) -> list[Rollout]:
    async def call() -> list[Rollout]:
        try:
            return await score_group(loaded, loaded.tasks("train")[0], rollouts, 30.0)
        finally:
            await loaded.close()

    return asyncio.run(call())


@pytest.mark.process
def test_a_function_of_lists_receives_the_whole_group_and_its_metrics_are_recorded() -> None:
    rollouts = scored(environment("rank", "group_size"), unscored("a", "bbb", "cc"))
    assert [rollout.reward for rollout in rollouts] == [0.0 + 3, 1.0 + 3, 0.5 + 3]
    assert rollouts[1].reward_components == {"rank": 1.0, "group_size": 3.0}
    assert [rollout.metrics["group_size/characters"] for rollout in rollouts] == [1.0, 3.0, 2.0]
    assert not awaits_group(rollouts)


@pytest.mark.process
def test_failed_rollouts_are_absent_and_unchanged() -> None:
    rollouts = unscored("a", "b", "c")
    rollouts[1] = replace(rollouts[1], error="broken", error_kind="engine")
    final = scored(environment("group_size"), rollouts)
    assert [rollout.reward for rollout in final] == [2.0, None, 2.0]
    assert final[1] == rollouts[1]


@pytest.mark.process
def test_scoring_again_replaces_the_rewards_of_the_group_and_keeps_those_of_the_completion() -> None:
    loaded = environment("length", "abstains_from_short")
    first = scored(loaded, unscored("aaa", "bbb", components={"length": 3.0}))
    assert [rollout.reward for rollout in first] == [4.0, 4.0]
    changed = replace(first[0], group_inputs={"completion": "a", "completion_tokens": 1})
    again = scored(loaded, [changed, first[1]])
    assert [rollout.reward_components for rollout in again] == [
        {"length": 3.0},
        {"length": 3.0, "abstains_from_short": 1.0},
    ]
    assert [rollout.reward for rollout in again] == [3.0, 4.0]


@pytest.mark.process
def test_a_completion_without_any_reward_fails_alone() -> None:
    final = scored(environment("abstains_from_short"), unscored("aaa", "b"))
    assert [rollout.reward for rollout in final] == [1.0, None]
    assert final[1].error_kind == "exception"
    assert "every reward function abstained" in (final[1].error or "")


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "message"),
    [("broken", "KeyError: 'no such key'"), ("too_few", "1 rewards were returned for 2 completions")],
)
def test_a_function_that_fails_fails_every_rollout_of_the_group(name: str, message: str) -> None:
    final = scored(environment(name), unscored("a", "b"))
    assert all(rollout.error_kind == "exception" and message in (rollout.error or "") for rollout in final)


def test_an_overrun_is_a_timeout_and_a_fatal_error_propagates() -> None:
    class Slow:
        name = "slow"
        error: Exception | None = None

        def tasks(self, split: str) -> list[Task]:
            return []

        async def episode(self, task: Task, client: Any) -> EpisodeResult:
            raise NotImplementedError

        async def score_group(self, task: Task, results: Sequence[EpisodeResult]) -> Any:
            if self.error is not None:
                raise self.error
            await asyncio.sleep(60)

    slow = Slow()
    (rollout,) = asyncio.run(score_group(slow, Task("t", {}), unscored("a"), 0.05))
    assert (rollout.error_kind, rollout.error) == ("timeout", "limits.timeout = 0.05 ran out in score_group")
    slow.error = FatalEnvironmentError("stop")
    with pytest.raises(FatalEnvironmentError, match="stop"):
        asyncio.run(score_group(slow, Task("t", {}), unscored("a"), 1.0))


def test_scope_completion_keeps_lists_of_one_and_scope_group_needs_lists() -> None:
    with pytest.raises(ConfigError, match='reward "group_functions:length": scope = "group" needs a function of lists'):
        environment({"name": "group_functions:length", "scope": "group"})
    loaded = environment({"name": "group_functions:group_size", "scope": "completion"})
    assert not loaded._scorer.needs_group


@pytest.mark.process
def test_evaluation_scores_all_samples_of_a_task_together() -> None:
    loaded = environment("group_size")
    engine = ScriptedEngine(answer=lambda prompt: "four" + END)

    async def call() -> Any:
        try:
            return await evaluate(
                engine,
                Renderer(engine.tokenizer),
                loaded,
                num_tasks=2,
                samples_per_task=3,
                sampling=Sampling(),
                limits=EpisodeLimits(),
                seed=0,
            )
        finally:
            await loaded.close()

    result = asyncio.run(call())
    assert result.reward == 3.0
    assert result.environment_means["environment_metrics/group_size/characters"] == 4.0


@pytest.mark.process
def test_keel_reward_scores_the_group_together(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "train.jsonl", "--model", "tiny", "--tasks", "2", "--samples", "4", "--max-tokens", "8"]
    main(["reward", "group_functions:group_size", *arguments, "--json"])
    trial = json.loads(capsys.readouterr().out)
    assert [completion["reward"] for completion in trial["scored"]] == [4.0] * 8


@pytest.mark.process
@pytest.mark.parametrize("ahead", ["0", "1"])
def test_a_run_with_a_group_reward_trains_records_components_and_resumes(ahead: str, folder: Path) -> None:
    arguments = ["--dataset", "train.jsonl", "--reward", "group_functions:rank", "--model", "tiny"]
    small = ["--scheduler.groups_per_step", "2", "--scheduler.group_size", "4", "--sampling.max_tokens", "6"]
    small += ["--scheduler.max_off_policy_steps", ahead, "--evaluation.when", "never"]
    assert main(["train", *arguments, "--steps", "2", *small]) == 0
    run = folder / "runs" / "train"
    assert main(["train", "--resume", str(run), "--steps", "3", "--allow-changes"]) == 0
    with closing(Ledger(run / "run.db")) as ledger:
        metrics = [row.metrics for row in ledger.steps()]
    assert len(metrics) == 3
    # a rank over a group varies, whereas lists of one would give 0 to every completion
    assert all(0.1 < row["reward_components/dataset/rank"] < 0.9 for row in metrics)
