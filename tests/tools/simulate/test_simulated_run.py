"""A simulated run agrees with closed forms: durations, staleness, and the accounting of every token."""

import asyncio
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config import EnvironmentSettings, RunSettings
from keel.config.simulate import SimulateSettings
from keel.errors import ConfigError, KeelError
from keel.rollout.scheduler.groups import RolloutRequest
from keel.tools.simulate.bottleneck import describe_bottleneck, propose_changes
from keel.tools.simulate.draws import SeededDraws, length_quantiles
from keel.tools.simulate.engines import DecodeSpeed
from keel.tools.simulate.fit import (
    RolloutTimings,
    admission_times,
    fit_decode_costs,
    fit_line,
    mean_concurrency,
    overlap_share,
)
from keel.tools.simulate.prediction import predict
from keel.tools.simulate.simulated_pool import SimulatedPool
from keel.tools.simulate.simulated_run import simulate, trainer_seconds
from keel.tools.simulate.virtual_clock import Deadlock, run_virtually


def recipe(**tables: Any) -> RunSettings:
    """Settings with four groups of four and completions of up to 128 tokens; tables given here are merged in."""
    tree: dict[str, Any] = {
        "steps": 12,
        "sampling": {"max_tokens": 128},
        "scheduler": {"groups_per_step": 4, "group_size": 4, "max_off_policy_steps": 0},
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table} if isinstance(table, dict) else table
    return RunSettings.model_validate(tree)


def pool_recipe(**tables: Any) -> RunSettings:
    return recipe(engine={"kind": "pool"}, pool={"urls": ["http://127.0.0.1:1"], "max_attempts": 3}, **tables)


def assume(**changes: Any) -> SimulateSettings:
    defaults = {"length": 100, "tokens_per_second_alone": 10.0, "tokens_per_second": 64.0, "max_batch": 16}
    return SimulateSettings.model_validate({**defaults, "trainer_tokens_per_second": 1000.0, **changes})


def decode_seconds(assumed: SimulateSettings, requests: int) -> float:
    """Seconds of a decode step, computed from the two assumed speeds."""
    alone, full, max_batch = 1 / assumed.tokens_per_second_alone, 16 / assumed.tokens_per_second, 16
    per_request = (full - alone) / (max_batch - 1)
    return alone - per_request + per_request * requests


# time


def test_virtual_time_jumps_and_a_deadlock_is_an_error() -> None:
    async def sleep_long() -> float:
        await asyncio.sleep(1e9)
        await asyncio.sleep(1e-9)  # below the float resolution at this time
        return asyncio.get_running_loop().time()

    assert run_virtually(sleep_long()) == pytest.approx(1e9)

    async def wait_indefinitely() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtually(wait_indefinitely())


def test_a_synchronous_step_lasts_its_decode_steps_plus_training() -> None:
    assumed = assume(step_seconds=2.0, prompt_tokens=50)
    step = simulate(recipe(), assumed)[5]
    assert step.waiting_seconds == pytest.approx(100 * decode_seconds(assumed, 16))
    assert step.computed_tokens == 16 * 100 + 4 * 50
    assert step.training_seconds == pytest.approx(2.0 + 1800 / 1000)


def test_requests_beyond_the_batch_size_wait() -> None:
    assumed = assume(max_batch=8, tokens_per_second=32.0)
    per_request = (8 / 32 - 1 / 10) / 7
    step_of_eight = 1 / 10 - per_request + 8 * per_request
    assert simulate(recipe(), assumed)[3].waiting_seconds == pytest.approx(2 * 100 * step_of_eight)


def test_a_trainer_slower_than_the_engines_determines_speed_and_staleness() -> None:
    settings = recipe(scheduler={"max_off_policy_steps": 2}, steps=30)
    assumed = assume(engines=8, step_seconds=300.0)
    prediction = predict(settings, assumed)
    assert prediction.step_seconds == pytest.approx(trainer_seconds(assumed, 1, 16 * 100 + 4 * 256))
    assert prediction.trainer_busy == pytest.approx(1.0)
    # the queue is always full, and a rollout that joins it trains two versions later
    assert prediction.staleness_shares == {2: 1.0}
    assert describe_bottleneck(prediction, settings, assumed).startswith("the trainer")


def test_with_slow_engines_twice_as_many_engines_are_twice_as_fast() -> None:
    settings = recipe(scheduler={"max_off_policy_steps": 4, "groups_per_step": 16, "max_in_flight": 10_000}, steps=30)
    one, two = (predict(settings, assume(engines=count, step_seconds=0.01)) for count in (1, 2))
    assert two.steps_per_hour / one.steps_per_hour == pytest.approx(2.0, rel=0.05)
    assert one.engine_fill > 0.95
    assert one.sampled_tokens_per_second == pytest.approx(64.0, rel=0.05)
    assert describe_bottleneck(one, settings, assume(engines=1)).startswith("the engines")


