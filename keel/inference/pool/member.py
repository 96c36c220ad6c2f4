"""One server of a pool: what it holds, how it is doing, and the way from found to ready.

A member is discovering (found, or in doubt, and not looked at since), syncing, ready or unhealthy.

Invariant: a member is ready only while it is known to hold the desired weights: it has named their version since it was
last in doubt, and weights that the pool was given were loaded into it since it last failed. It is updating from the
moment others are desired until it has taken them or was in doubt. A member that was out of reach may have been started
again, so what it held counts as lost and is loaded again, even where its version looks right.

It asks and loads; which member gets a request is the pool's to decide.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from keel.config.rollout import PoolSettings
from keel.inference.pool.discovery import plain
from keel.inference.pool.target_weights import Load, Weights
from keel.inference.protocol import Engine, EngineError

logger = logging.getLogger("keel")

State = Literal["discovering", "syncing", "ready", "unhealthy"]

DEAD_AFTER = 3
"""Looks in a row that find nobody ready after which requests in flight are given up: once may be a busy server."""
SLOWEST = 6.0
"""Intervals between two looks at a member that has been unhealthy for long."""
CLOSE_TIMEOUT = 5.0


@dataclass(eq=False, slots=True)
class Request:
    """A request in flight at a member."""

    versions: set[int | None]
    """Those that its tokens may have: the desired one at hand-out, and all desired since."""
    switch: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Rescheduled to now to give the request up."""
    given_up: bool = False

    def give_up(self) -> None:
        if self.given_up:
            return
        self.given_up = True
        self.switch.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class MemberRow:
    """What can be seen of a member."""

    url: str
    state: State
    version: int | None
    """As it last said."""
    running: int
    """As it last said, whoever asked."""
    waiting: int
    in_flight: int
    """Requests of this pool."""
    requests: int
    """Handed out to it so far."""
    errors: int
    last_error: str
    age: float
    """Seconds in this state."""
    leaving: bool
    """No longer a member, and finishing what it was given."""


