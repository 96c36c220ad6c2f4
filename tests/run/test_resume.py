"""A stopped or killed run resumes: nothing twice, nothing lost, bit-identical if it is synchronous."""

import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.errors import KeelError, StorageError
from keel.rollout.environments.builtin import LargerNumber
from keel.run.folder import RunFolder
from keel.run.summary import summarize_run
from tests.support.tiny_runs import Lives, resume, train

SYNCHRONOUS = {"scheduler__max_off_policy_steps": 0}
BITS = ("model.safetensors", "training/optimizer.safetensors")


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    lives = Lives()
    yield lives
    lives.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that was never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(folder, **SYNCHRONOUS)
    return folder


def assert_accounted_for(folder: Path, steps: int = 6) -> None:
    with sqlite3.connect(folder / "run.db") as db:
        assert db.execute("SELECT count(*) FROM finished").fetchone() == (0,)
        assert [row[0] for row in db.execute("SELECT step FROM steps ORDER BY step")] == list(range(1, steps + 1))
        keys = db.execute('SELECT "group", member, attempt FROM rollouts').fetchall()
        assert len(set(keys)) == len(keys)
        # every earlier attempt of a member has an outcome too: none was lost
        for group, member, attempt in keys:
            assert all((group, member, earlier) in set(keys) for earlier in range(attempt))
        trained = db.execute(
            "SELECT step, count(*) FROM rollouts WHERE outcome = 'trained' OR reason = 'zero_variance' GROUP BY step"
        ).fetchall()
        metrics = [json.loads(row[0]) for row in db.execute("SELECT metrics FROM steps ORDER BY step")]
        expected = [(step, 16 + 4 * row["refilled_groups"]) for step, row in enumerate(metrics, start=1)]
        assert trained == expected and len(trained) == steps


def assert_same_bits(expected: Path, actual: Path) -> None:
    for file in BITS:
        first, second = (folder / "checkpoints" / "step_6" / file for folder in (expected, actual))
        assert first.read_bytes() == second.read_bytes(), file


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_stopped_run_resumes_bit_identically(uninterrupted: Path, tmp_path: Path, stop: int) -> None:
    folder = tmp_path / "run"
    assert list(train(folder, stop_after=stop, **SYNCHRONOUS).steps) == list(range(1, stop + 1))
    watcher = resume(folder)
    assert list(watcher.steps) == list(range(stop + 1, 7))
    assert_same_bits(uninterrupted, folder)
    assert_accounted_for(folder)


@pytest.mark.model
def test_a_refilled_synchronous_run_resumes_bit_identically_and_trains_full_batches(tmp_path: Path) -> None:
    settings = {**SYNCHRONOUS, "scheduler__refill": True, "evaluation__when": "never"}
    whole = train(tmp_path / "whole", **settings)
    folder = tmp_path / "run"
    train(folder, stop_after=2, **settings)
    resumed = resume(folder)
    assert_same_bits(tmp_path / "whole", folder)
    assert_accounted_for(folder)
    refilled = [metrics["refilled_groups"] for metrics in whole.steps.values()]
    assert refilled[2:] == [metrics["refilled_groups"] for metrics in resumed.steps.values()]
    assert sum(refilled) > 0
    for metrics in whole.steps.values():
        assert metrics["zero_variance_groups"] >= metrics["refilled_groups"] <= 8
        if metrics["refilled_groups"] < 8:
            assert metrics["zero_variance_groups"] == metrics["refilled_groups"]
            assert metrics["groups"] == 4


