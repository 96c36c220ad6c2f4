"""Engines that sample nothing and take as long as real ones would.

One decode step of an engine with c requests takes a + b c seconds and gives each of them a token: so many requests get
that much less each, and the engine that much more in all. Requests beyond `max_batch` wait in line. A token carries the
version that the engine held when it was sampled. Time goes from event to event: nothing happens token by token, and
what a request costs does not grow with its length or with the number of engines.
"""

import asyncio
import heapq
from collections import deque
from typing import Any, NamedTuple, Protocol

from keel.config.simulate import SimulateSettings
from keel.errors import ConfigError

NEARLY = 1e-6
"""Of a token: what rounding leaves of a request that is done."""


class Speed(NamedTuple):
    """Seconds of a decode step by the requests in it."""

    base: float
    each: float
    max_batch: int

    @classmethod
    def of(cls, settings: SimulateSettings, max_batch: int) -> "Speed":
        """From the speed of a request alone and of a full batch."""
        most = max_batch * settings.tokens_per_second_alone
        if max_batch > 1 and settings.tokens_per_second > most * (1 + 1e-9):
            raise ConfigError(
                f"tokens_per_second = {settings.tokens_per_second:g} is above max_batch = {max_batch} times"
                f" tokens_per_second_alone = {settings.tokens_per_second_alone:g}: no request is faster for having"
                " others beside it"
            )
        alone, full = 1 / settings.tokens_per_second_alone, max_batch / settings.tokens_per_second
        each = max((full - alone) / (max_batch - 1), 0.0) if max_batch > 1 else 0.0
        return cls(max(alone - each, 0.0), each, max_batch)

    def rates(self) -> list[float]:
        """Tokens a second of each request, by how many there are."""
        return [0.0, *(1 / (self.base + self.each * count) for count in range(1, self.max_batch + 1))]


class Answer:
    """A rollout, as far as the scheduler and the account look at it."""

    __slots__ = ("cut", "error", "error_kind", "oldest_version", "parts", "tokens")

    def __init__(
        self, parts: list[tuple[int, int]], *, cut: bool = False, error_kind: str | None = None, error: str = ""
    ) -> None:
        self.parts = parts
        """Versions, and how many tokens were sampled from each."""
        self.tokens = sum(count for _, count in parts)
        self.oldest_version = parts[0][0] if parts else None
        self.cut = cut
        self.error_kind = error_kind
        self.error = error or None


class Request(asyncio.Future[Answer]):
    """One rollout under way. A bare future: what would only wait needs no task of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: "Owner", group: str, tokens: int) -> None:
        super().__init__(loop=loop)
        self._owner = owner
        self.group = group
        self.tokens = tokens
        """To sample until it ends, well or not."""
        self.cut = False
        self.fails: str | None = None
        """The kind of the error that it ends with."""
        self.engine: Engine | None = None
        self.running = False
        self.began = 0.0
        self.mark = 0
        self.tries = 0

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._owner.cancelled(self)
        return cancelled


class Owner(Protocol):
    """Who is told what becomes of requests, and what all engines have in common."""

    rates: list[float]
    """Of each request by their number, as things are now."""
    max_batch: int
    prefill: float
    """Seconds that a group's prompt takes."""

    def sampled(self, request: Request, parts: list[tuple[int, int]]) -> None:
        """All its tokens are there."""

    def cancelled(self, request: Request) -> None:
        """Nobody wants it any more."""

    def lighter(self, engine: "Engine") -> None:
        """It has fewer requests than before."""


