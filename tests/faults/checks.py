"""Invariants of a run folder after faults; each check returns its violations as sentences.

They read only the files, with sqlite, parquet and hashes, not with the code that wrote them.
"""

import sqlite3
import warnings
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from keel.config import CheckpointSettings
from keel.errors import ModelError
from keel.training.model.checkpoint import Checkpoints

COMPARED_FILES = ("model.safetensors", "training/optimizer.safetensors")
COLUMNS = ["step", "group", "member", "attempt", "sample", "outcome"]


def check_after_kill(run: Path) -> list[str]:
    """Check that every checkpoint of a killed run is intact."""
    checkpoints, violations = Checkpoints(run / "checkpoints", CheckpointSettings()), []
    for step in checkpoints.steps():
        try:
            checkpoints.verify(step)
        except ModelError as error:
            violations.append(f"checkpoint {step} is damaged: {error}")
    return violations


def check_finished_run(run: Path, steps: int, group_size: int = 4) -> list[str]:
    """Check ledger, records, checkpoints and leftover files of a finished run."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        violations = _check_ledger(db, steps, group_size)
        violations += _check_records(db, run, steps)
    db.close()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        if Checkpoints(run / "checkpoints", CheckpointSettings()).latest() != steps:
            violations.append(f"there is no intact checkpoint of step {steps}")
    leftovers = [str(path) for path in run.rglob(".keel-tmp-*") if path.is_file()]
    return violations + [f"left behind: {name}" for name in leftovers]


def _check_ledger(db: sqlite3.Connection, steps: int, group_size: int) -> list[str]:
    violations = []
    written = [row[0] for row in db.execute("SELECT step FROM steps ORDER BY step")]
    if written != list(range(1, steps + 1)):
        violations.append(f"the ledger has steps {written} instead of 1 to {steps}")
    if waiting := db.execute("SELECT count(*) FROM finished").fetchone()[0]:
        violations.append(f"{waiting} finished rollouts have no outcome")
    names = db.execute('SELECT "group", member, attempt, outcome, reason FROM rollouts').fetchall()
    known = {name[:3] for name in names}
    violations += [
        f"{group}/{member}/{earlier} was dispatched and has no outcome"
        for group, member, attempt in known
        for earlier in range(attempt)
        if (group, member, earlier) not in known
    ]
    trained = Counter((group, member) for group, member, _, outcome, _ in names if outcome == "trained")
    violations += [f"{group}/{member} trained {count} times" for (group, member), count in trained.items() if count > 1]
    violations += [f"{name[:3]} was dropped without a reason" for name in names if name[3] == "dropped" and not name[4]]
    members: dict[str, set[int]] = {}
    for group, member, *_ in names:
        members.setdefault(group, set()).add(member)
    # a group that was open when the run ended may have slots that were never dispatched
    cut = {group for group, _, _, outcome, reason in names if outcome == "trained" or reason == "zero_variance"}
    violations += [
        f"group {group} trained with members {sorted(members[group])}"
        for group in cut
        if members[group] != set(range(group_size))
    ]
    numbers = sorted(int(group.rpartition("#")[2]) for group in members)
    if numbers != list(range(len(numbers))):
        violations.append(f"groups are missing from the ledger: it has {numbers}")
    return violations


def _check_records(db: sqlite3.Connection, run: Path, steps: int) -> list[str]:
    """Check that records and ledger agree about which rollouts trained in which step."""
    violations: list[str] = []
    in_records: Counter[tuple[str, int, int, int]] = Counter()
    for step in range(1, steps + 1):
        rows = pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet", columns=COLUMNS).to_pylist()
        trained = [row for row in rows if row["outcome"] == "trained"]
        in_records.update({(row["group"], row["member"], row["attempt"], row["step"]): 1 for row in trained})
        samples = Counter((row["group"], row["member"], row["attempt"], row["sample"]) for row in trained)
        violations += [f"{name} occurs {count} times in record {step}" for name, count in samples.items() if count > 1]
    ledger = set(
        db.execute("SELECT \"group\", member, attempt, step FROM rollouts WHERE outcome = 'trained'").fetchall()
    )
    if set(in_records) != ledger:
        violations.append(f"ledger and records disagree about {sorted(set(in_records) ^ ledger)[:5]}")
    return violations


def compare_checkpoints(run: Path, reference: Path, step: int) -> list[str]:
    """Check that weights and optimizer state of two runs after a step are equal byte for byte."""
    return [
        f"{file} of step {step} differs from that of the uninterrupted run"
        for file in COMPARED_FILES
        if (run / f"checkpoints/step_{step}" / file).read_bytes()
        != (reference / f"checkpoints/step_{step}" / file).read_bytes()
    ]
