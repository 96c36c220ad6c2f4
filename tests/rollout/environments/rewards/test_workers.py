"""Reward workers: values, exceptions, time limits and crashes, with real processes."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from keel.rollout.environments.rewards import workers
from keel.rollout.environments.rewards.workers import RewardError, RewardFunction, RewardWorkers

pytestmark = pytest.mark.process

FUNCTIONS = """
import os, signal, subprocess, sys, time

def plain(completion, answer, **columns):
    return float(completion == answer)

def none(**columns):
    return None

def echo_column(completion, difficulty, **columns):
    return difficulty

def raises(**columns):
    raise ValueError("no such\\nthing")

def exits(**columns):
    sys.exit("bye")

def hangs(**columns):
    while True:
        pass

def sleeps(seconds, **columns):
    time.sleep(seconds)
    return seconds

def crashes(**columns):
    os.kill(os.getpid(), signal.SIGSEGV)

def ignores_signals_and_forks(pid_file, **columns):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    time.sleep(60)

def prints(**columns):
    print('{"value": 7}')
    os.write(1, b'{"value": 8}\\n')
    sys.stdin.read()
    return 1.0

def infinite(**columns):
    return float("inf")

def text(**columns):
    return "1.0"

def works(kind, seconds=0.0, **columns):
    if kind == "hang":
        while True:
            pass
    if kind == "sleep":
        time.sleep(seconds)
    end = time.process_time() + seconds
    while kind == "spin" and time.process_time() < end:
        sum(range(1000))
    return os.getpriority(os.PRIO_PROCESS, 0)

def kills_its_parent(**columns):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)

class Scaled:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, completion, **columns):
        return self.factor * len(completion)