class Engine:
    """One engine. Invariant: `progress` is the number of tokens that a request here since the beginning would have."""

    def __init__(self, number: int, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self._owner, self._loop = number, owner, loop
        self._running: list[tuple[float, int, Request]] = []
        self._order = 0
        self.waiting: deque[Request] = deque()
        self.rows = 0
        """Requests that are being decoded."""
        self.progress = self._at = self._stalled = self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._marks: list[tuple[float, int]] = [(0.0, 0)]
        self._prompts: set[str] = set()
        self.up = self.open = True
        """Not crashed; taking new requests."""
        self._emptied: asyncio.Future[None] | None = None
        self.key = 0
        """Under which it is known to whoever looks for the least loaded."""
        self.tokens = self.busy = self.down_since = 0.0

    @property
    def load(self) -> int:
        return self.rows + len(self.waiting)

    @property
    def version(self) -> int:
        return self._marks[-1][1]

    def take(self, request: Request) -> None:
        request.engine = self
        self.waiting.append(request)
        self._admit()

    def drop(self, request: Request) -> None:
        """It was cancelled."""
        if request.running:
            self.advance()
            request.running = False
            self.rows -= 1
            self._admit()
            self._plan()
        elif request in self.waiting:
            self.waiting.remove(request)
        self._owner.lighter(self)

    def hold(self, version: int) -> None:
        """New weights are live."""
        self.advance()
        self._marks.append((self.progress, version))
        self._prompts.clear()

    def stall(self, seconds: float) -> None:
        """Nothing is sampled for so long."""
        self.advance()
        self._stalled = max(self._stalled, self._loop.time()) + seconds
        self._plan(anew=True)

    async def empty(self) -> None:
        """Wait until nothing is being decoded."""
        if self.rows:
            self._emptied = self._loop.create_future()
            await self._emptied

    def welcome(self, is_open: bool) -> None:
        """Whether new requests are begun."""
        self.open = is_open
        self._admit()

    def change_pace(self) -> None:
        """The rates of all engines have changed; each was advanced by the old ones."""
        self._plan(anew=True)

    @property
    def running(self) -> list[Request]:
        return [request for *_, request in self._running if request.running]

    def crash(self) -> list[Request]:
        """Everything that it had is lost; who had asked for it."""
        self.advance()
        lost = [*self.running, *self.waiting]
        for request in lost:
            request.running, request.engine = False, None
        self._running, self.rows, self.up = [], 0, False
        self.down_since = self._loop.time()
        self.waiting.clear()
        self._prompts.clear()
        self._plan()
        return lost

    def come_back(self, version: int) -> None:
        """Empty, with these weights."""
        self.up = self.open = True
        self.key = 0
        self.hold(version)

    def sampled_of(self, request: Request) -> float:
        """Tokens so far."""
        return self.progress - request.began if request.running else 0.0

    # inside

    def _admit(self) -> None:
        if not (self.open and self.up and self.waiting):
            return
        self.advance()
        while self.waiting and self.rows < self._owner.max_batch:
            request = self.waiting.popleft()
            if self._owner.prefill and request.group not in self._prompts:
                self._prompts.add(request.group)
                self._stalled = max(self._stalled, self._loop.time()) + self._owner.prefill
            request.running, request.began, request.mark = True, self.progress, len(self._marks) - 1
            self.rows += 1
            self._order += 1
            heapq.heappush(self._running, (self.progress + request.tokens, self._order, request))
        self._plan()

    def advance(self) -> None:
        """Up to now."""
        now = self._loop.time()
        if self.rows:
            since = max(self._at, min(self._stalled, now))
            gained = (now - since) * self._owner.rates[self.rows]
            self.progress += gained
            self.tokens += gained * self.rows
            self.busy += now - self._at
        self._at = now

    def _plan(self, *, anew: bool = False) -> None:
        """Set the timer for whoever is done first. One that is set too early is not moved: it finds nothing to do and
        is set again, which is cheaper than moving it for each request that joins."""
        running = self._running
        while running and not running[0][2].running:
            heapq.heappop(running)
        if not running:
            if self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)
            return
        now = self._loop.time()
        left = max(running[0][0] - self.progress, 0.0)
        when = max(now, self._stalled) + left / self._owner.rates[self.rows]
        if self._timer is not None:
            if when >= self._due and not anew:
                return
            self._timer.cancel()
        self._due = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        self.advance()
        running, done = self._running, self.progress + NEARLY
        while running and (running[0][0] <= done or not running[0][2].running):
            request = heapq.heappop(running)[2]
            if request.running:
                request.running = False
                self.rows -= 1
                self._owner.sampled(request, self._parts(request))
                self._owner.lighter(self)
        self._admit()
        self._plan()

    def _parts(self, request: Request) -> list[tuple[int, int]]:
        """Its tokens by the version that sampled them."""
        marks = self._marks
        if request.mark == len(marks) - 1:
            return [(marks[-1][1], request.tokens)]
        parts, before = [], 0
        ends = [at for at, _ in marks[request.mark + 1 :]] + [self.progress]
        for (_, version), end in zip(marks[request.mark :], ends, strict=True):
            upto = min(round(end - request.began), request.tokens)
            if upto > before:
                parts.append((version, upto - before))
                before = upto
        if before < request.tokens:
            parts.append((marks[-1][1], request.tokens - before))
        return parts
