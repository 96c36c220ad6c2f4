"""What environments report reaches every record of a run, and a run in which every rollout failed is reported."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from keel.rollout.environments.environment import EpisodeResult, Task
from keel.rollout.rollout import Rollout
from keel.rollout.scheduler.accounts import RolloutBatch
from keel.rollout.scheduler.groups import Group, GroupMember
from keel.run import records
from keel.run.folder import RunFolder
from keel.run.ledger import Ledger, RolloutErrors
from keel.run.monitor.exporter import Exporter
from keel.run.scoring import all_rollouts_failed, batch_metrics, constant_rewards
from keel.run.summary import summarize_run
from tests.support.tiny_runs import Watcher, train


class Parts:
    """The reward is the sum of two parts that depend on the sampled tokens."""

    name = "parts"

    def __init__(self, **_options: object) -> None:
        pass

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}/{number}", {}) for number in range(40)]

    async def episode(self, task: Task, client: Any) -> EpisodeResult:
        reply = await client.chat([{"role": "user", "content": task.id}])
        even, first = len(reply.text) % 2, 0.5 * (reply.generation.token_ids[0] % 2)
        return EpisodeResult(even + first, {"even": even, "first": first}, {"letters": len(reply.text)})


class HalfBroken(Parts):
    """One of two parts never varies."""

    async def episode(self, task: Task, client: Any) -> EpisodeResult:
        result = await super().episode(task, client)
        return EpisodeResult(result.reward, {**result.reward_components, "format": 0.25})


class Broken(Parts):
    """Every episode raises."""

    async def episode(self, task: Task, client: Any) -> EpisodeResult:
        await asyncio.sleep(0)
        raise LookupError(f"no judge for {task.id.partition('/')[0]}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watcher]:
    folder = tmp_path_factory.mktemp("runs") / "parts"
    name = f"{__name__}:Parts"
    return folder, train(folder, steps=2, environments__larger_number__name=name)


def test_components_and_metrics_are_in_the_records_of_every_rollout(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    for step in (1, 2):
        rows = pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        parts = [dict(row["reward_components"]) for row in rows]
        assert [sum(part.values()) for part in parts] == [row["reward"] for row in rows]
        assert all(dict(row["environment_metrics"]).keys() == {"letters"} for row in rows)
        metrics = watcher.steps[step]
        for name in ("even", "first"):
            mean = sum(part[name] for part in parts) / len(parts)
            assert metrics[f"reward_components/larger_number/{name}"] == pytest.approx(mean)


def test_a_step_has_metrics_of_its_completions_and_rewards(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    for metrics in watcher.steps.values():
        assert 1 <= metrics["completion_tokens"] <= metrics["completion_tokens_max"] <= 4
        assert 0 <= metrics["truncated"] <= 1 and metrics["samples_per_rollout"] == 1.0
        assert 0 <= metrics["reward_std_group"] <= metrics["reward_std"]
        assert metrics["environment_metrics/larger_number/letters"] >= 0
    table = pq.read_table(folder / "metrics.parquet").to_pylist()
    names = {"reward_std", "truncated", "reward_components/larger_number/even"}
    assert [{name: row[name] for name in names} for row in table] == [
        {name: metrics[name] for name in names} for metrics in watcher.steps.values()
    ]
    exporter = Exporter()
    exporter.step(1, watcher.steps[1])
    assert b'keel_run_metric{name="reward_components/larger_number/even"}' in exporter.render()


def test_an_evaluation_of_a_run_has_the_same_means(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    scalars = watcher.evaluations[2].scalars()
    parts = scalars["reward_components/even"] + scalars["reward_components/first"]
    assert parts == pytest.approx(scalars["reward"])
    ledger = Ledger(folder / "run.db")
    assert ledger.evaluations()[-1][2] == scalars
    ledger.close()


def test_the_summary_has_a_line_with_the_components(run: tuple[Path, Watcher]) -> None:
    folder, watcher = run
    opened = RunFolder.open(run[0])
    text = summarize_run(opened)
    opened.close()
    first, last = (watcher.steps[step]["reward_components/larger_number/even"] for step in (1, 2))
    assert f"\ncomponents larger_number/even {first:.3g} -> {last:.3g}, larger_number/first " in text
    assert "\nmetrics    larger_number/letters " in text
    assert "\nerrors " not in text
    assert str(folder) in text


def test_records_written_before_components_existed_can_be_trained_again(run: tuple[Path, Watcher]) -> None:
    path = records.step_path(run[0] / "rollouts", 1)
    older = run[0].parent / "older.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["reward_components", "environment_metrics"]), older)
    assert records.read_step(older) == records.read_step(path)


def test_the_standard_deviation_of_rewards_is_over_the_batch_and_within_groups() -> None:
    def group(name: str, environment: str, *rewards: float) -> Group:
        rollouts = (
            Rollout(environment=environment, task_id="t", group=name, reward=reward, reward_components={"r": reward})
            for reward in rewards
        )
        members = tuple(GroupMember(index, 0, rollout) for index, rollout in enumerate(rollouts))
        return Group(name, environment, "t", None, members, None)

    batch = RolloutBatch(0, [group("a#0", "a", 0.0, 2.0), group("b#1", "b", 1.0, 1.0)], [], {})
    metrics = batch_metrics(batch, [], 0)
    assert metrics["reward_std"] == pytest.approx(0.5**0.5)
    assert metrics["reward_std_group"] == 0.5
    assert (metrics["reward/a"], metrics["reward/b"]) == (1.0, 1.0)
    assert metrics["reward_components/a/r"] == metrics["reward_components/b/r"] == 1.0
    assert not {"reward_std", "truncated"} & batch_metrics(RolloutBatch(0, [], [], {}), [], 0).keys()


def test_a_run_whose_rollouts_all_failed_is_recorded_as_failed_with_the_last_error(tmp_path: Path) -> None:
    watcher = train(
        tmp_path / "run",
        steps=2,
        environments__larger_number__name=f"{__name__}:Broken",
        scheduler__max_error_reschedule_attempts=0,
        evaluation__when="never",
    )
    assert watcher.failures[-1][0] >= 8
    ledger = Ledger(tmp_path / "run" / "run.db")
    errors = ledger.errors()
    assert errors is not None and errors.total == errors.last_total >= 8
    assert errors.last.startswith("LookupError: no judge for train (test_scoring.py:")
    assert ledger.get_meta("status") == "failed"
    assert ledger.get_meta("why") == all_rollouts_failed(ledger)
    assert str(all_rollouts_failed(ledger)).startswith(f"no optimizer step was taken: {errors}")
    ledger.close()
    opened = RunFolder.open(tmp_path / "run")
    assert f"\nerrors     {errors}\n" in summarize_run(opened)
    opened.close()


def test_errors_name_their_number_only_if_there_are_several() -> None:
    assert str(RolloutErrors(1, "E: x (a.py:1)", 1)) == "1 rollout failed; the last error: E: x (a.py:1)"
    assert str(RolloutErrors(9, "E: x", 4)) == "9 rollouts failed; the last error (4 times): E: x"


def test_a_component_that_never_varies_is_reported_after_three_steps_and_in_the_summary(tmp_path: Path) -> None:
    watcher = train(tmp_path / "run", steps=4, environments__larger_number__name=f"{__name__}:HalfBroken")
    report = "larger_number/format was 0.25 for every completion of all {} steps"
    (notice,) = [text for text in watcher.notices if "never varies" in text]
    assert report.format(3) in notice and "even" not in notice
    with closing(RunFolder.open(tmp_path / "run")) as folder:
        summary = summarize_run(folder)
        metrics = folder.ledger.steps()[0].metrics
    assert f"WARNING    {report.format(4)}" in summary
    assert metrics["reward_std/larger_number/format"] == 0.0 < metrics["reward_std/larger_number/even"]


@pytest.mark.parametrize(
    ("steps", "constant"),
    [
        ([{"reward/a": 0.0, "reward_std/a": 0.0}] * 2, {"a": 0.0}),
        ([{"reward/a": 0.0, "reward_std/a": 0.0}, {"reward/a": 1.0, "reward_std/a": 0.0}], {}),
        ([{"reward/a": 0.5, "reward_std/a": 0.5}] * 2, {}),
        ([{"reward/a": 0.5, "reward_std/a": 0.0}, {}], {}),
    ],
)
def test_a_reward_is_constant_if_it_varies_neither_in_a_step_nor_between_steps(
    steps: list[dict[str, float]], constant: dict[str, float]
) -> None:
    assert constant_rewards(steps) == constant
