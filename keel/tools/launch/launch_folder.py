"""The files of a launch in the run's folder: its key, its mark, its lock; the logs and the list of engines beside them.

Guarantees that the key is one word made for this launch alone, readable by its owner only, and gone when the launch is;
and that a run is launched by one launcher at a time. The kernel drops the lock of a launcher that was killed; the key
it left is replaced by the next one.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from keel.errors import KeelError, StorageError
from keel.run.folder import RunFolder
from keel.tools.launch.node_agent import MARK_FILE
from keel.tools.launch.plan import LaunchPlan


@contextmanager
def prepared_run_folder(plan: LaunchPlan, *, resume: bool, overrides: Sequence[str] = ()) -> Iterator[None]:
    """The run's folder with all that the parts look for in it, for as long as the block lasts."""
    if resume:
        words = [*overrides, *plan.overrides]
        RunFolder.open(plan.run_folder, overrides=words, allow_changes=True).close()
    else:
        RunFolder.create(plan.run_folder, plan.loaded).close()
    try:
        plan.launch_folder.mkdir(exist_ok=True)
        lock = (plan.launch_folder / "lock").open("a")
    except OSError as error:
        raise StorageError(
            f"{plan.launch_folder} could not be made: {error.strerror}; make room, or choose --run"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KeelError(
                f"{plan.run_folder} is being launched by another; wait for that launch, or stop it"
            ) from None
        try:
            _write_key(plan)
            (plan.launch_folder / MARK_FILE).write_text(secrets.token_hex(16))
            plan.engines_file.unlink(missing_ok=True)  # of servers that are gone
            yield
        finally:
            for file in (plan.key_file, plan.engines_file, plan.launch_folder / MARK_FILE):
                file.unlink(missing_ok=True)


def _write_key(plan: LaunchPlan) -> None:
    """A new file each time: one that is there may be readable by others."""
    plan.key_file.unlink(missing_ok=True)
    handle = os.open(plan.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32))
