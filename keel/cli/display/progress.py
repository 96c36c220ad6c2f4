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
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keel.cli.display.console import console, write_stdout
from keel.run.monitor.callbacks import RunCallback

if TYPE_CHECKING:
    from keel.run.evaluate import EvaluationResult

TABLE_ROWS = 10
"""Steps that the table holds, and that the time left is estimated from."""
QUIET_SECONDS = 30.0
"""Seconds without a line after which a log is told what is being waited for."""

Clock = Callable[[], float]


class StepColumn(NamedTuple):
    """One number of a step."""

    title: str
    metric: str
    """In the numbers of the step."""
    width: int
    format: str
    scale: float = 1.0

    def format_cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        # a step that trained nothing has no mean of anything
        return "-" if value is None or not math.isfinite(value) else format(value * self.scale, self.format)


COLUMNS = (
    StepColumn("reward", "reward", 6, ".3f"),
    StepColumn("loss", "loss", 8, "+.4f"),
    StepColumn("low %", "is_masked_low", 6, ".2f", 100.0),
    StepColumn("high %", "is_masked_high", 6, ".2f", 100.0),
    StepColumn("mismatch", "mismatch_kl", 8, ".1e"),
    StepColumn("stale", "staleness", 5, ".2f"),
    StepColumn("tok/s", "tokens_per_second", 6, ",.0f"),
    StepColumn("seconds", "seconds", 7, ".1f"),
)
"""low and high: the share of tokens that a gate dropped, by the side on which the policy left the sampler."""


def make_run_display(*, json: bool = False) -> "RunDisplay":
    """The display that suits standard output; use it in a `with`, so that a terminal is left as it was found."""
    if json:
        return RunJsonLog()
    screen = console()
    return RunScreen(screen) if screen.is_terminal else RunLog(screen)


class RunDisplay(RunCallback):
    """An observer that may hold the terminal."""

    def close(self) -> None:
        """Let go of the terminal. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StepPace:
    """How fast steps come, from when the last few of them ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_times: tuple[float, ...] = ()

    def restart(self) -> None:
        """From now on, unless a step has ended: what comes before the first says nothing about the others."""
        if len(self._end_times) < 2:
            self._end_times = (self._clock(),)

    def record_step(self) -> None:
        self._end_times = (*self._end_times, self._clock())[-TABLE_ROWS - 1 :]

    def seconds_left(self, steps: int) -> float | None:
        """Seconds that so many more steps will take; none before there is anything to go by."""
        if len(self._end_times) < 2:
            return None
        each = (self._end_times[-1] - self._end_times[0]) / (len(self._end_times) - 1)
        return max(0.0, each * steps - (self._clock() - self._end_times[-1]))


class RunScreen(RunDisplay):
    """A terminal: the last steps as a table, a bar with the time left, and what is being done just now."""

    def __init__(self, screen: Console, clock: Clock = time.monotonic) -> None:
        self._console = screen
        self._pace = StepPace(clock)
        self._rows: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self._status = ""
        self._last_step = self._total_steps = 0
        # drawn four times a second by a thread of its own: calls only change what will be drawn
        self._live = Live(console=screen, get_renderable=self._draw, refresh_per_second=4)

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._console.print(Text(_start_line(name, folder, steps, start_step)), soft_wrap=True)
        self._last_step, self._total_steps = start_step, steps
        self._pace.restart()

    def waiting(self, status: str) -> None:
        self._status = escape_unprintable(status)
        if not self._live.is_started:
            # the first word comes while the model is loaded, before the run has started
            self._live.start()
            # a process that is killed could not bring the cursor back
            self._console.show_cursor(True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.record_step()
        self._last_step = step
        # replaced whole: the drawing thread may be reading it
        self._rows = (*self._rows, (step, tuple(column.format_cell(metrics) for column in COLUMNS)))[-TABLE_ROWS:]

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        self._pace.restart()
        self._console.print(Text(_evaluation_line(step, evaluation)), soft_wrap=True)

    def notice(self, text: str) -> None:
        self._console.print(Text(escape_unprintable(text), style="bold"), soft_wrap=True)

    def ended(self, summary: str) -> None:
        self._status = ""
        self.close()
        if summary:
            self._console.print(Text(_escape_lines(summary)), soft_wrap=True)

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
        what = Text(self._status, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(*([table] if self._rows else []), *([self._progress_bar()] if self._total_steps else []), what)

    def _progress_bar(self) -> RenderableType:
        left = self._pace.seconds_left(self._total_steps - self._last_step)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"step {self._last_step}/{self._total_steps}"),
            ProgressBar(total=self._total_steps, completed=self._last_step, width=30),
            Text("" if left is None else f"about {format_duration(left)} left"),
        )
        return bar


