"""A simulated run, held against closed forms: what takes how long, what is how old, and where every token went."""

import asyncio
import math
from dataclasses import replace
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
    """Four groups of four, an answer of up to 128 tokens; changes table by table."""
    tree: dict[str, Any] = {
        "steps": 12,
        "sampling": {"max_tokens": 128},
        "scheduler": {"groups_per_step": 4, "group_size": 4, "max_off_policy_steps": 0},
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table} if isinstance(table, dict) else table
    return RunSettings.model_validate(tree)


def pooled(**tables: Any) -> RunSettings:
    return recipe(engine={"kind": "pool"}, pool={"urls": ["http://127.0.0.1:1"], "attempts": 3}, **tables)


def assume(**given: Any) -> SimulateSettings:
    plain = {"length": 100, "tokens_per_second_alone": 10.0, "tokens_per_second": 64.0, "max_batch": 16}
    return SimulateSettings.model_validate({**plain, "trainer_tokens_per_second": 1000.0, **given})


def decode(assumed: SimulateSettings, beside: int) -> float:
    """Seconds of a decode step, from the two speeds that are given."""
    alone, full, most = 1 / assumed.tokens_per_second_alone, 16 / assumed.tokens_per_second, 16
    each = (full - alone) / (most - 1)
    return alone - each + each * beside


# time


def test_time_jumps_and_nothing_left_to_wait_for_is_an_error() -> None:
    async def sleepy() -> float:
        await asyncio.sleep(1e9)
        await asyncio.sleep(1e-9)  # less than the clock can tell apart by then
        return asyncio.get_running_loop().time()

    assert run_virtually(sleepy()) == pytest.approx(1e9)

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtually(forever())


def test_a_synchronous_step_takes_its_decode_steps_and_its_training() -> None:
    assumed = assume(step_seconds=2.0, prompt_tokens=50)
    step = simulate(recipe(), assumed)[5]
    assert step.waiting_seconds == pytest.approx(100 * decode(assumed, 16))
    assert step.computed_tokens == 16 * 100 + 4 * 50
    assert step.training_seconds == pytest.approx(2.0 + 1800 / 1000)


def test_who_finds_no_place_in_the_batch_waits_for_one() -> None:
    assumed = assume(max_batch=8, tokens_per_second=32.0)
    each = (8 / 32 - 1 / 10) / 7
    step_of_eight = 1 / 10 - each + 8 * each
    assert simulate(recipe(), assumed)[3].waiting_seconds == pytest.approx(2 * 100 * step_of_eight)


def test_a_trainer_that_is_slower_than_the_engines_sets_the_pace_and_the_age() -> None:
    settings = recipe(scheduler={"max_off_policy_steps": 2}, steps=30)
    assumed = assume(engines=8, step_seconds=300.0)
    found = predict(settings, assumed)
    assert found.step_seconds == pytest.approx(trainer_seconds(assumed, 1, 16 * 100 + 4 * 256))
    assert found.trainer_busy == pytest.approx(1.0)
    # the line is always full, and what joins it trains two versions later
    assert found.staleness_shares == {2: 1.0}
    assert describe_bottleneck(found, settings, assumed).startswith("the trainer")


def test_engines_that_are_too_slow_set_the_pace_and_twice_as_many_are_twice_as_fast() -> None:
    settings = recipe(scheduler={"max_off_policy_steps": 4, "groups_per_step": 16, "max_in_flight": 10_000}, steps=30)
    one, two = (predict(settings, assume(engines=count, step_seconds=0.01)) for count in (1, 2))
    assert two.steps_per_hour / one.steps_per_hour == pytest.approx(2.0, rel=0.05)
    assert one.engine_fill > 0.95
    assert one.sampled_tokens_per_second == pytest.approx(64.0, rel=0.05)
    assert describe_bottleneck(one, settings, assume(engines=1)).startswith("the engines")


