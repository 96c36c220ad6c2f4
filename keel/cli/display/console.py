"""Standard output of the commands. The console is shared with `keel.train`."""

import sys

from keel.run.monitor.console import console

__all__ = ["console", "write_stdout"]


def write_stdout(text: str) -> None:
    """Write text unchanged, such as JSON or Markdown."""
    sys.stdout.write(text)
