"""Pools: who is handed out, what becomes of requests when members fail, and when the version advances."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from keel.inference.pool import pool as pool_module
from keel.inference.pool.target_weights import TargetWeights, WeightLoad
from keel.inference.protocol import EngineError
from tests.support.pool_world import World, now, play

# who is handed out


def test_requests_are_answered_by_ready_members() -> None:
    async def scene(world: World) -> None:
        answers = await asyncio.gather(*(world.ask() for _ in range(6)))
        assert [answer.versions for answer in answers] == [(0, 0)] * 6
        assert [len(world[i].asked) for i in range(3)] == [2, 2, 2]
        assert world.states() == ["ready"] * 3

    play(scene)


def test_a_member_that_comes_back_with_old_weights_is_synced_before_use() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 7)
        world[0].stop()
        await asyncio.sleep(30)
        assert world.states() == ["unhealthy", "ready", "ready"]
        world[0].restart()
        assert world[0].version == 0
        start = now()
        while "unhealthy" in world.states() or "syncing" in world.states():
            await world.ask()
        assert now() - start <= 60
        assert world[0].version == 7
        assert all(held for *_, held in world.hand_outs)

    play(scene)


def test_a_restart_between_two_looks_costs_the_answer_and_not_the_data() -> None:
    """The pool could not know; the versions of the tokens tell, the answer is refused, and the member synced."""

    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 7)
        await world.ask("g")
        member = world.hand_outs[-1][0]
        member.restart()
        answer = await world.ask("g")
        assert [held for *_, held in world.hand_outs] == [True, False, True]
        assert answer.versions == (7, 7)
        await asyncio.sleep(5)
        assert member.version == 7
        row = next(row for row in world.pool.status() if row.url == member.url)
        assert row.state == "ready"
        assert "version 0 instead of 7" in row.last_error

    play(scene)


def test_an_unreachable_member_is_loaded_again_even_if_its_version_looks_right() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 7)
        world[0].black_hole = True
        await asyncio.sleep(40)
        # it was started again by somebody who gave it the version and not the weights
        world[0].restart()
        world[0].version = 7
        await asyncio.sleep(90)
        assert world[0].loads == (WeightLoad("weights", "/w", 7),)
        assert world.states() == ["ready"] * 3

    play(scene)


def test_what_a_member_said_before_a_request_failed_does_not_count() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 7)
        world[0].health_seconds = 2.0
        world[0].answer_seconds = 11.4
        asking = asyncio.create_task(world.ask("g"))
        while len(world[0].health_calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        # it says that it holds 7, and is started again before that arrives
        world[0].restart()
        before = len(world.hand_outs)
        while world.states() == ["ready"]:
            await asyncio.sleep(0.01)
        while world.states() != ["ready"]:
            await asyncio.sleep(0.01)
        assert world[0].version == 7
        world[0].answer_seconds = 1.0
        assert (await asking).versions == (7, 7)
        assert all(held for *_, held in world.hand_outs[before:])

    play(scene, 1)


def test_a_member_at_a_version_that_nobody_can_give_it_is_not_used() -> None:
    async def scene(world: World) -> None:
        world[0].version = 5
        await world.pool.wait_until_probed()
        assert world.states() == ["unhealthy", "ready"]
        assert "holds version 5, but the pool is at version 0" in world.pool.status()[0].last_error
        await world.pool.load_weights("/w", 6)
        await asyncio.sleep(1)
        assert world.states() == ["ready", "ready"]

    play(scene, 2)


def test_without_a_version_members_are_used_as_they_are() -> None:
    async def scene(world: World) -> None:
        await world.pool.close()
        world.pool = pool_module.Pool(world.settings, world.connect, version=None, source=world)
        world[0].version, world[1].version = 5, 4
        assert (await world.ask()).versions in ((5, 5), (4, 4))
        assert await world.pool.version() == 4

    play(scene, 2)


# groups


def test_a_group_stays_with_its_member_and_groups_are_spread() -> None:
    async def scene(world: World) -> None:
        async def conversation(group: str) -> None:
            for _ in range(5):
                await world.ask(group)
                await asyncio.sleep(13)

        await asyncio.gather(*(conversation(f"g{i // 4}") for i in range(24)))
        members = {group: {s.url for s, g, *_ in world.hand_outs if g == group} for _, group, *_ in world.hand_outs}
        assert all(len(urls) == 1 for urls in members.values())
        assert [len({g for g, _ in world[i].asked}) for i in range(3)] == [2, 2, 2]

    play(scene)


def test_a_group_moves_when_its_member_dies_and_stays_where_it_went() -> None:
    async def scene(world: World) -> None:
        await world.ask("g")
        first = world.hand_outs[0][0]
        first.stop()
        for _ in range(3):
            await world.ask("g")
        first.restart()
        await asyncio.sleep(60)
        await world.ask("g")
        servers = [server for server, *_ in world.hand_outs]
        assert servers[1] is first  # nobody knew yet
        assert len(set(servers[2:])) == 1 and servers[2] is not first

    play(scene)


def test_a_group_waits_for_its_member_during_an_update() -> None:
    async def scene(world: World) -> None:
        world[0].load_seconds, world[1].load_seconds = 6.0, 0.5
        await world.ask("a")
        await world.ask("b")
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(1)
        answers = await asyncio.gather(world.ask("a"), world.ask("b"))
        await update
        assert [answer.versions for answer in answers] == [(1, 1), (1, 1)]
        assert [[g for g, _ in world[i].asked] for i in range(2)] == [["a", "a"], ["b", "b"]]

    play(scene, 2)


def test_what_waits_during_an_update_is_spread_over_all_members() -> None:
    async def scene(world: World) -> None:
        await world.ask()
        for i in range(3):
            world[i].load_seconds = 1.0 + i
            world[i].asked.clear()
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(0.1)
        await asyncio.gather(*(world.ask(f"g{i}") for i in range(30)), *(world.ask() for _ in range(30)))
        await update
        assert [len(world[i].asked) for i in range(3)] == [20, 20, 20]

    play(scene)


def test_the_memory_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_TRACKED_GROUPS", 50)

    async def scene(world: World) -> None:
        for i in range(200):
            await world.ask(f"g{i}")
        assert len(world.pool._group_urls) == 50

    play(scene)


def test_requests_of_others_count_as_load() -> None:
    async def scene(world: World) -> None:
        world[0].running = 9
        await world.pool.wait_until_probed()
        await asyncio.gather(*(world.ask() for _ in range(4)))
        assert [len(world[i].asked) for i in range(2)] == [0, 4]
        world[0].running = 0

    play(scene, 2)


# failures


def test_a_retryable_error_is_tried_elsewhere_and_others_pass() -> None:
    async def scene(world: World) -> None:
        await world.ask("g")
        member = world.hand_outs[0][0]
        member.error = EngineError("queue is full")
        assert (await world.ask("g")).finish_reason == "stop"
        assert [server is member for server, *_ in world.hand_outs] == [True, True, False]
        for i in range(3):
            world[i].error = EngineError("prompt is too long", retryable=False)
        handed = len(world.hand_outs)
        with pytest.raises(EngineError, match=r"^prompt is too long$") as refused:
            await world.ask("g")
        assert not refused.value.retryable
        assert len(world.hand_outs) == handed + 1
        assert world.states() == ["ready"] * 3

    play(scene)


def test_a_member_that_fails_at_once_does_not_draw_all_requests() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        world[0].error = EngineError("out of memory")
        world[0].answer_seconds = 0.0
        for _ in range(30):
            await asyncio.gather(*(world.ask() for _ in range(10)))
        assert len(world[0].asked) < 20
        world[0].error = None
        await asyncio.gather(*(world.ask() for _ in range(2000)))
        assert len(world[0].asked) > 500

    play(scene)


def test_attempts_are_limited_and_the_error_names_who_failed() -> None:
    async def scene(world: World) -> None:
        for i in range(3):
            world[i].error = EngineError(f"broken {i}")
        with pytest.raises(EngineError) as failed:
            await world.ask()
        assert len(world.hand_outs) == 2
        assert failed.value.retryable
        assert str(failed.value).splitlines() == [
            "failed after 2 attempts (pool.max_attempts):",
            "http://s0:1: broken 0",
            "http://s1:1: broken 1",
        ]

    play(scene, max_attempts=2)


def test_the_only_member_is_tried_again_after_it_said_that_it_is_well() -> None:
    async def scene(world: World) -> None:
        world[0].error = EngineError("for a moment")
        asking = asyncio.create_task(world.ask())
        await asyncio.sleep(0.8)
        world[0].error = None
        assert (await asking).finish_reason == "stop"
        assert len(world.hand_outs) == 2

    play(scene, 1)


def test_a_cancelled_request_is_cancelled_at_its_member() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        asking = asyncio.create_task(world.ask())
        await asyncio.sleep(0.3)
        assert sum(world[i].running for i in range(3)) == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert sum(world[i].running for i in range(3)) == 0
        assert sum(world[i].cancelled for i in range(3)) == 1
        assert (await world.pool.health()).running == 0
        assert [row.errors for row in world.pool.status()] == [0, 0, 0]

    play(scene)


def test_requests_at_a_member_that_vanished_are_given_up_and_moved() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        for i in range(3):
            world[i].answer_seconds = 60.0
        asking = [asyncio.create_task(world.ask()) for _ in range(3)]
        await asyncio.sleep(1)
        world[0].black_hole = True
        answers = await asyncio.gather(*asking)
        assert len(answers) == 3
        # three looks of 10 s each and the pauses between them, then 60 s elsewhere; the request limit is 120 s
        assert now() < 125
        assert world[0].cancelled >= 1

    play(scene)


def test_no_ready_member_is_an_error_that_lists_all_of_them() -> None:
    async def scene(world: World) -> None:
        world[0].stop()
        world[1].not_ready = "CUDA\x1b[31m out\nof memory [bold]" + "x" * 1000
        with pytest.raises(EngineError, match=r"no member was ready for 45 s \(pool.ready_timeout\)") as waited:
            await world.ask()
        assert now() == pytest.approx(45)
        _, first, second = str(waited.value).splitlines()
        assert first == "http://s0:1: unhealthy, http://s0:1 refused the connection"
        assert second.startswith("http://s1:1: unhealthy, CUDA [31m out of memory [bold]xxx") and len(second) < 250

    play(scene, 2, ready_timeout=45)


def test_nobody_found_is_an_error_too() -> None:
    async def scene(world: World) -> None:
        world.list_error = "engines.internal has no addresses"
        with pytest.raises(EngineError, match=r"engines\.internal has no addresses"):
            await world.ask()
        health = await world.pool.health()
        assert not health.ready and "no addresses" in health.error

    play(scene, ready_timeout=45)


def test_looks_at_a_dead_member_become_rare_and_it_is_found_when_it_returns() -> None:
    async def scene(world: World) -> None:
        world[0].stop()
        await world.pool.wait_until_probed()
        await asyncio.sleep(3600)
        gaps = [round(b - a, 1) for a, b in pairwise(world[0].health_calls)]
        assert gaps[:5] == [2.5, 5.0, 10.0, 20.0, 40.0]
        assert set(gaps[5:]) == {60.0}
        assert len(world[1].health_calls) == pytest.approx(360, abs=5)
        world[0].restart()
        await asyncio.sleep(61)
        assert world.states() == ["ready", "ready"]

    play(scene, 2)


def test_closing_ends_what_is_in_flight_and_what_waits() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        asking = asyncio.create_task(world.ask())
        await asyncio.sleep(0.3)
        for i in range(3):
            world[i].load_seconds = 50
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(world.ask())
        await asyncio.sleep(0.1)
        await world.pool.close()
        for task in (asking, waiting, update):
            with pytest.raises(EngineError):
                await task
        with pytest.raises(EngineError, match="closed"):
            await world.ask()
        assert now() < 2

    play(scene)


# weights


def test_an_update_reaches_all_members_at_once_and_then_the_version_advances() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        assert await world.pool.version() == 0
        start = now()
        update = asyncio.create_task(world.pool.load_weights("/w", 3))
        while not update.done():
            if all(world[i].version != 3 for i in range(3)):
                assert await world.pool.version() == 0
            await asyncio.sleep(0.05)
        await update
        assert now() - start < 1
        assert [world[i].version for i in range(3)] == [3, 3, 3]
        assert await world.pool.version() == 3

    play(scene)


def test_sampling_goes_on_with_the_weights_before_until_new_ones_are_live_somewhere() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        for i in range(3):
            world[i].load_seconds = 30.0 + 5 * i
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(0.1)
        for _ in range(20):
            before = now()
            assert {answer.versions for answer in await asyncio.gather(*(world.ask() for _ in range(6)))} == {(0, 0)}
            assert now() - before < 1.5
            assert (await world.pool.health()).ready
        assert not update.done()
        while await world.pool.version() == 0:
            await asyncio.sleep(0.1)
        asked = len(world.hand_outs)
        await asyncio.gather(*(world.ask() for _ in range(6)))
        assert {server for server, *_ in world.hand_outs[asked:]} == {world[0]}  # the others have yet to catch up
        await update
        await asyncio.sleep(20)
        assert world.states() == ["ready"] * 3

    play(scene, poll_interval=1.0)


def test_a_member_that_was_started_again_during_an_update_is_not_used_for_the_weights_before() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 1)
        for i in range(3):
            world[i].load_seconds = 40.0
        update = asyncio.create_task(world.pool.load_weights("/v", 2))
        await asyncio.sleep(1)
        world[0].restart()
        await asyncio.sleep(60)  # its load has failed, and it was looked at again
        answers = await asyncio.gather(*(world.ask() for _ in range(12)))
        assert {answer.versions for answer in answers} <= {(1, 1), (1, 2), (2, 2)}
        assert all(held for *_, held in world.hand_outs)
        await update

    play(scene)


def test_after_a_failed_update_nobody_is_used_on_the_strength_of_what_it_held_before() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 1)
        for i in range(3):
            world[i].load_seconds = 5.0
        update = asyncio.create_task(world.pool.load_weights("/v", 2))
        await asyncio.sleep(1)
        update.cancel()  # it is taken all the same, and then the one before it is loaded again
        await asyncio.sleep(0.5)
        again = asyncio.create_task(world.pool.load_weights("/u", 3))
        for _ in range(30):
            await asyncio.sleep(0.5)
            await world.ask()
        await again
        assert all(held for *_, held in world.hand_outs)

    play(scene)


def test_requests_in_flight_survive_an_update() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        for i in range(3):
            world[i].answer_seconds = 5
        asking = [asyncio.create_task(world.ask()) for _ in range(6)]
        await asyncio.sleep(1)
        await world.pool.load_adapter("/a", 1)
        assert {answer.versions for answer in await asyncio.gather(*asking)} == {(0, 1)}
        assert len(world.hand_outs) == 6

    play(scene)


def test_a_member_that_misses_an_update_is_left_out_until_it_has_caught_up() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        world[1].loads_fail = True
        await world.pool.load_weights("/w", 1)
        assert await world.pool.version() == 1
        assert world.states() == ["ready", "unhealthy", "ready"]
        assert "has no folder /w" in world.pool.status()[1].last_error
        await asyncio.gather(*(world.ask() for _ in range(9)))
        assert not world[1].asked
        await world.pool.load_weights("/w2", 2)
        world[1].loads_fail = False
        await asyncio.sleep(60)
        assert world.states() == ["ready"] * 3
        assert world[1].loads == (WeightLoad("weights", "/w2", 2),)

    play(scene)


def test_an_update_that_no_member_takes_is_an_error_and_changes_nothing() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 1)
        for i in range(3):
            world[i].loads_fail = True
        with pytest.raises(EngineError, match=r"no member loaded version 2 from /bad; the pool stays at version 1") as refused:
            await world.pool.load_weights("/bad", 2)
        assert all(f"http://s{i}:1: unhealthy" in str(refused.value) for i in range(3))
        assert await world.pool.version() == 1
        for i in range(3):
            world[i].loads_fail = False
        # what a failed load left behind is not known, so the old weights are loaded again
        assert (await world.ask()).versions == (1, 1)
        assert all(held for *_, held in world.hand_outs)

    play(scene)


@pytest.mark.parametrize("looked", [False, True])
def test_an_update_before_any_member_is_there_waits_for_one(looked: bool) -> None:
    async def scene(world: World) -> None:
        for i in range(2):
            world[i].stop()
        if looked:
            await world.pool.wait_until_probed()
        with pytest.raises(EngineError, match="no member loaded version 1"):
            await world.pool.load_weights("/w", 1)
        assert now() == pytest.approx(300, abs=1)
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(100)
        assert not update.done()
        world[1].restart()
        await update
        assert await world.pool.version() == 1
        assert world.states() == ["unhealthy", "ready"]

    play(scene, 2)


def test_a_cancelled_update_leaves_one_version() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        for i in range(3):
            world[i].load_seconds = 5
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(1)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert await world.pool.version() == 0
        # the servers took it all the same, and nothing brings them back to the weights they began with
        await asyncio.sleep(10)
        assert set(world.states()) == {"unhealthy"}
        await world.pool.load_weights("/w", 2)
        await asyncio.sleep(10)
        assert (await world.ask()).versions == (2, 2)

    play(scene)


def test_a_straggler_does_not_hold_up_the_others() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        world[2].load_seconds = 500
        start = now()
        update = asyncio.create_task(world.pool.load_weights("/w", 1))
        await asyncio.sleep(0.8)
        assert await world.pool.version() == 1
        assert (await world.ask()).versions == (1, 1)
        assert now() - start < 3
        await update
        assert now() - start < 12
        assert world.states() == ["ready", "ready", "syncing"]
        await asyncio.sleep(500)
        assert world.states() == ["ready"] * 3

    play(scene)


def test_a_load_that_never_ends_makes_a_member_unhealthy() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        world[0].load_seconds = 1e6
        with pytest.raises(EngineError, match=r"took longer than pool.load_timeout = 30 s"):
            await world.pool.load_weights("/w", 1)

    play(scene, 1, load_timeout=30)


def test_a_new_member_gets_all_weights_and_then_the_adapter() -> None:
    async def scene(world: World) -> None:
        world.listed = ["http://s0:1"]
        await world.pool.load_weights("/w", 1)
        await world.pool.load_adapter("/a", 2)
        await world.pool.load_adapter("/b", 3)
        world.listed = ["http://s0:1", "http://s1:1"]
        await asyncio.sleep(15)
        assert world.states() == ["ready", "ready"]
        assert world[0].loads == world[1].loads == (WeightLoad("weights", "/w", 1), WeightLoad("adapter", "/b", 3))

    play(scene, 2)


def test_a_version_that_counts_down_is_refused_only_when_negative() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_weights("/w", 5)
        await world.pool.load_weights("/v", 4)
        assert (await world.ask()).versions == (4, 4)
        with pytest.raises(EngineError, match="version = -1"):
            await world.pool.load_weights("/w", -1)

    play(scene)


def test_the_same_version_in_another_form_is_another_thing() -> None:
    async def scene(world: World) -> None:
        await world.pool.load_adapter("/a", 1)
        await world.pool.load_weights("/w", 1)
        assert {world[i].loads for i in range(3)} == {(WeightLoad("weights", "/w", 1),)}

    play(scene)


def test_only_what_is_missing_is_loaded() -> None:
    w, a, b = WeightLoad("weights", "/w", 1), WeightLoad("adapter", "/a", 2), WeightLoad("adapter", "/b", 3)
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


def test_members_come_and_go_without_a_request_lost() -> None:
    async def scene(world: World) -> None:
        world.listed = ["http://s0:1", "http://s1:1"]
        await world.pool.wait_until_probed()
        for i in range(3):
            world[i].answer_seconds = 30
        asking = [asyncio.create_task(world.ask()) for _ in range(4)]
        await asyncio.sleep(1)
        world.listed = ["http://s1:1", "http://s2:1"]
        await asyncio.sleep(14)
        assert [(row.url, row.retiring) for row in world.pool.status()] == [
            ("http://s1:1", False),
            ("http://s2:1", False),
            ("http://s0:1", True),
        ]
        world[2].answer_seconds = 1
        await world.ask()
        assert world[0].closed == 0
        await asyncio.gather(*asking)
        assert len(world.hand_outs) == 5  # nothing was asked twice
        assert len(world[0].asked) == 2  # nothing new after it left
        await asyncio.sleep(0)
        assert world[0].closed == 1
        assert [row.url for row in world.pool.status()] == ["http://s1:1", "http://s2:1"]

    play(scene)


def test_a_discovery_error_keeps_the_members_and_is_reported() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        world.list_error = "the list is \x00 gone"
        await asyncio.sleep(30)
        assert world.pool.discovery_error == "the list is gone"
        assert (await world.ask()).finish_reason == "stop"
        assert len(world.pool.status()) == 3
        world.list_error = ""
        world.listed = world.listed[:1]
        await asyncio.sleep(11)
        assert world.pool.discovery_error == ""
        assert len(world.pool.status()) == 1

    play(scene)


def test_a_source_that_hangs_is_reported_and_asked_only_once() -> None:
    async def scene(world: World) -> None:
        await world.pool.wait_until_probed()
        asked = []

        async def never() -> list[str]:
            asked.append(now())
            await asyncio.sleep(1000)
            return world.listed

        world.fetch_urls = never  # type: ignore[method-assign]
        await asyncio.sleep(300)
        assert "still waiting" in world.pool.discovery_error
        assert len(asked) == 1
        assert (await world.ask()).finish_reason == "stop"

    play(scene)


def test_a_connection_that_cannot_be_made_is_that_members_problem() -> None:
    async def scene(world: World) -> None:
        connect = world.connect

        def refuse(url: str) -> Any:
            if url == "http://s0:1":
                raise ValueError("no such engine")
            return connect(url)

        await world.pool.close()
        world.pool = pool_module.Pool(world.settings, refuse, source=world)
        await world.pool.wait_until_probed()
        assert world.states() == ["unhealthy", "ready"]
        assert world.pool.status()[0].last_error == "no such engine"

    play(scene, 2)


# what can be seen


def test_the_status_has_what_happened() -> None:
    async def scene(world: World) -> None:
        assert world.pool.status() == []
        await world.pool.wait_until_probed()
        world[1].answer_seconds = 20
        asking = [asyncio.create_task(world.ask()) for _ in range(2)]
        await asyncio.sleep(10.5)
        first, second = world.pool.status()
        assert (first.url, first.state, first.version) == ("http://s0:1", "ready", 0)
        assert (first.requests, first.errors, first.last_error) == (1, 0, "")
        assert (first.in_flight, second.in_flight, second.running) == (0, 1, 1)
        assert first.age == pytest.approx(10.5, abs=0.2)
        world[1].stop()
        await asyncio.gather(*asking)
        _, second = world.pool.status()
        assert second.state == "unhealthy"
        assert second.errors >= 1
        assert "refused the connection" in second.last_error
        assert (await world.pool.health()).version == 0

    play(scene, 2)
