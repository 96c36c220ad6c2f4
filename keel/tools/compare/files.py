"""Output files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keel.errors import KeelError


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A temporary file to write, which takes the place of `target` when the block ends well.

    `keel.common.atomic_files` does the same and more, but to import it loads every model's code, which takes seconds.
    """
    temporary = target.with_name(f".keel-tmp-{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise KeelError(f"{target} could not be written: {error}; what was there before is as it was") from error
    finally:
        temporary.unlink(missing_ok=True)
