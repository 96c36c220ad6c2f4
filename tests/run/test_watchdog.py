"""The watchdog: what hangs is named and ended, what is only slow is not."""

import asyncio
import threading
import time

import pytest

from keel.run.watchdog import RunStalled, Watchdog


def test_what_makes_no_progress_is_warned_about_and_ended_by_name() -> None:
    told: list[str] = []

    async def scene() -> None:
        with Watchdog(0.3, told.append) as watchdog:
            watchdog.set_activity("sampling: 3 groups ready")
            await asyncio.sleep(30)

    began = time.monotonic()
    with pytest.raises(
        RunStalled, match=r"nothing has come for 0 s \(stall_timeout = 0\.3\) of: sampling: 3 groups ready; "
    ):
        asyncio.run(scene())
    assert time.monotonic() - began < 5
    assert len(told) == 1 and "nothing has come" in told[0]


def test_progress_however_slow_is_enough_and_the_same_mark_is_none() -> None:
    async def slow() -> str:
        with Watchdog(0.4, lambda _: None) as watchdog:
            for number in range(8):
                await asyncio.sleep(0.15)
                watchdog.progress(("landed", number))
        return "done"

    async def still() -> None:
        with Watchdog(0.4, lambda _: None) as watchdog:
            while True:
                await asyncio.sleep(0.05)
                watchdog.progress(("landed", 0))

    assert asyncio.run(slow()) == "done"
    with pytest.raises(RunStalled):
        asyncio.run(still())


def test_a_cancellation_from_outside_stays_one() -> None:
    async def scene() -> None:
        with Watchdog(60, lambda _: None):
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.05, task.cancel)
            await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scene())


def test_a_loop_that_is_held_is_given_up_by_the_place_that_holds_it() -> None:
    told: list[str] = []
    given_up = threading.Event()

    def abandon(why: str) -> None:
        told.append(why)
        given_up.set()

    async def scene() -> None:
        with Watchdog(0.1, lambda _: None, abandon) as watchdog:
            watchdog.set_activity("sampling")
            hold(given_up)
            await asyncio.sleep(0)  # where the cancellation that nobody could deliver arrives

    with pytest.raises(RunStalled):
        asyncio.run(scene())
    assert "of: sampling" in told[0] and "held by" in told[0]


def hold(until: threading.Event) -> None:
    assert until.wait(10)
