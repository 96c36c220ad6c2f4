"""Awaiting several coroutines together."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


async def gather_or_cancel(awaitables: Sequence[Awaitable[Result]]) -> list[Result]:
    """Return every result, or raise the first failure after the rest was cancelled and awaited."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
