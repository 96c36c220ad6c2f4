"""A command ends when its coroutine does, whatever tasks are left running."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from keel.run import event_loop
from keel.run.event_loop import run_to_completion


def test_the_result_or_error_of_the_coroutine_is_passed_on() -> None:
    async def returns() -> int:
        return 7

    async def raises() -> None:
        raise LookupError("no")

    assert run_to_completion(returns()) == 7
    with pytest.raises(LookupError):
        run_to_completion(raises())


def test_a_task_that_ignores_cancellation_is_abandoned_after_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_GRACE", 0.2)
    ended = []

    async def ignores_cancellation() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async def polite() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("polite")

    async def work() -> str:
        kept.extend([asyncio.ensure_future(ignores_cancellation()), asyncio.ensure_future(polite())])
        await asyncio.sleep(0.01)
        return "done"

    kept: list[asyncio.Future[None]] = []
    start = time.monotonic()
    assert run_to_completion(work()) == "done"
    assert time.monotonic() - start < 5 and ended == ["polite"]


@pytest.mark.process
def test_suspended_time_does_not_count_as_waiting() -> None:
    """A child suspends itself for six seconds during a wait of two; the wait continues after it resumes."""
    code = """
import asyncio, os, signal, threading, time
from keel.run.event_loop import run_to_completion

async def work():
    loop = asyncio.get_running_loop()
    start, loop_start = time.monotonic(), loop.time()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    await asyncio.sleep(2)
    return time.monotonic() - start, loop.time() - loop_start

print(*run_to_completion(work()))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    os.waitpid(child.pid, os.WUNTRACED)
    time.sleep(6)
    os.kill(child.pid, signal.SIGCONT)
    output, _ = child.communicate(timeout=60)
    real, counted = map(float, output.split())
    assert real > 7 and 1.9 < counted < 4.5
