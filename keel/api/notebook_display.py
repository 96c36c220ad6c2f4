"""The progress of a run in a notebook: a bar, a table of the last steps and what the run reports.

The callbacks come from the thread of the run and only change what is shown. The caller's thread publishes it with
`refresh`: output of other threads may appear below another cell. All text is escaped: it may come from a model.
"""

import html
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.run.monitor.progress import (
    COLUMNS,
    TABLE_ROWS,
    Clock,
    RunDisplay,
    StepPace,
    escape_unprintable,
    evaluation_line,
    failure_line,
    format_components,
    format_duration,
    loss_line,
    start_line,
)

if TYPE_CHECKING:
    from keel.run.evaluation.evaluate import EvaluationResult

MAX_LINES = 30
"""Reported lines that are kept."""

Publish = Callable[[str, str], None]
"""Shows HTML, or text where HTML cannot be shown, in place of what was shown before."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay(RunDisplay):
    """Display for a notebook; the caller's thread calls `refresh`."""

    def __init__(self, publish: Publish | None = None, clock: Clock = time.monotonic) -> None:
        self._publish = publish or _publish_below_cell()
        self._pace = StepPace(clock)
        self._lines: list[str] = []
        self._rows: list[tuple[str, ...]] = []
        self._status = self._failures = self._components = self._summary = ""
        self._last_step = self._total_steps = 0
        self._shown = ""

    def started(self, name: str, folder: Path, steps: int, start_step: int) -> None:
        self._last_step, self._total_steps = start_step, steps
        self._pace.restart()
        self._add_line(start_line(name, folder, steps, start_step))

    def waiting(self, status: str) -> None:
        self._status = status

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.record_step()
        self._last_step = step
        cells = (str(step), *(column.format_cell(metrics) for column in COLUMNS))
        self._rows = [*self._rows, cells][-TABLE_ROWS:]
        self._components = format_components(metrics)

    def rollouts_failed(self, count: int, last_error: str) -> None:
        self._failures = failure_line(count, last_error)

    def evaluated(self, step: int, evaluation: "EvaluationResult") -> None:
        self._pace.restart()
        self._add_line(evaluation_line(step, evaluation))

    def loss_evaluated(self, step: int, name: str, metrics: Mapping[str, float]) -> None:
        self._pace.restart()
        self._add_line(loss_line(step, name, metrics))

    def notice(self, text: str) -> None:
        self._add_line(escape_unprintable(text))

    def ended(self, summary: str) -> None:
        self._summary, self._status, self._total_steps = summary, "", 0

    def refresh(self) -> None:
        """Publish what has changed."""
        page = self._html()
        if page != self._shown:
            self._shown = page
            self._publish(page, self._text())

    def _add_line(self, text: str) -> None:
        self._lines = [*self._lines, text][-MAX_LINES:]

    def _html(self) -> str:
        lines = [f"<div>{_escaped(line)}</div>" for line in self._lines]
        if self._rows:
            titles = "".join(f"<th>{_escaped(title)}</th>" for title in ("step", *(column.title for column in COLUMNS)))
            rows = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in self._rows)
            lines.append(f"<table><tr>{titles}</tr>{rows}</table>")
        lines += [f"<div>{_escaped(text)}</div>" for text in (self._components, self._failures) if text]
        if self._total_steps:
            bar = f'<progress value="{self._last_step}" max="{self._total_steps}"></progress>'
            lines.append(f"<div>{bar} {_escaped(self._progress())}</div>")
        if self._summary:
            summary = "\n".join(_escaped(line) for line in self._summary.split("\n"))
            lines.append(f"<pre>{summary}</pre>")
        return "".join(lines)

    def _text(self) -> str:
        header = [" ".join(f"{title:>11}" for title in ("step", *(column.title for column in COLUMNS)))]
        rows = [" ".join(f"{cell:>11}" for cell in row) for row in self._rows]
        end = [escape_unprintable(line) for line in self._summary.split("\n")] if self._summary else [self._progress()]
        return "\n".join([*self._lines, *(header if rows else []), *rows, *end])

    def _progress(self) -> str:
        left = self._pace.seconds_left(self._total_steps - self._last_step)
        parts = [f"step {self._last_step}/{self._total_steps}", escape_unprintable(self._status)]
        return ", ".join(part for part in (*parts, f"about {format_duration(left)} left" if left else "") if part)


def _escaped(text: str) -> str:
    return html.escape(escape_unprintable(text))


def _publish_below_cell() -> Publish:
    """Return a function that replaces the output below the cell that is running."""
    display = importlib.import_module("IPython.display").display
    handle: Any = None

    def publish(page: str, text: str) -> None:
        nonlocal handle
        bundle = {"text/html": page, "text/plain": text}
        if handle is None:
            handle = display(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return publish
