"""Pools: routing of requests, retries when members fail, and weight updates."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from keel.inference.pool import pool as pool_module
from keel.inference.pool.target_weights import TargetWeights, WeightLoad
from keel.inference.protocol import EngineError, WeightSource
from tests.support.pool_fakes import PoolHarness, now, run_scenario

# routing


def test_requests_are_spread_over_ready_members() -> None:
    async def scenario(harness: PoolHarness) -> None:
        generations = await asyncio.gather(*(harness.generate() for _ in range(6)))
        assert [generation.versions for generation in generations] == [(0, 0)] * 6
        assert [len(harness[i].requests) for i in range(3)] == [2, 2, 2]
        assert harness.states() == ["ready"] * 3

    run_scenario(scenario)


def test_a_member_that_returns_with_old_weights_is_synced_before_use() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 7)
        harness[0].stop()
        await asyncio.sleep(30)
        assert harness.states() == ["unhealthy", "ready", "ready"]
        harness[0].restart()
        assert harness[0].version == 0
        start = now()
        while "unhealthy" in harness.states() or "syncing" in harness.states():
            await harness.generate()
        assert now() - start <= 60
        assert harness[0].version == 7
        assert all(held for *_, held in harness.sent_requests)

    run_scenario(scenario)


def test_a_restart_between_two_probes_is_detected_and_the_completion_sampled_again() -> None:
    """The token versions reveal the restart: the completion is discarded and the member synced."""

    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 7)
        await harness.generate("g")
        member = harness.sent_requests[-1][0]
        member.restart()
        generation = await harness.generate("g")
        assert [held for *_, held in harness.sent_requests] == [True, False, True]
        assert generation.versions == (7, 7)
        await asyncio.sleep(5)
        assert member.version == 7
        row = next(row for row in harness.pool.status() if row.url == member.url)
        assert row.state == "ready"
        assert "version 0 instead of 7" in row.last_error

    run_scenario(scenario)


def test_an_unreachable_member_is_reloaded_even_if_its_version_looks_right() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 7)
        harness[0].hangs = True
        await asyncio.sleep(40)
        # it was restarted by another user with the right version but other weights
        harness[0].restart()
        harness[0].version = 7
        await asyncio.sleep(90)
        assert harness[0].loads == (WeightLoad(WeightSource.folder("/w"), 7),)
        assert harness.states() == ["ready"] * 3

    run_scenario(scenario)


def test_a_health_response_from_before_a_failed_request_is_ignored() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 7)
        harness[0].health_seconds = 2.0
        harness[0].sampling_seconds = 11.4
        request = asyncio.create_task(harness.generate("g"))
        while len(harness[0].health_calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        # it reports version 7 and restarts before the response arrives
        harness[0].restart()
        before = len(harness.sent_requests)
        while harness.states() == ["ready"]:
            await asyncio.sleep(0.01)
        while harness.states() != ["ready"]:
            await asyncio.sleep(0.01)
        assert harness[0].version == 7
        harness[0].sampling_seconds = 1.0
        assert (await request).versions == (7, 7)
        assert all(held for *_, held in harness.sent_requests[before:])

    run_scenario(scenario, 1)


def test_a_member_at_another_version_is_not_used_if_there_are_no_weights_to_load() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness[0].version = 5
        await harness.pool.wait_until_probed()
        assert harness.states() == ["unhealthy", "ready"]
        assert "holds version 5, but the pool is at version 0" in harness.pool.status()[0].last_error
        await harness.pool.load_weights(WeightSource.folder("/w"), 6)
        await asyncio.sleep(1)
        assert harness.states() == ["ready", "ready"]

    run_scenario(scenario, 2)


def test_a_pool_without_a_version_uses_members_as_they_are() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.close()
        harness.pool = pool_module.Pool(harness.settings, harness.connect, version=None, source=harness)
        harness[0].version, harness[1].version = 5, 4
        assert (await harness.generate()).versions in ((5, 5), (4, 4))
        assert await harness.pool.version() == 4

    run_scenario(scenario, 2)


# groups


def test_a_group_stays_on_one_member_and_groups_are_spread() -> None:
    async def scenario(harness: PoolHarness) -> None:
        async def conversation(group: str) -> None:
            for _ in range(5):
                await harness.generate(group)
                await asyncio.sleep(13)

        await asyncio.gather(*(conversation(f"g{i // 4}") for i in range(24)))
        members = {
            group: {s.url for s, g, *_ in harness.sent_requests if g == group} for _, group, *_ in harness.sent_requests
        }
        assert all(len(urls) == 1 for urls in members.values())
        assert [len({g for g, _ in harness[i].requests}) for i in range(3)] == [2, 2, 2]

    run_scenario(scenario)


def test_a_group_moves_when_its_member_dies_and_stays_on_the_new_one() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.generate("g")
        first = harness.sent_requests[0][0]
        first.stop()
        for _ in range(3):
            await harness.generate("g")
        first.restart()
        await asyncio.sleep(60)
        await harness.generate("g")
        servers = [server for server, *_ in harness.sent_requests]
        assert servers[1] is first  # the failure was not known yet
        assert len(set(servers[2:])) == 1 and servers[2] is not first

    run_scenario(scenario)


def test_a_group_waits_for_its_member_during_an_update() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness[0].load_seconds, harness[1].load_seconds = 6.0, 0.5
        await harness.generate("a")
        await harness.generate("b")
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(1)
        generations = await asyncio.gather(harness.generate("a"), harness.generate("b"))
        await update
        assert [generation.versions for generation in generations] == [(1, 1), (1, 1)]
        assert [[g for g, _ in harness[i].requests] for i in range(2)] == [["a", "a"], ["b", "b"]]

    run_scenario(scenario, 2)


def test_requests_that_wait_during_an_update_are_spread_over_all_members() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.generate()
        for i in range(3):
            harness[i].load_seconds = 1.0 + i
            harness[i].requests.clear()
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(0.1)
        await asyncio.gather(*(harness.generate(f"g{i}") for i in range(30)), *(harness.generate() for _ in range(30)))
        await update
        assert [len(harness[i].requests) for i in range(3)] == [20, 20, 20]

    run_scenario(scenario)


def test_the_number_of_tracked_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_TRACKED_GROUPS", 50)

    async def scenario(harness: PoolHarness) -> None:
        for i in range(200):
            await harness.generate(f"g{i}")
        assert len(harness.pool._group_urls) == 50

    run_scenario(scenario)


def test_requests_of_other_clients_count_as_load() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness[0].running = 9
        await harness.pool.wait_until_probed()
        await asyncio.gather(*(harness.generate() for _ in range(4)))
        assert [len(harness[i].requests) for i in range(2)] == [0, 4]
        harness[0].running = 0

    run_scenario(scenario, 2)


# failures


def test_a_retryable_error_is_retried_on_another_member_and_other_errors_are_raised() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.generate("g")
        member = harness.sent_requests[0][0]
        member.error = EngineError("queue is full")
        assert (await harness.generate("g")).finish_reason == "stop"
        assert [server is member for server, *_ in harness.sent_requests] == [True, True, False]
        for i in range(3):
            harness[i].error = EngineError("prompt is too long", retryable=False)
        sent = len(harness.sent_requests)
        with pytest.raises(EngineError, match=r"^prompt is too long$") as error:
            await harness.generate("g")
        assert not error.value.retryable
        assert len(harness.sent_requests) == sent + 1
        assert harness.states() == ["ready"] * 3

    run_scenario(scenario)


def test_a_member_that_fails_immediately_does_not_attract_all_requests() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        harness[0].error = EngineError("out of memory")
        harness[0].sampling_seconds = 0.0
        for _ in range(30):
            await asyncio.gather(*(harness.generate() for _ in range(10)))
        assert len(harness[0].requests) < 20
        harness[0].error = None
        await asyncio.gather(*(harness.generate() for _ in range(2000)))
        assert len(harness[0].requests) > 500

    run_scenario(scenario)


def test_attempts_are_limited_and_the_error_names_the_members() -> None:
    async def scenario(harness: PoolHarness) -> None:
        for i in range(3):
            harness[i].error = EngineError(f"broken {i}")
        with pytest.raises(EngineError) as error:
            await harness.generate()
        assert len(harness.sent_requests) == 2
        assert error.value.retryable
        assert str(error.value).splitlines() == [
            "failed after 2 attempts (pool.max_attempts):",
            "http://s0:1: broken 0",
            "http://s1:1: broken 1",
        ]

    run_scenario(scenario, max_attempts=2)


def test_the_only_member_is_retried_after_a_successful_probe() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness[0].error = EngineError("for a moment")
        request = asyncio.create_task(harness.generate())
        await asyncio.sleep(0.8)
        harness[0].error = None
        assert (await request).finish_reason == "stop"
        assert len(harness.sent_requests) == 2

    run_scenario(scenario, 1)


def test_a_cancelled_request_is_cancelled_on_its_member() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        request = asyncio.create_task(harness.generate())
        await asyncio.sleep(0.3)
        assert sum(harness[i].running for i in range(3)) == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert sum(harness[i].running for i in range(3)) == 0
        assert sum(harness[i].cancelled for i in range(3)) == 1
        assert (await harness.pool.health()).running == 0
        assert [row.errors for row in harness.pool.status()] == [0, 0, 0]

    run_scenario(scenario)


def test_requests_on_a_member_that_hangs_are_abandoned_and_retried() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        for i in range(3):
            harness[i].sampling_seconds = 60.0
        requests = [asyncio.create_task(harness.generate()) for _ in range(3)]
        await asyncio.sleep(1)
        harness[0].hangs = True
        generations = await asyncio.gather(*requests)
        assert len(generations) == 3
        # three probes of 10 s each with pauses, then 60 s on another member; the request timeout is 120 s
        assert now() < 125
        assert harness[0].cancelled >= 1

    run_scenario(scenario)


def test_the_error_without_a_ready_member_lists_all_members() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness[0].stop()
        harness[1].not_ready = "CUDA\x1b[31m out\nof memory [bold]" + "x" * 1000
        with pytest.raises(EngineError, match=r"no member was ready for 45 s \(pool.ready_timeout\)") as error:
            await harness.generate()
        assert now() == pytest.approx(45)
        _, first, second = str(error.value).splitlines()
        assert first == "http://s0:1: unhealthy, http://s0:1 refused the connection"
        assert second.startswith("http://s1:1: unhealthy, CUDA [31m out of memory [bold]xxx") and len(second) < 250

    run_scenario(scenario, 2, ready_timeout=45)


def test_failed_discovery_is_an_error() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness.list_error = "engines.internal has no addresses"
        with pytest.raises(EngineError, match=r"engines\.internal has no addresses"):
            await harness.generate()
        health = await harness.pool.health()
        assert not health.ready and "no addresses" in health.error

    run_scenario(scenario, ready_timeout=45)


def test_probes_of_a_dead_member_back_off_and_it_is_used_again_when_it_returns() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness[0].stop()
        await harness.pool.wait_until_probed()
        await asyncio.sleep(3600)
        gaps = [round(b - a, 1) for a, b in pairwise(harness[0].health_calls)]
        assert gaps[:5] == [2.5, 5.0, 10.0, 20.0, 40.0]
        assert set(gaps[5:]) == {60.0}
        assert len(harness[1].health_calls) == pytest.approx(360, abs=5)
        harness[0].restart()
        await asyncio.sleep(61)
        assert harness.states() == ["ready", "ready"]

    run_scenario(scenario, 2)


def test_closing_ends_requests_in_flight_and_waiting() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        request = asyncio.create_task(harness.generate())
        await asyncio.sleep(0.3)
        for i in range(3):
            harness[i].load_seconds = 50
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(harness.generate())
        await asyncio.sleep(0.1)
        await harness.pool.close()
        for task in (request, waiting, update):
            with pytest.raises(EngineError):
                await task
        with pytest.raises(EngineError, match="closed"):
            await harness.generate()
        assert now() < 2

    run_scenario(scenario)


# weights


def test_an_update_loads_all_members_concurrently_and_then_advances_the_version() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        assert await harness.pool.version() == 0
        start = now()
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 3))
        while not update.done():
            if all(harness[i].version != 3 for i in range(3)):
                assert await harness.pool.version() == 0
            await asyncio.sleep(0.05)
        await update
        assert now() - start < 1
        assert [harness[i].version for i in range(3)] == [3, 3, 3]
        assert await harness.pool.version() == 3

    run_scenario(scenario)


def test_sampling_continues_with_the_previous_weights_until_new_ones_are_live_on_a_member() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        for i in range(3):
            harness[i].load_seconds = 30.0 + 5 * i
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(0.1)
        for _ in range(20):
            start = now()
            assert {
                generation.versions for generation in await asyncio.gather(*(harness.generate() for _ in range(6)))
            } == {(0, 0)}
            assert now() - start < 1.5
            assert (await harness.pool.health()).ready
        assert not update.done()
        while await harness.pool.version() == 0:
            await asyncio.sleep(0.1)
        sent = len(harness.sent_requests)
        await asyncio.gather(*(harness.generate() for _ in range(6)))
        assert {server for server, *_ in harness.sent_requests[sent:]} == {harness[0]}  # the others have not caught up
        await update
        await asyncio.sleep(20)
        assert harness.states() == ["ready"] * 3

    run_scenario(scenario, poll_interval=1.0)


def test_a_member_that_restarted_during_an_update_is_not_used_for_the_previous_weights() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        for i in range(3):
            harness[i].load_seconds = 40.0
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/v"), 2))
        await asyncio.sleep(1)
        harness[0].restart()
        await asyncio.sleep(60)  # its load has failed and it was probed again
        generations = await asyncio.gather(*(harness.generate() for _ in range(12)))
        assert {generation.versions for generation in generations} <= {(1, 1), (1, 2), (2, 2)}
        assert all(held for *_, held in harness.sent_requests)
        await update

    run_scenario(scenario)


def test_after_a_failed_update_no_member_is_used_based_on_its_earlier_weights() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        for i in range(3):
            harness[i].load_seconds = 5.0
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/v"), 2))
        await asyncio.sleep(1)
        update.cancel()  # the servers load it anyway, and then the previous weights are loaded again
        await asyncio.sleep(0.5)
        second_update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/u"), 3))
        for _ in range(30):
            await asyncio.sleep(0.5)
            await harness.generate()
        await second_update
        assert all(held for *_, held in harness.sent_requests)

    run_scenario(scenario)


def test_requests_in_flight_survive_an_update() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        for i in range(3):
            harness[i].sampling_seconds = 5
        requests = [asyncio.create_task(harness.generate()) for _ in range(6)]
        await asyncio.sleep(1)
        await harness.pool.load_weights(WeightSource.adapter("/a"), 1)
        assert {generation.versions for generation in await asyncio.gather(*requests)} == {(0, 1)}
        assert len(harness.sent_requests) == 6

    run_scenario(scenario)


def test_a_member_that_misses_an_update_is_not_used_until_it_has_caught_up() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        harness[1].loads_fail = True
        await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        assert await harness.pool.version() == 1
        assert harness.states() == ["ready", "unhealthy", "ready"]
        assert "has no folder /w" in harness.pool.status()[1].last_error
        await asyncio.gather(*(harness.generate() for _ in range(9)))
        assert not harness[1].requests
        await harness.pool.load_weights(WeightSource.folder("/w2"), 2)
        harness[1].loads_fail = False
        await asyncio.sleep(60)
        assert harness.states() == ["ready"] * 3
        assert harness[1].loads == (WeightLoad(WeightSource.folder("/w2"), 2),)

    run_scenario(scenario)


def test_an_update_that_fails_on_all_members_is_an_error_and_changes_nothing() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        for i in range(3):
            harness[i].loads_fail = True
        with pytest.raises(
            EngineError, match=r"no member loaded version 2 from /bad; the pool stays at version 1"
        ) as error:
            await harness.pool.load_weights(WeightSource.folder("/bad"), 2)
        assert all(f"http://s{i}:1: unhealthy" in str(error.value) for i in range(3))
        assert await harness.pool.version() == 1
        for i in range(3):
            harness[i].loads_fail = False
        # the state after a failed load is unknown, so the old weights are loaded again
        assert (await harness.generate()).versions == (1, 1)
        assert all(held for *_, held in harness.sent_requests)

    run_scenario(scenario)


@pytest.mark.parametrize("probed", [False, True])
def test_an_update_without_a_healthy_member_waits_for_one(probed: bool) -> None:
    async def scenario(harness: PoolHarness) -> None:
        for i in range(2):
            harness[i].stop()
        if probed:
            await harness.pool.wait_until_probed()
        with pytest.raises(EngineError, match="no member loaded version 1"):
            await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        assert now() == pytest.approx(300, abs=1)
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(100)
        assert not update.done()
        harness[1].restart()
        await update
        assert await harness.pool.version() == 1
        assert harness.states() == ["unhealthy", "ready"]

    run_scenario(scenario, 2)


def test_a_cancelled_update_leaves_one_version() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        for i in range(3):
            harness[i].load_seconds = 5
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(1)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert await harness.pool.version() == 0
        # the servers loaded it anyway, and their initial weights cannot be restored
        await asyncio.sleep(10)
        assert set(harness.states()) == {"unhealthy"}
        await harness.pool.load_weights(WeightSource.folder("/w"), 2)
        await asyncio.sleep(10)
        assert (await harness.generate()).versions == (2, 2)

    run_scenario(scenario)


def test_a_slow_member_does_not_delay_the_others() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        harness[2].load_seconds = 500
        start = now()
        update = asyncio.create_task(harness.pool.load_weights(WeightSource.folder("/w"), 1))
        await asyncio.sleep(0.8)
        assert await harness.pool.version() == 1
        assert (await harness.generate()).versions == (1, 1)
        assert now() - start < 3
        await update
        assert now() - start < 12
        assert harness.states() == ["ready", "ready", "syncing"]
        await asyncio.sleep(500)
        assert harness.states() == ["ready"] * 3

    run_scenario(scenario)


def test_a_load_that_never_ends_makes_a_member_unhealthy() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        harness[0].load_seconds = 1e6
        with pytest.raises(EngineError, match=r"took longer than pool.load_timeout = 30 s"):
            await harness.pool.load_weights(WeightSource.folder("/w"), 1)

    run_scenario(scenario, 1, load_timeout=30)


def test_a_new_member_loads_full_weights_and_then_the_adapter() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness.listed = ["http://s0:1"]
        await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        await harness.pool.load_weights(WeightSource.adapter("/a"), 2)
        await harness.pool.load_weights(WeightSource.adapter("/b"), 3)
        harness.listed = ["http://s0:1", "http://s1:1"]
        await asyncio.sleep(15)
        assert harness.states() == ["ready", "ready"]
        assert (
            harness[0].loads
            == harness[1].loads
            == (WeightLoad(WeightSource.folder("/w"), 1), WeightLoad(WeightSource.adapter("/b"), 3))
        )

    run_scenario(scenario, 2)


def test_a_lower_version_is_allowed_and_a_negative_one_is_an_error() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.folder("/w"), 5)
        await harness.pool.load_weights(WeightSource.folder("/v"), 4)
        assert (await harness.generate()).versions == (4, 4)
        with pytest.raises(EngineError, match="version = -1"):
            await harness.pool.load_weights(WeightSource.folder("/w"), -1)

    run_scenario(scenario)


def test_full_weights_replace_an_adapter_of_the_same_version() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.load_weights(WeightSource.adapter("/a"), 1)
        await harness.pool.load_weights(WeightSource.folder("/w"), 1)
        assert {harness[i].loads for i in range(3)} == {(WeightLoad(WeightSource.folder("/w"), 1),)}

    run_scenario(scenario)


def test_only_missing_loads_are_applied() -> None:
    w, a, b = (
        WeightLoad(WeightSource.folder("/w"), 1),
        WeightLoad(WeightSource.adapter("/a"), 2),
        WeightLoad(WeightSource.adapter("/b"), 3),
    )
    base = TargetWeights(0)
    assert base.plus(w).plus(a) == TargetWeights(2, (w, a))
    assert base.plus(a).plus(b) == TargetWeights(3, (b,))
    assert base.plus(a).plus(w) == TargetWeights(1, (w,))
    assert TargetWeights(3, (w, b)).loads_needed(TargetWeights(2, (w, a))) == (b,)
    assert TargetWeights(3, (w, b)).loads_needed(TargetWeights(1, (w,))) == (b,)
    assert TargetWeights(3, (w, b)).loads_needed(None) == (w, b)
    assert TargetWeights(3, (w, b)).loads_needed(TargetWeights(2, (a,))) == (w, b)
    assert TargetWeights(3, (b,)).loads_needed(TargetWeights(2, (a,))) == (b,)
    assert TargetWeights(1, (w,)).loads_needed(TargetWeights(2, (w, a))) == (w,)
    assert TargetWeights(1, (w,)).loads_needed(TargetWeights(1, (w,))) == ()


# membership


def test_members_are_added_and_removed_without_losing_a_request() -> None:
    async def scenario(harness: PoolHarness) -> None:
        harness.listed = ["http://s0:1", "http://s1:1"]
        await harness.pool.wait_until_probed()
        for i in range(3):
            harness[i].sampling_seconds = 30
        requests = [asyncio.create_task(harness.generate()) for _ in range(4)]
        await asyncio.sleep(1)
        harness.listed = ["http://s1:1", "http://s2:1"]
        await asyncio.sleep(14)
        assert [(row.url, row.retiring) for row in harness.pool.status()] == [
            ("http://s1:1", False),
            ("http://s2:1", False),
            ("http://s0:1", True),
        ]
        harness[2].sampling_seconds = 1
        await harness.generate()
        assert harness[0].closed == 0
        await asyncio.gather(*requests)
        assert len(harness.sent_requests) == 5  # no request was sent twice
        assert len(harness[0].requests) == 2  # no new request after it was removed
        await asyncio.sleep(0)
        assert harness[0].closed == 1
        assert [row.url for row in harness.pool.status()] == ["http://s1:1", "http://s2:1"]

    run_scenario(scenario)


def test_a_discovery_error_keeps_the_members_and_is_reported() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        harness.list_error = "the list is \x00 gone"
        await asyncio.sleep(30)
        assert harness.pool.discovery_error == "the list is gone"
        assert (await harness.generate()).finish_reason == "stop"
        assert len(harness.pool.status()) == 3
        harness.list_error = ""
        harness.listed = harness.listed[:1]
        await asyncio.sleep(11)
        assert harness.pool.discovery_error == ""
        assert len(harness.pool.status()) == 1

    run_scenario(scenario)


def test_a_source_that_hangs_is_reported_and_called_only_once() -> None:
    async def scenario(harness: PoolHarness) -> None:
        await harness.pool.wait_until_probed()
        calls = []

        async def never() -> list[str]:
            calls.append(now())
            await asyncio.sleep(1000)
            return harness.listed

        harness.fetch_urls = never  # type: ignore[method-assign]
        await asyncio.sleep(300)
        assert "still waiting" in harness.pool.discovery_error
        assert len(calls) == 1
        assert (await harness.generate()).finish_reason == "stop"

    run_scenario(scenario)


def test_a_failed_connection_makes_only_that_member_unhealthy() -> None:
    async def scenario(harness: PoolHarness) -> None:
        connect = harness.connect

        def fail_for_first(url: str) -> Any:
            if url == "http://s0:1":
                raise ValueError("no such engine")
            return connect(url)

        await harness.pool.close()
        harness.pool = pool_module.Pool(harness.settings, fail_for_first, source=harness)
        await harness.pool.wait_until_probed()
        assert harness.states() == ["unhealthy", "ready"]
        assert harness.pool.status()[0].last_error == "no such engine"

    run_scenario(scenario, 2)


# status


def test_the_status_reports_requests_errors_and_states() -> None:
    async def scenario(harness: PoolHarness) -> None:
        assert harness.pool.status() == []
        await harness.pool.wait_until_probed()
        harness[1].sampling_seconds = 20
        requests = [asyncio.create_task(harness.generate()) for _ in range(2)]
        await asyncio.sleep(10.5)
        first, second = harness.pool.status()
        assert (first.url, first.state, first.version) == ("http://s0:1", "ready", 0)
        assert (first.requests, first.errors, first.last_error) == (1, 0, "")
        assert (first.in_flight, second.in_flight, second.running) == (0, 1, 1)
        assert first.age == pytest.approx(10.5, abs=0.2)
        harness[1].stop()
        await asyncio.gather(*requests)
        _, second = harness.pool.status()
        assert second.state == "unhealthy"
        assert second.errors >= 1
        assert "refused the connection" in second.last_error
        assert (await harness.pool.health()).version == 0

    run_scenario(scenario, 2)
