"""Several engine servers as one engine: discover members, keep their weights current, and route requests.

Guarantees, whatever fails in whatever order:
- There is one version at a time: a request is sent only to a member that holds the weights of the pool's version, and a
  completion with tokens of any version but that one and later targets is discarded and sampled again.
- Weight updates do not stop sampling: until the new weights are live on a member, members with the previous weights get
  requests. Then the version advances, and only members that have caught up get requests.
- Every request ends with a completion or an `EngineError`, in bounded time if the members' requests are bounded.
- The requests of a group go to one member while it lives, so that they share its prefix cache.

The pool starts no servers. What happens to requests that fail on all members is up to the caller.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from keel.config.engine import PoolSettings
from keel.config.rollout import Sampling
from keel.inference.pool.discovery import DiscoveryError, MemberSource, make_source, one_line
from keel.inference.pool.member import MemberRequest, MemberStatus, PoolMember
from keel.inference.pool.target_weights import TargetWeights, WeightLoad
from keel.inference.protocol import Engine, EngineError, Generation, Health, WeightSource

logger = logging.getLogger("keel")

MAX_TRACKED_GROUPS = 16_384
"""Groups whose member is remembered; the least recently used is forgotten first."""


class Pool:
    """An engine that consists of engines. Use it from one event loop; the first awaited method starts it."""

    def __init__(
        self,
        settings: PoolSettings,
        connect: Callable[[str], Engine],
        *,
        version: int | None = 0,
        source: MemberSource | None = None,
    ) -> None:
        """Create a pool.

        `version` is the version of the members' initial weights; None accepts whatever they hold.
        """
        self.settings = settings
        self.discovery_error = ""
        """Error of the last discovery; empty if it succeeded."""
        self._source = make_source(settings) if source is None else source
        self._connect = connect
        self._target_weights = self._live_weights = TargetWeights(version)
        self._members: dict[str, PoolMember] = {}
        self._member_tasks: dict[PoolMember, asyncio.Task[None]] = {}
        self._group_urls: OrderedDict[str, str] = OrderedDict()
        self._waiting = 0
        self._discovery_task: asyncio.Task[None] | None = None
        self._discovered = False
        self._closed = False
        self._load_lock = asyncio.Lock()
        self._change_event = asyncio.Event()

    # engine methods

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """Sample a completion on a ready member, and retry on others up to `max_attempts` attempts in total."""
        self._ensure_started()
        failed: dict[str, str] = {}
        for _ in range(self.settings.max_attempts):
            member = await self._wait_for_member(group, failed)
            try:
                return await self._send_request(member, prompt, sampling, group)
            except EngineError as error:
                if not error.retryable:
                    raise
                failed[member.url] = one_line(error)
        raise EngineError(
            f"failed after {self.settings.max_attempts} attempts (pool.max_attempts):"
            + "".join(f"\n{url}: {error}" for url, error in failed.items())
        )

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        await self._apply_load(WeightLoad(source, version, drain))

    async def version(self) -> int:
        """Return the version of the weights that every member in use holds."""
        self._ensure_started()
        if self._live_weights.version is not None:
            return self._live_weights.version
        return min((member.version or 0 for member in self._ready_members()), default=0)

    async def health(self) -> Health:
        if self._closed:
            return Health(ready=False, version=self._live_weights.version or 0, error="the pool is closed")
        self._ensure_started()
        ready = bool(self._ready_members())
        return Health(
            ready=ready,
            version=await self.version(),
            running=sum(len(member.in_flight) for member in self._member_tasks),
            waiting=self._waiting,
            error="" if ready else self._describe().strip(),
        )

    async def close(self) -> None:
        """Disconnect from the members; the servers keep running."""
        self._closed = True
        self._notify_waiters()
        tasks = [*self._member_tasks.values(), *([self._discovery_task] if self._discovery_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()

    # status

    def status(self) -> list[MemberStatus]:
        """Return the status of every member, including retired ones that still finish requests."""
        rows = [member.status() for member in self._members.values()]
        return rows + [member.status() for member in self._member_tasks if self._members.get(member.url) is not member]

    async def wait_until_probed(self) -> None:
        """Wait until discovery has succeeded or failed once and each member was probed once."""
        self._ensure_started()
        while not (self._discovered and all(member.probes for member in self._members.values())):
            await self._change_event.wait()
            self._ensure_started()

    # requests

    async def _send_request(
        self, member: PoolMember, prompt: Sequence[int], sampling: Sampling, group: str | None
    ) -> Generation:
        """Send a request to a member; there is no await between the choice of the member and the call."""
        request = MemberRequest({self._live_weights.version, self._target_weights.version})
        member.in_flight.add(request)
        member.requests += 1
        try:
            async with request.deadline:
                generation = await member.get_engine().generate(prompt, sampling, group=group)
        except TimeoutError:
            if self._closed:
                raise self._closed_error() from None
            if not request.abandoned:
                raise
            raise EngineError(f"stopped responding: {member.last_error}") from None
        except EngineError as error:
            if error.retryable:
                member.mark_suspect(error)
            raise
        finally:
            member.in_flight.discard(request)
            if member.retiring:
                member.wake()
        unexpected = set(generation.versions) - request.versions
        if unexpected and None not in request.versions:
            expected = min(version for version in request.versions if version is not None)
            lost = EngineError(
                f"sampled with version {min(unexpected)} instead of {expected}: the server lost its weights"
            )
            member.mark_suspect(lost)
            raise lost
        member.failed_requests = 0
        return generation

    async def _wait_for_member(self, group: str | None, failed_urls: Collection[str]) -> PoolMember:
        """Return a member for a request, waiting for one up to `ready_timeout` seconds."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        patient_until = start + min(self.settings.poll_interval, self.settings.ready_timeout)
        member: PoolMember | None = None
        while True:
            if self._closed:
                raise self._closed_error()
            now = loop.time()
            member = self._choose_member(group, failed_urls, member, allow_updating=now < patient_until)
            if member is not None and self._is_usable(member):
                return member
            if now >= start + self.settings.ready_timeout:
                raise EngineError(
                    f"no member was ready for {self.settings.ready_timeout:g} s (pool.ready_timeout):{self._describe()}"
                )
            self._waiting += 1
            if member is not None:
                member.waiting_requests += 1
            try:
                async with asyncio.timeout_at(
                    patient_until if now < patient_until else start + self.settings.ready_timeout
                ):
                    await self._change_event.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
                if member is not None:
                    member.waiting_requests -= 1

    def _is_usable(self, member: PoolMember) -> bool:
        """Return whether a member holds the pool's version: the target, or the previous weights until that is live."""
        return member.state == "ready" or (member.updating and self._live_weights != self._target_weights)

    def _choose_member(
        self, group: str | None, failed_urls: Collection[str], previous: PoolMember | None, *, allow_updating: bool
    ) -> PoolMember | None:
        """Return the group's member, or else the least loaded one, preferring members that did not fail this request.

        With `allow_updating` a member that is being updated can be chosen and waited for: otherwise all requests that
        wait during an update would go to the first member that completes it.
        """
        candidates = [m for m in self._members.values() if self._is_usable(m) or (allow_updating and m.updating)]
        candidates = [m for m in candidates if m.url not in failed_urls] or candidates
        if not candidates:
            return None
        sticky = self._members.get(self._group_urls.get(group, "")) if group is not None else previous
        chosen = sticky if sticky in candidates else min(candidates, key=lambda m: (m.load, m.requests))
        if group is not None:
            self._group_urls[group] = chosen.url
            self._group_urls.move_to_end(group)
            if len(self._group_urls) > MAX_TRACKED_GROUPS:
                self._group_urls.popitem(last=False)
        return chosen

    # weights

    async def _apply_load(self, load: WeightLoad) -> None:
        """Update all members concurrently. Members that fail get no requests; if none succeeds, nothing changes."""
        if load.version < 0:
            raise EngineError(f"version = {load.version} must not be negative", retryable=False)
        self._ensure_started()
        async with self._load_lock:
            if self._closed:
                raise self._closed_error()
            previous = self._target_weights
            target = previous.plus(load)
            if target == self._live_weights:
                return
            try:
                failures = await self._sync_members(target)
            finally:
                if self._live_weights != target:
                    self._set_target(previous)
        if self._live_weights != target:
            raise EngineError(
                f"no member loaded version {load.version} from {load.source}; the pool stays at version"
                f" {previous.version}:{failures}"
            )

    async def _sync_members(self, target: TargetWeights) -> str:
        """Wait until each healthy member has loaded the weights or failed; return a description of the members.

        Stragglers get as long again as the first member took, and at least one poll interval; they get no requests
        meanwhile, and the others work. If all members are unhealthy or were lost during the update, one that returns
        within `ready_timeout` is enough, since a server may be restarting. A member that responds with an error is not
        waited for.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        involved = {m: m.failures for m in self._members.values() if m.state != "unhealthy"}
        deadline = None if involved else start + self.settings.ready_timeout
        self._set_target(target)
        while not self._closed:
            now, live = loop.time(), self._live_weights == target
            loading = any(
                m.state != "ready" and m.failures == failures and not m.retiring for m, failures in involved.items()
            )
            if live and deadline is None:
                deadline = now + max(now - start, self.settings.poll_interval)
            if (live or involved) and not loading:
                if live or not any(member.unreachable for member in self._members.values()):
                    break
                deadline = start + self.settings.ready_timeout
            if deadline is not None and now >= deadline:
                break
            try:
                async with asyncio.timeout_at(deadline):
                    await self._change_event.wait()
            except TimeoutError:
                pass
        return self._describe()

    def _set_target(self, weights: TargetWeights) -> None:
        self._target_weights = weights
        for member in self._member_tasks:
            for request in member.in_flight:
                request.versions.add(weights.version)
            member.on_target_changed()

    # members

    def _ensure_started(self) -> None:
        if self._closed:
            raise self._closed_error()
        if self._discovery_task is None:
            self._discovery_task = asyncio.create_task(self._discover(), name="pool discovery")

    async def _discover(self) -> None:
        """Discover the members repeatedly. Errors are reported, and the last known members stay."""
        while True:
            # a slow source is not cancelled: each time a resolver thread would be left behind
            discovery = asyncio.ensure_future(self._source.fetch_urls())
            try:
                while not (await asyncio.wait({discovery}, timeout=max(30.0, self.settings.poll_interval)))[0]:
                    self._on_discovery(None, "still waiting for a response")
            finally:
                discovery.cancel()
            try:
                self._on_discovery(discovery.result(), "")
            except DiscoveryError as error:
                self._on_discovery(None, str(error))
            except Exception as error:  # noqa: BLE001 - sources may be user code; the pool continues without it
                self._on_discovery(None, f"{type(error).__name__}: {error}")
            if not (self._source.dynamic or self.discovery_error):
                return
            await asyncio.sleep(self.settings.poll_interval)

    def _on_discovery(self, urls: list[str] | None, error: str) -> None:
        error = one_line(error)
        if error and error != self.discovery_error:
            logger.warning("pool: members: %s", error)
        self.discovery_error = error
        self._discovered = True
        if urls is not None:
            for url in self._members.keys() - set(urls):
                self._members.pop(url).retire()
            for url in urls:
                if url not in self._members:
                    self._add_member(url)
            self._members = {url: self._members[url] for url in urls}
        self._notify_waiters()

    def _add_member(self, url: str) -> None:
        member = PoolMember(url, self._connect, self.settings, lambda: self._target_weights, self._on_member_change)
        self._members[url] = member
        task = asyncio.create_task(member.run(), name=f"pool member {url}")
        self._member_tasks[member] = task
        task.add_done_callback(lambda _: self._member_tasks.pop(member, None))

    def _on_member_change(self, member: PoolMember) -> None:
        if member.state == "ready" and not member.retiring:
            self._live_weights = self._target_weights
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        """Wake all waiters; each checks its own condition."""
        self._change_event.set()
        self._change_event = asyncio.Event()

    def _ready_members(self) -> list[PoolMember]:
        return [member for member in self._members.values() if self._is_usable(member)]

    def _describe(self) -> str:
        """Return one line per member with its state and last error."""
        lines = [
            f"\n{m.url}: {m.state}" + (f", {m.last_error}" if m.last_error and m.state != "ready" else "")
            for m in self._members.values()
        ]
        if self.discovery_error:
            lines.append(f"\nmembers: {self.discovery_error}")
        return "".join(lines) or " the pool has no members yet"

    def _closed_error(self) -> EngineError:
        return EngineError("the pool is closed", retryable=False)