"""

Scene = Callable[[RewardWorkers], Awaitable[None]]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(scene: Scene, *, workers: int = 2, timeout: float = 20.0) -> None:
    async def main() -> None:
        async with RewardWorkers(workers, timeout=timeout) as pool:
            await scene(pool)

    asyncio.run(main())


def register(pool: RewardWorkers, name: str, **options: Any) -> int:
    return pool.register(RewardFunction(f"reward_functions:{name}", options or None))


def failure(name: str, *, timeout: float = 20.0, **arguments: Any) -> RewardError:
    """Return the error of a call, after checking that the pool still works."""
    errors = []

    async def scene(pool: RewardWorkers) -> None:
        broken, plain = register(pool, name), register(pool, "plain")
        with pytest.raises(RewardError) as caught:
            await pool.call(broken, arguments, timeout)
        errors.append(caught.value)
        assert await pool.call(plain, {"completion": "a", "answer": "a"}) == 1.0

    run(scene, workers=1)
    return errors[0]


def test_a_function_receives_completion_answer_and_columns() -> None:
    async def scene(pool: RewardWorkers) -> None:
        plain, column, none = (register(pool, name) for name in ("plain", "echo_column", "none"))
        row = {"completion": "4", "answer": "4", "difficulty": 0.25}
        assert await pool.call(plain, row) == 1.0
        assert await pool.call(plain, row | {"answer": "5"}) == 0.0
        assert await pool.call(column, row) == 0.25
        assert await pool.call(none, row) is None

    run(scene)


def test_a_factory_is_called_with_its_options() -> None:
    async def scene(pool: RewardWorkers) -> None:
        assert await pool.call(register(pool, "Scaled", factor=0.5), {"completion": "four"}) == 2.0

    run(scene)


def test_what_a_function_prints_or_reads_cannot_corrupt_the_protocol() -> None:
    async def scene(pool: RewardWorkers) -> None:
        number = register(pool, "prints")
        assert [await pool.call(number, {}) for _ in range(3)] == [1.0] * 3

    run(scene)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "exception", "ValueError: no such thing (reward_functions.py:14)"),
        ("exits", "exception", "SystemExit: bye (reward_functions.py:17)"),
        ("crashes", "crash", "its worker process was killed by SIGSEGV"),
        ("infinite", "exception", "the reward is inf; it must be a finite number, or None to abstain"),
        ("text", "exception", "the reward is a str; it must be a number, or None to abstain"),
        ("missing", "exception", "AttributeError: module 'reward_functions' has no attribute 'missing'"),
    ],
)
def test_a_call_that_fails_says_why_and_the_next_one_works(name: str, kind: str, message: str) -> None:
    error = failure(name)
    assert error.kind == kind
    assert message in str(error)


def test_a_hanging_function_is_killed_at_its_time_limit() -> None:
    start = time.monotonic()
    error = failure("hangs", timeout=0.5)
    assert (error.kind, str(error)) == ("timeout", "reward reward_functions:hangs took longer than 0.5 s")
    assert time.monotonic() - start < 10


def test_processes_that_a_function_started_are_killed_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    error = failure("ignores_signals_and_forks", timeout=2.0, pid_file=str(file))
    assert error.kind == "timeout"
    pid = int(file.read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1]:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still alive")


def test_hanging_calls_do_not_delay_other_calls() -> None:
    async def scene(pool: RewardWorkers) -> None:
        sleeps, plain = register(pool, "sleeps"), register(pool, "plain")
        slow = [asyncio.create_task(pool.call(sleeps, {"seconds": 60}, 4.0)) for _ in range(4)]
        await asyncio.sleep(0)
        start = time.monotonic()
        row = {"completion": "a", "answer": "a"}
        assert await asyncio.gather(*(pool.call(plain, row) for _ in range(20))) == [1.0] * 20
        assert time.monotonic() - start < 3.0
        for error in await asyncio.gather(*slow, return_exceptions=True):
            assert isinstance(error, RewardError) and error.kind == "timeout"

    run(scene)


def test_a_module_that_imports_slowly_is_not_a_slow_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import time\ntime.sleep(1.5)\n\ndef reward(completion):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def scene(pool: RewardWorkers) -> None:
        number = pool.register(RewardFunction("slow_module:reward"))
        assert await pool.call(number, {"completion": "a"}, 1.0) == 1.0

    run(scene)


def test_a_module_that_never_finishes_its_import_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_module.py").write_text("while True:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("keel.rollout.environments.rewards.workers.LOAD_SECONDS", 1.0)

    async def scene(pool: RewardWorkers) -> None:
        number = pool.register(RewardFunction("endless_module:reward"))
        with pytest.raises(RewardError, match="its module was not imported in 1 s"):
            await pool.call(number, {"completion": "a"}, 0.5)

    run(scene)


def import_counts(tmp_path: Path, source: str) -> list[str]:
    """Return the processes that imported a module, after two of its workers were replaced."""
    log = tmp_path / "imports"
    (tmp_path / "logged_rewards.py").write_text(
        f"import os, threading, time\nwith open({str(log)!r}, 'a') as file:\n    file.write(f'{{os.getpid()}}\\n')\n"
        f"{source}\ndef fragile(completion):\n    return os._exit(3) if completion == 'crash' else 1.0\n"
    )

    async def scene(pool: RewardWorkers) -> None:
        number = pool.register(RewardFunction("logged_rewards:fragile"))
        for _ in range(2):
            assert await pool.call(number, {"completion": ""}) == 1.0
            with pytest.raises(RewardError, match="its worker process exited with code 3"):
                await pool.call(number, {"completion": "crash"})

    run(scene, workers=1)
    return log.read_text().split()


def test_a_replaced_worker_does_not_import_the_function_again(tmp_path: Path) -> None:
    (importer,) = import_counts(tmp_path, "")
    assert int(importer) != os.getpid()


@pytest.mark.parametrize(
    "source",
    [
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        f"if open('/proc/self/cmdline').read().count('fork_server') and os.getppid() == {os.getpid()}: os._exit(1)",
    ],
    ids=["starts a thread", "ends the fork server"],
)
def test_a_module_that_cannot_be_forked_is_imported_by_each_worker(source: str, tmp_path: Path) -> None:
    processes = import_counts(tmp_path, source)
    assert len(set(processes)) == len(processes) == 3


def test_workers_come_back_after_the_fork_server_was_killed() -> None:
    assert "its worker process ended" in str(failure("kills_its_parent"))


def test_a_busy_loop_of_a_function_that_hung_before_gets_the_lowest_priority() -> None:
    async def scene(pool: RewardWorkers) -> None:
        works = register(pool, "works")
        usual = await pool.call(works, {"kind": "plain"})
        with pytest.raises(RewardError):
            await pool.call(works, {"kind": "hang"}, 0.5)
        spinning = asyncio.create_task(pool.call(works, {"kind": "spin", "seconds": 0.5}))
        others = [pool.call(works, {"kind": "sleep", "seconds": 0.1}) for _ in range(60)]
        assert set(await asyncio.gather(*others)) == {usual}
        assert await spinning == 19
        assert await pool.call(works, {"kind": "plain"}) == usual

    run(scene, workers=1)


class StoppedProcess:
    """A worker process that has used 10 ms, and has otherwise waited for a processor, or slept."""

    def __init__(self, waits: bool) -> None:
        self._start, self._waits = time.monotonic(), waits

    def cpu_times(self) -> tuple[float, float]:
        elapsed = time.monotonic() - self._start
        return min(elapsed, 0.01), max(elapsed - 0.01, 0.0) if self._waits else 0.0


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_that_waits_for_a_processor_is_not_slow(waits: bool) -> None:
    worker: Any = workers._Worker()
    worker.process = StoppedProcess(waits)
    worker.begin(workers._CallTimes(0.1))
    time.sleep(0.3)
    assert worker.is_slow() is not waits
