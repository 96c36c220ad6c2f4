"""Full disks and damaged files: checkpoints, ledger, records.

A full disk is a small tmpfs if the user may mount one (root: a real ENOSPC), and otherwise a limit on file size
(EFBIG), which the run hits in the same places. Damage is a flipped bit, a truncated file, an empty file, or a missing
file.
"""

import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from . import checks
from .processes import ForkServer
from .scenarios import expect_completion, expect_error
from .target_run import RUN_TIMEOUT, Result, TargetRun

DISK_FULL_ERROR = r"No space left on device|disk is full|disk I/O error|File too large|could not be written"
Damage = Literal["flip", "cut", "empty", "gone"]
DAMAGES: tuple[Damage, ...] = ("flip", "cut", "empty", "gone")


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount a file system of this size for the duration of the block; requires root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder, 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def full(
    fork_server: ForkServer, folder: Path, kilobytes: int, *, synchronous: bool, compare: Path | None = None
) -> Result:
    """Run on a disk that fills up, then resume after it has grown."""
    result = Result("full disk", injected=1)
    staleness = 0 if synchronous else 2
    with small_disk(folder, kilobytes):
        target = TargetRun(fork_server, folder, scheduler__max_off_policy_steps=staleness, checkpoints__keep_last=8)
        process = target.start()
        if not process.wait(RUN_TIMEOUT):
            process.kill()
            result.violations.append(f"hangs on a full disk: {process.output()[-300:]}")
        if process.code == 0:
            result.violations.append(f"{kilobytes} KB are enough: the disk was never full")
        else:
            expect_error(process, result, DISK_FULL_ERROR)
        result.violations += checks.check_after_kill(target.run_folder)
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        if expect_completion(target, target.start(), result) and compare is not None:
            result.violations += checks.compare_checkpoints(target.run_folder, compare, target.steps)
    return result


def limited(fork_server: ForkServer, folder: Path, max_file_bytes: int, *, compare: Path | None = None) -> Result:
    """Run with a limit on the size of files, then resume without it."""
    result = Result("a file that cannot grow", injected=1)
    target = TargetRun(fork_server, folder, scheduler__max_off_policy_steps=0)
    expect_error(target.start(max_file_bytes=max_file_bytes), result, DISK_FULL_ERROR)
    if expect_completion(target, target.start(), result) and compare is not None:
        result.violations += checks.compare_checkpoints(target.run_folder, compare, target.steps)
    return result


def damage_file(path: Path, damage: Damage, rng: random.Random) -> None:
    """Damage one file."""
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
        return
    if damage == "flip" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[: rng.randrange(len(data))]), "empty": b""}[damage])


def stopped_run(fork_server: ForkServer, folder: Path, steps: int = 12) -> TargetRun:
    """Return a synchronous run killed after step 7: it has checkpoints of steps 3 and 6, and a record to replay."""
    target = TargetRun(fork_server, folder, steps=steps, scheduler__max_off_policy_steps=0)
    process = target.start()
    process.wait(RUN_TIMEOUT, lambda: target.recorded_steps() >= 8)
    process.kill()
    return target


def copy_run(target: TargetRun, folder: Path) -> TargetRun:
    """Return a copy of the run in another folder."""
    copied = TargetRun(target.fork_server, folder, steps=target.steps)
    shutil.copytree(target.run_folder, copied.run_folder)
    return copied


def checkpoint(
    target: TargetRun, folder: Path, damage: Damage, rng: random.Random, compare: Path, *, all_checkpoints: bool
) -> Result:
    """Damaged checkpoints are skipped: the run resumes from an earlier one, or from its records alone."""
    result, copied = Result("damaged checkpoint", injected=1), copy_run(target, folder)
    steps = sorted((copied.run_folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    for step in steps if all_checkpoints else steps[-1:]:
        damage_file(rng.choice([path for path in sorted(step.rglob("*")) if path.is_file()]), damage, rng)
    if expect_completion(copied, copied.start(), result):
        result.violations += checks.compare_checkpoints(copied.run_folder, compare, copied.steps)
    return result


def half_written(target: TargetRun, folder: Path, compare: Path) -> Result:
    """Partial files of killed writers are never read as results, and are removed."""
    result, copied = Result("half-written files", injected=3), copy_run(target, folder)
    half = copied.run_folder / "checkpoints" / ".keel-tmp-step_9-aaaa"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (copied.run_folder / "rollouts" / ".keel-tmp-step_000009.parquet-bbbb").write_bytes(b"PAR1")
    (copied.run_folder / "rollouts" / "step_000009.parquet").write_bytes(b"PAR1 of a step that was never committed")
    if expect_completion(copied, copied.start(), result):
        result.violations += checks.compare_checkpoints(copied.run_folder, compare, copied.steps)
        if half.exists():
            result.violations.append(f"left behind: {half}")
    return result


def record(
    target: TargetRun, folder: Path, damage: Damage, rng: random.Random, compare: Path, *, needed: bool
) -> Result:
    """A damaged record that must be replayed stops the run with an error that names it; others are not read."""
    result, copied = Result("damaged record", injected=1), copy_run(target, folder)
    path = copied.run_folder / "rollouts" / f"step_{7 if needed else 2:06d}.parquet"
    original = path.read_bytes()
    damage_file(path, damage, rng)
    if needed:
        expect_error(copied.start(), result, rf"{path.name} cannot be read: .* restore the file from a copy")
        path.write_bytes(original)  # the fix that the error suggests
    process = copied.start()
    process.wait(RUN_TIMEOUT)
    path.write_bytes(original)  # the checks read all records
    if expect_completion(copied, process, result):
        result.violations += checks.compare_checkpoints(copied.run_folder, compare, copied.steps)
    return result


def ledger(target: TargetRun, folder: Path, file: str, damage: Damage, rng: random.Random, compare: Path) -> Result:
    """A damaged ledger stops the run with an error that names it; damage in unused bytes lets the run complete."""
    result, copied = Result("damaged ledger", injected=1), copy_run(target, folder)
    path = copied.run_folder / file
    if not path.exists():
        return Result("damaged ledger")
    damage_file(path, damage, rng)
    process = copied.start(resume=True)
    process.wait(RUN_TIMEOUT)
    if process.code == 0:
        if expect_completion(copied, process, result):
            result.violations += checks.compare_checkpoints(copied.run_folder, compare, copied.steps)
        return result
    expect_error(process, result, r"run\.db|checkpoints/step_\d+ is newer than the ledger|cannot be read")
    shutil.rmtree(copied.run_folder)
    shutil.copytree(target.run_folder, copied.run_folder)  # the fix: restore a copy of the folder
    if expect_completion(copied, copied.start(), result):
        result.violations += checks.compare_checkpoints(copied.run_folder, compare, copied.steps)
    return result