def test_more_ranks_are_faster_by_their_efficiency() -> None:
    assumed = assume(rank_efficiency=0.5, step_seconds=0.0)
    assert trainer_seconds(assumed, 1, 1000) == pytest.approx(1.0)
    assert trainer_seconds(assumed, 3, 1000) == pytest.approx(0.5)
    assert predict(recipe(trainer={"ranks": 3}), assumed).ranks == 3
    assert predict(recipe(trainer={"ranks": 3}), assume(ranks=5)).ranks == 5


def test_engines_on_the_trainers_machine_are_slower_while_it_computes() -> None:
    settings = recipe(scheduler={"max_off_policy_steps": 1}, steps=20)
    apart, shared = (predict(settings, assume(step_seconds=60.0, trainer_slowdown=much)) for much in (1.0, 3.0))
    assert shared.engine_busy > apart.engine_busy * 1.5


# the way of weights


@pytest.mark.parametrize(
    ("way", "storage", "seconds"),
    [("folder", None, 20.0), ("broadcast", None, 10.0), ("folder", 2.0, 10.0 + 4 * 10 / 2)],
)
def test_publishing_takes_bytes_by_bandwidth(way: str, storage: float | None, seconds: float) -> None:
    settings = recipe(publish={"transport": way}, engine={"kind": "pool"}, pool={"urls": ["http://127.0.0.1:1"]})
    given = {"engines": 4, "publish_gigabytes": 10.0, "bandwidth": 1.0, "publish_seconds": 1.0}
    step = simulate(settings, assume(**given, storage_bandwidth=storage))[4]
    assert step.publishing_seconds == pytest.approx(1.0 + seconds)


def test_weights_travel_beside_the_next_rollouts_where_staleness_allows_it() -> None:
    assumed = assume(engines=2, publish_gigabytes=5.0, publish_seconds=1.0, step_seconds=30.0)
    waits = predict(pooled(steps=30), assumed)
    overlaps = predict(pooled(steps=30, scheduler={"max_off_policy_steps": 2}), assumed)
    assert waits.publishing * waits.step_seconds == pytest.approx(1.0 + 5.0 + 5.0)
    # the trainer may not change them while they are written, and need not wait until they are loaded
    assert overlaps.publishing * overlaps.step_seconds == pytest.approx(1.0 + 5.0)
    # engines that are one version behind meanwhile are given one batch less ahead: nothing gets too old for that
    assert overlaps.dropped_share == 0.0


def test_drained_answers_are_of_one_version_and_others_of_several() -> None:
    async def parts(how: str) -> list[int]:
        from keel.tools.simulate.publishing import SimulatedPublisher

        settings = recipe(publish={"in_flight": how}, scheduler={"max_off_policy_steps": 1})
        fleet = SimulatedPool(settings, assume(publish_seconds=1.0), {"e": EnvironmentSettings(name="e")}, lambda: None)
        answered = [fleet(RolloutRequest("e", "t", None, f"e#{n}", 0, 0)) for n in range(4)]
        publisher = SimulatedPublisher(settings, assume(publish_seconds=1.0), fleet, lambda _version: None)
        await publisher.publish(7)
        await publisher.wait_live()
        later = fleet(RolloutRequest("e", "t", None, "e#9", 0, 0))
        answers = [await one for one in [*answered, later]]
        return [len(answer.tokens_by_version) for answer in answers]

    assert run_virtually(parts("drain")) == [1, 1, 1, 1, 1]
    assert run_virtually(parts("continue"))[:4] == [2, 2, 2, 2]


# chance


def test_the_same_words_give_the_same_numbers_and_another_seed_gives_others() -> None:
    assumed = assume(length="lognormal:60:0.8", rollout_failures=0.1, engines=3, engine_crash_hours=0.5)
    settings = pooled(scheduler={"max_off_policy_steps": 1}, steps=20)
    assert predict(settings, assumed) == predict(settings, assumed)
    assert predict(settings, assumed) != predict(settings.model_copy(update={"seed": 1}), assumed)


def test_lengths_are_those_of_the_distribution() -> None:
    table = np.array(length_quantiles(SimulateSettings(length="lognormal:500:0.8").length, 1024))
    assert table.mean() == pytest.approx(500, rel=0.01)
    assert np.log(table).std() == pytest.approx(0.8, rel=0.01)
    assert set(length_quantiles(assume().length, 128)) == {100}
    seen = length_quantiles(SimulateSettings(length={"kind": "empirical", "values": [9, 1, 1, 1]}).length, 128)
    assert (seen.count(1), seen.count(9)) == (3 * 1024, 1024)


