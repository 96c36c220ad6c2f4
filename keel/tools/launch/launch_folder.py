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
from keel.tools.launch.node_agent import MARK
from keel.tools.launch.plan import Plan


@contextmanager
def prepared(plan: Plan, *, resume: bool, overrides: Sequence[str] = ()) -> Iterator[None]:
    """The run's folder with all that the parts look for in it, for as long as the block lasts."""
    if resume:
        words = [*overrides, *plan.changes]
        RunFolder.open(plan.run, overrides=words, allow_changes=True).close()
    else:
        RunFolder.create(plan.run, plan.loaded).close()
    try:
        plan.folder.mkdir(exist_ok=True)
        lock = (plan.folder / "lock").open("a")
    except OSError as error:
        raise StorageError(f"{plan.folder} could not be made: {error.strerror}; make room, or choose --run") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KeelError(f"{plan.run} is being launched by another; wait for that launch, or stop it") from None
        try:
            _write_key(plan)
            (plan.folder / MARK).write_text(secrets.token_hex(16))
            plan.members.unlink(missing_ok=True)  # of servers that are gone
            yield
        finally:
            for file in (plan.key, plan.members, plan.folder / MARK):
                file.unlink(missing_ok=True)


def _write_key(plan: Plan) -> None:
    """A new file each time: one that is there may be readable by others."""
    plan.key.unlink(missing_ok=True)
    handle = os.open(plan.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32))
