"""The answers that are decoded together: who waits, who runs, and what one step does for all of them.

Invariant: every request that enters leaves exactly once, finished, failed or cancelled, and requests start in the order
in which they came. A finished or cancelled row is gone before the next forward pass. Knows nothing of threads or event
loops: `step` is called by whoever owns the batch.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from keel.config import Sampling
from keel.inference.local.fused_linear import Fused
from keel.inference.local.prefix_cache import Ids, Node
from keel.inference.local.sampling import StopText, draw
from keel.inference.protocol import EngineError, Finish, Generation

PREFILL = 2048
"""No further prompts join a step that has this many prompt tokens to compute: answers under way wait for it."""


@dataclass(eq=False)
class Request:
    """One answer under way."""

    prompt: Ids
    sampling: Sampling
    stops: frozenset[int]
    text: StopText
    room: int
    """How many tokens it may have."""
    future: Future[Generation] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    heard: Callable[[], None] | None = None
    """Called after each token but the last."""
    leaf: Node | None = None
    """Where its prompt ends, while that is computed and kept; later also where the older part of a long answer ends."""

    def __post_init__(self) -> None:
        # of its own, so that nobody else's draws change what it gets
        self.chance = random.Random(self.sampling.seed)

    @property
    def stored(self) -> int:
        """Own tokens that have been through the model since the leaf; the last one has not."""
        return max(len(self.prompt) + len(self.tokens) - 1 - (self.leaf.end if self.leaf else 0), 0)

    def add(self, token: int, logprob: float, version: int) -> Finish | None:
        """One more token; why it was the last, if it was."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stops or self.text.found(self.tokens):
            return "stop"
        if len(self.tokens) >= self.room:
            return "length"
        if self.heard is not None:
            self.heard()
        return None

    def finish(self, why: Finish) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(
                Generation(
                    token_ids=tuple(self.tokens),
                    logprobs=tuple(self.logprobs),
                    versions=tuple(self.versions),
                    finish=why,
                    temperature=self.sampling.temperature,
                )
            )

    def fail(self, error: EngineError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Decoder(Protocol):
    """What computes. Rows are numbered 0..n-1, and keep their numbers between two calls unless they are moved."""

    network: Any
    """What is run; another one after int8 layers were made anew."""
    fused: Fused | None
    """Layers of the network that are computed as one."""

    def known(self, prompt: Ids) -> Node | None:
        """Where the prompt ends, if it need not be computed."""

    def logits(self, rows: Sequence[Request]) -> Tensor:
        """[n, V] for the next token of each row; rows without tokens are new, and come last."""

    def move(self, source: int, target: int, row: Request) -> None:
        """The row has another number now."""

    def clear(self, number: int) -> None:
        """The row with this number held what must not be seen again."""

    def keep(self, rows: Mapping[int, Request]) -> None:
        """Rows with these numbers are finished: what they have computed may be the beginning of a prompt to come."""

    def forget(self) -> None:
        """The weights have changed, or a step failed: compute new prompts anew."""


class Batch:
    """Up to `size` rows, and the requests that wait for one."""

    def __init__(self, decoder: Decoder, size: int) -> None:
        self.decoder, self.size = decoder, size
        self.waiting: deque[Request] = deque()
        self.rows: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """One token for every row, after new ones have joined. `version` is of the weights that are live."""
        self._drop_cancelled()
        joined = self._admit()
        if not self.rows:
            return
        logits = self.decoder.logits(self.rows)
        for request in self.waiting if joined else ():  # a prompt is kept as long as somebody waits for it
            request.leaf = request.leaf or self.decoder.known(request.prompt)
        chance = [row.chance.random() for row in self.rows]
        tokens, logprobs = draw(logits, [row.sampling for row in self.rows], chance)
        ended: dict[int, Finish | None] = {}
        """Rows that leave, with None for those whose logits are not finite."""
        for number, (row, token, logprob) in enumerate(zip(self.rows, tokens, logprobs, strict=True)):
            why = row.add(token, logprob, version) if math.isfinite(logprob) else None
            if why is not None or not math.isfinite(logprob):
                ended[number] = why
        self.decoder.keep({number: self.rows[number] for number, why in ended.items() if why is not None})
        for number in reversed(ended):
            row, why = self.rows[number], ended[number]
            self._remove(number, broken=why is None)
            if why is None:
                row.fail(EngineError(f"the model of version {version} gives logits that are not finite"))
            else:
                row.finish(why)

    def forget(self) -> None:
        """The weights have changed: what waits is computed by the new ones; what runs goes on with what it has."""
        self.decoder.forget()
        for request in self.waiting:
            request.leaf = None

    @torch.inference_mode()
    def fail(self, error: Callable[[], EngineError], *, waiting: bool) -> None:
        """End what runs, and what waits too if asked."""
        for number in reversed(range(len(self.rows))):
            row = self.rows[number]
            self._remove(number, broken=True)
            row.fail(error())
        while waiting and self.waiting:
            self.waiting.popleft().fail(error())
        self.forget()

    def _admit(self) -> bool:
        """Whether anybody joined."""
        new = 0
        joined: set[Ids] = set()
        while self.waiting and len(self.rows) < self.size:
            prompt = self.waiting[0].prompt
            if prompt not in joined and self.decoder.known(prompt) is None:
                if new and new + len(prompt) > PREFILL:
                    break
                new += len(prompt)
            joined.add(prompt)
            self.rows.append(self.waiting.popleft())
        return bool(joined)

    def _drop_cancelled(self) -> None:
        if any(request.future.cancelled() for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.future.cancelled())
        for number in reversed(range(len(self.rows))):
            if self.rows[number].future.cancelled():
                self._remove(number)

    def _remove(self, number: int, *, broken: bool = False) -> None:
        """Rows stay numbered without gaps: the last takes the place of the one that leaves."""
        if broken:
            self.decoder.clear(number)
        last = self.rows.pop()
        if number < len(self.rows):
            self.rows[number] = last
            self.decoder.move(len(self.rows), number, last)
