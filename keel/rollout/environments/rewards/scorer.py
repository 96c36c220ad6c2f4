"""Scoring of completions: several weighted reward functions, run in worker processes.

The scorer watches the functions: one that fails too often stops the run with its first traceback, and one that gave the
same value to every completion so far is reported, because that is how a broken verifier looks.
"""

import asyncio
import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.common.extras import import_object, missing_dependency
from keel.common.settings import suggest_name
from keel.common.tasks import gather_or_cancel
from keel.config.dataset import RewardSettings, RewardTotal
from keel.errors import ConfigError, FatalEnvironmentError
from keel.rollout.environments.environment import EpisodeResult
from keel.rollout.environments.rewards.builtin import BUILTIN
from keel.rollout.environments.rewards.workers import RewardError, RewardFunction, RewardWorkers, default_workers

MIN_CALLS = 20
"""Calls of a function before its failures can stop the run."""
CONSTANT_CALLS = 128
"""Completions after which a reward that never varied is reported."""

DEFAULT_TIMEOUT = 10.0
"""Seconds of a call of a function without a time limit of its own."""
TIMEOUT_MARGIN = 10.0
"""Seconds that a function with a time limit of its own has to start and stop what it runs, on a loaded machine."""

logger = logging.getLogger("keel")


@dataclass
class _Record:
    """What one reward function has done so far."""

    calls: int = 0
    failures: int = 0
    first_failure: RewardError | None = None
    values: set[float] = field(default_factory=set)
    """Up to two different values."""
    scored: int = 0


class RewardScorer:
    """Computes the reward of a completion as the weighted sum or mean of reward functions."""

    def __init__(self, rewards: Sequence[RewardSettings], total: RewardTotal, max_failure_fraction: float) -> None:
        self._rewards, self._total, self._max_failure_fraction = list(rewards), total, max_failure_fraction
        self._labels = _labels(rewards)
        self._functions = [_find_function(settings) for settings in rewards]
        self.timeouts = [_time_limit(settings) for settings in rewards]
        """Seconds that a call of each function may take."""
        self._records = [_Record() for _ in rewards]
        self._workers: RewardWorkers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, arguments: Mapping[str, Any]) -> EpisodeResult:
        """Return the reward of one completion and its components; raise RewardError if a function fails."""
        workers = self._open()
        calls = [self._call(workers, number, arguments) for number in range(len(self._rewards))]
        values = await gather_or_cancel(calls)
        scored = [
            (label, settings.weight, value)
            for label, settings, value in zip(self._labels, self._rewards, values, strict=True)
            if value is not None
        ]
        if not scored:
            raise RewardError("exception", f"every reward function abstained: {', '.join(self._labels)}")
        total = sum(weight * value for _, weight, value in scored)
        if self._total == "mean":
            total /= sum(abs(weight) for _, weight, _ in scored) or 1.0
        return EpisodeResult(total, reward_components={label: value for label, _, value in scored})

    async def close(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            await self._workers.close()
            self._workers = None

    async def _call(self, workers: RewardWorkers, number: int, arguments: Mapping[str, Any]) -> float | None:
        settings, record = self._rewards[number], self._records[number]
        record.calls += 1
        try:
            value = await workers.call(number, arguments, self.timeouts[number])
        except RewardError as error:
            record.failures += 1
            record.first_failure = record.first_failure or error
            self._check_failures(number)
            raise
        if value is None:
            return None
        value = settings.apply(value)
        record.scored += 1
        if len(record.values) < 2:
            record.values.add(value)
            if record.scored == CONSTANT_CALLS and len(record.values) == 1:
                logger.warning(
                    "reward %s gave %g to each of the first %d completions, so nothing can be learned; try it on"
                    " completions whose reward you know",
                    self._labels[number],
                    value,
                    CONSTANT_CALLS,
                )
        return value

    def _check_failures(self, number: int) -> None:
        record = self._records[number]
        if record.calls < MIN_CALLS or record.failures <= self._max_failure_fraction * record.calls:
            return
        assert record.first_failure is not None
        raise FatalEnvironmentError(
            f"reward {self._labels[number]} failed in {record.failures} of {record.calls} calls, more than"
            f" max_reward_failure_fraction = {self._max_failure_fraction:g}; the first failure:"
            f" {record.first_failure}\n{record.first_failure.traceback}".rstrip()
        )

    def _open(self) -> RewardWorkers:
        """Return the workers of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._workers is None or self._loop is not loop:
            self._loop, self._workers = loop, RewardWorkers(default_workers(), timeout=max(self.timeouts))
            for function in self._functions:
                self._workers.register(function)
        return self._workers


def _make_builtin(settings: RewardSettings) -> Any:
    """Return a built-in reward function made with its options."""
    module = importlib.import_module(BUILTIN[settings.name])
    try:
        return getattr(module, settings.name)(**settings.options)
    except ModuleNotFoundError as error:
        raise missing_dependency(error) or error from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f'reward "{settings.name}": options = {settings.options} cannot be used: {error}') from error


def _time_limit(settings: RewardSettings) -> float:
    """Return the seconds after which a call is killed: later than any time limit that the function keeps itself."""
    own = getattr(_make_builtin(settings), "time_limit", None) if settings.name in BUILTIN else None
    if own is None:
        return DEFAULT_TIMEOUT if settings.timeout is None else settings.timeout
    if settings.timeout is not None and settings.timeout <= own:
        raise ConfigError(
            f'reward "{settings.name}": timeout = {settings.timeout:g} must be above its own limit,'
            f" options.total_timeout = {own:g}; leave timeout out, or lower total_timeout"
        )
    return own + TIMEOUT_MARGIN if settings.timeout is None else settings.timeout


def _find_function(settings: RewardSettings) -> RewardFunction:
    name = settings.name
    if name in BUILTIN:
        _make_builtin(settings)
        return RewardFunction(f"{BUILTIN[name]}:{name}", settings.options)
    if not name.partition(":")[2]:
        raise ConfigError(
            f'rewards: "{name}" is not a built-in reward; {suggest_name(name, list(BUILTIN))} (your own function:'
            ' "module:function")'
        )
    if settings.options:
        raise ConfigError(f'reward "{name}": options are for built-in rewards')
    import_object(name, f'reward "{name}"')
    return RewardFunction(name)


def _labels(rewards: Sequence[RewardSettings]) -> list[str]:
    """Return the name of each component: the function's name, numbered if it is repeated."""
    names = [settings.name.rpartition(":")[2] for settings in rewards]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
