"""Find prompts that are too long for a run before it starts, without tokenising every row of a large data set.

A token stands for at least one byte, so a prompt with fewer bytes than the limit cannot be too long. The others are
rendered, longest first, for a bounded time. A row that is named is too long; one that was not reached fails its
rollouts with `prompt_too_long` when it is drawn.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CHECK_SECONDS = 5.0
"""Seconds for rendering the longest prompts of one data set."""

CountTokens = Callable[[Sequence[dict[str, Any]]], int]


@dataclass
class LengthReport:
    """The prompts of one data set that leave too little room for a completion."""

    checked: int = 0
    """Rows that were rendered."""
    candidates: int = 0
    """Rows that could be too long by their number of bytes."""
    too_long: list[tuple[int, int]] = field(default_factory=list)
    """Row and tokens of each prompt without room for any completion."""
    cut: int = 0
    """Prompts with room for a completion, but not for one of `sampling.max_tokens`."""


def find_long_prompts(
    sizes: "np.ndarray[Any, Any]",
    messages: Callable[[int], Sequence[dict[str, Any]]],
    count_tokens: CountTokens,
    *,
    limit: int,
    max_tokens: int,
    seconds: float = CHECK_SECONDS,
) -> LengthReport:
    """Return the prompts of at least `limit` tokens, and the number of those with less than `max_tokens` left.

    `sizes` bounds the bytes of each row's own messages from above; `messages` returns the whole prompt of a row.
    """
    report = LengthReport()
    if not len(sizes):
        return report
    # what the chat template, the system message and the examples add: at most the whole of the shortest prompt
    overhead = count_tokens(messages(int(np.argmin(sizes))))
    prompt_limit = limit - max_tokens if max_tokens < limit else limit
    order = np.argsort(-sizes, kind="stable")
    candidates = order[sizes[order] + overhead >= prompt_limit]
    report.candidates = len(candidates)
    deadline = time.monotonic() + seconds
    for number in candidates.tolist():
        if time.monotonic() > deadline:
            break
        tokens = count_tokens(messages(number))
        report.checked += 1
        if tokens >= limit:
            report.too_long.append((number, tokens))
        elif tokens > prompt_limit:
            report.cut += 1
    report.too_long.sort()
    return report
