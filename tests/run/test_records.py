"""What the disk lost, refused or changed is found and named before anything is trained on it."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from keel.errors import ConfigError, StorageError
from keel.rollout.rollout import Rollout
from keel.run.folder import RunFolder
from keel.run.ledger import Ledger, RolloutOutcome
from tests.support.tiny_runs import loaded


def fate(member: int, *, trained: bool = True) -> RolloutOutcome:
    told = ("trained", None) if trained else ("dropped", "stale")
    return RolloutOutcome("words#0", member, 0, "words", "task0", told[0], told[1], None, 1.0, 4)  # type: ignore[arg-type]


def rollout() -> Rollout:
    return Rollout(environment="words", task_id="task0", group="words#0", attempt=0, samples=(), reward=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two steps in its ledger and a rollout that waits."""
    folder = RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))
    ledger = folder.ledger
    ledger.write_step(
        1, version=1, stepped=True, metrics={"reward": 0.5}, outcomes=[fate(0)], state={"scheduler": {"number": 1}}
    )
    ledger.write_step(
        2, version=2, stepped=True, metrics={"reward": 0.7}, outcomes=[fate(1)], state={"scheduler": {"number": 2}}
    )
    ledger.write_dropped(2, [fate(2, trained=False)], {"scheduler": {"number": 3}})
    ledger.store_finished("words#1", 0, 0, rollout())
    folder.close()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE rollouts SET reward = 0.0 WHERE member = 0", "what step 1 wrote in it was changed"),
        ("DELETE FROM rollouts WHERE member = 1", "what step 2 wrote in it was changed"),
        ("UPDATE rollouts SET outcome = 'trained' WHERE member = 2", "what step 2 wrote in it was changed"),
        ("UPDATE steps SET stepped = 0 WHERE step = 2", "what step 2 wrote in it was changed"),
        ("DELETE FROM checksums WHERE step = 2", "step 2 is in it without its checksum"),
        ("UPDATE meta SET value = replace(value, '3', '4') WHERE key = 'state'", "the state .* was changed"),
    ],
)
def test_a_ledger_that_was_changed_is_refused_by_the_place_of_the_change(run: Path, statement: str, named: str) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute(statement)
    db.close()
    with pytest.raises(StorageError, match=rf"run\.db is damaged or no ledger: {named}.*restore it from a copy"):
        RunFolder.open(run)


def test_a_rollout_that_waits_in_a_damaged_ledger_is_named(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute("UPDATE finished SET data = substr(data, 1, length(data) - 3)")
    db.close()
    folder = RunFolder.open(run)
    try:
        with pytest.raises(StorageError, match="rollout words#1/0/0, which waits in it"):
            folder.ledger.load_finished("words#1", 0, 0)
    finally:
        folder.close()


def test_a_rollout_that_ends_after_it_was_given_up_does_not_get_a_second_fate(run: Path) -> None:
    folder = RunFolder.open(run)
    folder.ledger.store_finished("words#0", 2, 0, rollout())
    assert [name[:3] for name in folder.ledger.unresolved()] == [("words#1", 0, 0)]
    folder.close()


def test_a_ledger_without_seals_is_of_an_older_version_and_goes_on(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute("DROP TABLE checksums")
        db.execute("DELETE FROM meta WHERE key IN ('config', 'state_hash')")
    db.close()
    folder = RunFolder.open(run)
    folder.ledger.write_step(3, version=3, stepped=True, metrics={}, outcomes=[], state={}, record_hash="abc")
    assert (folder.ledger.record_hash(2), folder.ledger.record_hash(3)) == (None, "abc")
    folder.close()
    RunFolder.open(run).close()


def test_settings_that_were_edited_are_another_run_until_that_is_allowed(run: Path) -> None:
    file = run / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.001", "lr = 0.002"))
    with pytest.raises(ConfigError, match=r"- trainer\.optimizer\.lr = 0\.001\n.*\+ trainer\.optimizer\.lr = 0\.002"):
        RunFolder.open(run)
    RunFolder.open(run, allow_changes=True).close()
    folder = RunFolder.open(run)
    assert folder.settings.trainer.optimizer.lr == 0.002
    folder.close()


@pytest.mark.parametrize("damage", ["gone", "half"])
def test_settings_that_are_lost_are_written_again_from_the_ledger(run: Path, damage: str) -> None:
    file = run / "config.toml"
    before = file.read_text()
    file.unlink()
    if damage == "half":
        file.write_text(before[:200] + "\n[[")
    with pytest.warns(UserWarning, match="it is written again as the ledger has it"):
        RunFolder.open(run).close()
    assert file.read_text() == before


def test_a_refused_run_can_be_opened_once_it_is_mended(run: Path) -> None:
    copy = run.parent / "copy"
    shutil.copytree(run, copy)
    (run / "run.db").write_bytes(b"SQLite format 3\0" + bytes(4000))
    with pytest.raises(StorageError, match="is damaged or no ledger"):
        RunFolder.open(run)
    shutil.copyfile(copy / "run.db", run / "run.db")
    RunFolder.open(run).close()


@pytest.mark.parametrize("part", ["run.db-wal", "checkpoints/step_3", "rollouts/step_000001.parquet"])
def test_a_new_run_does_not_begin_among_the_parts_of_one_whose_ledger_is_gone(tmp_path: Path, part: str) -> None:
    path = tmp_path / "run" / part
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigError, match=rf"holds {part} of a run whose run\.db is gone"):
        RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))


def test_a_disk_that_is_full_is_named_with_what_to_do(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run.db", create=True)
    ledger._db.execute("PRAGMA max_page_count = 30")
    with pytest.raises(StorageError, match=r"could not be written: database or disk is full; .* go on with --resume"):
        ledger.set_meta("words", "x" * 10**6)
    ledger.set_meta("words", "few")  # nothing of it stays in the way
    assert ledger.get_meta("words") == "few"
    ledger.close()
