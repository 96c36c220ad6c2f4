"""A reward function in a module that loads nothing else, so that worker processes start quickly."""

from typing import Any


def even(completion: str, answer: str, **columns: Any) -> float:
    """Return 1 for a completion with an even number of bytes."""
    return float(len(completion.encode()) % 2 == 0)