def test_steps_after_the_last_checkpoint_are_trained_again_from_their_records(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    shutil.rmtree(folder / "checkpoints" / "step_6")
    watcher = resume(folder)
    assert [text.split()[1] for text in watcher.notices if "trained again" in text] == ["4", "5", "6"]
    assert not watcher.steps
    assert_same_bits(uninterrupted, folder)


def test_a_broken_checkpoint_is_skipped_and_nothing_is_lost(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    file = folder / "checkpoints" / "step_6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step 6 is corrupt") as warned:
        resume(folder)
    assert any("step 6 is corrupt and is replaced" in str(warning.message) for warning in warned)
    assert_same_bits(uninterrupted, folder)


def test_a_checkpoint_newer_than_the_ledger_is_an_error(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    (folder / "checkpoints" / "step_6").rename(folder / "checkpoints" / "step_6_")
    (folder / "checkpoints" / "step_3").rename(folder / "checkpoints" / "step_9")
    with pytest.raises(KeelError, match="step_9 is newer than the ledger, whose last step is 6"):
        resume(folder)


@pytest.mark.process
def test_a_synchronous_run_killed_repeatedly_ends_with_the_same_bits(
    uninterrupted: Path, tmp_path: Path, lives: Lives
) -> None:
    folder, rng, kills = tmp_path / "run", random.Random(3), 0
    while not lives.live(folder, rng.uniform(0.3, 4.0) if kills < 8 else None, **SYNCHRONOUS):
        kills += 1
    assert_same_bits(uninterrupted, folder)
    assert_accounted_for(folder)


@pytest.mark.process
def test_an_asynchronous_run_killed_repeatedly_trains_nothing_twice_and_loses_nothing(
    tmp_path: Path, lives: Lives
) -> None:
    folder, rng, kills = tmp_path / "run", random.Random(4), 0
    while not lives.live(folder, rng.uniform(0.3, 4.0) if kills < 8 else None, steps=12):
        kills += 1
    assert_accounted_for(folder, 12)


def test_rollouts_that_finished_before_an_interruption_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, stop_after=3)
    with sqlite3.connect(folder / "run.db") as db:
        finished = set(db.execute('SELECT "group", member, attempt FROM finished').fetchall())
    assert finished, "the next batch was sampled while step 3 trained"
    resume(folder)
    with sqlite3.connect(folder / "run.db") as db:
        used = set(
            db.execute(
                "SELECT \"group\", member, attempt FROM rollouts WHERE outcome = 'trained' OR reason = 'zero_variance'"
            ).fetchall()
        )
    assert len(finished & used) >= len(finished) / 2
    assert_accounted_for(folder)


def task_ids(folder: Path) -> list[str]:
    """Return the tasks of a run in the order in which their groups were started."""
    with sqlite3.connect(folder / "run.db") as db:
        rows = dict(db.execute('SELECT "group", task_id FROM rollouts').fetchall())
    return [rows[group] for group in sorted(rows, key=lambda group: int(group.rpartition("#")[2]))]


@pytest.mark.model
def test_the_order_of_tasks_depends_on_the_seed_and_continues_after_a_stop(uninterrupted: Path, tmp_path: Path) -> None:
    settings = {**SYNCHRONOUS, "evaluation__when": "never"}
    train(tmp_path / "stopped", stop_after=2, **settings)
    resume(tmp_path / "stopped")
    train(tmp_path / "other", seed=1, **settings)
    train(tmp_path / "given", **settings, environments__larger_number__curriculum="given")
    given = [task.id for task in LargerNumber(shots=0, digits=1).tasks("train")]
    orders = {name: task_ids(tmp_path / name) for name in ("stopped", "other", "given")}
    assert orders["given"] == given[:24]
    assert task_ids(uninterrupted) == orders["stopped"] != orders["given"]
    assert orders["other"] not in (orders["stopped"], orders["given"])
    assert set(orders["other"]) <= set(given)


@pytest.mark.model
def test_a_run_of_an_older_version_is_not_resumed_in_another_order(tmp_path: Path) -> None:
    train(tmp_path / "run", stop_after=1, **SYNCHRONOUS)
    with sqlite3.connect(tmp_path / "run" / "run.db") as db:
        state = json.loads(db.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()[0])
        state["scheduler"]["format"] = 2
        db.execute("UPDATE meta SET value = ? WHERE key = 'state'", (json.dumps(state),))
        db.execute("DELETE FROM meta WHERE key = 'state_hash'")
    with pytest.raises(KeelError, match="the scheduler snapshot has format 2, and this version of Keel reads 3"):
        resume(tmp_path / "run")


def task_table(folder: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute("SELECT * FROM tasks ORDER BY environment, task_index").fetchall()


@pytest.mark.model
def test_pass_rates_are_committed_with_their_step_and_a_run_by_difficulty_resumes_bit_identically(
    tmp_path: Path,
) -> None:
    settings = {
        **SYNCHRONOUS,
        "scheduler__refill": True,
        "evaluation__when": "never",
        "environments__larger_number__options__train_tasks": 10,
        "environments__larger_number__curriculum__order": "difficulty",
        "environments__larger_number__curriculum__retire_after": 1,
        "environments__larger_number__curriculum__retest_after": 2,
    }
    whole = train(tmp_path / "whole", **settings)
    folder = tmp_path / "run"
    train(folder, stop_after=2, **settings)
    resumed = resume(folder)
    assert_same_bits(tmp_path / "whole", folder)
    assert_accounted_for(folder)
    assert task_ids(tmp_path / "whole") == task_ids(folder)
    assert task_table(tmp_path / "whole") == task_table(folder) != []
    for step, metrics in resumed.steps.items():
        names = [name for name in metrics if name.startswith(("tasks_", "pass_rate/"))]
        assert len(names) == 5
        assert [metrics[name] for name in names] == [whole.steps[step][name] for name in names]
    with sqlite3.connect(folder / "run.db") as db:
        # every rollout of a group that was trained, or dropped for its equal rewards, counts once
        counted = dict(db.execute("SELECT task_id, rollouts FROM tasks").fetchall())
        recorded = dict(db.execute("SELECT task_id, count(*) FROM rollouts GROUP BY task_id").fetchall())
    assert counted == recorded
    opened = RunFolder.open(folder)
    summary = summarize_run(opened)
    opened.close()
    assert "\ntasks      larger_number 100 % seen, pass rate 0." in summary


@pytest.mark.model
def test_changed_pass_rates_are_detected_when_a_run_resumes(tmp_path: Path) -> None:
    train(tmp_path / "run", stop_after=1, **SYNCHRONOUS)
    with sqlite3.connect(tmp_path / "run" / "run.db") as db:
        db.execute("UPDATE tasks SET pass_rate = 0.77 WHERE task_index = (SELECT min(task_index) FROM tasks)")
    with pytest.raises(StorageError, match="the pass rates of tasks were changed"):
        resume(tmp_path / "run")
