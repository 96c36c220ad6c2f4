"""Reward functions in worker processes, with a time limit that is enforced by killing.

A synchronous reward function is user code: it may hang in a regular expression, crash the interpreter or never return
from C. It therefore never runs in the process of the run. A worker that overruns its time limit or dies is killed with
everything it started and replaced by a fork of a clean process (`processes/fork_server.py`); the call raises a
`RewardError`, and no other call waits for it:

- A call that uses more processor time than usual, or sleeps for long, no longer counts against the number of workers:
  another worker is started in its place, up to a bound. Time spent waiting for a processor does not count, because on a
  loaded machine further workers would only make every call slower.
- A function that has overrun before may hang again. While other calls wait, its calls that use more processor time than
  any call that returned get the lowest priority, so that a busy loop does not slow the others.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keel.errors import KeelError
from keel.rollout.environments.rewards.processes.launcher import WorkerLauncher, WorkerProcess

LOAD_SECONDS = 60.0
"""Seconds in which a worker may import the module of a function, if `timeout` is shorter: one that imports torch needs
10 s on a busy machine, and its calls must not fail for it."""
SLEEP_SECONDS = 0.2
"""A call that has slept this long, in a request to a server for example, does not count against `workers`."""
SLOW_FACTOR = 2.0
"""A call is slow when it has used this many times the median processor time of the latest calls that returned."""
MIN_SLOW_SECONDS = 0.05
"""The least processor time of a slow call; small differences are noise."""
FIRST_SLOW_FRACTION = 0.25
"""A function of which no call has returned yet is slow after this fraction of its time limit."""
HOG_FACTOR = 1.5
"""A call may use this many times the processor time of any call that returned before its priority is lowered."""
POLL_SECONDS = 0.02
"""Interval of looking for slow calls while others wait."""


class RewardError(KeelError):
    """A call of a reward function that gave no reward. `kind` is timeout, crash or exception."""

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.traceback = traceback


class RewardScore(NamedTuple):
    """The reward of one completion."""

    value: float | None
    """None: the reward abstained."""
    metrics: Mapping[str, float] = {}
    """Other values to record, such as the cost of a judge."""
    failure: RewardError | None = None
    """The reason, if it abstained because it failed."""


class RewardFunction:
    """A reward function that workers load by `module:attribute`."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """With `options`, even empty ones, `name` is a factory that returns the reward function."""
        self.name, self._options = name, options

    def load_request(self) -> dict[str, Any]:
        """Return the request that makes a worker load the function."""
        request: dict[str, Any] = {"name": self.name, "path": [entry or os.getcwd() for entry in sys.path]}
        return request if self._options is None else {**request, "options": dict(self._options)}


class _CallTimes:
    """The processor time of the calls of one function."""

    def __init__(self, slow_seconds: float) -> None:
        self._latest: deque[float] = deque(maxlen=32)
        self._longest = 0.0
        self.has_overrun = False
        self.slow_seconds = slow_seconds
        """A call that has used more is slow."""

    def add(self, seconds: float) -> None:
        """Record a call that returned."""
        self._latest.append(seconds)
        self._longest = max(self._longest, seconds)
        self.slow_seconds = max(SLOW_FACTOR * statistics.median(self._latest), MIN_SLOW_SECONDS)

    @property
    def hog_seconds(self) -> float:
        """A call that has used more is unlikely to return."""
        return max(HOG_FACTOR * self._longest, self.slow_seconds)


class RewardWorkers:
    """A pool of worker processes. Use as an async context manager."""

    def __init__(self, workers: int, *, timeout: float, max_workers: int | None = None) -> None:
        """`workers` calls run concurrently; with slow calls in progress up to `max_workers` processes exist."""
        self.timeout = timeout
        self._workers, self._max_workers = workers, max_workers or 8 * workers
        self._functions: list[RewardFunction] = []
        self._times: list[_CallTimes] = []
        self._launcher = WorkerLauncher(timeout)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._poll: asyncio.TimerHandle | None = None
        self._reaping: set[asyncio.Task[int | None]] = set()
        self._closed = False
        self.calls = self.failures = self.restarts = 0

    async def __aenter__(self) -> "RewardWorkers":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def register(self, function: RewardFunction) -> int:
        """Add a function and return the number to call it by."""
        self._functions.append(function)
        self._times.append(_CallTimes(FIRST_SLOW_FRACTION * self.timeout))
        return len(self._functions) - 1

    async def call(self, number: int, arguments: Mapping[str, Any], timeout: float | None = None) -> float | None:
        """Return the reward of one completion; None means the function abstained. Raises like `call_group`."""
        return (await self.call_group(number, [arguments], timeout))[0].value

    async def call_group(
        self, number: int, items: Sequence[Mapping[str, Any]], timeout: float | None = None
    ) -> list[RewardScore]:
        """Call a function for several completions in one worker. Raises RewardError when it raises, overruns or dies.

        A function of lists is called once, any other once for each completion; `timeout` covers all of them.
        """
        self.calls += 1
        worker = await self._acquire()
        reusable = False
        try:
            if worker.process is None:
                await self._launch(worker)
            worker.begin(self._times[number])
            limit = self.timeout if timeout is None else timeout
            scores = await worker.call(number, self._functions[number], items, limit)
            reusable = not worker.has_low_priority
            return scores
        except RewardError as error:
            self.failures += 1
            self._times[number].has_overrun |= error.kind == "timeout"
            # the function raised; the process is fine
            reusable = error.kind == "exception" and not worker.has_low_priority
            raise
        finally:
            worker.end()
            self._release(worker, reusable)

    async def close(self) -> None:
        """Kill all workers."""
        self._closed = True
        if self._poll is not None:
            self._poll.cancel()
        for future in self._waiting:
            if not future.done():
                future.set_exception(_closed_error())
        self._waiting.clear()
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()
        await self._launcher.close()
        await asyncio.gather(*self._reaping)

    async def _acquire(self) -> "_Worker":
        if self._closed:
            raise _closed_error()
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result(), True)
            raise

    def _dispatch(self) -> None:
        """Give workers to waiting calls in order, and look again later if some are left."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
            elif self._has_capacity():
                worker = self._idle.pop() if self._idle else _Worker()
                self._busy.add(worker)
                self._waiting.popleft().set_result(worker)
            else:
                break
        if self._waiting and self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(POLL_SECONDS, self._look_again)

    def _has_capacity(self) -> bool:
        running = sum(not worker.is_slow() for worker in self._busy)
        return running < self._workers and (bool(self._idle) or len(self._busy) < self._max_workers)

    def _look_again(self) -> None:
        self._poll = None
        for worker in self._busy:
            worker.yield_if_hog()
        self._dispatch()

    async def _launch(self, worker: "_Worker") -> None:
        try:
            worker.process = await self._launcher.launch([function.load_request() for function in self._functions])
        except RewardError:
            raise
        except KeelError as error:
            raise RewardError("crash", str(error)) from error

    def _release(self, worker: "_Worker", reusable: bool) -> None:
        self._busy.discard(worker)
        if reusable and not self._closed:
            self._idle.append(worker)
        else:
            self.restarts += not self._closed
            worker.kill()
            if worker.process is not None:
                reaping = asyncio.get_running_loop().create_task(worker.process.wait())
                self._reaping.add(reaping)
                reaping.add_done_callback(self._reaping.discard)
        if not self._closed:
            self._dispatch()