def test_more_ranks_are_faster_by_rank_efficiency() -> None:
    assumed = assume(rank_efficiency=0.5, step_seconds=0.0)
    assert trainer_seconds(assumed, 1, 1000) == pytest.approx(1.0)
    assert trainer_seconds(assumed, 3, 1000) == pytest.approx(0.5)
    assert predict(recipe(trainer={"ranks": 3}), assumed).ranks == 3
    assert predict(recipe(trainer={"ranks": 3}), assume(ranks=5)).ranks == 5


def test_trainer_slowdown_makes_engines_slower_while_the_trainer_computes() -> None:
    settings = recipe(scheduler={"max_off_policy_steps": 1}, steps=20)
    separate, shared = (
        predict(settings, assume(step_seconds=60.0, trainer_slowdown=slowdown)) for slowdown in (1.0, 3.0)
    )
    assert shared.engine_busy > separate.engine_busy * 1.5


# publishing weights


@pytest.mark.parametrize(
    ("transport", "storage", "seconds"),
    [("folder", None, 20.0), ("broadcast", None, 10.0), ("folder", 2.0, 10.0 + 4 * 10 / 2)],
)
def test_publishing_takes_bytes_divided_by_bandwidth(transport: str, storage: float | None, seconds: float) -> None:
    settings = recipe(publish={"transport": transport}, engine={"kind": "pool"}, pool={"urls": ["http://127.0.0.1:1"]})
    changes = {"engines": 4, "publish_gigabytes": 10.0, "bandwidth": 1.0, "publish_seconds": 1.0}
    step = simulate(settings, assume(**changes, storage_bandwidth=storage))[4]
    assert step.publishing_seconds == pytest.approx(1.0 + seconds)


def test_publishing_overlaps_rollouts_where_the_staleness_limit_allows_it() -> None:
    assumed = assume(engines=2, publish_gigabytes=5.0, publish_seconds=1.0, step_seconds=30.0)
    waits = predict(pool_recipe(steps=30), assumed)
    overlaps = predict(pool_recipe(steps=30, scheduler={"max_off_policy_steps": 2}), assumed)
    assert waits.publishing * waits.step_seconds == pytest.approx(1.0 + 5.0 + 5.0)
    # the trainer must not change the weights while they are written, but need not wait until they are loaded
    assert overlaps.publishing * overlaps.step_seconds == pytest.approx(1.0 + 5.0)
    # meanwhile the engines are one version behind and get one batch less ahead, so no rollout becomes too stale
    assert overlaps.dropped_share == 0.0


def test_drained_rollouts_have_one_version_and_continued_ones_several() -> None:
    async def versions_per_rollout(in_flight: str) -> list[int]:
        from keel.tools.simulate.publishing import SimulatedPublisher

        settings = recipe(publish={"in_flight": in_flight}, scheduler={"max_off_policy_steps": 1})
        pool = SimulatedPool(settings, assume(publish_seconds=1.0), {"e": EnvironmentSettings(name="e")}, lambda: None)
        requests = [pool(RolloutRequest("e", "t", None, f"e#{n}", 0, 0)) for n in range(4)]
        publisher = SimulatedPublisher(settings, assume(publish_seconds=1.0), pool, lambda _version: None)
        await publisher.publish(7)
        await publisher.wait_live()
        later = pool(RolloutRequest("e", "t", None, "e#9", 0, 0))
        rollouts = [await request for request in [*requests, later]]
        return [len(rollout.tokens_by_version) for rollout in rollouts]

    assert run_virtually(versions_per_rollout("drain")) == [1, 1, 1, 1, 1]
    assert run_virtually(versions_per_rollout("continue"))[:4] == [2, 2, 2, 2]


# random draws


def test_predictions_are_deterministic_and_depend_on_the_seed() -> None:
    assumed = assume(length="lognormal:60:0.8", rollout_failures=0.1, engines=3, engine_crash_hours=0.5)
    settings = pool_recipe(scheduler={"max_off_policy_steps": 1}, steps=20)
    assert predict(settings, assumed) == predict(settings, assumed)
    assert predict(settings, assumed) != predict(settings.model_copy(update={"seed": 1}), assumed)


def test_lengths_follow_the_distribution() -> None:
    table = np.array(length_quantiles(SimulateSettings(length="lognormal:500:0.8").length, 1024))
    assert table.mean() == pytest.approx(500, rel=0.01)
    assert np.log(table).std() == pytest.approx(0.8, rel=0.01)
    assert set(length_quantiles(assume().length, 128)) == {100}
    empirical = length_quantiles(SimulateSettings(length={"kind": "empirical", "values": [9, 1, 1, 1]}).length, 128)
    assert (empirical.count(1), empirical.count(9)) == (3 * 1024, 1024)


