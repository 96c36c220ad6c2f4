"""Display of `keel launch`: a table of components and the trainer's last lines in a terminal, plain lines elsewhere.

The trainer's output is untrusted text: characters that would move the cursor are escaped. It is read from the logs in
the run's folder, so everything shown is also there.
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
from keel.run.monitor.progress import escape_unprintable, format_duration

if TYPE_CHECKING:
    from keel.tools.launch.plan import LaunchPlan
    from keel.tools.launch.supervisor import ComponentState

TRAINER_LINES = 8
"""Lines of the trainer's output below the table."""
TRAIN_RESUME_HINT = "resume with: keel train --resume"
"""Lines with this hint of the trainer are hidden: a launch is resumed with `keel launch`."""
STYLES = {"placed": "dim", "starting": "yellow", "up": "green", "down": "red", "ended": "dim"}


class LogFollower:
    """Reads the complete lines that were appended to a log since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def read_new_lines(self) -> list[str]:
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                data = log.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.decode(errors="replace").splitlines()
        return [
            escape_unprintable(line) for line in lines if not line.startswith("--- ") and TRAIN_RESUME_HINT not in line
        ]


class LaunchLog:
    """Display for files and pipes: events and the trainer's output, line by line."""

    def __init__(self, screen: Console, log: Path) -> None:
        self._console, self._follower = screen, LogFollower(log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._print_new_lines()

    def on_event(self, text: str) -> None:
        self._print_new_lines()
        self._print(f"[{time.strftime('%H:%M:%S')}] {escape_unprintable(text)}")

    def on_status(self, states: "list[ComponentState]") -> None:  # noqa: ARG002 - changes were printed by on_event
        self._print_new_lines()

    def _print_new_lines(self) -> None:
        for line in self._follower.read_new_lines():
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()


class LaunchScreen:
    """Display for a terminal: one row per component, and the trainer's last lines."""

    def __init__(self, screen: Console, log: Path, host: Callable[[str], str]) -> None:
        self._console, self._follower, self._host = screen, LogFollower(log), host
        self._trainer_lines: deque[str] = deque(maxlen=TRAINER_LINES)
        self._live = Live(console=screen, refresh_per_second=2, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        # keep the cursor visible, since a killed process could not restore it
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
    """Return a table with one row per component."""
    table = Table(box=None, pad_edge=False)
    for title in ("component", "node", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("for", "restarts"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for state in states:
        table.add_row(
            Text(state.component.name),
            Text(host(state.component.name)),
            Text(state.status, style=STYLES[state.status]),
            Text(format_duration(max(0.0, clock() - state.status_since)) if state.status_since else ""),
            Text(str(state.restarts) if state.restarts else ""),
            Text(state.last_error if state.status == "down" else state.url),
        )
    return table


def make_launch_display(plan: "LaunchPlan", host: Callable[[str], str]) -> LaunchLog | LaunchScreen:
    """Return the display for standard output, a context manager that restores the terminal."""
    screen, log = console(), plan.log_path(plan.trainers[0].name)
    return LaunchScreen(screen, log, host) if screen.is_terminal else LaunchLog(screen, log)
