"""The folder `launch/` of a run: API key, node marker and lock, next to the logs and the list of engines.

Guarantees that the key is created for this launch, readable by its owner only, and deleted when the launch ends; and
that a run has one launcher at a time. The kernel releases the lock of a launcher that was killed; a key it left behind
is replaced by the next launch.
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
    """Create or open the run's folder with the files that the components need; delete key and marker on exit."""
    if resume:
        RunFolder.open(plan.run_folder, overrides=[*overrides, *plan.overrides], allow_changes=True).close()
    else:
        RunFolder.create(plan.run_folder, plan.loaded).close()
    try:
        plan.launch_folder.mkdir(exist_ok=True)
        lock = (plan.launch_folder / "lock").open("a")
    except OSError as error:
        raise StorageError(
            f"{plan.launch_folder} could not be created: {error.strerror}; free disk space, or choose another --run"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KeelError(
                f"{plan.run_folder} is in use by another keel launch; wait for it to end, or stop it"
            ) from None
        try:
            _write_key(plan)
            (plan.launch_folder / MARK_FILE).write_text(secrets.token_hex(16))
            plan.engines_file.unlink(missing_ok=True)  # lists servers of an earlier launch
            yield
        finally:
            for file in (plan.key_file, plan.engines_file, plan.launch_folder / MARK_FILE):
                file.unlink(missing_ok=True)


def _write_key(plan: LaunchPlan) -> None:
    """Write the key to a new file, since an existing one may be readable by other users."""
    plan.key_file.unlink(missing_ok=True)
    handle = os.open(plan.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32))