class _Worker:
    """One worker process, launched by its first call."""

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.has_low_priority = False
        self._times: _CallTimes | None = None
        self._started, self._cpu_started = 0.0, (0.0, 0.0)
        self._is_slow = False

    def begin(self, times: _CallTimes) -> None:
        """Note that a call begins."""
        assert self.process is not None
        self._times, self._started, self._cpu_started = times, time.monotonic(), self.process.cpu_times()
        self._is_slow = False

    def end(self) -> None:
        """Note that the call has ended."""
        self._times = None

    def is_slow(self) -> bool:
        """Whether the call takes longer than usual, and not for lack of a processor."""
        if self._times is not None and not self._is_slow:
            limit = self._times.slow_seconds
            if time.monotonic() - self._started > min(limit, SLEEP_SECONDS):
                running, sleeping = self._call_times()
                self._is_slow = running > limit or sleeping > SLEEP_SECONDS
        return self._times is not None and self._is_slow

    def yield_if_hog(self) -> None:
        """Lower the priority of a call that is likely to be a busy loop."""
        if self._times is None or not self._times.has_overrun or self.has_low_priority or not self.is_slow():
            return
        assert self.process is not None
        if self._call_times()[0] > self._times.hog_seconds:
            self.process.lower_priority()
            self.has_low_priority = True

    def _call_times(self) -> tuple[float, float]:
        """Return the seconds that the call has used a processor, and those it has slept."""
        assert self.process is not None
        running, waiting = (
            now - before for now, before in zip(self.process.cpu_times(), self._cpu_started, strict=True)
        )
        return running, time.monotonic() - self._started - running - waiting

    async def call(
        self, number: int, function: RewardFunction, items: Sequence[Mapping[str, Any]], timeout: float
    ) -> list[RewardScore]:
        assert self.process is not None and self._times is not None
        try:
            if number not in self.process.loaded:
                async with asyncio.timeout(max(timeout, LOAD_SECONDS)):
                    await self._ask({"load": number, **function.load_request()}, function.name)
                self.process.loaded.add(number)
            async with asyncio.timeout(timeout):
                reply = await self._ask({"call": number, "items": [dict(item) for item in items]}, function.name)
        except TimeoutError:
            self.process.kill()
            if number in self.process.loaded:
                raise RewardError("timeout", f"reward {function.name} took longer than {timeout:g} s") from None
            limit = max(timeout, LOAD_SECONDS)
            raise RewardError(
                "timeout", f"reward {function.name}: its module was not imported in {limit:g} s"
            ) from None
        self._times.add(self._call_times()[0])
        return [RewardScore(value, metrics) for value, metrics in reply["values"]]

    async def _ask(self, request: Mapping[str, Any], name: str) -> dict[str, Any]:
        assert self.process is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            self.process.writer.write(line)
            await self.process.writer.drain()
            answer = await self.process.reader.readline()
        except ConnectionError:
            answer = b""
        except ValueError as error:
            raise RewardError("crash", f"reward {name}: its worker sent too long a line: {error}") from error
        if not answer.endswith(b"\n"):
            self.process.kill()  # what it started, and itself if it only closed the connection
            raise RewardError("crash", f"reward {name}: its worker process {_describe_end(await self.process.wait())}")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise RewardError("exception", f"reward {name}: {reply['error']}", reply["traceback"])
        return reply

    def kill(self) -> None:
        """Kill the process and everything it started."""
        if self.process is not None:
            self.process.kill()


def _closed_error() -> RewardError:
    return RewardError("crash", "the reward workers are closed")


def _describe_end(status: int | None) -> str:
    if status is None:
        return "ended"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"


def default_workers() -> int:
    """Return the number of workers that leaves a core to the run."""
    return max((os.cpu_count() or 1) - 1, 1)
