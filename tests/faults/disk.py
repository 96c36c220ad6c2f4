"""Disks that are full, and files that are not what was written: checkpoints, ledger, records.

A full disk is a small tmpfs where the user may mount one (root: a real ENOSPC), and a limit on the length of files
elsewhere (EFBIG), which the run meets in the same places. Damage is a byte changed, an end cut off, or a file gone.
"""

import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from . import checks
from .lives import Lives
from .scenes import ends, stops
from .world import ENDS, Result, World

FULL = r"No space left on device|disk is full|disk I/O error|File too large|could not be written"
Harm = Literal["flip", "cut", "empty", "gone"]
HARMS: tuple[Harm, ...] = ("flip", "cut", "empty", "gone")


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size, for as long as the block lasts. Only root may make one."""
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


def full(lives: Lives, folder: Path, kilobytes: int, *, synchronous: bool, compare: Path | None = None) -> Result:
    """A run on a disk that fills up; then there is room, and it goes on."""
    result = Result("full disk", injected=1)
    age = 0 if synchronous else 2
    with small_disk(folder, kilobytes):
        world = World(lives, folder, scheduler__max_off_policy_steps=age, checkpoints__keep_last=8)
        life = world.start()
        if not life.wait(ENDS):
            life.kill()
            result.violations.append(f"hangs on a full disk: {life.said()[-300:]}")
        if life.code == 0:
            result.violations.append(f"{kilobytes} KB are enough: the disk was never full")
        else:
            stops(life, result, FULL)
        result.violations += checks.after_a_kill(world.run)
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        if ends(world, world.start(), result) and compare is not None:
            result.violations += checks.same_bits(world.run, compare, world.steps)
    return result


def limited(lives: Lives, folder: Path, largest: int, *, compare: Path | None = None) -> Result:
    """The same where nothing can be mounted: a file that would grow longer is refused."""
    result = Result("a file that cannot grow", injected=1)
    world = World(lives, folder, scheduler__max_off_policy_steps=0)
    stops(world.start(largest_file=largest), result, FULL)
    if ends(world, world.start(), result) and compare is not None:
        result.violations += checks.same_bits(world.run, compare, world.steps)
    return result


def harm(path: Path, how: Harm, chance: random.Random) -> None:
    """Damage one file."""
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flip" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[: chance.randrange(len(data))]), "empty": b""}[how])


def stopped_run(lives: Lives, folder: Path, steps: int = 12) -> World:
    """A synchronous run that was killed after its seventh step: checkpoints of 3 and 6, and a record to train again."""
    world = World(lives, folder, steps=steps, scheduler__max_off_policy_steps=0)
    life = world.start()
    life.wait(ENDS, lambda: world.recorded() >= 8)
    life.kill()
    return world


def copy_of(world: World, folder: Path) -> World:
    """The same run in another place."""
    twin = World(world.lives, folder, steps=world.steps)
    shutil.copytree(world.run, twin.run)
    return twin


def checkpoint(world: World, folder: Path, how: Harm, chance: random.Random, compare: Path, *, all_: bool) -> Result:
    """Damaged checkpoints are passed over: the run goes on from an earlier one, or from its records alone."""
    result, twin = Result("damaged checkpoint", injected=1), copy_of(world, folder)
    steps = sorted((twin.run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    for step in steps if all_ else steps[-1:]:
        harm(chance.choice([path for path in sorted(step.rglob("*")) if path.is_file()]), how, chance)
    if ends(twin, twin.start(), result):
        result.violations += checks.same_bits(twin.run, compare, twin.steps)
    return result


def half_written(world: World, folder: Path, compare: Path) -> Result:
    """What writers that were killed leave behind is never taken for a result, and is removed."""
    result, twin = Result("half-written files", injected=3), copy_of(world, folder)
    half = twin.run / "checkpoints" / ".keel-tmp-step_9-aaaa"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (twin.run / "rollouts" / ".keel-tmp-step_000009.parquet-bbbb").write_bytes(b"PAR1")
    (twin.run / "rollouts" / "step_000009.parquet").write_bytes(b"PAR1 of a step that was never committed")
    if ends(twin, twin.start(), result):
        result.violations += checks.same_bits(twin.run, compare, twin.steps)
        if half.exists():
            result.violations.append(f"left behind: {half}")
    return result


def record(world: World, folder: Path, how: Harm, chance: random.Random, compare: Path, *, needed: bool) -> Result:
    """A damaged record stops a run that has to train its step again, and by its name; others are not read."""
    result, twin = Result("damaged record", injected=1), copy_of(world, folder)
    path = twin.run / "rollouts" / f"step_{7 if needed else 2:06d}.parquet"
    whole = path.read_bytes()
    harm(path, how, chance)
    if needed:
        stops(twin.start(), result, rf"{path.name} cannot be read: .* restore it from a copy")
        path.write_bytes(whole)  # which is the remedy
    life = twin.start()
    life.wait(ENDS)
    path.write_bytes(whole)  # for the checks, which read all records
    if ends(twin, life, result):
        result.violations += checks.same_bits(twin.run, compare, twin.steps)
    return result


def ledger(world: World, folder: Path, file: str, how: Harm, chance: random.Random, compare: Path) -> Result:
    """A damaged ledger is refused by its name, or the damage is where nothing is and the run goes on as it should."""
    result, twin = Result("damaged ledger", injected=1), copy_of(world, folder)
    path = twin.run / file
    if not path.exists():
        return Result("damaged ledger")
    harm(path, how, chance)
    life = twin.start(again=True)
    life.wait(ENDS)
    if life.code == 0:
        if ends(twin, life, result):
            result.violations += checks.same_bits(twin.run, compare, twin.steps)
        return result
    stops(life, result, r"run\.db|checkpoints/step_\d+ is newer than the ledger|cannot be read")
    shutil.rmtree(twin.run)
    shutil.copytree(world.run, twin.run)  # a copy of the folder, which is the remedy
    if ends(twin, twin.start(), result):
        result.violations += checks.same_bits(twin.run, compare, twin.steps)
    return result
