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

DEFAULT_STALL_TIMEOUT = 3600.0
"""The limit where settings give none, in seconds; three times the longest episode's, where that is more."""
SUSPENDED_AFTER_POLLS = 20
"""Looks that have to be missed in a row before the process counts as stopped."""
SHUTDOWN_GRACE = 60.0
"""Seconds for a run that was told to end, since closing engines and episodes takes some; the limit, if less."""


class RunStalled(KeelError):
    """A run that waited for something for too long."""


class Watchdog:
    """Watches the task that enters it. `say` and `progress` may be called from any thread."""

    def __init__(
        self,
        timeout: float,
        on_warning: Callable[[str], None],
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        """`notice` is called in the event loop, `abandon` in the watchdog's own thread."""
        self.timeout, self.stall_reason = timeout, ""
        self._on_warning, self._on_hang, self._grace = on_warning, on_hang, min(SHUTDOWN_GRACE, timeout)
        self._activity, self._progress_mark = "starting", object()
        self._last_progress = time.monotonic()
        self._ended = threading.Event()

    def set_activity(self, activity: str) -> None:
        """What is being waited for; that alone is no progress."""
        self._activity = activity

    def progress(self, mark: object = None) -> None:
        """Something came of it; with a `mark`, only if it is another than the last."""
        if mark is None or mark != self._progress_mark:
            self._progress_mark = mark
            self._last_progress = time.monotonic()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._loop_thread = threading.get_ident()
        self.progress()
        threading.Thread(target=self._watch, name="keel watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.stall_reason and isinstance(error, asyncio.CancelledError):
            # still watched: what hangs may be a thread, for which the process would wait at its end
            raise RunStalled(self.stall_reason) from None
        self._ended.set()

    def _watch(self) -> None:
        warned, tick, last = False, min(1.0, self.timeout / 20), time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            if (
                now - last > SUSPENDED_AFTER_POLLS * tick
            ):  # this thread was not run either, so neither was what it watches
                self._last_progress += now - last
            last, quiet = now, now - self._last_progress
            if quiet >= self.timeout:
                self._stop_run(quiet)
                return
            late = quiet >= self.timeout / 2
            if late and not warned:
                self._call_in_loop(self._on_warning, f"nothing has come for {quiet:.0f} s of: {self._activity}")
            warned = late

    def _stop_run(self, idle_seconds: float) -> None:
        self.stall_reason = (
            f"nothing has come for {idle_seconds:.0f} s (stall_timeout = {self.timeout:g}) of: {self._activity}; mend what it waits"
            " for and go on with --resume, or raise stall_timeout if it is only slow"
        )
        if self._task is not None:
            self._call_in_loop(self._task.cancel)
        if not self._ended.wait(self._grace) and self._on_hang is not None:
            self._on_hang(f"{self.stall_reason}; the process is held by {self._describe_loop_position()}")

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the run has ended by itself
            return

    def _describe_loop_position(self) -> str:
        """Where the event loop is, for a loop that does not turn any more."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "a thread that does not end"
        last = traceback.extract_stack(frame)[-1]
        return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
