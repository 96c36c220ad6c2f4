"""Detect time in which the process was suspended.

A stopped process (SIGSTOP, a frozen container, a machine that sleeps) runs nothing, so a timeout must not count that
time. A component that polls at a known interval asks a `SuspendClock` after each poll: a poll that comes much later
than expected means that the process did not run.
"""

import time
from collections.abc import Callable


class SuspendClock:
    """Measures suspended time between polls, in monotonic seconds."""

    def __init__(self, threshold: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A poll counts as suspended if it is more than `threshold` seconds late."""
        self.threshold = threshold
        self.suspended_seconds = 0.0
        """Total suspended time so far."""
        self._clock = clock
        self._last_poll = clock()

    def start(self) -> float:
        """Start a new interval without checking the last one; return the current time."""
        self._last_poll = self._clock()
        return self._last_poll

    def poll(self, expected: float = 0.0) -> float:
        """Return the seconds by which this poll is late if the process was suspended, else 0.

        `expected` is how long the interval since the last `start` or `poll` should have lasted.
        """
        now = self._clock()
        late = now - self._last_poll - expected
        self._last_poll = now
        if late <= self.threshold:
            return 0.0
        self.suspended_seconds += late
        return late
