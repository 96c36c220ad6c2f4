"""Displays of a run: a live table in a terminal, aligned lines elsewhere, or JSON with one event per line.

All three are callbacks (`keel/run/monitor/callbacks.py`) and show the same metrics; a metric that a step does not have
is "-". Text may come from a model or an environment: it is never read as markup, and characters that would move the
cursor or reverse the text direction are escaped. The time left is an estimate from the last steps.
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

from keel.rollout.rollout_metrics import REWARD_COMPONENTS
from keel.run.monitor.callbacks import RunCallback
from keel.run.monitor.console import console

if TYPE_CHECKING:
    from keel.run.evaluation.evaluate import EvaluationResult

TABLE_ROWS = 10
"""Steps in the table; the time left is estimated from as many."""
QUIET_SECONDS = 30.0
"""Seconds without output after which a log prints what the run is waiting for."""

Clock = Callable[[], float]


class StepColumn(NamedTuple):
    """One metric of a step."""

    title: str
    metric: str
    """Name in the metrics of the step."""
    width: int
    format: str

    def format_cell(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        # a step that trained no tokens has no averages
        return "-" if value is None or not math.isfinite(value) else format(value, self.format)


COLUMNS = (
    StepColumn("reward", "reward", 6, ".3f"),
    StepColumn("loss", "loss", 8, "+.4f"),
    StepColumn("masked low", "is_masked_low", 6, ".2%"),
    StepColumn("masked high", "is_masked_high", 6, ".2%"),
    StepColumn("mismatch", "mismatch_kl", 8, ".1e"),
    StepColumn("staleness", "staleness", 5, ".2f"),
    StepColumn("tok/s", "tokens_per_second", 6, ",.0f"),
    StepColumn("seconds", "seconds", 7, ".1f"),
)
"""masked low, high: share of tokens dropped by a gate because the policy's probability was too low or too high
relative to the sampler's."""
SFT_COLUMNS = (
    StepColumn("loss", "loss", 8, ".4f"),
    StepColumn("entropy", "entropy", 7, ".4f"),
    StepColumn("gradient", "grad_norm", 8, ".3f"),
    StepColumn("lr", "lr", 8, ".1e"),
    StepColumn("epoch", "epoch", 6, ".2f"),
    StepColumn("tokens", "trainable_tokens", 6, ".0f"),
    *COLUMNS[-2:],
)
"""Columns of supervised fine-tuning. tokens: trained tokens of the step."""


def make_run_display(*, json: bool = False, columns: tuple[StepColumn, ...] = COLUMNS) -> "RunDisplay":
    """Return the display for standard output, a context manager that restores the terminal."""
    if json:
        return RunJsonLog()
    screen = console()
    return RunScreen(screen, columns=columns) if screen.is_terminal else RunLog(screen, columns=columns)


class RunDisplay(RunCallback):
    """A callback that may control the terminal."""

    def close(self) -> None:
        """Restore the terminal. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FailureNotice:
    """Decides when a log reports failed rollouts: the first time, then at most every `QUIET_SECONDS`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_time = -math.inf

    def is_due(self) -> bool:
        due = self._clock() - self._last_time >= QUIET_SECONDS
        if due:
            self._last_time = self._clock()
        return due


