"""What must hold of a run folder, whatever happened to the run: each is a sentence when it does not.

Read from the files alone, by sqlite, parquet and hashes, not by the code that wrote them.
"""

import sqlite3
import warnings
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from keel.config import CheckpointSettings
from keel.errors import ModelError
from keel.training.model.checkpoint import Checkpoints

BITS = ("model.safetensors", "training/optimizer.safetensors")
COLUMNS = ["step", "group", "member", "attempt", "sample", "outcome"]


def after_a_kill(run: Path) -> list[str]:
    """Of a run that was killed: every checkpoint that has a name is whole."""
    checkpoints, wrong = Checkpoints(run / "checkpoints", CheckpointSettings()), []
    for step in checkpoints.steps():
        try:
            checkpoints.verify(step)
        except ModelError as error:
            wrong.append(f"checkpoint {step} is not whole: {error}")
    return wrong


def at_the_end(run: Path, steps: int, group_size: int = 4) -> list[str]:
    """Of a run that came to its end."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        wrong = _of_the_ledger(db, steps, group_size)
        wrong += _of_the_records(db, run, steps)
    db.close()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        if Checkpoints(run / "checkpoints", CheckpointSettings()).latest() != steps:
            wrong.append(f"there is no whole checkpoint of step {steps}")
    left = [str(path) for path in run.rglob(".keel-tmp-*") if path.is_file()]
    return wrong + [f"left behind: {name}" for name in left]


def _of_the_ledger(db: sqlite3.Connection, steps: int, group_size: int) -> list[str]:
    wrong = []
    written = [row[0] for row in db.execute("SELECT step FROM steps ORDER BY step")]
    if written != list(range(1, steps + 1)):
        wrong.append(f"the ledger has steps {written} instead of 1 to {steps}")
    if waiting := db.execute("SELECT count(*) FROM finished").fetchone()[0]:
        wrong.append(f"{waiting} rollouts still wait for a fate")
    names = db.execute('SELECT "group", member, attempt, outcome, reason FROM rollouts').fetchall()
    known = {name[:3] for name in names}
    wrong += [
        f"{group}/{member}/{earlier} was dispatched and has no fate"
        for group, member, attempt in known
        for earlier in range(attempt)
        if (group, member, earlier) not in known
    ]
    trained = Counter((group, member) for group, member, _, outcome, _ in names if outcome == "trained")
    wrong += [f"{group}/{member} trained {count} times" for (group, member), count in trained.items() if count > 1]
    wrong += [f"{name[:3]} was refused without a reason" for name in names if name[3] == "dropped" and not name[4]]
    members: dict[str, set[int]] = {}
    for group, member, *_ in names:
        members.setdefault(group, set()).add(member)
    # a group that was begun when the run ended may have seats that were never dispatched
    cut = {group for group, _, _, outcome, reason in names if outcome == "trained" or reason == "zero_variance"}
    wrong += [
        f"group {group} trained with members {sorted(members[group])}"
        for group in cut
        if members[group] != set(range(group_size))
    ]
    numbers = sorted(int(group.rpartition("#")[2]) for group in members)
    if numbers != list(range(len(numbers))):
        wrong.append(f"groups are missing from the ledger: it has {numbers}")
    return wrong


def _of_the_records(db: sqlite3.Connection, run: Path, steps: int) -> list[str]:
    """What the parquet files say trained is what the ledger says trained, in the same step."""
    wrong: list[str] = []
    told: Counter[tuple[str, int, int, int]] = Counter()
    for step in range(1, steps + 1):
        rows = pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet", columns=COLUMNS).to_pylist()
        trained = [row for row in rows if row["outcome"] == "trained"]
        told.update({(row["group"], row["member"], row["attempt"], row["step"]): 1 for row in trained})
        samples = Counter((row["group"], row["member"], row["attempt"], row["sample"]) for row in trained)
        wrong += [f"{name} is {count} times in record {step}" for name, count in samples.items() if count > 1]
    ledger = set(
        db.execute("SELECT \"group\", member, attempt, step FROM rollouts WHERE outcome = 'trained'").fetchall()
    )
    if set(told) != ledger:
        wrong.append(f"ledger and records disagree about {sorted(set(told) ^ ledger)[:5]}")
    return wrong


def same_bits(one: Path, other: Path, step: int) -> list[str]:
    """Weights and optimizer of two runs after a step are equal, byte for byte."""
    return [
        f"{file} of step {step} differs from that of the run that nobody interrupted"
        for file in BITS
        if (one / f"checkpoints/step_{step}" / file).read_bytes()
        != (other / f"checkpoints/step_{step}" / file).read_bytes()
    ]
