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

from keel.config.rollout import PoolSettings, Sampling
from keel.inference.pool.discovery import DiscoveryError, Source, plain, source_of
from keel.inference.pool.member import Member, MemberRow, Request
from keel.inference.pool.target_weights import Load, Weights
from keel.inference.protocol import Engine, EngineError, Generation, Health

logger = logging.getLogger("keel")

GROUPS = 16_384
"""Groups whose member is remembered; the one used longest ago is forgotten first."""


class Pool:
    """An engine made of engines. All methods belong to one event loop; the first that is awaited starts it."""

    def __init__(
        self,
        settings: PoolSettings,
        connect: Callable[[str], Engine],
        *,
        version: int | None = 0,
        source: Source | None = None,
    ) -> None:
        """`version` is what members hold before anything was loaded through the pool; None: whatever they hold."""
        self.settings = settings
        self.discovery_error = ""
        """Why the members could not be found out when last tried; empty: they could."""
        self._source = source_of(settings) if source is None else source
        self._connect = connect
        self._desired = self._live = Weights(version)
        self._members: dict[str, Member] = {}
        self._keepers: dict[Member, asyncio.Task[None]] = {}
        self._groups: OrderedDict[str, str] = OrderedDict()
        self._waiting = 0
        self._discovering: asyncio.Task[None] | None = None
        self._looked = False
        self._closed = False
        self._loading = asyncio.Lock()
        self._changed = asyncio.Event()

    # what an engine does

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, group: str | None = None) -> Generation:
        """An answer by a member that is ready; when that fails, by another, `attempts` times in all."""
        self._start()
        failed: dict[str, str] = {}
        for _ in range(self.settings.attempts):
            member = await self._ready_member(group, failed)
            try:
                return await self._ask(member, prompt, sampling, group)
            except EngineError as error:
                if not error.retryable:
                    raise
                failed[member.url] = plain(error)
        raise EngineError(
            f"given up after {self.settings.attempts} attempts (pool.attempts):"
            + "".join(f"\n{url}: {error}" for url, error in failed.items())
        )

    async def load_weights(self, folder: str, version: int, *, drain: bool = False) -> None:
        await self._load(Load("weights", folder, version, drain))

    async def load_adapter(self, folder: str, version: int, *, drain: bool = False) -> None:
        await self._load(Load("adapter", folder, version, drain))

    async def version(self) -> int:
        """Of the weights that every member handed out holds."""
        self._start()
        if self._live.version is not None:
            return self._live.version
        return min((member.version or 0 for member in self._ready()), default=0)

    async def health(self) -> Health:
        if self._closed:
            return Health(ready=False, version=self._live.version or 0, error="the pool is closed")
        self._start()
        ready = bool(self._ready())
        return Health(
            ready=ready,
            version=await self.version(),
            running=sum(len(member.in_flight) for member in self._keepers),
            waiting=self._waiting,
            error="" if ready else self._describe().strip(),
        )

    async def close(self) -> None:
        """Let go of the members; the servers go on running."""
        self._closed = True
        self._notify()
        tasks = [*self._keepers.values(), *([self._discovering] if self._discovering else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()

    # what can be seen

    def status(self) -> list[MemberRow]:
        """Every member, and those that have left and are not yet done."""
        rows = [member.row() for member in self._members.values()]
        return rows + [member.row() for member in self._keepers if self._members.get(member.url) is not member]

    async def looked(self) -> None:
        """Wait until the members were found, or that failed, and each of them was looked at once."""
        self._start()
        while not (self._looked and all(member.looks for member in self._members.values())):
            await self._changed.wait()
            self._start()

    # requests

    async def _ask(self, member: Member, prompt: Sequence[int], sampling: Sampling, group: str | None) -> Generation:
        """Hand out; there is no await between the choice of the member and its call."""
        request = Request({self._live.version, self._desired.version})
        member.in_flight.add(request)
        member.requests += 1
        try:
            async with request.switch:
                answer = await member.connected().generate(prompt, sampling, group=group)
        except TimeoutError:
            if self._closed:
                raise self._closed_error() from None
            if not request.given_up:
                raise
            raise EngineError(f"stopped answering: {member.last_error}") from None
        except EngineError as error:
            if error.retryable:
                member.doubt(error)
            raise
        finally:
            member.in_flight.discard(request)
            if member.leaving:
                member.wake()
        strange = set(answer.versions) - request.versions
        if strange and None not in request.versions:
            wanted, got = sorted(v for v in request.versions if v is not None), sorted(strange)
            lost = EngineError(f"answered with version {got[0]} instead of {wanted[0]}: it lost its weights")
            member.doubt(lost)
            raise lost
        member.failed_requests = 0
        return answer

    async def _ready_member(self, group: str | None, failed: Collection[str]) -> Member:
        """The member for a request; waits for one, but not for ever."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        patient = start + min(self.settings.interval, self.settings.wait)
        member: Member | None = None
        while True:
            if self._closed:
                raise self._closed_error()
            now = loop.time()
            member = self._choose(group, failed, member, patient=now < patient)
            if member is not None and self._usable(member):
                return member
            if now >= start + self.settings.wait:
                raise EngineError(f"no member was ready for {self.settings.wait:g} s (pool.wait):{self._describe()}")
            self._waiting += 1
            if member is not None:
                member.expected += 1
            try:
                async with asyncio.timeout_at(patient if now < patient else start + self.settings.wait):
                    await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
                if member is not None:
                    member.expected -= 1

    def _usable(self, member: Member) -> bool:
        """Whether it holds the weights of the pool's version: the desired ones, or those before until they are live."""
        return member.state == "ready" or (member.updating and self._live != self._desired)

    def _choose(
        self, group: str | None, failed: Collection[str], last: Member | None, *, patient: bool
    ) -> Member | None:
        """The member of the group, or else the least loaded one, and one that has not failed the request if there is.

        A patient request also takes a member which is being updated and waits for it: otherwise all that wait during an
        update would go to the first member that has done with it.
        """
        able = [m for m in self._members.values() if self._usable(m) or (patient and m.updating)]
        able = [m for m in able if m.url not in failed] or able
        if not able:
            return None
        known = self._members.get(self._groups.get(group, "")) if group is not None else last
        chosen = known if known in able else min(able, key=lambda m: (m.load, m.requests))
        if group is not None:
            self._groups[group] = chosen.url
            self._groups.move_to_end(group)
            if len(self._groups) > GROUPS:
                self._groups.popitem(last=False)
        return chosen

    # weights

    async def _load(self, load: Load) -> None:
        """Update all members at once. Those that fail are left out; if none succeeds, all is as before."""
        if load.version < 0:
            raise EngineError(f"version = {load.version} must not be negative", retryable=False)
        self._start()
        async with self._loading:
            if self._closed:
                raise self._closed_error()
            before = self._desired
            wanted = before.then(load)
            if wanted == self._live:
                return
            try:
                failures = await self._update(wanted)
            finally:
                if self._live != wanted:
                    self._want(before)
        if self._live != wanted:
            raise EngineError(
                f"no member loaded version {load.version} from {load.folder}; the pool stays at {before.version}:"
                f"{failures}"
            )

    async def _update(self, wanted: Weights) -> str:
        """Wait until each member that can has the weights or has failed; what the members say then.

        A straggler is waited for as long again as the first took, and at least an interval: it is not handed out
        meanwhile, and the others work. Where all members are unhealthy, or were lost on the way, one that returns
        within `wait` is enough: a server may be being started again. One that answers and refuses is not waited for.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        involved = {m: m.setbacks for m in self._members.values() if m.state != "unhealthy"}
        deadline = None if involved else start + self.settings.wait
        self._want(wanted)
        while not self._closed:
            now, live = loop.time(), self._live == wanted
            under_way = any(
                m.state != "ready" and m.setbacks == setbacks and not m.leaving for m, setbacks in involved.items()
            )
            if live and deadline is None:
                deadline = now + max(now - start, self.settings.interval)
            if (live or involved) and not under_way:
                if live or not any(member.gone for member in self._members.values()):
                    break
                deadline = start + self.settings.wait
            if deadline is not None and now >= deadline:
                break
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self._describe()

    def _want(self, weights: Weights) -> None:
        self._desired = weights
        for member in self._keepers:
            for request in member.in_flight:
                request.versions.add(weights.version)
            member.want()

    # members

    def _start(self) -> None:
        if self._closed:
            raise self._closed_error()
        if self._discovering is None:
            self._discovering = asyncio.create_task(self._discover(), name="pool discovery")

    async def _discover(self) -> None:
        """Find the members again and again. What goes wrong is reported, and the last good members stay."""
        while True:
            # not cancelled when it takes long: a thread that asks the resolver would stay behind each time
            finding = asyncio.ensure_future(self._source.find())
            try:
                while not (await asyncio.wait({finding}, timeout=max(30.0, self.settings.interval)))[0]:
                    self._found(None, "is still waiting for an answer")
            finally:
                finding.cancel()
            try:
                self._found(finding.result(), "")
            except DiscoveryError as error:
                self._found(None, str(error))
            except Exception as error:  # noqa: BLE001 - a source is anybody's code, and the members go on without it
                self._found(None, f"{type(error).__name__}: {error}")
            if not (self._source.changes or self.discovery_error):
                return
            await asyncio.sleep(self.settings.interval)

    def _found(self, urls: list[str] | None, error: str) -> None:
        error = plain(error)
        if error and error != self.discovery_error:
            logger.warning("pool: members: %s", error)
        self.discovery_error = error
        self._looked = True
        if urls is not None:
            for url in self._members.keys() - set(urls):
                self._members.pop(url).leave()
            for url in urls:
                if url not in self._members:
                    self._join(url)
            self._members = {url: self._members[url] for url in urls}
        self._notify()

    def _join(self, url: str) -> None:
        member = Member(url, self._connect, self.settings, lambda: self._desired, self._member_changed)
        self._members[url] = member
        keeper = asyncio.create_task(member.keep(), name=f"pool member {url}")
        self._keepers[member] = keeper
        keeper.add_done_callback(lambda _: self._keepers.pop(member, None))

    def _member_changed(self, member: Member) -> None:
        if member.state == "ready" and not member.leaving:
            self._live = self._desired
        self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for any change; they look for themselves."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _ready(self) -> list[Member]:
        return [member for member in self._members.values() if self._usable(member)]

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
