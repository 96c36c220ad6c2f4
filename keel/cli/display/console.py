"""Where the commands write: one console for people, plain text for files and pipes.

Away from a terminal there are no colour codes, and lines are as wide as COLUMNS says or else wide enough for the
tables, so that the same command always prints the same bytes.
"""

import os
import sys

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns when standard output is not a terminal and COLUMNS is not set."""


def console() -> Console:
    """A console on the present standard output."""
    terminal = sys.stdout.isatty()
    width = None if terminal or os.environ.get("COLUMNS", "").isdecimal() else PLAIN_WIDTH
    return Console(force_terminal=terminal, width=width, markup=False, highlight=False, emoji=False)


def write_stdout(text: str) -> None:
    """Text as it is, for machines and for documents."""
    sys.stdout.write(text)
