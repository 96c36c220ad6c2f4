"""All engines of a simulated run: who gets which request, what fails, and how new weights arrive.

As a pool does it: the requests of a group go to one engine, a new group to the least loaded; one that crashed comes
back with the newest weights, and what the crash interrupted is asked for again elsewhere, `attempts` times in all.
Waiting for an engine has no time limit here.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keel.config import EnvironmentSettings, RunSettings
from keel.config.simulate import SimulateSettings
from keel.rollout.scheduler.groups import Dispatch
from keel.tools.simulate.draws import QUANTILES, Chance, lengths
from keel.tools.simulate.engines import Answer, Engine, Request, Speed

GROUPS = 65_536
"""Groups whose engine is remembered."""
POOL_BATCH = 256
"""Requests of an engine that is a server of somebody else's, where nothing says how many."""


def max_batch_of(settings: RunSettings, assumed: SimulateSettings) -> int:
    """Requests that one engine decodes together."""
    if assumed.max_batch is not None:
        return assumed.max_batch
    return settings.engine.max_batch if settings.engine.kind in ("local", "process") else POOL_BATCH


@dataclass
class Totals:
    """What the engines have come to since the beginning."""

    tokens: float = 0.0
    """Sampled."""
    busy: float = 0.0
    """Seconds of all engines with at least one request."""
    flights: float = 0.0
    """Rollouts under way, times seconds."""
    down: float = 0.0
    """Seconds of all engines that had crashed and were not back."""
    crashed: float = 0.0
    """Tokens that crashes lost."""
    crashes: int = 0