def test_as_many_are_cut_as_are_longer_than_allowed() -> None:
    settings = recipe(scheduler={"groups_per_step": 64}, steps=12)
    found = predict(settings, assume(length="lognormal:64:0.8", engines=16))
    longer = 1 - NormalDist(math.log(64) - 0.32, 0.8).cdf(math.log(128))
    assert found.truncated == pytest.approx(longer, abs=0.02)


def test_failures_crashes_and_groups_without_signal_are_as_frequent_as_assumed() -> None:
    settings = pooled(scheduler={"groups_per_step": 32, "max_off_policy_steps": 1, "max_in_flight": 1000}, steps=40)
    assumed = assume(
        rollout_failures=0.2, zero_variance_share=0.25, engines=16, engine_crash_hours=0.1, engine_restart_seconds=90.0
    )
    found = predict(settings, assumed)
    trained = 1 - found.dropped_share
    failed = found.dropped["exception"]
    assert failed / (failed + trained / (1 - 0.25)) == pytest.approx(0.2, abs=0.02)
    assert found.dropped["zero_variance"] / (trained + found.dropped["zero_variance"]) == pytest.approx(0.25, abs=0.05)
    assert found.engine_down == pytest.approx(90 / (360 + 90), abs=0.05)
    assert found.wasted["crash"] > 0


def test_a_crash_is_an_error_only_where_nobody_asks_again() -> None:
    hard = assume(engines=4, engine_crash_hours=0.02, engine_restart_seconds=10.0)
    alone = predict(recipe(scheduler={"max_off_policy_steps": 1}, steps=20), hard)
    asked_again = predict(pooled(scheduler={"max_off_policy_steps": 1}, steps=20), hard)
    assert alone.dropped["engine"] > 2 * asked_again.dropped.get("engine", 0.0)


@given(
    data=st.fixed_dictionaries(
        {
            "engines": st.integers(1, 5),
            "rollout_failures": st.sampled_from([0.0, 0.3]),
            "engine_crash_hours": st.sampled_from([None, 0.02]),
            "zero_variance": st.sampled_from([0.0, 0.4]),
            "environment_seconds": st.sampled_from([0.0, 3.0]),
            "prefill_tokens_per_second": st.sampled_from([None, 100.0]),
            "load_seconds": st.sampled_from([0.0, 5.0]),
            "publish_gigabytes": st.sampled_from([0.0, 20.0]),
            "contention": st.sampled_from([1.0, 2.0]),
        }
    ),
    ahead=st.integers(0, 3),
    how=st.sampled_from(["continue", "drain"]),
    retries=st.sampled_from([None, 1]),
)
@settings(max_examples=60, deadline=None)
def test_every_token_sampled_has_trained_or_has_a_reason_or_is_still_under_way(
    data: dict[str, Any], ahead: int, how: str, retries: int | None
) -> None:
    schedule = {"max_off_policy_steps": ahead, "max_error_reschedule_attempts": retries, "halt_after": None}
    run = pooled(scheduler=schedule, publish={"in_flight": how}, steps=6)
    assumed = assume(length="lognormal:40:0.8", engine_restart_seconds=20.0, **data)
    steps = simulate(run, assumed)
    totals = steps[-1].engine_totals
    used = sum(one.trained_tokens + one.wasted_tokens.total() for one in steps) + totals.lost_tokens
    in_line = (ahead + 1) * 16 * 128
    assert -1.0 <= totals.sampled_tokens - used <= in_line + sum(one.dropped["group_dropped"] for one in steps) * 128
    for number, step in enumerate(steps):
        assert sum(step.staleness.values()) == step.trained_tokens
        assert all(0 <= age <= min(ahead, number) for age in step.staleness)
        assert step.waiting_seconds >= 0 and step.ended_at >= (steps[number - 1].ended_at if number else 0)