class StepPace:
    """Estimates the time left from the end times of the last steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_times: tuple[float, ...] = ()

    def restart(self) -> None:
        """Start the clock now, unless a step has ended: the time before the first step is not part of a step."""
        if len(self._end_times) < 2:
            self._end_times = (self._clock(),)

    def record_step(self) -> None:
        self._end_times = (*self._end_times, self._clock())[-TABLE_ROWS - 1 :]

    def seconds_left(self, steps: int) -> float | None:
        """Return the estimated seconds of this many further steps, or None before the first step has ended."""
        if len(self._end_times) < 2:
            return None
        step_seconds = (self._end_times[-1] - self._end_times[0]) / (len(self._end_times) - 1)
        return max(0.0, step_seconds * steps - (self._clock() - self._end_times[-1]))


class RunScreen(RunDisplay):
    """Display for a terminal: a table of the last steps, a bar with the time left, and the current status."""

    def __init__(
        self, screen: Console, clock: Clock = time.monotonic, columns: tuple[StepColumn, ...] = COLUMNS
    ) -> None:
        self._console, self._columns = screen, columns
        self._pace = StepPace(clock)
        self._rows: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self._status = self._failures = self._components = ""
        self._last_step = self._total_steps = 0
        # a separate thread draws four times a second; the callbacks only change what it draws
        self._live = Live(console=screen, get_renderable=self._draw, refresh_per_second=4)

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._console.print(Text(start_line(name, folder, steps, start_step)), soft_wrap=True)
        self._last_step, self._total_steps = start_step, steps
        self._pace.restart()

    def waiting(self, status: str) -> None:
        self._status = escape_unprintable(status)
        if not self._live.is_started:
            # the first status arrives while the model is loaded, before the run has started
            self._live.start()
            # keep the cursor visible, since a killed process could not restore it
            self._console.show_cursor(True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.record_step()
        self._last_step = step
        # assigned as a new tuple, since the drawing thread may be reading the old one
        self._rows = (*self._rows, (step, tuple(column.format_cell(metrics) for column in self._columns)))[-TABLE_ROWS:]
        self._components = escape_unprintable(format_components(metrics))

    def rollouts_failed(self, count: int, last_error: str) -> None:
        self._failures = failure_line(count, last_error)

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        self._pace.restart()
        self._console.print(Text(evaluation_line(step, evaluation)), soft_wrap=True)

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        self._pace.restart()
        self._console.print(Text(loss_line(step, name, metrics)), soft_wrap=True)

    def notice(self, text: str) -> None:
        self._console.print(Text(escape_unprintable(text), style="bold"), soft_wrap=True)

    def ended(self, summary: str) -> None:
        self._status, self._total_steps = "", 0  # the last drawing shows neither status nor bar
        if summary:
            self._failures = ""  # part of the summary
        self.close()
        if summary:
            self._console.print(Text(_escape_lines(summary)), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right", no_wrap=True, min_width=5)
        for column in self._columns:
            # titles of two words take two lines, so that the table fits 80 columns
            header = column.title.replace(" ", "\n")
            table.add_column(header, justify="right", no_wrap=True, min_width=column.width)
        # in a small window show only the newest steps, so that the bar below them stays visible
        notes = [Text(self._components, style="dim", no_wrap=True, overflow="ellipsis")] if self._components else []
        notes += [Text(self._failures, style="red")] if self._failures else []
        note_lines = bool(self._components) + math.ceil(len(self._failures) / max(self._console.width, 1))
        for step, cells in self._rows[-max(1, self._console.height - 5 - note_lines) :]:
            table.add_row(str(step), *cells)
        status = Text(self._status, style="dim", no_wrap=True, overflow="ellipsis")
        bar = [self._progress_bar()] if self._total_steps else []
        return Group(*([table] if self._rows else []), *notes, *bar, status)

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
    """Display for files and pipes: one aligned line per step, to be read with `tail`, `grep` and `awk`."""

    def __init__(
        self, screen: Console, clock: Clock = time.monotonic, columns: tuple[StepColumn, ...] = COLUMNS
    ) -> None:
        self._console, self._columns = screen, columns
        self._clock = clock
        self._pace = StepPace(clock)
        self._failure_notice = FailureNotice(clock)
        self._total_steps = 0
        self._last_line_time = clock()

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._total_steps = steps
        self._pace.restart()
        self._print(start_line(name, folder, steps, start_step))

    def waiting(self, status: str) -> None:
        if self._clock() - self._last_line_time >= QUIET_SECONDS:
            self._print(escape_unprintable(status))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.record_step()
        step_number = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        cells = [f"{column.title} {column.format_cell(metrics):>{column.width}}" for column in self._columns]
        left = self._pace.seconds_left(self._total_steps - step)
        self._print("  ".join([step_number, *cells, f"left {'-' if left is None else format_duration(left)}"]))

    def rollouts_failed(self, count: int, last_error: str) -> None:
        if self._failure_notice.is_due():
            self._print(failure_line(count, last_error))

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        self._pace.restart()
        self._print(evaluation_line(step, evaluation))

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        self._pace.restart()
        self._print(loss_line(step, name, metrics))

    def notice(self, text: str) -> None:
        self._print(escape_unprintable(text))

    def ended(self, summary: str) -> None:
        if summary:
            self._print(_escape_lines(summary))

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._last_line_time = self._clock()


class RunJsonLog(RunDisplay):
    """Display as JSON: every event is an object with `event` and its fields; numbers that are not finite are null."""

    def __init__(self, out: Callable[[str], None] | None = None, clock: Clock = time.monotonic) -> None:
        self._out = out or _write_and_flush
        self._clock = clock
        self._failure_notice = FailureNotice(clock)
        self._last_line_time = -math.inf

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._emit("started", name=name, folder=str(folder), steps=steps, start_step=start_step)

    def waiting(self, status: str) -> None:
        if self._clock() - self._last_line_time >= QUIET_SECONDS:
            self._emit("waiting", status=status)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._emit("step", step=step, metrics=_replace_non_finite(metrics))

    def rollouts_failed(self, count: int, last_error: str) -> None:
        if self._failure_notice.is_due():
            self._emit("rollouts_failed", count=count, last_error=last_error)

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        self.loss_evaluated(step, evaluation.environment, evaluation.scalars())

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        self._emit("evaluated", step=step, environment=name, metrics=_replace_non_finite(metrics))

    def notice(self, text: str) -> None:
        self._emit("notice", text=text)

    def ended(self, summary: str) -> None:
        self._emit("ended", summary=summary)

    def _emit(self, event: str, **fields: Any) -> None:
        self._out(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._last_line_time = self._clock()


def escape_unprintable(text: str) -> str:
    """Escape every character that is not printable, such as escape sequences, newlines and right-to-left overrides."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_interval(low: float, high: float) -> str:
    """Format a 95 % interval, or "-" if it is not known."""
    return f"{low:.3f} - {high:.3f}" if math.isfinite(low) and math.isfinite(high) else "-"


