"""Lost, damaged or changed files of a run are detected and named before anything trains on them."""

import errno
import shutil
import sqlite3
from pathlib import Path

import pytest

from keel.errors import ConfigError, StorageError
from keel.rollout.rollout import Rollout
from keel.run.folder import RunFolder
from keel.run.ledger import Ledger, RolloutOutcome
from tests.support.tiny_runs import loaded


def outcome(member: int, *, trained: bool = True) -> RolloutOutcome:
    kind, reason = ("trained", None) if trained else ("dropped", "stale")
    return RolloutOutcome("words#0", member, 0, "words", "task0", kind, reason, None, 1.0, 4)  # type: ignore[arg-type]


def rollout() -> Rollout:
    return Rollout(environment="words", task_id="task0", group="words#0", attempt=0, samples=(), reward=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two steps in its ledger and a finished rollout without an outcome."""
    folder = RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))
    ledger = folder.ledger
    ledger.write_step(
        1, version=1, stepped=True, metrics={"reward": 0.5}, outcomes=[outcome(0)], state={"scheduler": {"number": 1}}
    )
    ledger.write_step(
        2, version=2, stepped=True, metrics={"reward": 0.7}, outcomes=[outcome(1)], state={"scheduler": {"number": 2}}
    )
    ledger.write_dropped(2, [outcome(2, trained=False)], {"scheduler": {"number": 3}})
    ledger.store_finished("words#1", 0, 0, rollout())
    folder.close()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE rollouts SET reward = 0.0 WHERE member = 0", "the records of step 1 were changed"),
        ("DELETE FROM rollouts WHERE member = 1", "the records of step 2 were changed"),
        ("UPDATE rollouts SET outcome = 'trained' WHERE member = 2", "the records of step 2 were changed"),
        ("UPDATE steps SET stepped = 0 WHERE step = 2", "the records of step 2 were changed"),
        ("DELETE FROM checksums WHERE step = 2", "step 2 has no checksum"),
        ("UPDATE meta SET value = replace(value, '3', '4') WHERE key = 'state'", "the state .* was changed"),
    ],
)
def test_a_changed_ledger_is_an_error_that_names_the_change(run: Path, statement: str, problem: str) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute(statement)
    db.close()
    with pytest.raises(StorageError, match=rf"run\.db is damaged or not a ledger: {problem}.*restore it from a copy"):
        RunFolder.open(run)


def test_a_damaged_finished_rollout_is_named(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute("UPDATE finished SET data = substr(data, 1, length(data) - 3)")
    db.close()
    folder = RunFolder.open(run)
    try:
        with pytest.raises(StorageError, match="finished rollout words#1/0/0"):
            folder.ledger.load_finished("words#1", 0, 0)
    finally:
        folder.close()


def test_a_rollout_that_finishes_after_it_was_dropped_does_not_get_a_second_outcome(run: Path) -> None:
    folder = RunFolder.open(run)
    folder.ledger.store_finished("words#0", 2, 0, rollout())
    assert [name[:3] for name in folder.ledger.unresolved()] == [("words#1", 0, 0)]
    folder.close()


def test_an_older_ledger_without_checksums_can_be_resumed(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as db:
        db.execute("DROP TABLE checksums")
        db.execute("DELETE FROM meta WHERE key IN ('config', 'state_hash')")
    db.close()
    folder = RunFolder.open(run)
    folder.ledger.write_step(3, version=3, stepped=True, metrics={}, outcomes=[], state={}, record_hash="abc")
    assert (folder.ledger.record_hash(2), folder.ledger.record_hash(3)) == (None, "abc")
    folder.close()
    RunFolder.open(run).close()


def test_edited_settings_are_an_error_unless_changes_are_allowed(run: Path) -> None:
    file = run / "config.toml"
    file.write_text(file.read_text().replace("lr = 0.001", "lr = 0.002"))
    with pytest.raises(ConfigError, match=r"- trainer\.optimizer\.lr = 0\.001\n.*\+ trainer\.optimizer\.lr = 0\.002"):
        RunFolder.open(run)
    RunFolder.open(run, allow_changes=True).close()
    folder = RunFolder.open(run)
    assert folder.settings.trainer.optimizer.lr == 0.002
    folder.close()


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_lost_settings_are_restored_from_the_ledger(run: Path, damage: str) -> None:
    file = run / "config.toml"
    before = file.read_text()
    file.unlink()
    if damage == "truncated":
        file.write_text(before[:200] + "\n[[")
    with pytest.warns(UserWarning, match="it is restored from the ledger"):
        RunFolder.open(run).close()
    assert file.read_text() == before


def test_a_damaged_run_can_be_opened_after_its_ledger_is_restored(run: Path) -> None:
    copy = run.parent / "copy"
    shutil.copytree(run, copy)
    (run / "run.db").write_bytes(b"SQLite format 3\0" + bytes(4000))
    with pytest.raises(StorageError, match="is damaged or not a ledger"):
        RunFolder.open(run)
    shutil.copyfile(copy / "run.db", run / "run.db")
    RunFolder.open(run).close()


@pytest.mark.parametrize(
    "part", ["run.db-wal", "checkpoints/step_3", "rollouts/step_000001.parquet", "evaluations/step_000000.parquet"]
)
def test_a_new_run_does_not_start_in_a_folder_with_leftovers_of_another(tmp_path: Path, part: str) -> None:
    path = tmp_path / "run" / part
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigError, match=rf"holds {part} of a run whose run\.db is missing"):
        RunFolder.create(tmp_path / "run", loaded(tmp_path / "run"))


def test_a_folder_that_cannot_be_written_is_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = loaded(tmp_path / "run")
    monkeypatch.setattr("keel.run.folder.write_json", fail)
    with pytest.raises(StorageError, match=r"run could not be written: No space left on device; free space, or"):
        RunFolder.create(tmp_path / "new" / "run", settings)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run.db", create=True)
    ledger._db.execute("PRAGMA max_page_count = 30")
    with pytest.raises(StorageError, match=r"could not be written: database or disk is full; .* rerun with --resume"):
        ledger.set_meta("words", "x" * 10**6)
    ledger.set_meta("words", "few")  # the failed write leaves nothing behind
    assert ledger.get_meta("words") == "few"
    ledger.close()
