"""Running a coroutine to its end without being held up by what it leaves behind.

`asyncio.run` waits for ever for a task that goes on after it was cancelled, as an episode of a careless environment
may: the run would be over and its process would not. Here such tasks have a moment to end, and are then left.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Done = TypeVar("Done")

MOMENT = 5.0
"""Seconds for tasks that were cancelled."""


def complete(work: Coroutine[Any, Any, Done]) -> Done:
    """What the coroutine returns or raises, in an event loop of its own."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        try:
            _end(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=MOMENT))
    if any(not task.done() for task in tasks):
        loop.set_exception_handler(lambda *_: None)  # that they are pending when they are thrown away is known
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
