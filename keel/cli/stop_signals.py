"""Ctrl-C and SIGTERM for commands that own several processes."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNAL_DEBOUNCE_SECONDS = 1.0
"""Seconds within which a second signal is ignored: wrappers forward signals that the terminal has already sent."""


@contextmanager
def stop_on_signals(stop: Callable[[], None], kill: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first signal, `kill` on the second."""
    first_signal: float | None = None

    def interrupted(*_: object) -> None:
        nonlocal first_signal
        if first_signal is None:
            first_signal = time.monotonic()
            stop()
        elif time.monotonic() - first_signal > SIGNAL_DEBOUNCE_SECONDS:
            kill()

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
