"""All engines of a simulated run: routing of requests, failures, crashes and weight transfer times.

Follows the rules of the real pool: the requests of a group go to one engine, a new group to the least loaded; an engine
that crashed comes back with the newest weights, and interrupted requests are retried on another engine, up to
`pool.max_attempts` attempts in total. Unlike in the real pool, waiting for an engine has no time limit.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keel.config import EnvironmentSettings, RunSettings
from keel.config.simulate import SimulateSettings
from keel.rollout.scheduler.groups import RolloutRequest
from keel.tools.simulate.draws import NUM_QUANTILES, SeededDraws, length_quantiles
from keel.tools.simulate.engines import DecodeSpeed, SimulatedEngine, SimulatedRequest, SimulatedRollout

MAX_TRACKED_GROUPS = 65_536
"""Number of groups whose engine is remembered."""
DEFAULT_POOL_BATCH = 256
"""Assumed batch size of an external server, whose batch size is not in the settings."""


def resolve_max_batch(settings: RunSettings, assumed: SimulateSettings) -> int:
    """Return the number of requests that one engine decodes together."""
    if assumed.max_batch is not None:
        return assumed.max_batch
    return settings.engine.max_batch if settings.engine.kind in ("local", "process") else DEFAULT_POOL_BATCH


@dataclass
class EngineTotals:
    """Totals over all engines since the start of the run."""

    sampled_tokens: float = 0.0
    busy_seconds: float = 0.0
    """Engine seconds with at least one request."""
    rollout_seconds: float = 0.0
    """Rollouts in flight, integrated over time."""
    down_seconds: float = 0.0
    """Engine seconds between a crash and the restart."""
    lost_tokens: float = 0.0
    """Tokens lost in crashes."""
    crashes: int = 0


class SimulatedPool:
    """Runs the scheduler's rollout requests on simulated engines in virtual time."""

    def __init__(
        self,
        settings: RunSettings,
        assumed: SimulateSettings,
        environments: dict[str, EnvironmentSettings],
        on_dispatch: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings, self._assumed, self._on_dispatch = settings, assumed, on_dispatch
        self.max_batch = resolve_max_batch(settings, assumed)
        self.speed = DecodeSpeed.from_settings(assumed, self.max_batch)
        self._full_rates = self.rates = self.speed.rates()
        self._slowed_rates = [rate / assumed.trainer_slowdown for rate in self._full_rates]
        self.prefill_seconds = (
            assumed.prompt_tokens / assumed.prefill_tokens_per_second if assumed.prefill_tokens_per_second else 0.0
        )
        self._draws = SeededDraws(settings.seed)
        self._length_tables: dict[str, list[int]] = {}
        self._max_sampled_tokens: dict[str, int] = {}
        for name, environment in environments.items():
            max_tokens = (environment.sampling or settings.sampling).max_tokens
            self._length_tables[name] = length_quantiles(assumed.length, max_tokens)
            self._max_sampled_tokens[name] = max_tokens * assumed.turns
        self._limits = {name: environment.limits for name, environment in environments.items()}
        self._num_failures = 0
        self._max_attempts = settings.pool.max_attempts if settings.pool is not None else 1
        self.engines = [SimulatedEngine(number, self, self._loop) for number in range(assumed.engines)]
        self._load_heap = [(0, engine.number) for engine in self.engines]
        self._group_engines: dict[str, SimulatedEngine] = {}
        self._unplaced: deque[SimulatedRequest] = deque()
        self.version = 0
        """The newest live version, which a restarted engine loads."""
        self._in_flight, self._counted_at = 0, 0.0
        self._totals = EngineTotals()
        self._crash_timers: dict[int, asyncio.TimerHandle] = {}
        if assumed.engine_crash_hours is not None:
            for engine in self.engines:
                self._schedule_crash(engine, self._draws.crash_intervals(engine.number, assumed.engine_crash_hours))

    def __call__(self, rollout_request: RolloutRequest) -> SimulatedRequest:
        """Start one rollout. Its length and failure are drawn from its group, member and attempt."""
        self._on_dispatch()
        assumed, name = self._assumed, rollout_request.environment
        length, failure, failure_point = self._draws.uniforms(
            rollout_request.group, rollout_request.member, rollout_request.attempt
        )
        drawn, cap = self._length_tables[name][int(length * NUM_QUANTILES)], self._max_sampled_tokens[name]
        request = SimulatedRequest(self._loop, self, rollout_request.group, min(drawn, cap))
        request.truncated = drawn >= cap
        limits = self._limits[name]
        if failure < assumed.rollout_failures:
            request.fails_with, request.truncated = "exception", False
            request.tokens = int(request.tokens * failure_point)
        elif assumed.prompt_tokens + request.tokens > limits.max_sequence_tokens:
            if limits.on_overlength == "drop":
                request.fails_with = "over_length"
            else:
                request.tokens, request.truncated = max(limits.max_sequence_tokens - assumed.prompt_tokens, 0), True
        self._update_in_flight(1)
        self._assign(request)
        return request

    def on_sampled(self, request: SimulatedRequest, tokens_by_version: list[tuple[int, int]]) -> None:
        kind = request.fails_with
        error = ""
        if kind:
            # numbered, because failures are independent here: the scheduler does not retry an exception that repeats
            self._num_failures += 1
            error = f"simulated: {kind} (failure {self._num_failures})"
        rollout = SimulatedRollout(tokens_by_version, truncated=request.truncated, error_kind=kind, error=error)
        if self._assumed.environment_seconds:
            self._loop.call_later(self._assumed.environment_seconds, self._complete, request, rollout)
        else:
            self._complete(request, rollout)

    def on_cancelled(self, request: SimulatedRequest) -> None:
        self._update_in_flight(-1)
        if request.engine is not None:
            request.engine.remove(request)

    def _complete(self, request: SimulatedRequest, rollout: SimulatedRollout) -> None:
        if not request.done():
            self._update_in_flight(-1)
            request.set_result(rollout)

    def _assign(self, request: SimulatedRequest) -> None:
        engine = self._group_engines.get(request.group)
        if engine is None or not engine.up:
            engine = self._least_loaded()
            if engine is None:
                self._unplaced.append(request)
                return
            self._group_engines[request.group] = engine
            if len(self._group_engines) > MAX_TRACKED_GROUPS:
                del self._group_engines[next(iter(self._group_engines))]
        engine.submit(request)

    def _least_loaded(self) -> SimulatedEngine | None:
        """Return the running engine with the least load, or none.

        In the heap each engine has one valid entry, under `SimulatedEngine.heap_load`, which is at most its load.
        """
        heap = self._load_heap
        while heap:
            load, number = heap[0]
            engine = self.engines[number]
            if not engine.up or load != engine.heap_load:
                heapq.heappop(heap)
            elif engine.load > load:
                engine.heap_load = engine.load
                heapq.heapreplace(heap, (engine.heap_load, number))
            else:
                return engine
        return None

    def on_load_decreased(self, engine: SimulatedEngine) -> None:
        if engine.load < engine.heap_load and engine.up:
            engine.heap_load = engine.load
            heapq.heappush(self._load_heap, (engine.heap_load, engine.number))

    def transfer_seconds(self, num_engines: int) -> float:
        """Return the seconds until `num_engines` engines have received published weights."""
        size, bandwidth = self._assumed.publish_gigabytes, self._assumed.bandwidth
        if self._assumed.storage_bandwidth is not None:
            bandwidth = min(bandwidth, self._assumed.storage_bandwidth / max(num_engines, 1))
        return size / bandwidth

    def set_trainer_computing(self, computing: bool) -> None:
        """Slow the engines down while the trainer computes on the same machine."""
        if self._assumed.trainer_slowdown > 1:
            for engine in self.engines:
                engine.advance()
            self.rates = self._slowed_rates if computing else self._full_rates
            for engine in self.engines:
                engine.on_rates_changed()

    def totals(self) -> EngineTotals:
        """Return the totals up to now."""
        self._update_in_flight(0)
        for engine in self.engines:
            engine.advance()
        now = self._loop.time()
        totals = self._totals
        totals.sampled_tokens = sum(engine.sampled_tokens for engine in self.engines)
        totals.busy_seconds = sum(engine.busy_seconds for engine in self.engines)
        down_seconds = totals.down_seconds + sum(now - engine.down_since for engine in self.engines if not engine.up)
        return EngineTotals(
            totals.sampled_tokens,
            totals.busy_seconds,
            totals.rollout_seconds,
            down_seconds,
            totals.lost_tokens,
            totals.crashes,
        )

    def close(self) -> None:
        for timer in self._crash_timers.values():
            timer.cancel()

    def _update_in_flight(self, delta: int) -> None:
        now = self._loop.time()
        self._totals.rollout_seconds += self._in_flight * (now - self._counted_at)
        self._in_flight += delta
        self._counted_at = now

    def _schedule_crash(self, engine: SimulatedEngine, intervals: Iterator[float]) -> None:
        self._crash_timers[engine.number] = self._loop.call_later(next(intervals), self._crash, engine, intervals)

    def _crash(self, engine: SimulatedEngine, intervals: Iterator[float]) -> None:
        engine.advance()
        self._totals.lost_tokens += sum(engine.tokens_sampled_for(request) for request in engine.running_requests)
        self._totals.crashes += 1
        restart_seconds = self._assumed.engine_restart_seconds + self.transfer_seconds(1)
        lost = engine.crash()
        self._crash_timers[engine.number] = self._loop.call_later(restart_seconds, self._restart, engine, intervals)
        for request in lost:
            request.attempts += 1
            if request.attempts < self._max_attempts:
                self._assign(request)
            else:
                self._complete(
                    request, SimulatedRollout([], error_kind="engine", error="simulated: the engine crashed")
                )

    def _restart(self, engine: SimulatedEngine, intervals: Iterator[float]) -> None:
        self._totals.down_seconds += self._loop.time() - engine.down_since
        engine.restart(self.version)
        heapq.heappush(self._load_heap, (0, engine.number))
        self._schedule_crash(engine, intervals)
        unplaced, self._unplaced = self._unplaced, deque()
        for request in unplaced:
            if not request.done():
                self._assign(request)
