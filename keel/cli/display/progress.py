"""What `keel train` shows while it runs: a live table in a terminal, aligned lines elsewhere, or JSON, an event a line.

All three are observers (`keel/run/monitor/callbacks.py`) and show the same numbers; one that a step does not have is
"-". Text may come from a model or an environment: it is never read as markup, and characters that would move the
cursor or turn the text round are written out. Only what has happened is shown, and the time left is an estimate from
the last steps.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write
from keel.run.evaluate import Evaluation
from keel.run.monitor.callbacks import Observer

ROWS = 10
"""Steps that the table holds, and that the time left is estimated from."""
QUIET = 30.0
"""Seconds without a line after which a log is told what is being waited for."""

Clock = Callable[[], float]


class Column(NamedTuple):
    """One number of a step."""

    title: str
    name: str
    """In the numbers of the step."""
    width: int
    format: str
    scale: float = 1.0

    def show(self, numbers: Mapping[str, float]) -> str:
        value = numbers.get(self.name)
        # a step that trained nothing has no mean of anything
        return "-" if value is None or not math.isfinite(value) else format(value * self.scale, self.format)


COLUMNS = (
    Column("reward", "reward", 6, ".3f"),
    Column("loss", "loss", 8, "+.4f"),
    Column("low %", "is_masked_low", 6, ".2f", 100.0),
    Column("high %", "is_masked_high", 6, ".2f", 100.0),
    Column("mismatch", "mismatch_kl", 8, ".1e"),
    Column("stale", "staleness", 5, ".2f"),
    Column("tok/s", "tokens_per_second", 6, ",.0f"),
    Column("seconds", "seconds", 7, ".1f"),
)
"""low and high: the share of tokens that a gate dropped, by the side on which the policy left the sampler."""


def display(*, json: bool = False) -> "Display":
    """The display that suits standard output; use it in a `with`, so that a terminal is left as it was found."""
    if json:
        return JsonLines()
    screen = console()
    return Screen(screen) if screen.is_terminal else Lines(screen)


class Display(Observer):
    """An observer that may hold the terminal."""

    def close(self) -> None:
        """Let go of the terminal. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pace:
    """How fast steps come, from when the last few of them ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: tuple[float, ...] = ()

    def begin(self) -> None:
        """From now on, unless a step has ended: what comes before the first says nothing about the others."""
        if len(self._ends) < 2:
            self._ends = (self._clock(),)

    def step(self) -> None:
        self._ends = (*self._ends, self._clock())[-ROWS - 1 :]

    def left(self, steps: int) -> float | None:
        """Seconds that so many more steps will take; none before there is anything to go by."""
        if len(self._ends) < 2:
            return None
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, each * steps - (self._clock() - self._ends[-1]))


class Screen(Display):
    """A terminal: the last steps as a table, a bar with the time left, and what is being done just now."""

    def __init__(self, screen: Console, clock: Clock = time.monotonic) -> None:
        self._console = screen
        self._pace = Pace(clock)
        self._rows: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self._what = ""
        self._done = self._steps = 0
        # drawn four times a second by a thread of its own: calls only change what will be drawn
        self._live = Live(console=screen, get_renderable=self._draw, refresh_per_second=4)

    def started(self, name: str, folder: Path, steps: int, first: int) -> None:
        self._console.print(Text(_opening(name, folder, steps, first)), soft_wrap=True)
        self._done, self._steps = first, steps
        self._pace.begin()

    def waiting(self, what: str) -> None:
        self._what = plain(what)
        if not self._live.is_started:
            # the first word comes while the model is loaded, before the run has started
            self._live.start()
            # a process that is killed could not bring the cursor back
            self._console.show_cursor(True)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._pace.step()
        self._done = step
        # replaced whole: the drawing thread may be reading it
        self._rows = (*self._rows, (step, tuple(column.show(numbers) for column in COLUMNS)))[-ROWS:]

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._pace.begin()
        self._console.print(Text(_evaluated(step, evaluation)), soft_wrap=True)

    def notice(self, text: str) -> None:
        self._console.print(Text(plain(text), style="bold"), soft_wrap=True)

    def ended(self, summary: str) -> None:
        self._what = ""
        self.close()
        if summary:
            self._console.print(Text(_lines(summary)), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right", no_wrap=True, min_width=5)
        for column in COLUMNS:
            table.add_column(column.title, justify="right", no_wrap=True, min_width=column.width)
        # in a low window the newest steps matter, and the bar below them
        for step, shown in self._rows[-max(1, self._console.height - 5) :]:
            table.add_row(str(step), *shown)
        what = Text(self._what, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(*([table] if self._rows else []), *([self._bar()] if self._steps else []), what)

    def _bar(self) -> RenderableType:
        left = self._pace.left(self._steps - self._done)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"step {self._done}/{self._steps}"),
            ProgressBar(total=self._steps, completed=self._done, width=30),
            Text("" if left is None else f"about {duration(left)} left"),
        )
        return bar


class Lines(Display):
    """A log: one aligned line a step, so that columns stay columns under `tail`, `grep` and `awk`."""

    def __init__(self, screen: Console, clock: Clock = time.monotonic) -> None:
        self._console = screen
        self._clock = clock
        self._pace = Pace(clock)
        self._steps = 0
        self._last = clock()

    def started(self, name: str, folder: Path, steps: int, first: int) -> None:
        self._steps = steps
        self._pace.begin()
        self._say(_opening(name, folder, steps, first))

    def waiting(self, what: str) -> None:
        if self._clock() - self._last >= QUIET:
            self._say(plain(what))

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._pace.step()
        place = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        shown = [f"{column.title} {column.show(numbers):>{column.width}}" for column in COLUMNS]
        left = self._pace.left(self._steps - step)
        self._say("  ".join([place, *shown, f"left {'-' if left is None else duration(left)}"]))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._pace.begin()
        self._say(_evaluated(step, evaluation))

    def notice(self, text: str) -> None:
        self._say(plain(text))

    def ended(self, summary: str) -> None:
        if summary:
            self._say(_lines(summary))

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._last = self._clock()


class JsonLines(Display):
    """For machines: every event as an object with `event` and its fields; numbers that are not finite are null."""

    def __init__(self, out: Callable[[str], None] | None = None, clock: Clock = time.monotonic) -> None:
        self._out = out or _at_once
        self._clock = clock
        self._last = -math.inf

    def started(self, name: str, folder: Path, steps: int, first: int) -> None:
        self._say("started", name=name, folder=str(folder), steps=steps, first=first)

    def waiting(self, what: str) -> None:
        if self._clock() - self._last >= QUIET:
            self._say("waiting", what=what)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._say("step", step=step, numbers=_finite(numbers))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        numbers = _finite(evaluation.numbers())
        self._say("evaluated", step=step, environment=evaluation.environment, numbers=numbers)

    def notice(self, text: str) -> None:
        self._say("notice", text=text)

    def ended(self, summary: str) -> None:
        self._say("ended", summary=summary)

    def _say(self, event: str, **fields: Any) -> None:
        self._out(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._last = self._clock()


def plain(text: str) -> str:
    """Text with every character that is not printable written out: no escape sequence, no second line, no right-to-left
    override comes through."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def interval(low: float, high: float) -> str:
    """A 95 % interval for people."""
    return f"{low:.3f} - {high:.3f}" if math.isfinite(low) and math.isfinite(high) else "-"


def duration(seconds: float) -> str:
    """As 45s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _opening(name: str, folder: Path, steps: int, first: int) -> str:
    going = f"goes on after step {first} of {steps}" if first else f"{steps} steps"
    return plain(f"{name}: {going}, in {folder}")


def _evaluated(step: int, one: Evaluation) -> str:
    # pass@1 is the reward again where rewards are 0 or 1; only larger k say something new
    passes = "".join(f", pass@{k} {value:.3f}" for k, value in one.passes.items() if k > 1)
    failed = f", {one.failed} failed (first: {one.error})" if one.failed else ""
    when = f"after step {step}" if step else "before training"
    return plain(
        f"evaluated {when}: {one.environment} reward {one.reward:.3f} ({interval(one.low, one.high)}){passes},"
        f" {one.tasks} x {one.samples}{failed}"
    )


def _lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.split("\n"))


def _at_once(text: str) -> None:
    # whoever reads a pipe follows the run, and must not be a buffer behind it
    write(text)
    sys.stdout.flush()


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
