"""The watchdog ends runs that hang and names the cause; slow runs continue."""

import asyncio
import threading
import time

import pytest

from keel.run.watchdog import RunStalled, Watchdog


def test_a_run_without_progress_is_warned_about_and_ended_with_its_activity() -> None:
    warnings: list[str] = []

    async def scene() -> None:
        with Watchdog(0.3, warnings.append) as watchdog:
            watchdog.set_activity("sampling: 3 groups ready")
            await asyncio.sleep(30)

    start = time.monotonic()
    with pytest.raises(
        RunStalled, match=r"No progress for 0 s \(stall_timeout = 0\.3\) while sampling: 3 groups ready; "
    ):
        asyncio.run(scene())
    assert time.monotonic() - start < 5
    assert len(warnings) == 1 and "No progress" in warnings[0]


def test_slow_progress_is_enough_and_a_repeated_mark_is_not_progress() -> None:
    async def slow() -> str:
        with Watchdog(0.4, lambda _: None) as watchdog:
            for count in range(8):
                await asyncio.sleep(0.15)
                watchdog.progress(("completed", count))
        return "done"

    async def still() -> None:
        with Watchdog(0.4, lambda _: None) as watchdog:
            while True:
                await asyncio.sleep(0.05)
                watchdog.progress(("completed", 0))

    assert asyncio.run(slow()) == "done"
    with pytest.raises(RunStalled):
        asyncio.run(still())


def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    async def scene() -> None:
        with Watchdog(60, lambda _: None):
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.05, task.cancel)
            await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())


def test_a_blocked_event_loop_is_reported_with_the_line_that_blocks_it() -> None:
    reasons: list[str] = []
    reported = threading.Event()

    def on_hang(reason: str) -> None:
        reasons.append(reason)
        reported.set()

    async def scene() -> None:
        with Watchdog(0.1, lambda _: None, on_hang) as watchdog:
            watchdog.set_activity("sampling")
            block(reported)
            await asyncio.sleep(0)  # the cancellation that could not be delivered before arrives here

    with pytest.raises(RunStalled):
        asyncio.run(scene())
    assert "while sampling" in reasons[0] and "blocked in" in reasons[0]


def block(until: threading.Event) -> None:
    assert until.wait(10)
