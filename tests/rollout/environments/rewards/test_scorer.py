"""Scoring: the time limit of each reward function."""

from typing import Any

import pytest

from keel.config.dataset import RewardSettings
from keel.errors import ConfigError
from keel.rollout.environments.rewards.scorer import RewardScorer


def time_limit(**settings: Any) -> float:
    (limit,) = RewardScorer([RewardSettings.model_validate(settings)], "sum", 0.5).timeouts
    return limit


def test_a_call_may_take_ten_seconds_or_what_the_settings_say() -> None:
    assert time_limit(name="exact") == 10.0
    assert time_limit(name="exact", timeout=3.0) == 3.0


@pytest.mark.parametrize("options", [{}, {"timeout": 100.0}, {"timeout": 1.0, "total_timeout": 500.0}])
def test_the_limit_of_a_worker_is_above_that_of_the_programs_it_runs(options: dict[str, float]) -> None:
    own = max(options.get("total_timeout", 60.0), options.get("timeout", 10.0))
    assert time_limit(name="code", options=options) == own + 10.0


def test_a_limit_below_that_of_the_programs_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"timeout = 30 must be above its own limit, options.total_timeout = 60"):
        time_limit(name="code", timeout=30.0)
    assert time_limit(name="code", timeout=30.0, options={"total_timeout": 20.0}) == 30.0
