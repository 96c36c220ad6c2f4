"""One server of a pool: its state, its health checks, and its weight loads.

A member is discovering (found or suspect, not probed since), syncing, ready or unhealthy.

Invariant: a member is ready only while it is known to hold the target weights: it reported their version since it was
last suspect, and weights given to the pool were loaded into it since it last failed. It is updating from the moment the
target changes until it has loaded the new weights or became suspect. A member that was unreachable may have restarted,
so its weights are assumed lost and are loaded again even if its version looks right.

A member probes and loads; the pool decides which member gets a request.
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
"""Consecutive failed probes after which requests in flight are abandoned; one may be a busy server."""
MAX_BACKOFF_INTERVALS = 6.0
"""Maximum backoff between probes of an unhealthy member, in poll intervals."""
CLOSE_TIMEOUT = 5.0


@dataclass(eq=False, slots=True)
class MemberRequest:
    """A request in flight at a member."""

    versions: set[int | None]
    """Versions that its tokens may have: the target when it was sent, and every target since."""
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Rescheduled to now to abandon the request."""
    abandoned: bool = False

    def abandon(self) -> None:
        """End the request with a timeout."""
        if self.abandoned:
            return
        self.abandoned = True
        self.deadline.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """Snapshot of a member."""

    url: str
    state: MemberState
    version: int | None
    """As last reported."""
    running: int
    """Requests of all clients, as last reported."""
    waiting: int
    in_flight: int
    """Requests of this pool."""
    requests: int
    """Requests sent to it so far."""
    errors: int
    last_error: str
    age: float
    """Seconds in the current state."""
    retiring: bool
    """Removed from the pool and finishing its requests."""


class PoolMember:
    """One server. `run` probes it until it is retired; all other methods return immediately."""

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
        """The weights it is known to hold; None: unknown."""
        self.updating = False
        """Whether it is syncing only because the target changed: it was ready before, and holds the previous weights
        until the new ones are live."""
        self.retiring = False
        self.in_flight: set[MemberRequest] = set()
        self.waiting_requests = 0
        """Requests waiting for this member."""
        self.external_requests = 0
        """Requests of other clients, as last reported."""
        self.failed_requests = 0
        """Failed requests since the last completion."""
        self.probes = 0
        self.failures = 0
        """Probes that found it unhealthy."""
        self.version: int | None = None
        self.running = self.waiting = self.requests = self.errors = 0
        self.last_error = ""
        self._connect, self._settings, self._get_target, self._on_change = connect, settings, get_target, on_change
        self._state_since = asyncio.get_running_loop().time()
        self._engine: Engine | None = None
        self._wake = asyncio.Event()
        self._suspect_count = 0
        self._last_full_version: int | None = None
        """Version of the full weights sent last, without an adapter since; they may be live even if the load failed."""
        self._consecutive_failures = 0
        self._missed_probes = 0
        self._load_interrupted = False
        """Whether its last load failed with a retryable error, such as a lost connection."""

    @property
    def load(self) -> int:
        """Number of requests that a new one would compete with.

        A member that fails immediately is never busy and would attract all requests, so each consecutive failure adds
        a growing penalty.
        """
        penalty = (1 << 2 * min(self.failed_requests, 8)) - 1
        return len(self.in_flight) + self.waiting_requests + self.external_requests + penalty

    @property
    def unreachable(self) -> bool:
        """Whether the last probe got no response, or the connection was lost during a load."""
        return self.state == "unhealthy" and (self._missed_probes > 0 or self._load_interrupted)

    def get_engine(self) -> Engine:
        """Return the client of the server."""
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
        """Probe now."""
        self._wake.set()

    def on_target_changed(self) -> None:
        """Start loading: the target weights changed."""
        # a load in progress may be live by now, so only for a ready member is it known what it holds
        self.updating = self.state == "ready"
        if self.updating:
            self._set_state("syncing")
        self.wake()

    def mark_suspect(self, error: object) -> None:
        """Note a failed request: the member is not ready again before it passes a probe."""
        self._record_error(error)
        self._suspect_count += 1
        self.failed_requests += 1
        self.updating = False
        # in every other state a probe is in progress and will see the count, or is scheduled
        if self.state == "ready":
            self._set_state("discovering")
            self.wake()

    def retire(self) -> None:
        """Leave the pool; requests in flight continue."""
        self.retiring = True
        self.updating = False
        self.wake()

    async def run(self) -> None:
        """Probe repeatedly until the member is retired and has no requests in flight."""
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
        """Check the health once, and load the target weights if the member does not hold them."""
        try:
            while True:
                suspect_count = self._suspect_count
                await self._check_health()
                if self.retiring:
                    break
                await self._sync()
                # no await between this check and ready, so it still holds
                if suspect_count == self._suspect_count:
                    self._set_state("ready")
                    break
            self._consecutive_failures = 0
        except TimeoutError:
            self._mark_unhealthy(
                f"took longer than pool.load_timeout = {self._settings.load_timeout:g} s to load weights"
            )
        except Exception as error:  # noqa: BLE001 - a failure of any kind makes this member unhealthy
            self._mark_unhealthy(error)
        finally:
            self.probes += 1
            self._on_change(self)

    async def _check_health(self) -> None:
        """Query health and version, or raise if the member is not ready."""
        self._missed_probes += 1
        try:
            async with asyncio.timeout(self._settings.health_timeout):
                health = await self.get_engine().health()
        except TimeoutError:
            limit = self._settings.health_timeout
            raise EngineError(f"did not respond within pool.health_timeout = {limit:g} s") from None
        if not health.ready:
            raise EngineError(health.error or "reports that it is not ready")
        self._missed_probes = 0
        self.updating = self.updating and health.version == self.version
        self.version, self.running, self.waiting = health.version, health.running, health.waiting
        self.external_requests = max(0, health.running + health.waiting - len(self.in_flight))

    async def _sync(self) -> None:
        """Load until the member holds the target, which may change meanwhile."""
        if self.loaded_weights is not None and self.version != self.loaded_weights.version:
            self.loaded_weights = None
        while not self._holds_target(target := self._get_target()):
            loads = target.loads_needed(self.loaded_weights)
            if not loads:
                raise EngineError(
                    f"holds version {self.version}, but the pool is at version {target.version} and has no weights to"
                    " load; restart the server, or load weights"
                )
            if not target.base and self.version == self._last_full_version:
                raise EngineError(
                    f"holds full weights of version {self._last_full_version}, but the adapter of version"
                    f" {target.version} belongs on the initial weights; restart the server"
                )
            self._set_state("syncing")
            for load in loads:
                await self._load(load)
            self.loaded_weights = target

    async def _load(self, load: WeightLoad) -> None:
        self.loaded_weights = None  # unknown until the load is live: it may fail half-way
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
        """Return the seconds until the next probe: short after the first failure, then doubled each time."""
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
        except Exception as error:  # noqa: BLE001 - the member is removed either way
            self._record_error(error)
