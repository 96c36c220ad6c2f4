"""Simulated engines: they sample no tokens but take as long as real engines would.

One decode step of an engine with c requests takes a + b c seconds and gives each request one token: with more requests
each gets slower, and the engine's total throughput grows. Requests beyond `max_batch` wait in a queue. A token carries
the version that the engine held when it was sampled. The simulation is event-driven, not per token: the cost of
simulating a request does not depend on its length or on the number of engines.
"""

import asyncio
import heapq
from collections import deque
from typing import Any, NamedTuple, Protocol

from keel.config.simulate import SimulateSettings
from keel.errors import ConfigError

TOKEN_TOLERANCE = 1e-6
"""Fraction of a token: a request with less than this left to sample is done (rounding error)."""


class DecodeSpeed(NamedTuple):
    """Seconds of a decode step as a function of the number of requests in it."""

    base_seconds: float
    seconds_per_request: float
    max_batch: int

    @classmethod
    def from_settings(cls, settings: SimulateSettings, max_batch: int) -> "DecodeSpeed":
        """Derive the costs from the speed of a single request and of a full batch."""
        max_speed = max_batch * settings.tokens_per_second_alone
        if max_batch > 1 and settings.tokens_per_second > max_speed * (1 + 1e-9):
            raise ConfigError(
                f"tokens_per_second = {settings.tokens_per_second:g} is above max_batch = {max_batch} times"
                f" tokens_per_second_alone = {settings.tokens_per_second_alone:g}: a request cannot be faster in a"
                " batch than alone"
            )
        alone, full = 1 / settings.tokens_per_second_alone, max_batch / settings.tokens_per_second
        per_request = max((full - alone) / (max_batch - 1), 0.0) if max_batch > 1 else 0.0
        return cls(max(alone - per_request, 0.0), per_request, max_batch)

    def rates(self) -> list[float]:
        """Return the tokens per second of each request, indexed by the number of requests."""
        return [
            0.0,
            *(1 / (self.base_seconds + self.seconds_per_request * count) for count in range(1, self.max_batch + 1)),
        ]


class SimulatedRollout:
    """The fields of a rollout that the scheduler and the prediction read."""

    __slots__ = ("error", "error_kind", "oldest_version", "tokens", "tokens_by_version", "truncated")

    def __init__(
        self,
        tokens_by_version: list[tuple[int, int]],
        *,
        truncated: bool = False,
        error_kind: str | None = None,
        error: str = "",
    ) -> None:
        self.tokens_by_version = tokens_by_version
        """Pairs of version and number of tokens sampled with it."""
        self.tokens = sum(count for _, count in tokens_by_version)
        self.oldest_version = tokens_by_version[0][0] if tokens_by_version else None
        self.truncated = truncated
        self.error_kind = error_kind
        self.error = error or None


class SimulatedRequest(asyncio.Future[SimulatedRollout]):
    """One rollout in flight. A plain future: it only waits, so it needs no task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: "EngineListener", group: str, tokens: int) -> None:
        super().__init__(loop=loop)
        self._listener = listener
        self.group = group
        self.tokens = tokens
        """Tokens to sample until it ends, successfully or not."""
        self.truncated = False
        self.fails_with: str | None = None
        """Kind of the error that it ends with."""
        self.engine: SimulatedEngine | None = None
        self.running = False
        self.start_progress = 0.0
        self.start_version_index = 0
        self.attempts = 0

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._listener.on_cancelled(self)
        return cancelled


class EngineListener(Protocol):
    """Receives the events of all engines, and holds the parameters that they share."""

    rates: list[float]
    """Current tokens per second of each request, indexed by the number of requests."""
    max_batch: int
    prefill_seconds: float
    """Seconds to compute a group's prompt."""

    def on_sampled(self, request: SimulatedRequest, tokens_by_version: list[tuple[int, int]]) -> None:
        """All tokens of a request have been sampled."""

    def on_cancelled(self, request: SimulatedRequest) -> None:
        """A request was cancelled."""

    def on_load_decreased(self, engine: "SimulatedEngine") -> None:
        """An engine has fewer requests than before."""