class Member:
    """One server. `keep` looks after it for as long as it lives; everything else returns at once."""

    def __init__(
        self,
        url: str,
        connect: Callable[[str], Engine],
        settings: PoolSettings,
        desired: Callable[[], Weights],
        changed: Callable[["Member"], None],
    ) -> None:
        self.url = url
        self.state: State = "discovering"
        self.held: Weights | None = None
        """What was loaded here; None: nothing is known."""
        self.updating = False
        """Whether it is syncing only because new weights came: it was ready just before, and until they are live it
        holds what it held."""
        self.leaving = False
        self.in_flight: set[Request] = set()
        self.expected = 0
        """Requests that wait for it."""
        self.others = 0
        """Requests of others, as it last said."""
        self.failed_requests = 0
        """Since its last answer."""
        self.looks = 0
        self.setbacks = 0
        """Looks that ended with it unhealthy."""
        self.version: int | None = None
        self.running = self.waiting = self.requests = self.errors = 0
        self.last_error = ""
        self._connect, self._settings, self._desired, self._changed = connect, settings, desired, changed
        self._since = asyncio.get_running_loop().time()
        self._engine: Engine | None = None
        self._wake = asyncio.Event()
        self._doubts = 0
        self._full: int | None = None
        """The version of all weights that were sent last, with no adapter since: they may have arrived even if that
        failed."""
        self._failed_in_a_row = 0
        self._absent_in_a_row = 0
        self._lost = False
        """Whether its last load ended in a way that may pass, as a broken connection does."""

    @property
    def load(self) -> int:
        """Requests that a new one would share it with.

        One that fails at once is never busy, and would draw all requests to itself: each failure in a row counts as
        more of them.
        """
        penalty = (1 << 2 * min(self.failed_requests, 8)) - 1
        return len(self.in_flight) + self.expected + self.others + penalty

    @property
    def gone(self) -> bool:
        """Whether nobody was there at the last look, or went away while it was given weights."""
        return self.state == "unhealthy" and (self._absent_in_a_row > 0 or self._lost)

    def connected(self) -> Engine:
        """The server, to talk to."""
        if self._engine is None:
            self._engine = self._connect(self.url)
        return self._engine

    def row(self) -> MemberRow:
        return MemberRow(
            url=self.url,
            state=self.state,
            version=self.version,
            running=self.running,
            waiting=self.waiting,
            in_flight=len(self.in_flight),
            requests=self.requests,
            errors=self.errors,
            last_error=self.last_error,
            age=asyncio.get_running_loop().time() - self._since,
            leaving=self.leaving,
        )

    def wake(self) -> None:
        """Look at it now."""
        self._wake.set()

    def want(self) -> None:
        """The desired weights have changed."""
        # what it was being given may be live by now, so only of a member that was ready it is known what it holds
        self.updating = self.state == "ready"
        if self.updating:
            self._enter("syncing")
        self.wake()

    def doubt(self, error: object) -> None:
        """Something went wrong with a request: it is ready again when it has said that it is."""
        self._note(error)
        self._doubts += 1
        self.failed_requests += 1
        self.updating = False
        # in every other state a look is under way, which will see the doubt, or has its time
        if self.state == "ready":
            self._enter("discovering")
            self.wake()

    def leave(self) -> None:
        """Stop being a member; requests in flight go on."""
        self.leaving = True
        self.updating = False
        self.wake()

    async def keep(self) -> None:
        """Look at it again and again, until it has left and has nothing in flight."""
        try:
            while not (self.leaving and not self.in_flight):
                self._wake.clear()
                await self._look()
                try:
                    async with asyncio.timeout(self._pause()):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            await self._close()

    async def _look(self) -> None:
        """One look: is it there, and does it hold the desired weights? If not, load them."""
        try:
            while True:
                doubts = self._doubts
                await self._ask()
                if self.leaving:
                    break
                await self._sync()
                # no await from here to ready: what was true is still true
                if doubts == self._doubts:
                    self._enter("ready")
                    break
            self._failed_in_a_row = 0
        except TimeoutError:
            self._fail(f"took longer than pool.load_timeout = {self._settings.load_timeout:g} s to load weights")
        except Exception as error:  # noqa: BLE001 - whatever a member's failure is, it is that member's
            self._fail(error)
        finally:
            self.looks += 1
            self._changed(self)

    async def _ask(self) -> None:
        """How it is doing and what it says it holds."""
        self._absent_in_a_row += 1
        try:
            async with asyncio.timeout(self._settings.health_timeout):
                health = await self.connected().health()
        except TimeoutError:
            limit = self._settings.health_timeout
            raise EngineError(f"did not answer within pool.health_timeout = {limit:g} s") from None
        if not health.ready:
            raise EngineError(health.error or "says that it is not ready")
        self._absent_in_a_row = 0
        self.updating = self.updating and health.version == self.version
        self.version, self.running, self.waiting = health.version, health.running, health.waiting
        self.others = max(0, health.running + health.waiting - len(self.in_flight))

    async def _sync(self) -> None:
        """Load until it holds what is desired; that may change meanwhile."""
        if self.held is not None and self.version != self.held.version:
            self.held = None
        while not self._holds(wanted := self._desired()):
            loads = wanted.missing(self.held)
            if not loads:
                raise EngineError(
                    f"holds version {self.version}, the pool wants {wanted.version} and was not yet given any weights;"
                    " start the server again, or load weights"
                )
            if not wanted.below and self.version == self._full:
                raise EngineError(
                    f"holds all weights of version {self._full}, on which the adapter of version {wanted.version} does"
                    " not belong; start the server again"
                )
            self._enter("syncing")
            for load in loads:
                await self._load(load)
            self.held = wanted

    async def _load(self, load: Load) -> None:
        self.held = None  # until it is live, nobody knows what a failure leaves behind
        self._full = load.version if load.kind == "weights" else None
        self._lost = False
        try:
            async with asyncio.timeout(self._settings.load_timeout):
                await load.into(self.connected())
        except EngineError as error:
            self._lost = error.retryable
            raise
        self.version = load.version

    def _holds(self, wanted: Weights) -> bool:
        if wanted.version is None:
            return True
        return self.version == wanted.version and (not wanted.loads or self.held == wanted)

    def _fail(self, error: object) -> None:
        self._note(error)
        self.setbacks += 1
        self._failed_in_a_row += 1
        self.held = None
        self._enter("unhealthy")
        if self._absent_in_a_row >= DEAD_AFTER:
            for request in tuple(self.in_flight):
                request.give_up()

    def _note(self, error: object) -> None:
        self.errors += 1
        text = plain(error) or type(error).__name__
        if text != self.last_error:
            logger.warning("pool: %s: %s", self.url, text)
        self.last_error = text

    def _pause(self) -> float:
        """Seconds to the next look: soon after the first failure, then half as often each time."""
        interval = self._settings.interval
        if not self._failed_in_a_row:
            return interval
        return min(SLOWEST * interval, interval / 8 * 2.0 ** min(self._failed_in_a_row, 16))

    def _enter(self, state: State) -> None:
        if state in ("ready", "unhealthy"):
            self.updating = False
        if state != self.state:
            logger.info("pool: %s is %s, was %s", self.url, state, self.state)
            self.state = state
            self._since = asyncio.get_running_loop().time()
        self._changed(self)

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        for request in tuple(self.in_flight):
            request.give_up()
        if engine is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await engine.close()
        except Exception as error:  # noqa: BLE001 - it is gone either way
            self._note(error)
