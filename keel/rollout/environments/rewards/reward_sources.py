"""What computes the values of one reward: a function in worker processes, or a judge.

A source is made from the settings of a reward before the run starts: whatever can be checked then is an error that
names the setting.
"""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keel.common.extras import import_object, missing_dependency
from keel.common.settings import suggest_name
from keel.config.dataset import RewardScope, RewardSettings
from keel.errors import ConfigError
from keel.rollout.environments.rewards.builtin import BUILTIN
from keel.rollout.environments.rewards.processes.worker_main import takes_lists
from keel.rollout.environments.rewards.workers import RewardFunction, RewardScore, RewardWorkers, default_workers
from keel.rollout.model_rewards.judge import Judge
from keel.rollout.model_rewards.reward_model import LOAD_TIMEOUT

FUNCTION_TIMEOUT = 10.0
"""Seconds of a call of a function without a time limit of its own."""
TIMEOUT_MARGIN = 10.0
"""Seconds that a function with a time limit of its own has to start and stop what it runs, on a loaded machine."""


class RewardSource(Protocol):
    """Computes one reward. Many calls of `score` may run concurrently."""

    timeout: float
    """Seconds that a call of `score`, or a request of a judge, may take."""
    scope: RewardScope
    """With "group", `score` needs all completions of a group; with "completion" it receives one."""

    async def score(self, items: Sequence[Mapping[str, Any]]) -> list[RewardScore]:
        """Return the reward of each completion, given by its arguments; raise RewardError if there is none at all."""

    async def close(self) -> None:
        """Release processes and connections; a later call of `score` opens them again."""


class WorkerPool:
    """Worker processes for some functions, started in the event loop that uses them."""

    def __init__(self, workers: int, max_workers: int | None = None) -> None:
        self._sizes = workers, max_workers
        self._functions: list[RewardFunction] = []
        self._workers: RewardWorkers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def register(self, function: RewardFunction) -> int:
        """Add a function and return the number to call it by."""
        self._functions.append(function)
        return len(self._functions) - 1

    def get(self) -> RewardWorkers:
        """Return the workers of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._workers is None or self._loop is not loop:
            workers, max_workers = self._sizes
            self._loop = loop
            self._workers = RewardWorkers(workers, timeout=FUNCTION_TIMEOUT, max_workers=max_workers)
            for function in self._functions:
                self._workers.register(function)
        return self._workers

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
            self._workers = None


class FunctionSource:
    """A reward function in worker processes."""

    def __init__(self, function: RewardFunction, scope: RewardScope, timeout: float, pool: WorkerPool) -> None:
        self.scope = scope
        self.timeout, self._pool = timeout, pool
        self._number = pool.register(function)

    async def score(self, items: Sequence[Mapping[str, Any]]) -> list[RewardScore]:
        return await self._pool.get().call_group(self._number, items, self.timeout)

    async def close(self) -> None:
        await self._pool.close()


def make_source(settings: RewardSettings, pool: WorkerPool) -> RewardSource:
    """Return the source of a reward; `pool` runs the functions that need no process of their own."""
    if settings.name == "judge":
        _check_scope_unset(settings)
        return Judge(settings.options, settings.timeout)
    function, callable_ = _find_function(settings)
    scope: RewardScope = "group" if takes_lists(callable_) else "completion"
    if settings.scope == "group" and scope == "completion":
        raise ConfigError(
            f'reward "{settings.name}": scope = "group" needs a function of lists, with a parameter completions, that'
            " returns a list"
        )
    timeout = _time_limit(settings, callable_)
    if settings.name == "reward_model":
        _check_scope_unset(settings)
        pool, timeout = WorkerPool(1, max_workers=1), settings.timeout or LOAD_TIMEOUT  # the model is loaded once
    return FunctionSource(function, settings.scope or scope, timeout, pool)


def make_sources(rewards: Sequence[RewardSettings]) -> list[RewardSource]:
    """Return the sources of rewards, whose functions share worker processes."""
    pool = WorkerPool(default_workers())
    return [make_source(settings, pool) for settings in rewards]


def _check_scope_unset(settings: RewardSettings) -> None:
    if settings.scope is not None:
        hint = "; options.mode decides it" if settings.name == "judge" else ""
        raise ConfigError(f'reward "{settings.name}": scope = "{settings.scope}" has no effect{hint}')


def _time_limit(settings: RewardSettings, function: Any) -> float:
    """Return the seconds after which a call is killed: later than any time limit that the function keeps itself."""
    own: float | None = getattr(function, "time_limit", None) if settings.name in BUILTIN else None
    if own is None:
        return FUNCTION_TIMEOUT if settings.timeout is None else settings.timeout
    if settings.timeout is not None and settings.timeout <= own:
        raise ConfigError(
            f'reward "{settings.name}": timeout = {settings.timeout:g} must be above its own limit,'
            f" options.total_timeout = {own:g}; leave timeout out, or lower total_timeout"
        )
    return own + TIMEOUT_MARGIN if settings.timeout is None else settings.timeout


def _find_function(settings: RewardSettings) -> tuple[RewardFunction, Any]:
    """Return a function for workers, and the function itself."""
    name = settings.name
    if name in BUILTIN:
        return RewardFunction(f"{BUILTIN[name]}:{name}", settings.options), _call_factory(settings)
    if not name.partition(":")[2]:
        raise ConfigError(
            f'rewards: "{name}" is not a built-in reward; {suggest_name(name, list(BUILTIN))} (your own function:'
            ' "module:function")'
        )
    if settings.options:
        raise ConfigError(f'reward "{name}": options are for built-in rewards')
    function = import_object(name, f'reward "{name}"')
    return RewardFunction(name), function


def _call_factory(settings: RewardSettings) -> Any:
    """Return the function that a built-in factory makes of the options."""
    try:
        return getattr(importlib.import_module(BUILTIN[settings.name]), settings.name)(**settings.options)
    except ModuleNotFoundError as error:
        raise missing_dependency(error) or error from error
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f'reward "{settings.name}": options = {settings.options} cannot be used: {error}') from error