class Fleet:
    """Runs dispatches of the scheduler on engines in virtual time."""

    def __init__(
        self,
        settings: RunSettings,
        assumed: SimulateSettings,
        environments: dict[str, EnvironmentSettings],
        dispatched: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings, self._assumed, self._dispatched = settings, assumed, dispatched
        self.max_batch = max_batch_of(settings, assumed)
        self.speed = Speed.of(assumed, self.max_batch)
        self._rates = self.rates = self.speed.rates()
        self._slow = [rate / assumed.contention for rate in self._rates]
        self.prefill = assumed.prompt / assumed.prefill_tokens_per_second if assumed.prefill_tokens_per_second else 0.0
        self._chance = Chance(settings.seed)
        self._table: dict[str, list[int]] = {}
        self._caps: dict[str, int] = {}
        for name, one in environments.items():
            most = (one.sampling or settings.sampling).max_tokens
            self._table[name] = lengths(assumed.length, most)
            self._caps[name] = most * assumed.turns
        self._limits = {name: one.limits for name, one in environments.items()}
        self._attempts = settings.pool.attempts if settings.pool is not None else 1
        self.engines = [Engine(number, self, self._loop) for number in range(assumed.engines)]
        self._free = [(0, engine.number) for engine in self.engines]
        self._groups: dict[str, Engine] = {}
        self._homeless: deque[Request] = deque()
        self.version = 0
        """The newest that is live: what an engine that comes back has."""
        self._flying, self._at = 0, 0.0
        self._totals = Totals()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        if assumed.engine_crash_hours is not None:
            for engine in self.engines:
                self._await_crash(engine, self._chance.crashes(engine.number, assumed.engine_crash_hours))

    # requests

    def __call__(self, dispatch: Dispatch) -> Request:
        """One rollout; what becomes of it depends on its name."""
        self._dispatched()
        assumed, name = self._assumed, dispatch.environment
        length, failure, where = self._chance.draws(dispatch.group, dispatch.member, dispatch.attempt)
        drawn, cap = self._table[name][int(length * QUANTILES)], self._caps[name]
        request = Request(self._loop, self, dispatch.group, min(drawn, cap))
        request.cut = drawn >= cap
        limits = self._limits[name]
        if failure < assumed.rollout_failures:
            request.fails, request.cut = "exception", False
            request.tokens = int(request.tokens * where)
        elif assumed.prompt + request.tokens > limits.tokens:
            if limits.over_length == "refuse":
                request.fails = "over_length"
            else:
                request.tokens, request.cut = max(limits.tokens - assumed.prompt, 0), True
        self._count(1)
        self._place(request)
        return request

    def sampled(self, request: Request, parts: list[tuple[int, int]]) -> None:
        kind = request.fails
        error = f"simulated: {kind}" if kind else ""
        answer = Answer(parts, cut=request.cut, error_kind=kind, error=error)
        if self._assumed.environment_seconds:
            self._loop.call_later(self._assumed.environment_seconds, self._land, request, answer)
        else:
            self._land(request, answer)

    def cancelled(self, request: Request) -> None:
        self._count(-1)
        if request.engine is not None:
            request.engine.drop(request)

    def _land(self, request: Request, answer: Answer) -> None:
        if not request.done():
            self._count(-1)
            request.set_result(answer)

    def _place(self, request: Request) -> None:
        engine = self._groups.get(request.group)
        if engine is None or not engine.up:
            engine = self._least_loaded()
            if engine is None:
                self._homeless.append(request)
                return
            self._groups[request.group] = engine
            if len(self._groups) > GROUPS:
                del self._groups[next(iter(self._groups))]
        engine.take(request)

    def _least_loaded(self) -> Engine | None:
        """By a heap in which each engine has one good entry, under `Engine.key`, which is its load or less."""
        free = self._free
        while free:
            load, number = free[0]
            engine = self.engines[number]
            if not engine.up or load != engine.key:
                heapq.heappop(free)
            elif engine.load > load:
                engine.key = engine.load
                heapq.heapreplace(free, (engine.key, number))
            else:
                return engine
        return None

    def lighter(self, engine: Engine) -> None:
        if engine.load < engine.key and engine.up:
            engine.key = engine.load
            heapq.heappush(self._free, (engine.key, engine.number))

    # what happens to all of them

    def load_seconds(self, readers: int) -> float:
        """Of weights that are there for all, until each of so many engines has them."""
        size, each = self._assumed.publish_gigabytes, self._assumed.bandwidth
        if self._assumed.storage_bandwidth is not None:
            each = min(each, self._assumed.storage_bandwidth / max(readers, 1))
        return size / each

    def share_machine(self, trainer_computes: bool) -> None:
        """The trainer begins or ends to use what the engines use too."""
        if self._assumed.contention > 1:
            for engine in self.engines:
                engine.advance()
            self.rates = self._slow if trainer_computes else self._rates
            for engine in self.engines:
                engine.change_pace()

    def totals(self) -> Totals:
        """Up to now."""
        self._count(0)
        for engine in self.engines:
            engine.advance()
        now = self._loop.time()
        found = self._totals
        found.tokens = sum(engine.tokens for engine in self.engines)
        found.busy = sum(engine.busy for engine in self.engines)
        down = found.down + sum(now - engine.down_since for engine in self.engines if not engine.up)
        return Totals(found.tokens, found.busy, found.flights, down, found.crashed, found.crashes)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _count(self, change: int) -> None:
        now = self._loop.time()
        self._totals.flights += self._flying * (now - self._at)
        self._flying += change
        self._at = now

    # crashes

    def _await_crash(self, engine: Engine, gaps: Iterator[float]) -> None:
        self._timers[engine.number] = self._loop.call_later(next(gaps), self._crash, engine, gaps)

    def _crash(self, engine: Engine, gaps: Iterator[float]) -> None:
        engine.advance()
        self._totals.crashed += sum(engine.sampled_of(one) for one in engine.running)
        self._totals.crashes += 1
        back = self._assumed.engine_restart_seconds + self.load_seconds(1)
        lost = engine.crash()
        self._timers[engine.number] = self._loop.call_later(back, self._return, engine, gaps)
        for request in lost:
            request.tries += 1
            if request.tries < self._attempts:
                self._place(request)
            else:
                self._land(request, Answer([], error_kind="engine", error="simulated: the engine crashed"))

    def _return(self, engine: Engine, gaps: Iterator[float]) -> None:
        self._totals.down += self._loop.time() - engine.down_since
        engine.come_back(self.version)
        heapq.heappush(self._free, (0, engine.number))
        self._await_crash(engine, gaps)
        homeless, self._homeless = self._homeless, deque()
        for request in homeless:
            if not request.done():
                self._place(request)