def test_the_truncated_share_is_the_share_above_the_limit() -> None:
    settings = recipe(scheduler={"groups_per_step": 64}, steps=12)
    prediction = predict(settings, assume(length="lognormal:64:0.8", engines=16))
    longer = 1 - NormalDist(math.log(64) - 0.32, 0.8).cdf(math.log(128))
    assert prediction.truncated == pytest.approx(longer, abs=0.02)


def test_failures_crashes_and_zero_variance_groups_are_as_frequent_as_assumed() -> None:
    settings = pool_recipe(
        scheduler={"groups_per_step": 32, "max_off_policy_steps": 1, "max_in_flight": 1000}, steps=40
    )
    assumed = assume(
        rollout_failures=0.2, zero_variance_share=0.25, engines=16, engine_crash_hours=0.1, engine_restart_seconds=90.0
    )
    prediction = predict(settings, assumed)
    trained = 1 - prediction.dropped_share
    failed = prediction.dropped["exception"]
    assert failed / (failed + trained / (1 - 0.25)) == pytest.approx(0.2, abs=0.02)
    assert prediction.dropped["zero_variance"] / (trained + prediction.dropped["zero_variance"]) == pytest.approx(
        0.25, abs=0.05
    )
    assert prediction.engine_down == pytest.approx(90 / (360 + 90), abs=0.05)
    assert prediction.wasted["crash"] > 0


def test_a_crash_drops_rollouts_only_without_retries() -> None:
    frequent_crashes = assume(engines=4, engine_crash_hours=0.02, engine_restart_seconds=10.0)
    alone = predict(recipe(scheduler={"max_off_policy_steps": 1}, steps=20), frequent_crashes)
    retried = predict(pool_recipe(scheduler={"max_off_policy_steps": 1}, steps=20), frequent_crashes)
    assert alone.dropped["engine"] > 2 * retried.dropped.get("engine", 0.0)


@pytest.mark.fuzz
@given(
    data=st.fixed_dictionaries(
        {
            "engines": st.integers(1, 5),
            "rollout_failures": st.sampled_from([0.0, 0.3]),
            "engine_crash_hours": st.sampled_from([None, 0.02]),
            "zero_variance_share": st.sampled_from([0.0, 0.4]),
            "environment_seconds": st.sampled_from([0.0, 3.0]),
            "prefill_tokens_per_second": st.sampled_from([None, 100.0]),
            "load_seconds": st.sampled_from([0.0, 5.0]),
            "publish_gigabytes": st.sampled_from([0.0, 20.0]),
            "trainer_slowdown": st.sampled_from([1.0, 2.0]),
        }
    ),
    max_staleness=st.integers(0, 3),
    in_flight=st.sampled_from(["continue", "drain"]),
    retries=st.sampled_from([None, 1]),
)
@settings(max_examples=60, deadline=None)
def test_every_sampled_token_is_trained_dropped_with_a_reason_or_in_flight(
    data: dict[str, Any], max_staleness: int, in_flight: str, retries: int | None
) -> None:
    scheduler = {
        "max_off_policy_steps": max_staleness,
        "max_error_reschedule_attempts": retries,
        "max_empty_steps": None,
    }
    run = pool_recipe(scheduler=scheduler, publish={"in_flight": in_flight}, steps=6)
    assumed = assume(length="lognormal:40:0.8", engine_restart_seconds=20.0, **data)
    steps = simulate(run, assumed)
    totals = steps[-1].engine_totals
    accounted = sum(step.trained_tokens + step.wasted_tokens.total() for step in steps) + totals.lost_tokens
    queued = (max_staleness + 1) * 16 * 128
    dropped_groups = sum(step.dropped["group_dropped"] for step in steps)
    assert -1.0 <= totals.sampled_tokens - accounted <= queued + dropped_groups * 128
    for number, step in enumerate(steps):
        assert sum(step.staleness.values()) == step.trained_tokens
        assert all(0 <= staleness <= min(max_staleness, number) for staleness in step.staleness)
        assert step.waiting_seconds >= 0 and step.ended_at >= (steps[number - 1].ended_at if number else 0)


# calibration


