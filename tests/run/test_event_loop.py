"""A command ends when its work does, whatever was left running."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from keel.run import event_loop
from keel.run.event_loop import run_to_completion


def test_what_it_returns_or_raises_is_handed_on() -> None:
    async def gives() -> int:
        return 7

    async def raises() -> None:
        raise LookupError("no")

    assert run_to_completion(gives()) == 7
    with pytest.raises(LookupError):
        run_to_completion(raises())


def test_a_task_that_ignores_its_end_is_left_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_GRACE", 0.2)
    ended = []

    async def deaf() -> None:
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
        kept.extend([asyncio.ensure_future(deaf()), asyncio.ensure_future(polite())])
        await asyncio.sleep(0.01)
        return "done"

    kept: list[asyncio.Future[None]] = []
    began = time.monotonic()
    assert run_to_completion(work()) == "done"
    assert time.monotonic() - began < 5 and ended == ["polite"]


def test_a_process_that_was_stopped_has_not_waited() -> None:
    """A child stops itself for six seconds while it waits two; the wait is not over when it goes on."""
    code = """
import asyncio, os, signal, threading, time
from keel.run.event_loop import run_to_completion

async def work():
    loop = asyncio.get_running_loop()
    began, counted = time.monotonic(), loop.time()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    await asyncio.sleep(2)
    return time.monotonic() - began, loop.time() - counted

print(*run_to_completion(work()))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    os.waitpid(child.pid, os.WUNTRACED)
    time.sleep(6)
    os.kill(child.pid, signal.SIGCONT)
    told, _ = child.communicate(timeout=60)
    real, counted = map(float, told.split())
    assert real > 7 and 1.9 < counted < 4.5