class SimulatedEngine:
    """One engine. Invariant: `progress` is the number of tokens a request would have if it had run from the start."""

    def __init__(self, number: int, listener: EngineListener, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self._listener, self._loop = number, listener, loop
        self._running: list[tuple[float, int, SimulatedRequest]] = []
        self._admission_count = 0
        self.waiting: deque[SimulatedRequest] = deque()
        self.num_decoding = 0
        """Requests that are being decoded."""
        self.progress = self._advanced_at = self._stalled_until = self._timer_due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._version_marks: list[tuple[float, int]] = [(0.0, 0)]
        self._cached_groups: set[str] = set()
        self.up = self.accepting = True
        """Whether it has not crashed, and whether it admits new requests."""
        self._drained: asyncio.Future[None] | None = None
        self.heap_load = 0
        """The load under which it is in the pool's heap."""
        self.sampled_tokens = self.busy_seconds = self.down_since = 0.0

    @property
    def load(self) -> int:
        return self.num_decoding + len(self.waiting)

    @property
    def version(self) -> int:
        return self._version_marks[-1][1]

    def submit(self, request: SimulatedRequest) -> None:
        request.engine = self
        self.waiting.append(request)
        self._admit()

    def remove(self, request: SimulatedRequest) -> None:
        """Remove a cancelled request."""
        if request.running:
            self.advance()
            request.running = False
            self.num_decoding -= 1
            self._admit()
            self._schedule_next()
        elif request in self.waiting:
            self.waiting.remove(request)
        self._listener.on_load_decreased(self)

    def set_version(self, version: int) -> None:
        """Sample with new weights from now on."""
        self.advance()
        self._version_marks.append((self.progress, version))
        self._cached_groups.clear()

    def stall(self, seconds: float) -> None:
        """Stop sampling for a number of seconds."""
        self.advance()
        self._stalled_until = max(self._stalled_until, self._loop.time()) + seconds
        self._schedule_next(force=True)

    async def wait_drained(self) -> None:
        """Wait until no request is being decoded."""
        if self.num_decoding:
            self._drained = self._loop.create_future()
            await self._drained

    def set_accepting(self, accepting: bool) -> None:
        """Set whether waiting requests are admitted."""
        self.accepting = accepting
        self._admit()

    def on_rates_changed(self) -> None:
        """Reschedule after the shared rates changed; the engine was already advanced with the old rates."""
        self._schedule_next(force=True)

    @property
    def running_requests(self) -> list[SimulatedRequest]:
        return [request for *_, request in self._running if request.running]

    def crash(self) -> list[SimulatedRequest]:
        """Lose all requests and return them."""
        self.advance()
        lost = [*self.running_requests, *self.waiting]
        for request in lost:
            request.running, request.engine = False, None
        self._running, self.num_decoding, self.up = [], 0, False
        self.down_since = self._loop.time()
        self.waiting.clear()
        self._cached_groups.clear()
        self._schedule_next()
        return lost

    def restart(self, version: int) -> None:
        """Come back without requests, with the weights of a version."""
        self.up = self.accepting = True
        self.heap_load = 0
        self.set_version(version)

    def tokens_sampled_for(self, request: SimulatedRequest) -> float:
        """Return the number of tokens sampled so far for a request."""
        return self.progress - request.start_progress if request.running else 0.0

    def _admit(self) -> None:
        if not (self.accepting and self.up and self.waiting):
            return
        self.advance()
        while self.waiting and self.num_decoding < self._listener.max_batch:
            request = self.waiting.popleft()
            if self._listener.prefill_seconds and request.group not in self._cached_groups:
                self._cached_groups.add(request.group)
                self._stalled_until = max(self._stalled_until, self._loop.time()) + self._listener.prefill_seconds
            request.running, request.start_progress, request.start_version_index = (
                True,
                self.progress,
                len(self._version_marks) - 1,
            )
            self.num_decoding += 1
            self._admission_count += 1
            heapq.heappush(self._running, (self.progress + request.tokens, self._admission_count, request))
        self._schedule_next()

    def advance(self) -> None:
        """Account for the tokens sampled up to now."""
        now = self._loop.time()
        if self.num_decoding:
            since = max(self._advanced_at, min(self._stalled_until, now))
            gained = (now - since) * self._listener.rates[self.num_decoding]
            self.progress += gained
            self.sampled_tokens += gained * self.num_decoding
            self.busy_seconds += now - self._advanced_at
        self._advanced_at = now

    def _schedule_next(self, *, force: bool = False) -> None:
        """Set the timer for the first request to finish.

        A timer that is due too early is not moved: it fires, finds nothing to do and is set again, which is cheaper
        than moving it for each request that joins.
        """
        running = self._running
        while running and not running[0][2].running:
            heapq.heappop(running)
        if not running:
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            return
        now = self._loop.time()
        left = max(running[0][0] - self.progress, 0.0)
        when = max(now, self._stalled_until) + left / self._listener.rates[self.num_decoding]
        if self._timer is not None:
            if when >= self._timer_due and not force:
                return
            self._timer.cancel()
        self._timer_due = when
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.advance()
        running, done = self._running, self.progress + TOKEN_TOLERANCE
        while running and (running[0][0] <= done or not running[0][2].running):
            request = heapq.heappop(running)[2]
            if request.running:
                request.running = False
                self.num_decoding -= 1
                self._listener.on_sampled(request, self._tokens_by_version(request))
                self._listener.on_load_decreased(self)
        self._admit()
        self._schedule_next()

    def _tokens_by_version(self, request: SimulatedRequest) -> list[tuple[int, int]]:
        """Split a request's tokens by the version that sampled them."""
        marks = self._version_marks
        if request.start_version_index == len(marks) - 1:
            return [(marks[-1][1], request.tokens)]
        parts, before = [], 0
        ends = [at for at, _ in marks[request.start_version_index + 1 :]] + [self.progress]
        for (_, version), end in zip(marks[request.start_version_index :], ends, strict=True):
            sampled = min(round(end - request.start_progress), request.tokens)
            if sampled > before:
                parts.append((version, sampled - before))
                before = sampled
        if before < request.tokens:
            parts.append((marks[-1][1], request.tokens - before))
        return parts