def test_decode_costs_are_recovered_from_rollout_times() -> None:
    async def simulate_timings() -> RolloutTimings:
        loop = asyncio.get_running_loop()
        assumed = assume(length="lognormal:40:0.8", environment_seconds=1.5)
        pool = SimulatedPool(recipe(), assumed, {"e": EnvironmentSettings(name="e")}, lambda: None)
        rows: list[tuple[float, float, int]] = []

        async def run_rollout(number: int, delay: float) -> None:
            await asyncio.sleep(delay)
            start = loop.time()
            rollout = await pool(RolloutRequest("e", "t", None, f"e#{number}", 0, 0))
            rows.append((start, loop.time(), rollout.tokens))

        draws = SeededDraws(3)
        await asyncio.gather(*(run_rollout(n, 300 * draws.uniforms(f"wait{n}")[0]) for n in range(200)))
        started_at, ended_at, tokens = np.array(sorted(rows)).T
        return RolloutTimings(started_at, ended_at, tokens, np.zeros((0, 2)), 16)

    costs = fit_decode_costs(run_virtually(simulate_timings()), 1)
    truth = DecodeSpeed.from_settings(assume(), 16)
    assert costs.base_seconds + costs.seconds_per_request == pytest.approx(
        truth.base_seconds + truth.seconds_per_request, rel=0.15
    )
    assert costs.base_seconds + 16 * costs.seconds_per_request == pytest.approx(
        truth.base_seconds + 16 * truth.seconds_per_request, rel=0.15
    )
    assert costs.trainer_slowdown == pytest.approx(1.0)


def test_concurrency_and_overlap_are_computed_exactly() -> None:
    started_at, ended_at = np.array([0.0, 0.0, 5.0]), np.array([10.0, 5.0, 10.0])
    assert mean_concurrency(started_at, ended_at).tolist() == [2.0, 2.0, 2.0]
    assert overlap_share(started_at, ended_at, np.array([[4.0, 6.0]])).tolist() == pytest.approx([0.2, 0.2, 0.2])
    queue = RolloutTimings(np.array([0.0, 1.0, 2.0]), np.array([4.0, 6.0, 9.0]), np.ones(3), np.zeros((0, 2)), 1)
    assert admission_times(queue).tolist() == [0.0, 4.0, 6.0]
    assert fit_line([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx((3.0, 2.0))
    assert fit_line([1.0, 2.0], [5.0, 4.0])[1] == 0.0


# proposed changes


def test_proposed_changes_have_the_simulated_gain() -> None:
    settings, assumed = recipe(scheduler={"max_off_policy_steps": 1}, steps=15), assume(step_seconds=300.0, engines=16)
    prediction = predict(settings, assumed)
    proposed = {change.description: change for change in propose_changes(prediction, settings, assumed)}
    assert "engines 3 instead of 16" in proposed or any("instead of 16" in text for text in proposed)
    assert abs(next(change.gain for text, change in proposed.items() if "instead of" in text)) < 0.05
    waiting = assume(step_seconds=0.1)
    better = propose_changes(predict(recipe(), waiting), recipe(), waiting)
    assert better and better[0].description in ("engines 2", "scheduler.max_off_policy_steps 1")
    assert all(change.gain >= 0.05 for change in better)


# errors


def test_a_run_that_cannot_continue_is_an_error() -> None:
    always_fails = assume(rollout_failures=0.99)
    few_retries = recipe(scheduler={"max_error_reschedule_attempts": 0, "max_empty_steps": 3})
    with pytest.raises(KeelError, match="stops at step 3, as a real one would"):
        simulate(few_retries, always_fails)
    with pytest.raises(KeelError, match=r"stops at step 10, .* check zero_variance_share = 1$"):
        simulate(recipe(), assume(zero_variance_share=1.0))
    short_limit = recipe(environments={"e": {"limits": {"max_sequence_tokens": 60}}})
    with pytest.raises(KeelError, match=r"stops at step 10, .* dropped: over_length"):
        simulate(short_limit, assume(prompt_tokens=10))
    endless = recipe(
        environments={"e": {"limits": {"max_sequence_tokens": 60}}},
        scheduler={"max_error_reschedule_attempts": 1_000_000},
    )
    with pytest.raises(KeelError, match="does not get beyond step 1"):
        simulate(endless, assume(prompt_tokens=10))


def test_an_impossible_speed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="above max_batch = 16"):
        DecodeSpeed.from_settings(SimulateSettings(tokens_per_second=2000.0, max_batch=16), 16)


def test_environments_have_groups_of_their_own_size() -> None:
    environments = {"small": {"name": "a", "group_size": 2}, "large": {"name": "b", "group_size": 10}}
    steps = simulate(recipe(environments=environments), assume())
    assert {step.trained_rollouts for step in steps} == {2 * 2 + 2 * 10}
    assert recipe(environments=environments).mean_group_size == 6
    environments["large"]["weight"] = 3.0
    assert recipe(environments=environments).mean_group_size == 8