class RunLog(RunDisplay):
    """A log: one aligned line a step, so that columns stay columns under `tail`, `grep` and `awk`."""

    def __init__(self, screen: Console, clock: Clock = time.monotonic) -> None:
        self._console = screen
        self._clock = clock
        self._pace = StepPace(clock)
        self._total_steps = 0
        self._last_line_time = clock()

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._total_steps = steps
        self._pace.restart()
        self._print(_start_line(name, folder, steps, start_step))

    def waiting(self, status: str) -> None:
        if self._clock() - self._last_line_time >= QUIET_SECONDS:
            self._print(escape_unprintable(status))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.record_step()
        place = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        shown = [f"{column.title} {column.format_cell(metrics):>{column.width}}" for column in COLUMNS]
        left = self._pace.seconds_left(self._total_steps - step)
        self._print("  ".join([place, *shown, f"left {'-' if left is None else format_duration(left)}"]))

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        self._pace.restart()
        self._print(_evaluation_line(step, evaluation))

    def notice(self, text: str) -> None:
        self._print(escape_unprintable(text))

    def ended(self, summary: str) -> None:
        if summary:
            self._print(_escape_lines(summary))

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._last_line_time = self._clock()


class RunJsonLog(RunDisplay):
    """For machines: every event as an object with `event` and its fields; numbers that are not finite are null."""

    def __init__(self, out: Callable[[str], None] | None = None, clock: Clock = time.monotonic) -> None:
        self._out = out or _write_and_flush
        self._clock = clock
        self._last_line_time = -math.inf

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._emit("started", name=name, folder=str(folder), steps=steps, first=start_step)

    def waiting(self, status: str) -> None:
        if self._clock() - self._last_line_time >= QUIET_SECONDS:
            self._emit("waiting", what=status)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._emit("step", step=step, numbers=_replace_non_finite(metrics))

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        numbers = _replace_non_finite(evaluation.scalars())
        self._emit("evaluated", step=step, environment=evaluation.environment, numbers=numbers)

    def notice(self, text: str) -> None:
        self._emit("notice", text=text)

    def ended(self, summary: str) -> None:
        self._emit("ended", summary=summary)

    def _emit(self, event: str, **fields: Any) -> None:
        self._out(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._last_line_time = self._clock()


def escape_unprintable(text: str) -> str:
    """Text with every character that is not printable written out: no escape sequence, no second line, no right-to-left
    override comes through."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def format_interval(low: float, high: float) -> str:
    """A 95 % interval for people."""
    return f"{low:.3f} - {high:.3f}" if math.isfinite(low) and math.isfinite(high) else "-"


def format_duration(seconds: float) -> str:
    """As 45s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _start_line(name: str, folder: Path, steps: int, start_step: int) -> str:
    going = f"goes on after step {start_step} of {steps}" if start_step else f"{steps} steps"
    return escape_unprintable(f"{name}: {going}, in {folder}")


def _evaluation_line(step: int, evaluation: "EvaluationResult") -> str:
    # pass@1 is the reward again where rewards are 0 or 1; only larger k say something new
    passes = "".join(f", pass@{k} {value:.3f}" for k, value in evaluation.pass_at_k.items() if k > 1)
    failed = (
        f", {evaluation.failed_episodes} failed (first: {evaluation.first_error})" if evaluation.failed_episodes else ""
    )
    when = f"after step {step}" if step else "before training"
    return escape_unprintable(
        f"evaluated {when}: {evaluation.environment} reward {evaluation.reward:.3f} ({format_interval(evaluation.low, evaluation.high)}){passes},"
        f" {evaluation.num_tasks} x {evaluation.samples_per_task}{failed}"
    )


def _escape_lines(text: str) -> str:
    return "\n".join(escape_unprintable(line) for line in text.split("\n"))


def _write_and_flush(text: str) -> None:
    # whoever reads a pipe follows the run, and must not be a buffer behind it
    write_stdout(text)
    sys.stdout.flush()


def _replace_non_finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
