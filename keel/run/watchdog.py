"""The watchdog of a run: after too long without progress it names what the run waits for and ends it.

It is a thread, because the event loop itself may hang, for example in an environment that computes without awaiting.
Any progress counts, however slow, and only monotonic time in which the process ran: neither a changed system clock nor
a suspended machine. A run without progress is warned about at half of its limit, then ends with `RunStalled`, which
names what it waited for. If even that does not end it (a blocked event loop, a thread that never returns), `on_hang` is
called; the command line then ends the process.
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

from keel.common.suspend_clock import SuspendClock
from keel.errors import KeelError

DEFAULT_STALL_TIMEOUT = 3600.0
"""Default limit in seconds; a run uses three times the longest episode timeout if that is longer."""
SUSPENDED_AFTER_POLLS = 20
"""Polls that must be missed in a row before the process counts as suspended."""
SHUTDOWN_GRACE = 60.0
"""Seconds for a cancelled run to close its engines and episodes; at most the limit itself."""


class RunStalled(KeelError):
    """A run that made no progress for too long."""


class Watchdog:
    """Watches the task that enters it. `set_activity` and `progress` may be called from any thread."""

    def __init__(
        self,
        timeout: float,
        on_warning: Callable[[str], None],
        on_hang: Callable[[str], None] | None = None,
    ) -> None:
        """`on_warning` is called in the event loop, `on_hang` in the watchdog's own thread."""
        self.timeout, self.stall_reason = timeout, ""
        self._on_warning, self._on_hang, self._grace = on_warning, on_hang, min(SHUTDOWN_GRACE, timeout)
        self._activity, self._progress_mark = "starting", object()
        self._last_progress = time.monotonic()
        self._ended = threading.Event()

    def set_activity(self, activity: str) -> None:
        """Set what the run is waiting for; this alone is not progress."""
        self._activity = activity

    def progress(self, mark: object = None) -> None:
        """Record progress; with a `mark`, only if it differs from the last one."""
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
            # keep watching: a thread may hang, and the process would wait for it at exit
            raise RunStalled(self.stall_reason) from None
        self._ended.set()

    def _watch(self) -> None:
        warned, interval = False, min(1.0, self.timeout / 20)
        suspend_clock = SuspendClock(SUSPENDED_AFTER_POLLS * interval)
        while not self._ended.wait(interval):
            # this thread did not run while suspended, so neither did the run it watches
            self._last_progress += suspend_clock.poll()
            idle_seconds = time.monotonic() - self._last_progress
            if idle_seconds >= self.timeout:
                self._stop_run(idle_seconds)
                return
            late = idle_seconds >= self.timeout / 2
            if late and not warned:
                self._call_in_loop(self._on_warning, f"No progress for {idle_seconds:.0f} s while {self._activity}")
            warned = late

    def _stop_run(self, idle_seconds: float) -> None:
        self.stall_reason = (
            f"No progress for {idle_seconds:.0f} s (stall_timeout = {self.timeout:g}) while {self._activity}; fix the"
            " cause and rerun with --resume, or raise stall_timeout if the run is only slow"
        )
        if self._task is not None:
            self._call_in_loop(self._task.cancel)
        if not self._ended.wait(self._grace) and self._on_hang is not None:
            self._on_hang(f"{self.stall_reason}; the process is blocked in {self._describe_loop_position()}")

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the run has already ended
            return

    def _describe_loop_position(self) -> str:
        """Return the source line that blocks the event loop."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "a thread that does not finish"
        last = traceback.extract_stack(frame)[-1]
        return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