def format_duration(seconds: float) -> str:
    """Format a duration, such as 45s, 3m20s or 2h05m."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"


def format_components(metrics: Mapping[str, float]) -> str:
    """Format the means of the reward components of a step, or return an empty string if there are none."""
    prefix = f"{REWARD_COMPONENTS}/"
    parts = [f"{name.removeprefix(prefix)} {value:.3g}" for name, value in metrics.items() if name.startswith(prefix)]
    return f"reward components: {', '.join(parts)}" if parts else ""


def failure_line(count: int, last_error: str) -> str:
    """Format the number of failed rollouts and the last error."""
    return escape_unprintable(f"{count} rollout{'' if count == 1 else 's'} failed; the last error: {last_error}")


def start_line(name: str, folder: Path, steps: int, start_step: int) -> str:
    """Format the first line of a run."""
    steps_text = f"resumes after step {start_step} of {steps}" if start_step else f"{steps} steps"
    return escape_unprintable(f"{name}: {steps_text}, in {folder}")


def evaluation_line(step: int, evaluation: "EvaluationResult") -> str:
    """Format the result of an evaluation."""
    # pass@1 equals the reward if rewards are 0 or 1, so only larger k are shown
    passes = "".join(f", pass@{k} {value:.3f}" for k, value in evaluation.pass_at_k.items() if k > 1)
    failed = (
        f", {evaluation.failed_episodes} failed (first: {evaluation.first_error})" if evaluation.failed_episodes else ""
    )
    when = f"after step {step}" if step else "before training"
    interval = format_interval(evaluation.low, evaluation.high)
    samples = f" x {evaluation.samples_per_task} samples" if evaluation.samples_per_task > 1 else ""
    return escape_unprintable(
        f"evaluated {when}: {evaluation.environment} reward {evaluation.reward:.3f} ({interval}){passes},"
        f" {evaluation.num_tasks} tasks{samples}{failed}"
    )


def loss_line(step: int, name: str, metrics: Mapping[str, float]) -> str:
    when = f"after step {step}" if step else "before training"
    return escape_unprintable(
        f"evaluated {when}: {name} loss {metrics.get('loss', math.nan):.4f}, {metrics['rows']:.0f} held-out samples"
    )


def _escape_lines(text: str) -> str:
    return "\n".join(escape_unprintable(line) for line in text.split("\n"))


def _write_and_flush(text: str) -> None:
    # flush every event, so that a reader of the pipe follows the run without delay
    sys.stdout.write(text)
    sys.stdout.flush()


def _replace_non_finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
