"""Standard output: a rich console for a terminal, plain text for files and pipes.

If standard output is not a terminal there are no colour codes, and lines are COLUMNS wide, or wide enough for the
tables, so the same command always prints the same bytes.
"""

import os
import sys

from rich.console import Console

PLAIN_WIDTH = 120
"""Width if standard output is not a terminal and COLUMNS is not set."""


def console() -> Console:
    """Return a console for the current standard output."""
    terminal = sys.stdout.isatty()
    width = None if terminal or os.environ.get("COLUMNS", "").isdecimal() else PLAIN_WIDTH
    return Console(force_terminal=terminal, width=width, markup=False, highlight=False, emoji=False)
