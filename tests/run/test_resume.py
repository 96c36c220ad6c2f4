"""A run that is stopped or killed goes on: nothing twice, nothing lost, the same bits where it is synchronous."""

import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.errors import KeelError
from tests.support.run_world import Lives, resume, train

SYNCHRONOUS = {"scheduler__max_off_policy_steps": 0}
BITS = ("model.safetensors", "training/optimizer.safetensors")


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    made = Lives()
    yield made
    made.close()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(folder, **SYNCHRONOUS)
    return folder


def assert_accounted_for(folder: Path, steps: int = 6) -> None:
    with sqlite3.connect(folder / "run.db") as db:
        assert db.execute("SELECT count(*) FROM finished").fetchone() == (0,)
        assert [row[0] for row in db.execute("SELECT step FROM steps ORDER BY step")] == list(range(1, steps + 1))
        names = db.execute('SELECT "group", member, attempt FROM rollouts').fetchall()
        assert len(set(names)) == len(names)
        # every attempt before the last of a member has a fate too: none was lost on the way
        for group, member, attempt in names:
            assert all((group, member, earlier) in set(names) for earlier in range(attempt))
        trained = db.execute(
            "SELECT step, count(*) FROM rollouts WHERE outcome = 'trained' OR reason = 'zero_variance' GROUP BY step"
        ).fetchall()
        assert trained == [(step, 16) for step in range(1, steps + 1)]


def assert_same_bits(one: Path, other: Path) -> None:
    for file in BITS:
        first, second = (folder / "checkpoints" / "step_6" / file for folder in (one, other))
        assert first.read_bytes() == second.read_bytes(), file


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_run_that_was_told_to_stop_goes_on_bit_for_bit(straight: Path, tmp_path: Path, stop: int) -> None:
    folder = tmp_path / "run"
    assert list(train(folder, stop_after=stop, **SYNCHRONOUS).steps) == list(range(1, stop + 1))
    watcher = resume(folder)
    assert list(watcher.steps) == list(range(stop + 1, 7))
    assert_same_bits(straight, folder)
    assert_accounted_for(folder)


def test_steps_that_no_checkpoint_holds_are_trained_again_from_their_record(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints" / "step_6")
    watcher = resume(folder)
    assert [text.split()[1] for text in watcher.notices if "trained again" in text] == ["4", "5", "6"]
    assert not watcher.steps
    assert_same_bits(straight, folder)


def test_a_broken_checkpoint_is_passed_over_and_nothing_is_lost(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    file = folder / "checkpoints" / "step_6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step 6 is corrupt") as warned:
        resume(folder)
    assert any("step 6 is corrupt and is replaced" in str(one.message) for one in warned)
    assert_same_bits(straight, folder)


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    (folder / "checkpoints" / "step_6").rename(folder / "checkpoints" / "step_6_")
    (folder / "checkpoints" / "step_3").rename(folder / "checkpoints" / "step_9")
    with pytest.raises(KeelError, match="step_9 is newer than the ledger, which ends with step 6"):
        resume(folder)


def test_a_synchronous_run_killed_again_and_again_ends_with_the_same_bits(
    straight: Path, tmp_path: Path, lives: Lives
) -> None:
    folder, chance, kills = tmp_path / "run", random.Random(3), 0
    while not lives.live(folder, chance.uniform(0.3, 4.0) if kills < 8 else None, **SYNCHRONOUS):
        kills += 1
    assert_same_bits(straight, folder)
    assert_accounted_for(folder)


def test_an_asynchronous_run_killed_again_and_again_trains_nothing_twice_and_loses_nothing(
    tmp_path: Path, lives: Lives
) -> None:
    folder, chance, kills = tmp_path / "run", random.Random(4), 0
    while not lives.live(folder, chance.uniform(0.3, 4.0) if kills < 8 else None, steps=12):
        kills += 1
    assert_accounted_for(folder, 12)


def test_rollouts_that_had_ended_when_the_process_was_killed_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, stop_after=3)
    with sqlite3.connect(folder / "run.db") as db:
        kept = set(db.execute('SELECT "group", member, attempt FROM finished').fetchall())
    assert kept, "the next batch was sampled while step 3 was trained"
    resume(folder)
    with sqlite3.connect(folder / "run.db") as db:
        used = set(
            db.execute(
                "SELECT \"group\", member, attempt FROM rollouts WHERE outcome = 'trained' OR reason = 'zero_variance'"
            ).fetchall()
        )
    assert len(kept & used) >= len(kept) / 2
    assert_accounted_for(folder)
