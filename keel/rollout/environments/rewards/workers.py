"""Reward functions in worker processes, with a time limit that is enforced by killing.

A synchronous reward function is user code: it may hang in a regular expression, crash the interpreter or never return
from C. It therefore never runs in the process of the run. A worker that overruns its time limit or dies is killed with
everything it started and replaced; the call raises a `RewardError`, and no other call waits for it: while a worker is
slow, another one is started in its place, up to a bound.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keel.errors import KeelError

SLOW_SECONDS = 0.2
"""Seconds after which a busy worker no longer counts against `workers`, so that hanging calls do not block others."""
MAX_LINE = 64 * 2**20
"""Bytes of a request or reply."""
KILL_SECONDS = 5.0
"""Seconds to wait for a killed process; the kernel needs none unless the machine is overloaded."""


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


class RewardWorkers:
    """A pool of worker processes. Use as an async context manager."""

    def __init__(self, workers: int, *, timeout: float, max_workers: int | None = None) -> None:
        """`workers` calls run concurrently; with slow calls in progress up to `max_workers` processes exist."""
        self.timeout = timeout
        self._workers, self._max_workers = workers, max_workers or 8 * workers
        self._functions: list[RewardFunction] = []
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._killed: set[asyncio.Task[None]] = set()
        self._closed = False
        self.calls = self.failures = self.restarts = 0

    async def __aenter__(self) -> "RewardWorkers":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def register(self, function: RewardFunction) -> int:
        """Add a function and return the number to call it by."""
        self._functions.append(function)
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
        healthy = False
        try:
            limit = self.timeout if timeout is None else timeout
            scores = await worker.call(number, self._functions[number], items, limit)
            healthy = True
            return scores
        except RewardError as error:
            self.failures += 1
            healthy = error.kind == "exception"  # the function raised; the process is fine
            raise
        finally:
            self._release(worker, healthy)

    async def close(self) -> None:
        """Kill all workers."""
        self._closed = True
        await asyncio.gather(*(worker.kill() for worker in (*self._idle, *self._busy)), *self._killed)
        self._idle.clear()

    async def _acquire(self) -> "_Worker":
        while True:
            if self._closed:
                raise RewardError("crash", "the reward workers are closed")
            active = sum(not worker.is_slow for worker in self._busy)
            if active < self._workers:
                if self._idle:
                    worker = self._idle.pop()
                    break
                if len(self._busy) < self._max_workers:
                    worker = _Worker()
                    break
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            with contextlib.suppress(TimeoutError):
                # a busy worker becomes slow without an event, so look again after that time
                await asyncio.wait_for(future, SLOW_SECONDS)
        worker.started = time.monotonic()
        self._busy.add(worker)
        return worker

    def _release(self, worker: "_Worker", healthy: bool) -> None:
        self._busy.discard(worker)
        if healthy and not self._closed:
            self._idle.append(worker)
        else:
            self.restarts += not self._closed
            killed = asyncio.get_running_loop().create_task(worker.kill())
            self._killed.add(killed)
            killed.add_done_callback(self._killed.discard)
        while self._waiting:
            future = self._waiting.pop(0)
            if not future.done():
                future.set_result(None)
                break


class _Worker:
    """One worker process, started by its first call."""

    def __init__(self) -> None:
        self.started = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._loaded: set[int] = set()

    @property
    def is_slow(self) -> bool:
        return time.monotonic() - self.started > SLOW_SECONDS

    async def call(
        self, number: int, function: RewardFunction, items: Sequence[Mapping[str, Any]], timeout: float
    ) -> list[RewardScore]:
        if self._process is None:
            await self._start()
        try:
            async with asyncio.timeout(timeout):
                if number not in self._loaded:
                    await self._ask({"load": number, **function.load_request()}, function.name)
                    self._loaded.add(number)
                request = {"call": number, "items": [dict(item) for item in items]}
                reply = await self._ask(request, function.name)
        except TimeoutError:
            raise RewardError("timeout", f"reward {function.name} took longer than {timeout:g} s") from None
        return [RewardScore(value, metrics) for value, metrics in reply["values"]]

    async def _start(self) -> None:
        argv = [sys.executable, "-m", "keel.rollout.environments.rewards.worker_main"]
        self._process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE,
            start_new_session=True,
        )

    async def _ask(self, request: Mapping[str, Any], name: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
            answer = await self._process.stdout.readline()
        except (ConnectionError, ValueError) as error:
            raise RewardError("crash", f"reward {name}: the connection to its worker broke: {error}") from error
        if not answer.endswith(b"\n"):
            code = await self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise RewardError("crash", f"reward {name}: its worker process {how}")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise RewardError("exception", f"reward {name}: {reply['error']}", reply["traceback"])
        return reply

    async def kill(self) -> None:
        """Kill the process and everything it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # its group may outlive it
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), KILL_SECONDS)
        if self._process.stdin is not None:
            self._process.stdin.close()


def default_workers() -> int:
    """Return the number of workers that leaves a core to the run."""
    return max((os.cpu_count() or 1) - 1, 1)
