"""Several engine servers as one engine: who is a member, who is ready, and which of them gets a request.

Guarantees, whatever fails in whatever order:
- there is one version at a time: a request is handed out only to a member that holds the weights of the pool's
  version, and an answer with tokens of any but those and what was desired since is refused and asked for again;
- new weights do not stop the sampling: while nobody holds them yet, members with those before them are handed out; the
  version advances when they are live on a member, and from then on no member is handed out that has not caught up;
- every request ends with an answer or an `EngineError`, in bounded time when the members' own requests are bounded;
- the requests of a group go to one member while it lives, so that they share its prefix cache.

It starts no servers, and it decides nothing about requests that all fail: that is the scheduler's.
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
"""Groups whose member is remembered; the one used longest ago is forgotten first."""


class Pool:
    """An engine made of engines. All methods belong to one event loop; the first that is awaited starts it."""

    def __init__(
        self,
        settings: PoolSettings,
        connect: Callable[[str], Engine],
        *,
        version: int | None = 0,
        source: MemberSource | None = None,
    ) -> None:
        """`version` is what members hold before anything was loaded through the pool; None: whatever they hold."""
        self.settings = settings
        self.discovery_error = ""
        """Why the members could not be found out when last tried; empty: they could."""
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

    # what an engine does

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer by a member that is ready; when that fails, by another, `attempts` times in all."""
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
            f"given up after {self.settings.max_attempts} attempts (pool.max_attempts):"
            + "".join(f"\n{url}: {error}" for url, error in failed.items())
        )

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        await self._apply_load(WeightLoad(source, version, drain))

    async def version(self) -> int:
        """Of the weights that every member handed out holds."""
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
        """Let go of the members; the servers go on running."""
        self._closed = True
        self._notify_waiters()
        tasks = [*self._member_tasks.values(), *([self._discovery_task] if self._discovery_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()

    # what can be seen

    def status(self) -> list[MemberStatus]:
        """Every member, and those that have left and are not yet done."""
        rows = [member.status() for member in self._members.values()]
        return rows + [member.status() for member in self._member_tasks if self._members.get(member.url) is not member]

    async def wait_until_probed(self) -> None:
        """Wait until the members were found, or that failed, and each of them was looked at once."""
        self._ensure_started()
        while not (self._discovered and all(member.probes for member in self._members.values())):
            await self._change_event.wait()
            self._ensure_started()

    # requests

    async def _send_request(
        self, member: PoolMember, prompt: Sequence[int], sampling: Sampling, group: str | None
    ) -> Generation:
        """Hand out; there is no await between the choice of the member and its call."""
        request = MemberRequest({self._live_weights.version, self._target_weights.version})
        member.in_flight.add(request)
        member.requests += 1
        try:
            async with request.deadline:
                answer = await member.get_engine().generate(prompt, sampling, group=group)
        except TimeoutError:
            if self._closed:
                raise self._closed_error() from None
            if not request.abandoned:
                raise
            raise EngineError(f"stopped answering: {member.last_error}") from None
        except EngineError as error:
            if error.retryable:
                member.mark_suspect(error)
            raise
        finally:
            member.in_flight.discard(request)
            if member.retiring:
                member.wake()
        strange = set(answer.versions) - request.versions
        if strange and None not in request.versions:
            wanted, got = sorted(v for v in request.versions if v is not None), sorted(strange)
            lost = EngineError(f"answered with version {got[0]} instead of {wanted[0]}: it lost its weights")
            member.mark_suspect(lost)
            raise lost
        member.failed_requests = 0
        return answer

    async def _wait_for_member(self, group: str | None, failed_urls: Collection[str]) -> PoolMember:
        """The member for a request; waits for one, but not for ever."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        patient = start + min(self.settings.poll_interval, self.settings.ready_timeout)
        member: PoolMember | None = None
        while True:
            if self._closed:
                raise self._closed_error()
            now = loop.time()
            member = self._choose_member(group, failed_urls, member, allow_updating=now < patient)
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
                async with asyncio.timeout_at(patient if now < patient else start + self.settings.ready_timeout):
                    await self._change_event.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
                if member is not None:
                    member.waiting_requests -= 1

    def _is_usable(self, member: PoolMember) -> bool:
        """Whether it holds the weights of the pool's version: the desired ones, or those before until they are live."""
        return member.state == "ready" or (member.updating and self._live_weights != self._target_weights)

    def _choose_member(
        self, group: str | None, failed_urls: Collection[str], previous: PoolMember | None, *, allow_updating: bool
    ) -> PoolMember | None:
        """The member of the group, or else the least loaded one, and one that has not failed the request if there is.

        A patient request also takes a member which is being updated and waits for it: otherwise all that wait during an
        update would go to the first member that has done with it.
        """
        able = [m for m in self._members.values() if self._is_usable(m) or (allow_updating and m.updating)]
        able = [m for m in able if m.url not in failed_urls] or able
        if not able:
            return None
        known = self._members.get(self._group_urls.get(group, "")) if group is not None else previous
        chosen = known if known in able else min(able, key=lambda m: (m.load, m.requests))
        if group is not None:
            self._group_urls[group] = chosen.url
            self._group_urls.move_to_end(group)
            if len(self._group_urls) > MAX_TRACKED_GROUPS:
                self._group_urls.popitem(last=False)
        return chosen

    # weights

    async def _apply_load(self, load: WeightLoad) -> None:
        """Update all members at once. Those that fail are left out; if none succeeds, all is as before."""
        if load.version < 0:
            raise EngineError(f"version = {load.version} must not be negative", retryable=False)
        self._ensure_started()
        async with self._load_lock:
            if self._closed:
                raise self._closed_error()
            before = self._target_weights
            wanted = before.plus(load)
            if wanted == self._live_weights:
                return
            try:
                failures = await self._sync_members(wanted)
            finally:
                if self._live_weights != wanted:
                    self._set_target(before)
        if self._live_weights != wanted:
            raise EngineError(
                f"no member loaded version {load.version} from {load.source}; the pool stays at {before.version}:"
                f"{failures}"
            )

    async def _sync_members(self, target: TargetWeights) -> str:
        """Wait until each member that can has the weights or has failed; what the members say then.

        A straggler is waited for as long again as the first took, and at least an interval: it is not handed out
        meanwhile, and the others work. Where all members are unhealthy, or were lost on the way, one that returns
        within `wait` is enough: a server may be being started again. One that answers and refuses is not waited for.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        involved = {m: m.failures for m in self._members.values() if m.state != "unhealthy"}
        deadline = None if involved else start + self.settings.ready_timeout
        self._set_target(target)
        while not self._closed:
            now, live = loop.time(), self._live_weights == target
            under_way = any(
                m.state != "ready" and m.failures == setbacks and not m.retiring for m, setbacks in involved.items()
            )
            if live and deadline is None:
                deadline = now + max(now - start, self.settings.poll_interval)
            if (live or involved) and not under_way:
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
        """Find the members again and again. What goes wrong is reported, and the last good members stay."""
        while True:
            # not cancelled when it takes long: a thread that asks the resolver would stay behind each time
            finding = asyncio.ensure_future(self._source.fetch_urls())
            try:
                while not (await asyncio.wait({finding}, timeout=max(30.0, self.settings.poll_interval)))[0]:
                    self._on_discovery(None, "is still waiting for an answer")
            finally:
                finding.cancel()
            try:
                self._on_discovery(finding.result(), "")
            except DiscoveryError as error:
                self._on_discovery(None, str(error))
            except Exception as error:  # noqa: BLE001 - a source is anybody's code, and the members go on without it
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
        keeper = asyncio.create_task(member.run(), name=f"pool member {url}")
        self._member_tasks[member] = keeper
        keeper.add_done_callback(lambda _: self._member_tasks.pop(member, None))

    def _on_member_change(self, member: PoolMember) -> None:
        if member.state == "ready" and not member.retiring:
            self._live_weights = self._target_weights
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        """Wake whoever waits for any change; they look for themselves."""
        self._change_event.set()
        self._change_event = asyncio.Event()

    def _ready_members(self) -> list[PoolMember]:
        return [member for member in self._members.values() if self._is_usable(member)]

    def _describe(self) -> str:
        """Every member with its state and last error, a line each."""
        lines = [
            f"\n{m.url}: {m.state}" + (f", {m.last_error}" if m.last_error and m.state != "ready" else "")
            for m in self._members.values()
        ]
        if self.discovery_error:
            lines.append(f"\nmembers: {self.discovery_error}")
        return "".join(lines) or " it has no members yet"

    def _closed_error(self) -> EngineError:
        return EngineError("the pool is closed", retryable=False)
