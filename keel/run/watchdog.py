"""The watchdog of a run: when nothing has come of waiting for too long it says what for, and ends the run.

It is a thread, because what hangs may be the event loop itself: an environment that computes and never awaits. Any
progress is enough, ever so slow, and only monotonic time in which the process ran counts: not a clock that is set, not
a machine that slept. Guarantees that a run without progress is warned about at half of its limit, then ends with
`Stalled`, which names what was waited for; where not even that ends it (a loop that is held, a thread that never
returns) `abandon` is called, which in a command is the end of the process.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from keel.errors import KeelError

STALL = 3600.0
"""The limit where settings give none, in seconds; three times the longest episode's, where that is more."""
ASLEEP = 20
"""Looks that have to be missed in a row before the process counts as stopped."""
GRACE = 60.0
"""Seconds for a run that was told to end, since closing engines and episodes takes some; the limit, if less."""


class Stalled(KeelError):
    """A run that waited for something for too long."""


class Watchdog:
    """Watches the task that enters it. `say` and `progress` may be called from any thread."""

    def __init__(
        self,
        limit: float,
        notice: Callable[[str], None],
        abandon: Callable[[str], None] | None = None,
    ) -> None:
        """`notice` is called in the event loop, `abandon` in the watchdog's own thread."""
        self.limit, self.verdict = limit, ""
        self._notice, self._abandon, self._grace = notice, abandon, min(GRACE, limit)
        self._what, self._mark = "starting", object()
        self._since = time.monotonic()
        self._ended = threading.Event()

    def say(self, what: str) -> None:
        """What is being waited for; that alone is no progress."""
        self._what = what

    def progress(self, mark: object = None) -> None:
        """Something came of it; with a `mark`, only if it is another than the last."""
        if mark is None or mark != self._mark:
            self._mark = mark
            self._since = time.monotonic()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._thread_of_loop = threading.get_ident()
        self.progress()
        threading.Thread(target=self._watch, name="keel watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.verdict and isinstance(error, asyncio.CancelledError):
            # still watched: what hangs may be a thread, for which the process would wait at its end
            raise Stalled(self.verdict) from None
        self._ended.set()

    def _watch(self) -> None:
        warned, tick, last = False, min(1.0, self.limit / 20), time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            if now - last > ASLEEP * tick:  # this thread was not run either, so neither was what it watches
                self._since += now - last
            last, quiet = now, now - self._since
            if quiet >= self.limit:
                self._end(quiet)
                return
            late = quiet >= self.limit / 2
            if late and not warned:
                self._tell(self._notice, f"nothing has come for {quiet:.0f} s of: {self._what}")
            warned = late

    def _end(self, quiet: float) -> None:
        self.verdict = (
            f"nothing has come for {quiet:.0f} s (stall_after = {self.limit:g}) of: {self._what}; mend what it waits"
            " for and go on with --resume, or raise stall_after if it is only slow"
        )
        if self._task is not None:
            self._tell(self._task.cancel)
        if not self._ended.wait(self._grace) and self._abandon is not None:
            self._abandon(f"{self.verdict}; the process is held by {self._place()}")

    def _tell(self, call: Callable[..., object], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed: the run has ended by itself
            return

    def _place(self) -> str:
        """Where the event loop is, for a loop that does not turn any more."""
        frame = sys._current_frames().get(self._thread_of_loop)
        if frame is None:
            return "a thread that does not end"
        last = traceback.extract_stack(frame)[-1]
        return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