# measuring


def test_costs_are_found_again_from_when_rollouts_began_and_ended() -> None:
    async def made() -> RolloutTimings:
        loop = asyncio.get_running_loop()
        assumed = assume(length="lognormal:40:0.8", environment_seconds=1.5)
        fleet = SimulatedPool(recipe(), assumed, {"e": EnvironmentSettings(name="e")}, lambda: None)
        rows: list[tuple[float, float, int]] = []

        async def one(number: int, wait: float) -> None:
            await asyncio.sleep(wait)
            began = loop.time()
            answer = await fleet(RolloutRequest("e", "t", None, f"e#{number}", 0, 0))
            rows.append((began, loop.time(), answer.tokens))

        chance = SeededDraws(3)
        await asyncio.gather(*(one(n, 300 * chance.uniforms(f"wait{n}")[0]) for n in range(200)))
        began, ended, tokens = np.array(sorted(rows)).T
        return RolloutTimings(began, ended, tokens, np.zeros((0, 2)), 16)

    found = fit_decode_costs(run_virtually(made()), 1)
    truth = DecodeSpeed.from_settings(assume(), 16)
    assert found.base_seconds + found.seconds_per_request == pytest.approx(
        truth.base_seconds + truth.seconds_per_request, rel=0.15
    )
    assert found.base_seconds + 16 * found.seconds_per_request == pytest.approx(
        truth.base_seconds + 16 * truth.seconds_per_request, rel=0.15
    )
    assert found.trainer_slowdown == pytest.approx(1.0)


def test_who_was_under_way_is_counted_exactly() -> None:
    began, ended = np.array([0.0, 0.0, 5.0]), np.array([10.0, 5.0, 10.0])
    assert mean_concurrency(began, ended).tolist() == [2.0, 2.0, 2.0]
    assert overlap_share(began, ended, np.array([[4.0, 6.0]])).tolist() == pytest.approx([0.2, 0.2, 0.2])
    line = RolloutTimings(np.array([0.0, 1.0, 2.0]), np.array([4.0, 6.0, 9.0]), np.ones(3), np.zeros((0, 2)), 1)
    assert admission_times(line).tolist() == [0.0, 4.0, 6.0]
    assert fit_line([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx((3.0, 2.0))
    assert fit_line([1.0, 2.0], [5.0, 4.0])[1] == 0.0


# advice


def test_a_change_that_is_told_was_simulated_and_brings_what_is_told() -> None:
    settings, assumed = recipe(scheduler={"max_off_policy_steps": 1}, steps=15), assume(step_seconds=300.0, engines=16)
    found = predict(settings, assumed)
    told = {one.description: one for one in propose_changes(found, settings, assumed)}
    assert "engines 3 in place of 16" in told or any("in place of 16" in words for words in told)
    assert abs(next(one.gain for words, one in told.items() if "in place" in words)) < 0.05
    waiting = assume(step_seconds=0.1)
    better = propose_changes(predict(recipe(), waiting), recipe(), waiting)
    again = {"engines 2": replace, "scheduler.max_off_policy_steps 1": replace}
    assert better and better[0].description in again
    assert all(one.gain >= 0.05 for one in better)


# refusals


def test_a_run_that_cannot_go_on_says_so() -> None:
    never = assume(rollout_failures=0.99)
    halted = recipe(scheduler={"max_error_reschedule_attempts": 0, "max_empty_steps": 3})
    with pytest.raises(KeelError, match="stops at step 3, as a real one would"):
        simulate(halted, never)
    with pytest.raises(KeelError, match=r"stops at step 10, .* look at zero_variance_share = 1$"):
        simulate(recipe(), assume(zero_variance_share=1.0))
    long = recipe(environments={"e": {"limits": {"max_sequence_tokens": 60}}})
    with pytest.raises(KeelError, match="does not get beyond step 1"):
        simulate(long, assume(prompt_tokens=10))


def test_a_speed_that_is_impossible_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="above max_batch = 16"):
        DecodeSpeed.from_settings(SimulateSettings(tokens_per_second=2000.0, max_batch=16), 16)
