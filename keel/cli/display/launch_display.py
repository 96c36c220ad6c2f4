"""What `keel launch` shows: a table of all parts and the trainer's last lines in a terminal, plain lines elsewhere.

Lines of a part are text of others: characters that would move the cursor are written out. Everything shown is also in
the logs of the run's folder; what is shown is only followed from them.
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console
from keel.cli.display.progress import escape_unprintable, format_duration

if TYPE_CHECKING:
    from keel.tools.launch.plan import LaunchPlan
    from keel.tools.launch.supervisor import ComponentState

TRAINER_LINES = 8
"""Of the trainer, under the table."""
TRAIN_RESUME_HINT = "go on with: keel train --resume"
"""The trainer knows nothing of the launch, which goes on by another command."""
STYLES = {"placed": "dim", "starting": "yellow", "up": "green", "down": "red", "ended": "dim"}


class LogFollower:
    """The lines that a log has got since it was last read; only whole ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def read_new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                read = log.read()
        except OSError:
            return []
        whole = read[: read.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [
            escape_unprintable(line) for line in lines if not line.startswith("--- ") and TRAIN_RESUME_HINT not in line
        ]


class LaunchLog:
    """For files and pipes: what happens, and what the trainer says, as it comes."""

    def __init__(self, screen: Console, log: Path) -> None:
        self._console, self._follower = screen, LogFollower(log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._print_new_lines()

    def on_event(self, text: str) -> None:
        self._print_new_lines()
        self._print(f"[{time.strftime('%H:%M:%S')}] {escape_unprintable(text)}")

    def on_status(self, states: "list[ComponentState]") -> None:  # noqa: ARG002 - what changed was told already
        self._print_new_lines()

    def _print_new_lines(self) -> None:
        for line in self._follower.read_new_lines():
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()


class LaunchScreen:
    """For a terminal: one row a part, and the trainer's last lines."""

    def __init__(self, screen: Console, log: Path, host: Callable[[str], str]) -> None:
        self._console, self._follower, self._host = screen, LogFollower(log), host
        self._trainer_lines: deque[str] = deque(maxlen=TRAINER_LINES)
        self._live = Live(console=screen, refresh_per_second=2, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        # a process that is killed could not bring the cursor back
        self._console.show_cursor(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for line in self._follower.read_new_lines():
            self._console.print(Text(line), soft_wrap=True)

    def on_event(self, text: str) -> None:
        self._console.print(Text(f"[{time.strftime('%H:%M:%S')}] {escape_unprintable(text)}"), soft_wrap=True)

    def on_status(self, states: "list[ComponentState]") -> None:
        self._trainer_lines.extend(self._follower.read_new_lines())
        self._live.update(
            Group(status_table(states, self._host), *(Text(line) for line in self._trainer_lines)), refresh=True
        )


def status_table(
    states: "list[ComponentState]", host: Callable[[str], str], clock: Callable[[], float] = time.monotonic
) -> RenderableType:
    """All parts, a row each."""
    shown = Table(box=None, pad_edge=False)
    for title in ("part", "node", "state"):
        shown.add_column(title, no_wrap=True)
    for title in ("for", "restarts"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("", overflow="fold")
    for life in states:
        shown.add_row(
            Text(life.component.name),
            Text(host(life.component.name)),
            Text(life.status, style=STYLES[life.status]),
            Text(format_duration(max(0.0, clock() - life.status_since)) if life.status_since else ""),
            Text(str(life.restarts) if life.restarts else ""),
            Text(life.last_error if life.status == "down" else life.url),
        )
    return shown


def make_launch_display(plan: "LaunchPlan", host: Callable[[str], str]) -> LaunchLog | LaunchScreen:
    """The view that suits standard output; a context manager, so that a terminal is left as it was found."""
    screen, log = console(), plan.log_path(plan.trainers[0].name)
    return LaunchScreen(screen, log, host) if screen.is_terminal else LaunchLog(screen, log)
