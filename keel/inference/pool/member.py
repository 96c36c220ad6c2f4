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

from keel.config.engine import PoolSettings
from keel.inference.pool.discovery import one_line
from keel.inference.pool.target_weights import TargetWeights, WeightLoad
from keel.inference.protocol import Engine, EngineError

logger = logging.getLogger("keel")

MemberState = Literal["discovering", "syncing", "ready", "unhealthy"]

DEAD_AFTER_PROBES = 3
"""Looks in a row that find nobody ready after which requests in flight are given up: once may be a busy server."""
MAX_BACKOFF_INTERVALS = 6.0
"""Intervals between two looks at a member that has been unhealthy for long."""
CLOSE_TIMEOUT = 5.0


@dataclass(eq=False, slots=True)
class MemberRequest:
    """A request in flight at a member."""

    versions: set[int | None]
    """Those that its tokens may have: the desired one at hand-out, and all desired since."""
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Rescheduled to now to give the request up."""
    abandoned: bool = False

    def abandon(self) -> None:
        if self.abandoned:
            return
        self.abandoned = True
        self.deadline.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What can be seen of a member."""

    url: str
    state: MemberState
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
    retiring: bool
    """No longer a member, and finishing what it was given."""


class PoolMember:
    """One server. `keep` looks after it for as long as it lives; everything else returns at once."""

    def __init__(
        self,
        url: str,
        connect: Callable[[str], Engine],
        settings: PoolSettings,
        get_target: Callable[[], TargetWeights],
        on_change: Callable[["PoolMember"], None],
    ) -> None:
        self.url = url
        self.state: MemberState = "discovering"
        self.loaded_weights: TargetWeights | None = None
        """What was loaded here; None: nothing is known."""
        self.updating = False
        """Whether it is syncing only because new weights came: it was ready just before, and until they are live it
        holds what it held."""
        self.retiring = False
        self.in_flight: set[MemberRequest] = set()
        self.waiting_requests = 0
        """Requests that wait for it."""
        self.external_requests = 0
        """Requests of others, as it last said."""
        self.failed_requests = 0
        """Since its last answer."""
        self.probes = 0
        self.failures = 0
        """Looks that ended with it unhealthy."""
        self.version: int | None = None
        self.running = self.waiting = self.requests = self.errors = 0
        self.last_error = ""
        self._connect, self._settings, self._get_target, self._on_change = connect, settings, get_target, on_change
        self._state_since = asyncio.get_running_loop().time()
        self._engine: Engine | None = None
        self._wake = asyncio.Event()
        self._suspect_count = 0
        self._last_full_version: int | None = None
        """The version of all weights that were sent last, with no adapter since: they may have arrived even if that
        failed."""
        self._consecutive_failures = 0
        self._missed_probes = 0
        self._load_interrupted = False
        """Whether its last load ended in a way that may pass, as a broken connection does."""

    @property
    def load(self) -> int:
        """Requests that a new one would share it with.

        One that fails at once is never busy, and would draw all requests to itself: each failure in a row counts as
        more of them.
        """
        penalty = (1 << 2 * min(self.failed_requests, 8)) - 1
        return len(self.in_flight) + self.waiting_requests + self.external_requests + penalty

    @property
    def unreachable(self) -> bool:
        """Whether nobody was there at the last look, or went away while it was given weights."""
        return self.state == "unhealthy" and (self._missed_probes > 0 or self._load_interrupted)

    def get_engine(self) -> Engine:
        """The server, to talk to."""
        if self._engine is None:
            self._engine = self._connect(self.url)
        return self._engine

    def status(self) -> MemberStatus:
        return MemberStatus(
            url=self.url,
            state=self.state,
            version=self.version,
            running=self.running,
            waiting=self.waiting,
            in_flight=len(self.in_flight),
            requests=self.requests,
            errors=self.errors,
            last_error=self.last_error,
            age=asyncio.get_running_loop().time() - self._state_since,
            retiring=self.retiring,
        )

    def wake(self) -> None:
        """Look at it now."""
        self._wake.set()

    def on_target_changed(self) -> None:
        """The desired weights have changed."""
        # what it was being given may be live by now, so only of a member that was ready it is known what it holds
        self.updating = self.state == "ready"
        if self.updating:
            self._set_state("syncing")
        self.wake()

    def mark_suspect(self, error: object) -> None:
        """Something went wrong with a request: it is ready again when it has said that it is."""
        self._record_error(error)
        self._suspect_count += 1
        self.failed_requests += 1
        self.updating = False
        # in every other state a look is under way, which will see the doubt, or has its time
        if self.state == "ready":
            self._set_state("discovering")
            self.wake()

    def retire(self) -> None:
        """Stop being a member; requests in flight go on."""
        self.retiring = True
        self.updating = False
        self.wake()

    async def run(self) -> None:
        """Look at it again and again, until it has left and has nothing in flight."""
        try:
            while not (self.retiring and not self.in_flight):
                self._wake.clear()
                await self._probe()
                try:
                    async with asyncio.timeout(self._probe_delay()):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            await self._close()

    async def _probe(self) -> None:
        """One look: is it there, and does it hold the desired weights? If not, load them."""
        try:
            while True:
                doubts = self._suspect_count
                await self._check_health()
                if self.retiring:
                    break
                await self._sync()
                # no await from here to ready: what was true is still true
                if doubts == self._suspect_count:
                    self._set_state("ready")
                    break
            self._consecutive_failures = 0
        except TimeoutError:
            self._mark_unhealthy(
                f"took longer than pool.load_timeout = {self._settings.load_timeout:g} s to load weights"
            )
        except Exception as error:  # noqa: BLE001 - whatever a member's failure is, it is that member's
            self._mark_unhealthy(error)
        finally:
            self.probes += 1
            self._on_change(self)

    async def _check_health(self) -> None:
        """How it is doing and what it says it holds."""
        self._missed_probes += 1
        try:
            async with asyncio.timeout(self._settings.health_timeout):
                health = await self.get_engine().health()
        except TimeoutError:
            limit = self._settings.health_timeout
            raise EngineError(f"did not answer within pool.health_timeout = {limit:g} s") from None
        if not health.ready:
            raise EngineError(health.error or "says that it is not ready")
        self._missed_probes = 0
        self.updating = self.updating and health.version == self.version
        self.version, self.running, self.waiting = health.version, health.running, health.waiting
        self.external_requests = max(0, health.running + health.waiting - len(self.in_flight))

    async def _sync(self) -> None:
        """Load until it holds what is desired; that may change meanwhile."""
        if self.loaded_weights is not None and self.version != self.loaded_weights.version:
            self.loaded_weights = None
        while not self._holds_target(wanted := self._get_target()):
            loads = wanted.loads_needed(self.loaded_weights)
            if not loads:
                raise EngineError(
                    f"holds version {self.version}, the pool wants {wanted.version} and was not yet given any weights;"
                    " start the server again, or load weights"
                )
            if not wanted.base and self.version == self._last_full_version:
                raise EngineError(
                    f"holds all weights of version {self._last_full_version}, on which the adapter of version {wanted.version} does"
                    " not belong; start the server again"
                )
            self._set_state("syncing")
            for load in loads:
                await self._load(load)
            self.loaded_weights = wanted

    async def _load(self, load: WeightLoad) -> None:
        self.loaded_weights = None  # until it is live, nobody knows what a failure leaves behind
        self._last_full_version = None if load.is_adapter else load.version
        self._load_interrupted = False
        try:
            async with asyncio.timeout(self._settings.load_timeout):
                await load.apply_to(self.get_engine())
        except EngineError as error:
            self._load_interrupted = error.retryable
            raise
        self.version = load.version

    def _holds_target(self, target: TargetWeights) -> bool:
        if target.version is None:
            return True
        return self.version == target.version and (not target.loads or self.loaded_weights == target)

    def _mark_unhealthy(self, error: object) -> None:
        self._record_error(error)
        self.failures += 1
        self._consecutive_failures += 1
        self.loaded_weights = None
        self._set_state("unhealthy")
        if self._missed_probes >= DEAD_AFTER_PROBES:
            for request in tuple(self.in_flight):
                request.abandon()

    def _record_error(self, error: object) -> None:
        self.errors += 1
        text = one_line(error) or type(error).__name__
        if text != self.last_error:
            logger.warning("pool: %s: %s", self.url, text)
        self.last_error = text

    def _probe_delay(self) -> float:
        """Seconds to the next look: soon after the first failure, then half as often each time."""
        interval = self._settings.poll_interval
        if not self._consecutive_failures:
            return interval
        return min(MAX_BACKOFF_INTERVALS * interval, interval / 8 * 2.0 ** min(self._consecutive_failures, 16))

    def _set_state(self, state: MemberState) -> None:
        if state in ("ready", "unhealthy"):
            self.updating = False
        if state != self.state:
            logger.info("pool: %s is %s, was %s", self.url, state, self.state)
            self.state = state
            self._state_since = asyncio.get_running_loop().time()
        self._on_change(self)

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        for request in tuple(self.in_flight):
            request.abandon()
        if engine is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await engine.close()
        except Exception as error:  # noqa: BLE001 - it is gone either way
            self._record_error(error)
